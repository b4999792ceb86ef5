"""The training loop: one file, the same code whatever the placement of generator and learner.

                 prompts                    groups, in order of admission
    PromptPool ----------> Generator ------------------------------------> verify -> make_batch
        ^                      ^                                               |          |
        | pass rates           | weights, version          rewards ------------+          v
        +----------------------+--------------------------------------------------- Learner.step

    admit    consumes tickets; waits for nothing; a ticket comes back when every generator has installed the
             weights of the step that consumed it
    work     consumes groups in order of admission; waits until the next batch of them is complete (with
             `OffPolicy`, the next k batches), and admits meanwhile
    step     consumes a batch; then publishes the weights, which unblocks admission (with `OffPolicy`, after
             the k-th of a phase)

`PipelineRL(k)` has (k + 1) batches of tickets and no other limit, so no trained token is older than k
versions: with P groups a step, group g is admitted once version g // P - k is installed, so that it is
sampled by that version or later, and it is consumed by the step that starts at version g // P. Completions in
flight while the trainer steps go on with the new weights and the KV cache of the old ones (PipelineRL, arXiv
2509.19128; PipelineRL-k, arXiv 2510.13786). `OffPolicy(k)` has k batches of tickets, and all of a phase is
sampled by the weights at its start: the last of its batches is trained at age k - 1.

With the generator in this process the placement is `inline`: `work` is one decode step, until just the next
batch is complete; then the trainer steps. That fixed rule makes a run a function of its seed, bit for bit.
With generators in processes of their own (`scalerl.rl.local`) they decode all the while, `work` waits for a
message of theirs, and weights are installed in the middle of whatever is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.rl.batch import Batch, make_batch
from scalerl.rl.learner import Learner, StepStats
from scalerl.rl.length import AnyLength
from scalerl.rl.pool import PromptPool
from scalerl.rl.recipe import Recipe
from scalerl.rl.types import Generator, Group, Judge, Reward, Rollout


@dataclass(frozen=True)
class Step:
    """What one turn of the loop did."""

    index: int
    groups: tuple[Group, ...]
    batch: Batch
    stats: StepStats
    train_seconds: float


def run_pipeline(
    recipe: Recipe,
    pool: PromptPool,
    generator: Generator,
    learner: Learner,
    judge: Judge,
) -> Iterator[Step]:
    """Train for as long as the caller takes steps; ends by itself when the pool has run dry."""
    n_prompts, n_samples = recipe.batch.prompts, recipe.batch.samples
    schedule, ready = recipe.schedule, deque[Group]()
    admitted = collected = 0

    def admit() -> None:
        nonlocal admitted
        # Every version is the answer to one batch: so many groups have come back as installed weights.
        allowed = generator.installed * n_prompts + schedule.tickets(n_prompts)
        while admitted < allowed:
            if (draw := pool.draw()) is None:
                return
            generator.submit(*draw, n_samples)
            admitted += 1

    while True:
        admit()
        if not ready:
            wanted = schedule.at_once(n_prompts)
            while generator.ready < wanted:
                if admitted < collected + wanted and not pool.left:
                    wanted = (admitted - collected) // n_prompts * n_prompts  # the last that there is
                    continue
                generator.work()
                admit()
            if not wanted:
                return
            sampled = generator.take(wanted)
            for rollouts, rewards in zip(sampled, judge(sampled), strict=True):
                ready.append(make_group(rollouts, rewards, recipe.length))
                pool.record(ready[-1])
            collected += wanted
        started = time.perf_counter()
        groups = [ready.popleft() for _ in range(n_prompts)]
        batch = make_batch(
            groups,
            recipe.advantage,
            recipe.averaging,
            recipe.context.sampled,
            keep_zero_variance=recipe.zero_variance == "keep",
            keep_truncated=recipe.truncated == "keep",
        )
        stats = learner.step(batch)
        if schedule.publishes(learner.version):
            generator.update(learner.weights(), learner.version)
        yield Step(learner.version, tuple(groups), batch, stats, time.perf_counter() - started)


def make_group(rollouts: Sequence[Rollout], rewards: Sequence[Reward], length: AnyLength) -> Group:
    """The group of some completions; the length control may take from their rewards."""
    group = Group.of(rollouts, rewards)
    penalties = [length.penalty(r.length, v.correct) for r, v in zip(rollouts, rewards, strict=True)]
    return replace(group, reward_G=group.reward_G + np.array(penalties))
