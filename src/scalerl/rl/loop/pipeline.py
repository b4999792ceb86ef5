"""The training loop: one file, the same code whatever the placement of generator and learner.

                 prompts                    groups, in order of admission
    PromptPool ----------> Generator ------------------------------------> verify -> make_batch
        ^                      ^                                               |          |
        | pass rates           | weights, version          rewards ------------+          v
        +----------------------+--------------------------------------------------- Learner.begin

    admit    submits prompts as long as `scalerl.rl.loop.admission` allows; waits for nothing
    work     consumes groups in order of admission; waits until the next batch of them is complete (with
             `OffPolicy`, the next k batches), and admits meanwhile
    step     consumes a batch; then publishes the weights, which unblocks admission (with `OffPolicy`, after
             the k-th of a phase)

While a learner in other processes steps, this process goes on: it receives messages, admits groups, verifies
those that are needed next, and makes their batch; never more than those of one more wait, so that memory is
bounded. A learner in this process is done when `begin` returns.

The in-flight limit of `scalerl.rl.loop.admission` bounds the staleness of trained tokens. Completions in
flight while the trainer steps go on with the new weights and the KV cache of the old ones.

With the placement `inline` the generator is in this process: `work` is one decode step, until just the next
batch is complete; then the trainer steps. That fixed rule makes a run a function of its seed, bit for bit.
Generators in processes of their own (`scalerl.rl.placement.rollouts`) decode all the time, `work` waits for a
message from them, and weights are updated while completions are in flight.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalerl.errors import OutOfMemoryError, OwnCodeError
from scalerl.record.activity import Count
from scalerl.rl.algo.checked import penalty_of
from scalerl.rl.algo.length import LengthControl
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.ordered import Generator, pack_groups, pack_samples, unpack_groups, unpack_samples
from scalerl.rl.learner.batch import Batch, StepStats, make_batch
from scalerl.rl.learner.learner import Learner, StepStoppedError
from scalerl.rl.loop.admission import AdmissionControl, VerifiedGroups
from scalerl.rl.loop.progress import TRAINING, Activities
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.weights import bytes_of
from scalerl.rl.types import Done, Group, Pending, Reward, Rollout, Verify

_POLL_SECONDS = 0.02
"""Seconds to wait for the end of a step, or of a verification, before messages are received."""


@dataclass(frozen=True)
class WeightSync:
    """The weight sync of a step; zeros where the schedule publishes no weights."""

    bytes: int = 0
    """Size of all tensors, in their own dtype."""
    seconds: float = 0.0
    """Time in which the trainer sent them."""
    update_seconds: float = math.nan
    """From the start of that until all generators had the newest version that they were found to have since
    the step before; NaN where there is none."""


@dataclass(frozen=True)
class Step:
    """One trainer step: what it consumed, and what it showed."""

    index: int
    groups: tuple[Group, ...]
    batch: Batch
    stats: StepStats
    trained_at: float
    """Start of the training, in Unix seconds."""
    train_seconds: float
    waited_seconds: float
    """Time in which the trainer waited for groups to be generated."""
    sync: WeightSync = WeightSync()


@dataclass(frozen=True)
class _PendingRewards:
    sampled: Sequence[tuple[Rollout, ...]]
    rewards: Pending[list[list[Reward]]]


class Pipeline:
    """The loop over its parts. While none is under way, `state` is what a resume needs beside their states.

    Once `stop` is set, no further step is yielded: within two decode steps, micro-batches or messages.
    """

    def __init__(
        self,
        recipe: Recipe,
        pool: PromptPool,
        generator: Generator,
        learner: Learner,
        verify: Verify,
        stop: threading.Event | None = None,
        activities: Activities | None = None,
    ) -> None:
        self._recipe, self._pool, self._generator = recipe, pool, generator
        self._learner, self._verify, self._stop = learner, verify, stop or threading.Event()
        self._activities = activities or Activities()
        self._admission = AdmissionControl(recipe.schedule, recipe.batch.prompts)
        self._verifying: _PendingRewards | None = None
        self._verified = VerifiedGroups(recipe)
        self._begun = learner.version
        """Steps that are begun or made."""
        self._batch: Batch | None = None
        """The batch of the next verified groups, if it is made already."""
        self._waited = 0.0
        """Seconds since the last step in which the trainer waited for groups to be generated."""
        self._published = deque[tuple[int, float]]()
        """Versions that not all generators are known to have, and when their sync began."""
        self._update_seconds = math.nan

    @property
    def admitted(self) -> int:
        """Groups submitted to the generator so far."""
        return self._admission.admitted

    @property
    def pool_left(self) -> int:
        """Prompts that can still be drawn."""
        return self._pool.left

    def queue(self) -> dict[str, int]:
        """Return the groups in flight by state: being generated, generated and next in order, verified."""
        generated = self._generator.ready
        generating = self._generator.in_flight - generated
        return {
            "generating": generating,
            "generated": generated + self._n_verifying,
            "verified": len(self._verified),
        }

    def ledger(self, fates: Mapping[str, int]) -> dict[str, int]:
        """Return the groups admitted, the fates of those consumed, and those in flight, counted apart."""
        in_flight = self._generator.in_flight + self._n_verifying + len(self._verified)
        return {"admitted": self.admitted, **fates, "in_flight": in_flight}

    def steps(self) -> Iterator[Step]:
        """Yield trainer steps, until the pool has run dry or `stop` is set."""
        while self._wait_for_batches():
            try:
                step = self._step()
            except StepStoppedError:
                return
            yield step

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs. Groups that are being verified are verified again after it: to wait
        for verdicts may take longer than a run that is stopped has left."""
        verifying = self._verifying.sampled if self._verifying else ()
        verified, replaced = self._verified.state()
        return {
            "admitted": self.admitted,
            "verifying": pack_samples(dict(enumerate(verifying))),
            "verified": pack_groups(verified),
            "replaced": replaced,
            "waited": self._waited,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""
        self._admission.admitted = state["admitted"]
        self._verified.restore(unpack_groups(state["verified"]), state["replaced"])
        self._begun, self._waited = self._learner.version, state["waited"]
        if sampled := list(unpack_samples(state["verifying"]).values()):
            self._verifying = _PendingRewards(sampled, self._verify(sampled))

    def _admit(self) -> None:
        installed = self._version_everywhere()
        while (
            self._admission.allows(installed, self._verified.replaced)
            and (drawn := self._pool.draw()) is not None
        ):
            self._generator.submit(*drawn, self._recipe.batch.samples)
            self._admission.admitted += 1

    @property
    def _n_verifying(self) -> int:
        return len(self._verifying.sampled) if self._verifying else 0

    @property
    def _batches_needed(self) -> int:
        """Batches that must be complete before the next step: with `OffPolicy` the rest of the phase."""
        n_prompts = self._recipe.batch.prompts
        at_once = self._recipe.schedule.at_once(n_prompts) // n_prompts
        return at_once - self._begun % at_once

    def _n_to_verify(self) -> int:
        """Return how many groups to verify next; 0 where there are enough, or too few are left."""
        wanted, left = self._verified.missing(self._batches_needed), self._generator.in_flight
        if left < wanted and not self._pool.left:
            # A step takes whole batches: what is left of the pool's last one is never trained.
            first = self._verified.missing(self._verified.complete + 1)
            n_prompts = self._recipe.batch.prompts
            return first + (left - first) // n_prompts * n_prompts if left >= first else 0  # the last ones
        return wanted

    def _wait_for_batches(self) -> bool:
        """Wait until the groups of a step are verified; False when there are none left, or to stop."""
        while self._verified.complete < self._batches_needed:
            if self._stop.is_set():
                return False
            self._learner.check_life()  # without it no weights come, which the groups wait for
            self._admit_and_verify()
            if self._verified.complete >= self._batches_needed or self._verifying:
                if self._verifying and self._activities.due("verifying"):
                    self._activities.doing("verifying", Count(0, self._n_verifying, "groups"))
                continue
            if not (wanted := self._n_to_verify()):
                return self._verified.complete > 0
            if wanted <= self._generator.ready:  # groups that take the place of others are there already
                continue
            if self._activities.due("generating"):
                count = Count(self._generator.ready, wanted, "groups")
                self._activities.doing("generating", count, self._generator.counters.tokens)
            # Only this counts as waiting for generation; a wait for the verifier does not.
            started = time.perf_counter()
            self._generator.work()
            self._waited += time.perf_counter() - started
        return True

    def _admit_and_verify(self) -> None:
        """Admit what may be admitted, and verify the groups that are needed next; hardly waits."""
        self._admit()
        if not self._verifying and 0 < (n := self._n_to_verify()) <= self._generator.ready:
            sampled = self._generator.take(n)
            self._verifying = _PendingRewards(sampled, self._verify(sampled))
        if (done := self._verifying) and done.rewards.wait(_POLL_SECONDS):
            rewards, made = done.rewards.result(), 0
            try:
                for rollouts, verdicts in zip(done.sampled, rewards, strict=True):
                    group = make_group(rollouts, verdicts, self._recipe.length)
                    self._pool.record(group)
                    self._verified.add(group)
                    made += 1
            finally:  # a custom class may have raised: the others wait, from that group on
                left = done.sampled[made:]
                self._verifying = _PendingRewards(left, Done(rewards[made:])) if left else None
            self._admit()  # for those without signal, where others replace them

    def _make_batch(self) -> Batch:
        recipe = self._recipe
        return make_batch(
            self._verified.first(),
            recipe.advantage,
            recipe.averaging,
            recipe.context.sampled,
            keep_zero_variance=recipe.zero_variance == "keep",
            keep_truncated=recipe.truncated == "keep",
        )

    def _step(self) -> Step:
        started, at = time.perf_counter(), time.time()
        recipe, learner = self._recipe, self._learner
        batch, self._batch = self._make_batch() if self._batch is None else self._batch, None
        groups = self._verified.take()
        self._begun += 1
        try:
            pending = learner.begin(batch)
        except (StepStoppedError, OutOfMemoryError, OwnCodeError):
            self._unmake(groups)
            raise
        try:
            # 0: while groups are being verified, `_admit_and_verify` does the waiting.
            while not pending.wait(0.0 if self._verifying else _POLL_SECONDS):
                self._activities.doing(TRAINING)
                with suppress(OwnCodeError):  # it is raised again after this step, which would be torn
                    self._admit_and_verify()
                    if self._verified.complete and self._batch is None:
                        self._batch = self._make_batch()
            stats = pending.result()
        except StepStoppedError:
            self._unmake(groups)
            raise
        seconds = time.perf_counter() - started
        sync = self._publish() if recipe.schedule.publishes(learner.version) else WeightSync()
        sync = replace(sync, update_seconds=self._update_seconds)
        waited, self._waited, self._update_seconds = self._waited, 0.0, math.nan
        return Step(learner.version, tuple(groups), batch, stats, at, seconds, waited, sync)

    def _unmake(self, groups: list[Group]) -> None:
        """Put the groups of a step back that has trained nothing: a resume makes it from its beginning."""
        self._verified.put_back(groups)
        self._begun -= 1
        self._batch = None

    def _version_everywhere(self) -> int:
        """Return the version that all generators have; note the seconds since its sync began."""
        installed = self._generator.installed
        while self._published and self._published[0][0] <= installed:
            self._update_seconds = time.perf_counter() - self._published.popleft()[1]
        return installed

    def _publish(self) -> WeightSync:
        started = time.perf_counter()
        # Read only where they are sent: from a sharded learner that is a gather over all ranks.
        weights = self._learner.weights()
        self._generator.update(weights, self._learner.version)
        self._published.append((self._learner.version, started))
        self._version_everywhere()
        return WeightSync(sum(map(bytes_of, weights.plan)), time.perf_counter() - started)


def make_group(rollouts: Sequence[Rollout], rewards: Sequence[Reward], length: LengthControl) -> Group:
    """Return the group of some completions, with the penalties of the length control."""
    group = Group.of(rollouts, rewards)
    penalties = [penalty_of(length, r.length, v.correct) for r, v in zip(rollouts, rewards, strict=True)]
    return replace(group, reward_G=group.reward_G + np.array(penalties))
