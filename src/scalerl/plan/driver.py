"""The driver: the loop of `scalerl.rl.loop.pipeline`, with trainers and generators that only take time.

hear    messages of generators wait while the driver does something else; it takes them where it collects
        groups, and before it looks whether there are enough
admit   as many groups as the schedule allows at the versions installed, each to the generator with the
        fewest in flight
take    as many groups, in order of admission, as the schedule wants at once; they are verified
step    of one batch; then the weights are published, where the schedule says so

It does one of these after the other. Where it is `overlapped`, it collects while the trainers step and while
groups are verified, until the groups of the next steps are verified and wait.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.plan.broadcast import arrivals
from scalerl.plan.clock import Clock
from scalerl.plan.job import PlannedJob
from scalerl.plan.queue import Queue
from scalerl.plan.rates import Rates
from scalerl.plan.replica import Replica, SimulatedGroup

MAX_PENDING = 3
"""Evaluations under way before training waits for the oldest, as in `scalerl.rl.loop.evaluations`."""
_DRAWN_AT_ONCE = 512


@dataclass(frozen=True)
class SimulatedStep:
    """What one step took, and what was where at its end. The first five are of the trainers' time, and all of
    it."""

    time: float
    """At its end."""
    trained: float
    waited: float
    """For groups."""
    verified: float
    """For their verification."""
    handled: float
    """For the driver: taking messages, admitting, making the batch, publishing, recording."""
    evaluated: float
    """Held up by evaluations."""
    driven: float
    """Seconds that the driver did something, and those that a verification took, whoever waited."""
    judged: float
    tokens: int
    """Decoded for the completions of the batch."""
    longest: int
    """Of these completions, in tokens."""
    age_A: np.ndarray
    """Trained tokens by age; empty where the step was skipped."""
    generating: int
    generated: int
    """Groups that are complete and next in order; all others that are in flight are `generating`."""


class SimulatedDriver:
    """Runs so many steps; `steps` has them afterwards."""

    def __init__(
        self,
        job: PlannedJob,
        rates: Rates,
        generators: int,
        trainers: int,
        n_steps: int,
        seed: int,
        clock: Clock,
    ) -> None:
        self._job, self._rates, self._trainers, self._clock = job, rates, trainers, clock
        self._n_steps, self._rng = n_steps, np.random.default_rng(seed)
        self._overlapped = job.overlapped or rates.driver.overlapped
        self._driving, self._verifying, self._evaluating = (clock.worker() for _ in range(3))
        self._trainer = clock.worker() if self._overlapped else self._driving
        self.replicas = [Replica(i, job.rows, rates, clock, self.hear) for i in range(generators)]
        self.steps: list[SimulatedStep] = []
        self.admitted = self.taken = 0
        self.queue = Queue(rates.driver.in_order)
        self._in_flight = [0] * generators  # completions
        self._least = [(0, i) for i in range(generators)]
        self._known = [0] * generators  # versions installed, as the driver has been told
        self._behind = Counter({0: generators})
        self._installed = 0
        self._inbox = deque[tuple[Replica, list[SimulatedGroup], int]]()
        self._lengths = deque[list[int]]()
        self.broadcast = arrivals(rates.weights, job.way, generators, trainers)
        self._link_free = 0.0
        self._evaluations = 0  # that are asked for and not done
        self._held_up: Callable[[], None] | None = None
        self._version = 0
        self._batches = deque[list[SimulatedGroup]]()  # of the collection that is trained
        self._ahead: list[list[SimulatedGroup]] = []  # of the next one
        self._busy = self._training = self._judging = False
        self._hearing = False  # messages that leave it waiting for more
        self._looked = False  # since it last began to collect
        self._done: Sequence[SimulatedGroup] | None = None  # of a step whose end the driver has not seen to
        self._since = 0.0
        self._spent = defaultdict[str, float](float)

    # -- what is next ----------------------------------------------------------------------------------

    def go(self) -> None:
        """Do the next thing that there is to do."""
        if self._busy:
            return
        if self._done is not None:
            groups, self._done = self._done, None
            self._publish(groups)
        elif not self._training and (self._batches or self._ahead):
            if not self._batches:
                self._batches, self._ahead = deque(self._ahead), []
            self._make(self._batches.popleft())
        elif self._may_collect():
            if self._inbox or not self._looked:
                self._handle()
            elif self.queue.ready >= self._wanted:
                self._take()

    def _may_collect(self) -> bool:
        if self._judging or self._ahead or len(self.steps) >= self._n_steps:
            return False
        return self._overlapped or not (self._training or self._batches)

    @property
    def _wanted(self) -> int:
        return self._job.schedule.at_once(self._job.prompts)

    def _do(self, seconds: float, then: Callable[..., None], *args: Any, looks: float = 0.0) -> None:
        """The driver is busy for so long, and with looks, as many as it has time for; then does `then`."""
        self._account()
        self._busy = True
        self._spent["driven"] += seconds
        self._driving.work(seconds + looks, self._did, then, args)

    def _did(self, then: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._account()
        self._busy = False
        then(*args)
        self.go()

    def _account(self) -> None:
        """What the time since the last call was of the trainers' time."""
        state = (
            ("trained", self._training),
            ("evaluated", self._held_up is not None),
            ("handled", self._busy and not self._hearing),
            ("verified", self._judging),
            ("waited", True),
        )
        self._spent[next(name for name, holds in state if holds)] += self._clock.now - self._since
        self._since = self._clock.now

    # -- messages --------------------------------------------------------------------------------------

    def hear(self, replica: Replica, groups: list[SimulatedGroup], version: int) -> None:
        """A generator says that groups are complete, or that it has installed a version."""
        self._inbox.append((replica, groups, version))
        self.go()

    def _handle(self) -> None:
        """Take all messages that are there, and admit what they allow."""
        driver, self._looked = self._rates.driver, True
        costs = driver.message * len(self._inbox)
        while self._inbox:
            replica, groups, version = self._inbox.popleft()
            for group in groups:
                self._in_flight[replica.index] -= len(group.lengths)
                costs += driver.completion * len(group.lengths) + driver.token * sum(group.lengths)
                self.queue.complete(group)
            if groups:
                heapq.heappush(self._least, (self._in_flight[replica.index], replica.index))
            else:
                self._note(replica.index, version)
        costs += self._admit()
        self._hearing = self.queue.ready < self._wanted
        self._do(costs, self._heard, looks=driver.look * len(self.replicas))

    def _heard(self) -> None:
        self._hearing = False

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
        prompts, driver = self._job.prompts, self._rates.driver
        n = self._installed * prompts + self._job.schedule.in_flight_limit(prompts) - self.admitted
        n_parts = min(driver.parts, self._job.samples)
        for _ in range(n):
            lengths = self._draw()
            self.queue.admit(self.admitted, n_parts)
            for i in range(n_parts):
                self._place(SimulatedGroup(self.admitted, lengths[i::n_parts]))
            self.admitted += 1
        return max(n, 0) * n_parts * (driver.group + driver.generator * len(self.replicas))

    def _place(self, group: SimulatedGroup) -> None:
        while True:
            count, index = heapq.heappop(self._least)
            if count == self._in_flight[index]:
                break
        self._in_flight[index] += len(group.lengths)
        heapq.heappush(self._least, (self._in_flight[index], index))
        self.replicas[index].submit(group)

    def _draw(self) -> list[int]:
        if not self._lengths:
            drawn_BG = self._rates.lengths.draw(self._rng, _DRAWN_AT_ONCE, self._job.samples, self._job.cut)
            self._lengths.extend(drawn_BG.tolist())
        return self._lengths.popleft()

    # -- training --------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Have the next groups verified."""
        self._account()
        groups = self.queue.take(self._wanted)
        self.taken += len(groups)
        verify = self._rates.verify
        seconds = len(groups) * self._job.samples * verify.completion / verify.workers
        self._spent["judged"] += seconds
        self._judging, self._looked = True, False
        self._verifying.work(seconds, self._judged, groups)

    def _judged(self, groups: list[SimulatedGroup]) -> None:
        self._account()
        self._judging = False
        n = self._job.prompts
        self._ahead = [groups[i : i + n] for i in range(0, len(groups), n)]
        self.go()

    def _make(self, groups: list[SimulatedGroup]) -> None:
        """Make the batch, and have it trained."""
        used = [group for group in groups if self._rng.random() < self._rates.trainer.used]
        length_N = np.array([length for group in used for length in group.lengths], dtype=np.int64)
        self._do(self._rates.driver.batch_token * float(length_N.sum()), self._train, groups, used, length_N)

    def _train(self, groups: list[SimulatedGroup], used: list[SimulatedGroup], length_N: np.ndarray) -> None:
        self._account()
        trainer = self._rates.trainer
        self._training = True
        seconds = trainer.fixed + trainer.token * largest_share(length_N, self._trainers)
        seconds += trainer.micro * math.ceil(len(length_N) / self._trainers / self._job.micro)
        self._trainer.work(seconds, self._trained, groups, used)

    def _trained(self, groups: list[SimulatedGroup], used: Sequence[SimulatedGroup]) -> None:
        self._account()
        self._training = False
        self._spent["tokens"] = sum(sum(group.lengths) for group in groups)
        self._spent["longest"] = max(max(group.lengths) for group in groups)
        self._done = used
        self.go()

    def _publish(self, used: Sequence[SimulatedGroup]) -> None:
        age_A = self._ages(used)
        self._version += 1
        publishes = self._job.schedule.publishes(self._version)
        offers = self._rates.weights.publish + self._rates.driver.offer * len(self.replicas)
        self._do(offers if publishes else 0.0, self._record, age_A, publishes)

    def _record(self, age_A: np.ndarray, publishes: bool) -> None:
        if publishes:
            self._send()
        self._do(self._rates.driver.step, self._evaluate, lambda: self._end(age_A))

    def _end(self, age_A: np.ndarray) -> None:
        self._account()
        self.steps.append(
            SimulatedStep(
                time=self._clock.now,
                **{name: self._spent[name] for name in _SECONDS},
                tokens=int(self._spent["tokens"]),
                longest=int(self._spent["longest"]),
                age_A=age_A,
                generating=self.admitted - self.taken - self.queue.ready,
                generated=self.queue.ready,
            )
        )
        self._spent.clear()
        self._looked = False

    def _ages(self, used: Sequence[SimulatedGroup]) -> np.ndarray:
        ages = Counter[int]()
        for group in used:
            for version, tokens in group.tokens.items():
                ages[self._version - version] += tokens
        return np.array([ages[age] for age in range(max(ages) + 1)] if ages else [], dtype=np.int64)

    def _send(self) -> None:
        """The new weights are on their way."""
        arrive_R, sending = self.broadcast
        starts = max(self._clock.now, self._link_free)
        self._link_free = starts + sending
        if not arrive_R[-1]:
            self._clock.at(starts, self._arrive, self.replicas, self._version)
            return
        for replica, at in zip(self.replicas, (starts + arrive_R).tolist(), strict=True):
            self._clock.at(at, self._arrive, [replica], self._version)

    def _arrive(self, replicas: Sequence[Replica], version: int) -> None:
        for replica in replicas:
            replica.offer(version)

    # -- evaluations -----------------------------------------------------------------------------------

    def _evaluate(self, then: Callable[[], None]) -> None:
        """Begin an evaluation if one is due; `then` comes once it holds the training up no more."""
        every, evaluate = self._job.evaluate_every, self._rates.evaluate
        due = math.floor(self._version / every) > math.floor((self._version - 1) / every)
        if not due or not evaluate.seconds:
            then()
        elif evaluate.by == "generators":
            for replica in self.replicas:
                replica.hold(evaluate.seconds)
            then()
        elif evaluate.by == "trainer":
            self._hold(then)
            self._trainer.work(evaluate.seconds, self._let_go)
        elif self._evaluations < MAX_PENDING:
            self._ask()
            then()
        else:
            self._hold(lambda: (self._ask(), then()))

    def _hold(self, then: Callable[[], Any]) -> None:
        self._account()
        self._busy, self._held_up = True, then

    def _let_go(self) -> None:
        """What was held up goes on."""
        if self._held_up is not None:
            self._account()
            self._busy, then, self._held_up = False, self._held_up, None
            then()
            self.go()

    def _ask(self) -> None:
        """One evaluation after another, aside."""
        self._evaluations += 1
        if self._evaluations == 1:
            self._evaluating.work(self._rates.evaluate.seconds, self._evaluated)

    def _evaluated(self) -> None:
        self._evaluations -= 1
        if self._evaluations:
            self._evaluating.work(self._rates.evaluate.seconds, self._evaluated)
        self._let_go()


_SECONDS = ("trained", "waited", "verified", "handled", "evaluated", "driven", "judged")


def largest_share(length_N: np.ndarray, n: int) -> float:
    """Tokens of the one of `n` trainers that has the most, when each completion, the longest first, goes to
    the one that has the least."""
    if n == 1 or not len(length_N):
        return float(length_N.sum())
    loads = [0] * n
    for length in np.sort(length_N)[::-1].tolist():
        heapq.heapreplace(loads, loads[0] + length)
    return float(max(loads))
