"""The training loop: one file, the same code whatever the placement of generator and learner.

                 prompts                    groups, in order of admission
    PromptPool ----------> Generator ------------------------------------> verify -> make_batch
        ^                      ^                                               |          |
        | pass rates           | weights, version          rewards ------------+          v
        +----------------------+--------------------------------------------------- Learner.step

    admit    consumes tickets; waits for nothing; a ticket comes back when the generators have installed the
             weights of the step that consumed it
    collect  consumes groups in order of admission; waits until the next batch of them is complete
    step     consumes a batch; then publishes the weights, which unblocks admission

There are (k + 1) batches of tickets and no other limit, so no trained token is older than k versions: with P
groups a step, group g is admitted once version g // P - k is installed, so that it is sampled by that version
or later, and it is consumed by the step that starts at version g // P. Completions in flight while the
trainer steps go on with the new weights and the KV cache of the old ones (PipelineRL, arXiv 2509.19128;
PipelineRL-k, arXiv 2510.13786).

With the generator in this process the placement is `inline`: `collect` decodes just until the next batch is
complete, then the trainer steps. That fixed rule makes a run a function of its seed, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from scalerl.rl.batch import Batch, make_batch
from scalerl.rl.learner import Learner, StepStats
from scalerl.rl.pool import PromptPool
from scalerl.rl.recipe import Recipe
from scalerl.rl.types import Generator, Group, Judge


@dataclass(frozen=True)
class Step:
    """What one turn of the loop did."""

    index: int
    groups: tuple[Group, ...]
    batch: Batch
    stats: StepStats
    generate_seconds: float
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
    admitted = consumed = 0
    while True:
        started = time.perf_counter()
        while admitted < consumed + recipe.schedule.tickets(n_prompts) and (draw := pool.draw()) is not None:
            generator.submit(*draw, n_samples)
            admitted += 1
        if admitted < consumed + n_prompts:
            return
        collected = generator.collect(n_prompts)
        groups = [Group.of(*pair) for pair in zip(collected, judge(collected), strict=True)]
        generated = time.perf_counter()
        for group in groups:
            pool.record(group)
        batch = make_batch(groups, recipe.advantage, recipe.averaging, recipe.zero_variance == "keep")
        stats = learner.step(batch)
        generator.update(learner.weights(), learner.version)
        consumed += n_prompts  # only now: these tickets' weights are installed
        trained = time.perf_counter()
        yield Step(learner.version, tuple(groups), batch, stats, generated - started, trained - generated)
