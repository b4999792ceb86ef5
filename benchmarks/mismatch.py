"""How far are the trainer's log-probabilities from the generator's in bf16, and does an FP32 head help?

    python benchmarks/mismatch.py [--vocabulary 32768] [--layers 8] [--hidden 512] [--completions 32] [--tiny]

The generator decodes token by token with a KV cache, the trainer makes one forward pass of all of a
completion: other kernels, other rounding, with the same weights. Printed for the LM head in FP32 on both
sides, one of them, and neither (MiniMax-M1, arXiv 2506.13585; arXiv 2510.13786): |d log p| of the sampled
tokens, and the effective sample size of the importance ratios rho, (sum rho)^2 / (n sum rho^2).

The weights are random, of the Qwen3 shape; logits have the standard deviation `--spread`, which with 32,768
tokens leaves an entropy of about four nats (6: about one). With the same rounding on both sides every gap
would be 0, and the effective sample size 1.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from random_model import END_TOKEN, chain_tokenizer, random_qwen3
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.engine.generator import Sampling, TorchGenerator
from scalerl.rl.learner.learner import Learner
from scalerl.rl.types import Prompt, Rollout

NAMES = {
    (True, True): "both",
    (True, False): "generator",
    (False, True): "trainer",
    (False, False): "neither",
}


def sample(model: torch.nn.Module, fp32_logits: bool, completions: int, tokens: int) -> list[Rollout]:
    """Return completions of up to `tokens` tokens, decoded sixteen at a time, one per submitted prompt."""
    rule = LengthRule(tokens - 1, 1, Marker((END_TOKEN,)))
    sampling = Sampling(1.0, fp32_logits, 0, 16, rule, END_TOKEN)
    generator = TorchGenerator(model, chain_tokenizer(), sampling, min(completions, 16))
    for n in range(completions):
        generator.submit(Prompt(f"p/{n}", f"{n % 10} + {n // 10 % 10} * 3 =", ""), 0, 1)
    return [rollout for (rollout,) in generator.collect(completions)]


@torch.no_grad()
def trainers(model: torch.nn.Module, fp32_logits: bool, rollouts: list[Rollout]) -> np.ndarray:
    """Return the trainer's log-probability of every sampled token."""
    where = "both" if fp32_logits else "neither"
    learner = Learner(model, load_recipe("demo", [f"fp32_logits={where}"]))
    found = []
    for r in rollouts:
        token_1T = torch.from_numpy(np.concatenate([r.prompt_T, r.token_T]))[None]
        wanted_1T = torch.arange(1, token_1T.shape[1])[None] >= len(r.prompt_T)
        logp_1T, _ = learner.score(token_1T.cpu().numpy(), wanted_1T.cpu().numpy())
        found.append(logp_1T[0, len(r.prompt_T) - 1 :].float().cpu().numpy())
    return np.concatenate(found).astype(float)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--completions", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--tiny", action="store_true", help="seconds, and no figures to speak of")
    args = parser.parse_args()
    if args.tiny:
        args.vocabulary, args.layers, args.hidden, args.completions, args.tokens = 512, 2, 64, 8, 16
    torch.set_num_threads(1)
    model = random_qwen3(
        torch.bfloat16,
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        args.spread,
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(args.hidden // 128, 1),
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
    )
    print(
        "| FP32 head | tokens | entropy | mean abs(d log p) | 99 % | max | effective sample size |\n"
        + "|---" * 7
        + "|"
    )
    for at_sampling in (True, False):
        rollouts = sample(model, at_sampling, args.completions, args.tokens)
        recorded = np.concatenate([r.logp_T for r in rollouts]).astype(float)
        for in_training in (True, False):
            apart = trainers(model, in_training, rollouts) - recorded
            gap, rho = np.abs(apart), np.exp(apart)
            size = rho.sum() ** 2 / (len(rho) * (rho**2).sum())
            print(
                f"| {NAMES[at_sampling, in_training]} | {len(gap)} | {-recorded.mean():.2f} "
                f"| {gap.mean():.5f} | {np.quantile(gap, 0.99):.4f} | {gap.max():.4f} | {size:.6f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
