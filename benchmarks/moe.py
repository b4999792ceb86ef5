"""How far are trainer and generator apart on a mixture of experts, and what does Routing Replay change?

    python benchmarks/moe.py [--completions 256] [--steps 1500] [--lr 1e-4] [--tiny]

A Qwen3-MoE of two layers and eight experts, of which a token meets two, is trained on worked examples of
chains of arithmetic (`--steps`). Completions of it are sampled with the experts that read each token, and
scored by the trainer with its own routers (`own`) and with the recorded experts (`replay`; R3, arXiv
2510.11370).

With the same weights, generator and trainer each in float32 or bfloat16; then in float32 by a trainer that
has made k steps since, each on completions of its newest weights. Printed: the tokens; the choices, by
token and layer, in which the trainer uses another pair of experts (with `replay` none, as it should be); the
mean and the largest |log ratio|; and the effective sample size, (sum rho)^2 / (n sum rho^2).
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from scalerl.rl.algo.length import ForcedInterruption
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Context, Steps
from scalerl.rl.engine.build import load_generator
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.learner.batch import Batch, make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.load import load_learner
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.tasks.chain import Chain, Demonstrations
from scalerl.rl.types import Group, Rollout, as_reward
from scalerl.rl.verify.verifier import texts_of

TASK = Chain(k_max=4)
SAMPLES = 16
STRIDE = 97
"""Step from one prompt to the next, as prompts are in order of length."""
STALE = (1, 2, 4, 8, 16, 32)
Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


def sample(generator: TorchGenerator, recipe: Recipe, first: int, n_groups: int) -> list[Group]:
    """Return verified groups of training prompts of all lengths."""
    prompts = recipe.task.prompts("train")
    for number in range(first, first + n_groups):
        generator.submit(prompts[number * STRIDE % len(prompts)], number // len(prompts), SAMPLES)
    return [verified(generator, recipe, group) for group in generator.collect(n_groups)]


def verified(generator: TorchGenerator, recipe: Recipe, rollouts: tuple[Rollout, ...]) -> Group:
    texts = texts_of(generator.tokenizer, [(r.prompt, [r.token_T]) for r in rollouts])
    verdicts = (recipe.task.verify(r.prompt, text) for r, (text,) in zip(rollouts, texts, strict=True))
    return Group.of(rollouts, [as_reward(verdict) for verdict in verdicts])


def batch_of(groups: list[Group], recipe: Recipe, everything: bool) -> Batch:
    how: dict[str, Any] = {"keep_zero_variance": everything, "keep_truncated": everything}
    return make_batch(groups, recipe.advantage, recipe.averaging, recipe.context.sampled, **how)


@torch.no_grad()
def row(learner: Learner, batch: Batch, replay: bool) -> str:
    """Return the cells of a line: how far the trainer is from the recorded log-probabilities and experts."""
    wanted_NT = batch.sampled_NT[:, 1:]
    assert batch.expert_NTLK is not None
    recorded_NTLK = batch.expert_NTLK[:, :-1]
    score, apart, other = learner.score, [], []
    for rows in np.array_split(np.arange(len(batch)), max(1, len(batch) // 64)):
        given = recorded_NTLK[rows] if replay else None
        logp_MT, _ = score(batch.token_NT[rows], wanted_NT[rows], expert_MTLK=given)
        behaviour_MT = batch.behaviour_logp_NT[rows, 1:]
        apart.append((logp_MT.cpu().numpy() - behaviour_MT)[wanted_NT[rows]].astype(float))
        assert score.routers is not None
        chosen_MTLK = score.routers.chosen().view(recorded_NTLK[rows].shape).cpu().numpy()
        same = np.sort(chosen_MTLK, -1) == np.sort(recorded_NTLK[rows], -1)
        other.append(~same.all(-1)[wanted_NT[rows]])
    gap = np.abs(log_rho := np.concatenate(apart))
    rho = np.exp(log_rho)
    size = rho.sum() ** 2 / (len(rho) * (rho**2).sum())
    flipped = np.concatenate(other).mean()
    return f"{len(gap)} | {flipped:.3%} | {gap.mean():.2e} | {gap.max():.2e} | {size:.5f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500, help="of the model's training on worked examples")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--tiny", action="store_true", help="seconds, and no figures to speak of")
    args = parser.parse_args()
    stale = STALE
    if args.tiny:
        args.completions, args.steps, stale = 32, 20, STALE[:2]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        spec = BaseModel(
            Demonstrations(TASK, 8), experts=8, max_careful_steps=args.steps, imperfect_steps=args.steps // 5
        )
        report(str(build_base(spec, Path(cache))), args.completions // SAMPLES, args.lr, stale)


def report(model: str, n_groups: int, lr: float, stale: tuple[int, ...]) -> None:
    recipe = Recipe(
        model=model,
        task=TASK,
        budget=Steps(1),
        context=Context(prompt=10, thinking=8, answer=4),
        length=ForcedInterruption(phrase="! </think>", low=8, high=8),
        batch=BatchSize(prompts=n_groups, samples=SAMPLES, micro=64),
        optimiser=AdamW(lr=lr, warmup_steps=1),
        decode_slots=64,
        routing_replay=True,
    )
    columns = "tokens | other experts | mean abs(log ratio) | largest | effective sample size |"
    print(f"| generator | trainer | routing | {columns}\n" + "|---" * 8 + "|")
    learners = {p: load_learner(replace(recipe, precision=p), model) for p in PRECISIONS}
    for sampled in PRECISIONS:
        generator = load_generator(replace(recipe, precision=sampled), model, 0, recipe.decode_slots)
        batch = batch_of(sample(generator, recipe, 0, n_groups), recipe, everything=True)
        for trained, learner in learners.items():
            for replay in (False, True):
                how = "replay" if replay else "own"
                print(f"| {sampled} | {trained} | {how} | {row(learner, batch, replay)}", flush=True)
    print(f"\n| steps since | routing | {columns}\n" + "|---" * 7 + "|")
    learner = learners["float32"]
    generator = load_generator(recipe, model, 0, recipe.decode_slots)
    old = batch_of(sample(generator, recipe, 0, n_groups), recipe, everything=True)
    trained = 0
    assert old.expert_NTLK is not None
    experts = old.expert_NTLK[0, 0].nbytes
    for step in range(1, stale[-1] + 1):
        groups = sample(generator, recipe, step * n_groups, n_groups)
        trained += learner.step(batch_of(groups, recipe, everything=False)).tokens > 0
        generator.update(learner.weights(), learner.version)
        if step in stale:
            for replay in (False, True):
                print(f"| {step} | {'replay' if replay else 'own'} | {row(learner, old, replay)}", flush=True)
    print(f"\n{trained} of these {stale[-1]} steps had a group with a signal.")
    print(f"{experts} bytes are recorded of a token of prompt or completion.")


if __name__ == "__main__":
    main()
