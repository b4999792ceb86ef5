"""The training loop: one file and the same code for every placement of generator and learner.

                 prompts                    groups, in order of admission
    PromptPool ----------> Generator ------------------------------------> verify -> make_batch
        ^                      ^                                               |          |
        | pass rates           | weights, version          rewards ------------+          v
        +----------------------+--------------------------------------------------- Learner.begin

    admit    submits prompts as long as `scalerl.rl.loop.admission` allows; never waits
    work     takes groups in order of admission; waits until the next batch is complete (with `OffPolicy`,
             the rest of the phase), and admits meanwhile
    step     consumes a batch, then publishes the weights, which unblocks admission (with `OffPolicy`, only
             after the k-th batch of a phase)

While a learner in other processes makes a step, this process receives messages, admits groups, verifies the
groups needed next, and makes their batch. It verifies no further than the next wait needs, which bounds
memory. An in-process learner has finished by the time `begin` returns.

The in-flight limit of `scalerl.rl.loop.admission` bounds the staleness of trained tokens. Completions in
flight during a weight update continue with the new weights on the old weights' KV cache.

With the placement `inline` the generator is in this process: `work` makes one decode step, and the trainer
steps as soon as the next batch is complete. This fixed rule makes a run a function of its seed, bit for bit.
Generators in processes of their own (`scalerl.rl.placement.rollouts`) decode continuously: `work` waits for a
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
"""Longest wait for a step or a verification, in seconds, before messages are received again."""


@dataclass(frozen=True)
class WeightSync:
    """The weight sync of a step; `bytes` and `seconds` are 0 if the schedule publishes no weights then."""

    bytes: int = 0
    """Size of all tensors, in their own dtype."""
    seconds: float = 0.0
    """Seconds the trainer spent sending them."""
    update_seconds: float = math.nan
    """Seconds from the start of a sync until every generator was found to have its version, for the newest
    such version since the previous step; NaN if there is none."""


@dataclass(frozen=True)
class Step:
    """One trainer step: the groups it consumed, its statistics and times."""

    index: int
    groups: tuple[Group, ...]
    batch: Batch
    stats: StepStats
    trained_at: float
    """Start of the training, in Unix seconds."""
    train_seconds: float
    waited_seconds: float
    """Seconds the trainer spent waiting for generation before this step."""
    sync: WeightSync = WeightSync()


@dataclass(frozen=True)
class _PendingRewards:
    sampled: Sequence[tuple[Rollout, ...]]
    rewards: Pending[list[list[Reward]]]


class Pipeline:
    """The training loop over pool, generator, learner and verifier.

    Between steps, `state` and the states of these parts are all that a resume needs. Once `stop` is set,
    `steps` ends within two decode steps, micro-batches or messages.
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
        """Number of steps started so far, including one in progress."""
        self._batch: Batch | None = None
        """The batch of the next step, if it is already made."""
        self._waited = 0.0
        """Seconds the trainer has spent waiting for generation since the last step."""
        self._published = deque[tuple[int, float]]()
        """Versions that some generator may not have yet, each with the start of its sync."""
        self._update_seconds = math.nan

    @property
    def admitted(self) -> int:
        """Number of groups submitted to the generator so far."""
        return self._admission.admitted

    @property
    def pool_left(self) -> int:
        """Number of prompts that can still be drawn."""
        return self._pool.left

    def queue(self) -> dict[str, int]:
        """Return the number of groups in flight by state; generated ones are complete and next in order."""
        generated = self._generator.ready
        generating = self._generator.in_flight - generated
        return {
            "generating": generating,
            "generated": generated + self._n_verifying,
            "verified": len(self._verified),
        }

    def ledger(self, fates: Mapping[str, int]) -> dict[str, int]:
        """Return how many groups were admitted, met each fate, and are in flight, each counted on its own."""
        in_flight = self._generator.in_flight + self._n_verifying + len(self._verified)
        return {"admitted": self.admitted, **fates, "in_flight": in_flight}

    def steps(self) -> Iterator[Step]:
        """Yield trainer steps until the pool runs dry or `stop` is set."""
        while self._wait_for_batches():
            try:
                step = self._step()
            except StepStoppedError:
                return
            yield step

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs; it verifies again the groups that are under verification now."""
        # Waiting for their verdicts could take longer than a run that is being stopped has left.
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
        """Continue from `state`."""
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
        """Number of batches that must be complete before the next step; `OffPolicy`: the rest of a phase."""
        n_prompts = self._recipe.batch.prompts
        at_once = self._recipe.schedule.at_once(n_prompts) // n_prompts
        return at_once - self._begun % at_once

    def _n_to_verify(self) -> int:
        """Return how many groups to verify next; 0 if enough are verified or too few are left."""
        wanted, left = self._verified.missing(self._batches_needed), self._generator.in_flight
        if left < wanted and not self._pool.left:
            # A step takes whole batches, so the groups of an unfinished last batch are never trained.
            first = self._verified.missing(self._verified.complete + 1)
            n_prompts = self._recipe.batch.prompts
            return first + (left - first) // n_prompts * n_prompts if left >= first else 0
        return wanted

    def _wait_for_batches(self) -> bool:
        """Wait until the groups of the next step are verified; return False if none are left or on `stop`."""
        while self._verified.complete < self._batches_needed:
            if self._stop.is_set():
                return False
            self._learner.check_life()  # groups may wait for weights that a lost learner never sends
            self._admit_and_verify()
            if self._verified.complete >= self._batches_needed or self._verifying:
                if self._verifying and self._activities.due("verifying"):
                    self._activities.doing("verifying", Count(0, self._n_verifying, "groups"))
                continue
            if not (wanted := self._n_to_verify()):
                return self._verified.complete > 0
            if wanted <= self._generator.ready:  # the replacements are already generated
                continue
            if self._activities.due("generating"):
                count = Count(self._generator.ready, wanted, "groups")
                self._activities.doing("generating", count, self._generator.counters.tokens)
            # Waiting for the verifier does not count as waiting for generation.
            started = time.perf_counter()
            self._generator.work()
            self._waited += time.perf_counter() - started
        return True

    def _admit_and_verify(self) -> None:
        """Admit what the limit allows and verify the groups needed next; wait `_POLL_SECONDS` at most."""
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
            finally:  # if a custom class raised, its group and those after it stay pending
                left = done.sampled[made:]
                self._verifying = _PendingRewards(left, Done(rewards[made:])) if left else None
            self._admit()  # groups without signal may have freed their slots

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
            # 0 while groups are being verified: `_admit_and_verify` then does the waiting.
            while not pending.wait(0.0 if self._verifying else _POLL_SECONDS):
                self._activities.doing(TRAINING)
                with suppress(OwnCodeError):  # raised again after this step, so as not to abandon it half-way
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
        """Put back the groups of a step that trained nothing, so that a resume makes the step anew."""
        self._verified.put_back(groups)
        self._begun -= 1
        self._batch = None

    def _version_everywhere(self) -> int:
        """Return the version that all generators have; record the seconds since its sync started."""
        installed = self._generator.installed
        while self._published and self._published[0][0] <= installed:
            self._update_seconds = time.perf_counter() - self._published.popleft()[1]
        return installed

    def _publish(self) -> WeightSync:
        started = time.perf_counter()
        # Read the weights only to send them: with a sharded learner that is a gather over all ranks.
        weights = self._learner.weights()
        self._generator.update(weights, self._learner.version)
        self._published.append((self._learner.version, started))
        self._version_everywhere()
        return WeightSync(sum(map(bytes_of, weights.plan)), time.perf_counter() - started)


def make_group(rollouts: Sequence[Rollout], rewards: Sequence[Reward], length: LengthControl) -> Group:
    """Return the group of these completions, with the length control's penalties added to the rewards."""
    group = Group.of(rollouts, rewards)
    penalties = [penalty_of(length, r.length, v.correct) for r, v in zip(rollouts, rewards, strict=True)]
    return replace(group, reward_G=group.reward_G + np.array(penalties))
