"""The driver: the loop of `scalerl.rl.pipeline`, with trainers and generators that only take time.

hear    messages of generators wait while the driver does something else; it takes them where it waits for
        groups, and before it looks whether there are enough
admit   as many groups as the schedule allows at the versions installed, each to the generator with the
        fewest in flight
take    as many groups, in order of admission, as the schedule wants at once; they are verified
step    of one batch; then the weights are published, where the schedule says so
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.plan.broadcast import arrivals
from scalerl.plan.clock import Clock
from scalerl.plan.job import Job
from scalerl.plan.rates import Rates
from scalerl.plan.replica import Group, Replica

MAX_PENDING = 3
"""Evaluations under way before training waits for the oldest, as in `scalerl.rl.evaluations`."""
_DRAWN_AT_ONCE = 512


@dataclass(frozen=True)
class Step:
    """What one step took, and what was where at its end. Seconds are of the driver."""

    time: float
    """At its end."""
    waited: float
    """For groups."""
    trained: float
    verified: float
    handled: float
    """Taking messages, admitting groups, making the batch, publishing, recording."""
    evaluated: float
    """Held up by evaluations."""
    tokens: int
    """Decoded for the completions of the batch."""
    longest: int
    """Of these completions, in tokens."""
    age_A: np.ndarray
    """Trained tokens by age; empty where the step was skipped."""
    generating: int
    generated: int
    """Groups that are complete and next in order; all others that are in flight are `generating`."""


class Driver:
    """Runs so many steps; `steps` has them afterwards."""

    def __init__(
        self, job: Job, rates: Rates, generators: int, trainers: int, n_steps: int, seed: int, clock: Clock
    ) -> None:
        self._job, self._rates, self._trainers, self._clock = job, rates, trainers, clock
        self._n_steps, self._rng = n_steps, np.random.default_rng(seed)
        self.replicas = [Replica(i, job.rows, rates, clock, self.hear) for i in range(generators)]
        self.steps: list[Step] = []
        self.admitted = self.taken = 0
        self._ready = 0  # complete and next in order
        self._complete: dict[int, Group] = {}
        self._in_flight = [0] * generators
        self._least = [(0, i) for i in range(generators)]
        self._known = [0] * generators  # versions installed, as the driver has been told
        self._behind = Counter({0: generators})
        self._installed = 0
        self._inbox = deque[tuple[Replica, list[Group], int]]()
        self._lengths = deque[list[int]]()
        self.broadcast = arrivals(rates.weights, generators)
        self._link_free = 0.0
        self._evaluations = deque[float]()  # the ends of those under way
        self._evaluator_free = 0.0
        self._version = 0
        self._collecting = self._handling = False
        self._since = 0.0
        self._spent = defaultdict[str, float](float)

    # -- messages --------------------------------------------------------------------------------------

    def hear(self, replica: Replica, groups: list[Group], version: int) -> None:
        """A generator says that groups are complete, or that it has installed a version."""
        self._inbox.append((replica, groups, version))
        if self._collecting and not self._handling:
            self._handle()

    def collect(self) -> None:
        """Begin to wait for the next groups."""
        self._collecting, self._since = True, self._clock.now
        self._handle()

    def _handle(self) -> None:
        """Take all messages that are there, and admit what they allow."""
        self._handling = True
        driver = self._rates.driver
        costs = driver.generator * len(self.replicas) + driver.message * len(self._inbox)
        while self._inbox:
            replica, groups, version = self._inbox.popleft()
            for group in groups:
                self._complete[group.place] = group
                self._in_flight[replica.index] -= 1
                costs += driver.completion * len(group.lengths) + driver.token * sum(group.lengths)
            if groups:
                heapq.heappush(self._least, (self._in_flight[replica.index], replica.index))
            else:
                self._note(replica.index, version)
        while self.taken + self._ready in self._complete:
            self._ready += 1
        costs += self._admit()
        self._spent["handled"] += costs
        if costs:
            self._clock.at(self._clock.now + costs, self._handled)
        else:
            self._handled()

    def _handled(self) -> None:
        self._handling = False
        if self._ready >= self._job.schedule.at_once(self._job.prompts):
            self._collecting = False
            self._take()
        elif self._inbox:
            self._handle()

    def _note(self, index: int, version: int) -> None:
        """A generator has installed a version."""
        self._behind[self._known[index]] -= 1
        self._behind[version] += 1
        self._known[index] = version
        while not self._behind[self._installed]:
            del self._behind[self._installed]
            self._installed = min(self._behind)

    def _admit(self) -> float:
        """Submit what the schedule allows; the seconds that it takes."""
        prompts = self._job.prompts
        n = self._installed * prompts + self._job.schedule.tickets(prompts) - self.admitted
        for _ in range(n):
            group = Group(self.admitted, self._draw())
            while True:
                count, index = heapq.heappop(self._least)
                if count == self._in_flight[index]:
                    break
            self._in_flight[index] += 1
            heapq.heappush(self._least, (count + 1, index))
            self.replicas[index].submit(group)
            self.admitted += 1
        driver = self._rates.driver
        return max(n, 0) * (driver.group + driver.generator * len(self.replicas))

    def _draw(self) -> list[int]:
        if not self._lengths:
            drawn_BG = self._rates.lengths.draw(self._rng, _DRAWN_AT_ONCE, self._job.samples, self._job.cut)
            self._lengths.extend(drawn_BG.tolist())
        return self._lengths.popleft()

    # -- training --------------------------------------------------------------------------------------

    def _take(self) -> None:
        wanted = self._job.schedule.at_once(self._job.prompts)
        # All that it has handled since the last step, it has while it waited.
        self._spent["waited"] = max(self._clock.now - self._since - self._spent["handled"], 0.0)
        groups = [self._complete.pop(place) for place in range(self.taken, self.taken + wanted)]
        self.taken += wanted
        self._ready -= wanted
        verify = self._rates.verify
        seconds = wanted * self._job.samples * verify.completion / verify.workers
        self._spent["verified"] += seconds
        batches = deque(groups[i : i + self._job.prompts] for i in range(0, wanted, self._job.prompts))
        self._clock.at(self._clock.now + seconds, self._train, batches)

    def _train(self, batches: deque[list[Group]]) -> None:
        groups = batches.popleft()
        used = [group for group in groups if self._rng.random() < self._rates.trainer.used]
        length_N = np.array([length for group in used for length in group.lengths], dtype=np.int64)
        trainer, driver = self._rates.trainer, self._rates.driver
        trained = trainer.fixed + trainer.token * largest_share(length_N, self._trainers)
        making = driver.batch_token * float(length_N.sum())
        self._spent["trained"] += trained
        self._spent["handled"] += making
        self._clock.at(self._clock.now + making + trained, self._trained, groups, used, batches)

    def _trained(self, groups: list[Group], used: Sequence[Group], batches: deque[list[Group]]) -> None:
        age_A = self._ages(used)
        self._version += 1
        held = 0.0
        if self._job.schedule.publishes(self._version):
            held = self._rates.weights.publish
            self._publish(self._clock.now + held)
        held += self._rates.driver.step
        self._spent["handled"] += held
        evaluated = self._evaluate(self._clock.now + held)
        tokens = sum(sum(group.lengths) for group in groups)
        longest = max(max(group.lengths) for group in groups)
        ends = self._clock.now + held + evaluated
        self._clock.at(ends, self._end, age_A, tokens, longest, evaluated, batches)

    def _end(
        self,
        age_A: np.ndarray,
        tokens: int,
        longest: int,
        evaluated: float,
        batches: deque[list[Group]],
    ) -> None:
        spent = self._spent
        self.steps.append(
            Step(
                time=self._clock.now,
                waited=spent["waited"],
                trained=spent["trained"],
                verified=spent["verified"],
                handled=spent["handled"],
                evaluated=evaluated,
                tokens=tokens,
                longest=longest,
                age_A=age_A,
                generating=self.admitted - self.taken - self._ready,
                generated=self._ready,
            )
        )
        self._spent.clear()
        if batches:
            self._train(batches)
        elif len(self.steps) < self._n_steps:
            self.collect()

    def _ages(self, used: Sequence[Group]) -> np.ndarray:
        ages = Counter[int]()
        for group in used:
            for version, tokens in group.tokens.items():
                ages[self._version - version] += tokens
        return np.array([ages[age] for age in range(max(ages) + 1)] if ages else [], dtype=np.int64)

    def _publish(self, now: float) -> None:
        arrive_R, sending = self.broadcast
        starts = max(now, self._link_free)
        self._link_free = starts + sending
        if not arrive_R[-1]:
            self._clock.at(starts, self._arrive, self.replicas, self._version)
            return
        for replica, at in zip(self.replicas, (starts + arrive_R).tolist(), strict=True):
            self._clock.at(at, self._arrive, [replica], self._version)

    def _arrive(self, replicas: Sequence[Replica], version: int) -> None:
        for replica in replicas:
            replica.offer(version)

    def _evaluate(self, now: float) -> float:
        """Begin an evaluation if one is due; the seconds that it holds up the training."""
        every, evaluate = self._job.evaluate_every, self._rates.evaluate
        due = math.floor(self._version / every) > math.floor((self._version - 1) / every)
        if not due or not evaluate.seconds:
            return 0.0
        if evaluate.by == "trainer":
            return evaluate.seconds
        if evaluate.by == "generators":
            for replica in self.replicas:
                replica.hold(evaluate.seconds)
            return 0.0
        while self._evaluations and self._evaluations[0] <= now:
            self._evaluations.popleft()
        held = 0.0
        if len(self._evaluations) >= MAX_PENDING:
            held = self._evaluations.popleft() - now
        self._evaluator_free = max(self._evaluator_free, now + held) + evaluate.seconds
        self._evaluations.append(self._evaluator_free)
        return held


def largest_share(length_N: np.ndarray, n: int) -> float:
    """Tokens of the one of `n` trainers that has the most, when each completion, the longest first, goes to
    the one that has the least."""
    if n == 1 or not len(length_N):
        return float(length_N.sum())
    loads = [0] * n
    for length in np.sort(length_N)[::-1].tolist():
        heapq.heapreplace(loads, loads[0] + length)
    return float(max(loads))
