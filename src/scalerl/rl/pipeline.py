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
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scalerl.rl.batch import Batch, make_batch
from scalerl.rl.learner import Learner, StepStats
from scalerl.rl.length import AnyLength
from scalerl.rl.pool import PromptPool
from scalerl.rl.recipe import Recipe
from scalerl.rl.saved_rollouts import pack_groups, unpack_groups
from scalerl.rl.types import Generator, Group, Judge, Reward, Rollout


@dataclass(frozen=True)
class Step:
    """What one turn of the loop did."""

    index: int
    groups: tuple[Group, ...]
    batch: Batch
    stats: StepStats
    trained_at: float
    """When it began to train, in Unix seconds."""
    train_seconds: float
    waited_seconds: float
    """For groups that were not generated yet."""
    verified_seconds: float = 0.0
    """In which the groups collected since the last step were verified."""
    cpu: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds of this process since the last step, by what it did; see `Pipeline`."""


class Pipeline:
    """The loop over its parts. Between two steps `state` has what a resume needs, beside theirs.

    The CPU seconds of this process are those to `hear` generators, to `admit`, to `verify`, to `train`, to
    `publish`, and those between two steps, to `record`.
    """

    def __init__(
        self, recipe: Recipe, pool: PromptPool, generator: Generator, learner: Learner, judge: Judge
    ) -> None:
        self._recipe, self._pool, self._generator = recipe, pool, generator
        self._learner, self._judge = learner, judge
        self.admitted = 0
        """Groups submitted to the generator so far."""
        self._collected = 0
        self._verified = deque[Group]()
        self._waited = self._verifying = 0.0  # seconds since the last step
        self._cpu, self._cpu_at = defaultdict[str, float](float), time.process_time()

    @property
    def pool_left(self) -> int:
        """Prompts that can still be drawn."""
        return self._pool.left

    def queue(self) -> dict[str, int]:
        """Groups by where they are: being generated, generated and next in order, verified."""
        generated = self._generator.ready
        generating = self._generator.in_flight - generated
        return {"generating": generating, "generated": generated, "verified": len(self._verified)}

    def ledger(self, fates: Mapping[str, int]) -> dict[str, int]:
        """Groups admitted, what became of those consumed (`fates`), and those in flight, counted apart."""
        in_flight = self._generator.in_flight + len(self._verified)
        return {"admitted": self.admitted, **fates, "in_flight": in_flight}

    def steps(self) -> Iterator[Step]:
        """Train for as long as the caller takes steps; ends by itself when the pool has run dry."""
        while self._verified or self._collect():
            yield self._step()

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {
            "admitted": self.admitted,
            "collected": self._collected,
            "verified": pack_groups(self._verified),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self.admitted, self._collected = state["admitted"], state["collected"]
        self._verified = deque(unpack_groups(state["verified"]))

    def _admit(self) -> None:
        n_prompts = self._recipe.batch.prompts
        # Every version is the answer to one batch: so many groups have come back as installed weights.
        allowed = self._generator.installed * n_prompts + self._recipe.schedule.tickets(n_prompts)
        self._spent_to("hear")
        while self.admitted < allowed and (draw := self._pool.draw()) is not None:
            self._generator.submit(*draw, self._recipe.batch.samples)
            self.admitted += 1
        self._spent_to("admit")

    def _collect(self) -> bool:
        """Wait for as many groups as the schedule wants at once, and verify them; False when none is left."""
        n_prompts, generator = self._recipe.batch.prompts, self._generator
        wanted = self._recipe.schedule.at_once(n_prompts)
        self._spent_to("record")
        self._admit()
        while generator.ready < wanted:
            if self.admitted < self._collected + wanted and not self._pool.left:
                wanted = (self.admitted - self._collected) // n_prompts * n_prompts  # the last that there is
                continue
            started = time.perf_counter()
            generator.work()
            self._waited += time.perf_counter() - started
            self._admit()
        sampled = generator.take(wanted)
        self._spent_to("hear")
        started = time.perf_counter()
        judged = self._judge(sampled)
        self._verifying += time.perf_counter() - started
        for rollouts, rewards in zip(sampled, judged, strict=True):
            self._verified.append(make_group(rollouts, rewards, self._recipe.length))
            self._pool.record(self._verified[-1])
        self._collected += wanted
        self._spent_to("verify")
        return wanted > 0

    def _step(self) -> Step:
        started, at = time.perf_counter(), time.time()
        recipe, learner = self._recipe, self._learner
        self._spent_to("record")
        groups = [self._verified.popleft() for _ in range(recipe.batch.prompts)]
        batch = make_batch(
            groups,
            recipe.advantage,
            recipe.averaging,
            recipe.context.sampled,
            keep_zero_variance=recipe.zero_variance == "keep",
            keep_truncated=recipe.truncated == "keep",
        )
        stats = learner.step(batch)
        weights = learner.weights() if recipe.schedule.publishes(learner.version) else None
        seconds = time.perf_counter() - started
        self._spent_to("train")
        if weights is not None:
            self._generator.update(weights, learner.version)
        self._spent_to("publish")
        waited, verified, cpu = self._waited, self._verifying, self._cpu
        self._waited, self._verifying, self._cpu = 0.0, 0.0, defaultdict[str, float](float)
        return Step(learner.version, tuple(groups), batch, stats, at, seconds, waited, verified, cpu)

    def _spent_to(self, what: str) -> None:
        """The CPU seconds since the last call went to `what`."""
        before, self._cpu_at = self._cpu_at, time.process_time()
        self._cpu[what] += self._cpu_at - before


def make_group(rollouts: Sequence[Rollout], rewards: Sequence[Reward], length: AnyLength) -> Group:
    """The group of some completions; the length control may take from their rewards."""
    group = Group.of(rollouts, rewards)
    penalties = [length.penalty(r.length, v.correct) for r, v in zip(rollouts, rewards, strict=True)]
    return replace(group, reward_G=group.reward_G + np.array(penalties))
