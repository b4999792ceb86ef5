"""Generation and training on a GPU, against what its memory and its matrix units allow; under 8 minutes.

    python benchmarks/gpu.py [--rows 64 256] [--tokens 512] [--tiny]

A model of the Qwen3-0.6B shape with random weights, bf16 with an FP32 head, through this package's own
generator and learner. The floors are measured on the spot:

    generation   a decode step reads every weight and the keys and values of every row once, at the rate of
                 a large copy
    training     three forward passes' worth of multiplications (six operations per weight and token, the head
                 for every token), at the rate of a large bf16 matrix product

`--tiny` runs the same on whatever there is, in seconds, with a model of no size: to see that it runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from random_model import END_TOKEN, chain_tokenizer, random_qwen3
from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import TokenAverage
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.engine.generator import Sampling, TorchGenerator
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import FlopCount, compute_device
from scalerl.rl.types import Group, Prompt, Reward, Rollout

QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Machine:
    """What the device can do, measured."""

    device: torch.device
    bytes_per_second: float
    flops: float

    @classmethod
    def measure(cls, device: torch.device, tiny: bool) -> Machine:
        """The rates of a large copy (bytes read and written) and of a large bf16 matrix product."""
        n = 2**20 if tiny else 2**30
        source, target = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
        copied = 2 * n / best_seconds(device, lambda: target.copy_(source))
        d = 256 if tiny else 8192
        a, b = (torch.randn(d, d, dtype=torch.bfloat16, device=device) for _ in range(2))
        return cls(device, copied, 2 * d**3 / best_seconds(device, lambda: a @ b))


def best_seconds(device: torch.device, run: Callable[[], Any], times: int = 10) -> float:
    """Seconds of the fastest of some runs, after two to warm up."""
    for _ in range(2):
        run()
    return min(seconds(device, run) for _ in range(times))


def seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds of one run, until the device is done."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generation(model: Any, machine: Machine, rows: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of full rows, and the most that reading weights and cache allows."""
    rule = LengthRule(tokens - 1, 1, Marker((END_TOKEN,)))
    sampling = Sampling(1.0, True, 0, 16, rule, END_TOKEN)
    generator = TorchGenerator(model, chain_tokenizer(), sampling, rows)
    for n in range(2 * rows):  # those that end early are replaced, as in a run
        generator.submit(Prompt(f"p/{n}", f"{n % 10} + {n // 10 % 10} * 3 =", ""), 0, 1)
    for _ in range(4):
        generator.work()
    before, first, attended, ticks = generator.counters.tokens, generator.counters.ticks, 0, tokens // 2

    def decode() -> None:
        nonlocal attended
        for _ in range(ticks):
            generator.work()
            attended += rows * (generator.counters.ticks - first + 10)  # of the rows' 6 prompt tokens and 4

    took = seconds(machine.device, decode)
    config = model.config
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    floor = (ticks * weights + attended * per_position) / machine.bytes_per_second
    made = generator.counters.tokens - before
    return made / took, made / floor


def group_of(completions: int, tokens: int, vocabulary: int) -> Group:
    """Completions of random tokens after prompts of a quarter of them, every other one right."""
    rng, start = np.random.default_rng(0), tokens // 4
    rollouts = [
        Rollout(
            prompt=Prompt("p", "", ""),
            epoch=0,
            sample=sample,
            prompt_T=rng.integers(0, vocabulary, start),
            token_T=rng.integers(0, vocabulary, tokens - start),
            sampled_T=np.ones(tokens - start, dtype=bool),
            logp_T=np.full(tokens - start, -np.log(vocabulary), dtype=np.float32),
            version_T=np.zeros(tokens - start, dtype=np.int32),
            first_version=0,
            truncated=False,
            interrupted=False,
        )
        for sample in range(completions)
    ]
    return Group.of(rollouts, [Reward(1.0 - 2.0 * (n % 2), n % 2 == 0) for n in range(completions)])


def training(model: Any, machine: Machine, completions: int, tokens: int, micro: int) -> tuple[float, float]:
    """Trained tokens a second of whole steps, and the most that matrix products allow."""
    learner = Learner(model, load_recipe("demo", [f"batch.micro={micro}"]))
    group = group_of(completions, tokens, model.config.vocab_size)
    batch = make_batch([group], BatchStd(), TokenAverage(), tokens)
    took = best_seconds(machine.device, lambda: learner.step(batch), times=3)
    read = tokens - 1.0  # the last token is predicted, never read
    flops = 3 * FlopCount.of(model).forward(completions * read, completions * read * (read + 1) / 2)
    made = int(batch.sampled_NT.sum())
    return made / took, made * machine.flops / flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="completions decoded at once")
    parser.add_argument("--tokens", type=int, default=512, help="of a completion")
    parser.add_argument("--completions", type=int, default=32, help="of a trainer step")
    parser.add_argument("--micro", type=int, default=4, help="completions of a forward pass of the trainer")
    parser.add_argument("--tiny", action="store_true", help="seconds, and no figures to speak of")
    args = parser.parse_args()
    torch.set_num_threads(1)  # of the CPU, which only hands out work
    device = compute_device()
    if device.type != "cuda" and not args.tiny:
        parser.error("needs a CUDA device; --tiny runs anywhere")
    if args.tiny:
        args.rows, args.tokens, args.completions, args.micro = [4], 16, 8, 4
    machine = Machine.measure(device, args.tiny)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    rates = f"copy {machine.bytes_per_second / 1e9:.1f} GB/s, bf16 product {machine.flops / 1e12:.3f} TFLOP/s"
    print(rates)
    shape = TINY if args.tiny else QWEN3_06B
    model = random_qwen3(
        torch.bfloat16, device, 4.0, **shape, tie_word_embeddings=True, max_position_embeddings=4096
    )
    print("| | tokens a second | allowed | share |\n|---|---|---|---|")
    for rows in args.rows:
        report(f"generation, {rows} rows", *generation(model, machine, rows, args.tokens))
    what = f"training, {args.completions} completions of {args.tokens} tokens"
    report(what, *training(model, machine, args.completions, args.tokens, args.micro))


def report(what: str, found: float, allowed: float) -> None:
    print(f"| {what} | {found:,.0f} | {allowed:,.0f} | {found / allowed:.3f} |", flush=True)


if __name__ == "__main__":
    main()
