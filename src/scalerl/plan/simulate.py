"""Simulation of a job on some generators and trainers: the training loop as one event loop.

It is the loop of `scalerl.rl.loop.pipeline`, with parts that only take time:

    admit     as many groups as the schedule allows at the version that all generators have, each
              to the generator with the fewest groups in flight
    collect   as many groups, in order of admission, as the schedule requires at once; they are verified,
              and the driver receives them
    step      train on one batch, then publish the weights if the schedule says so

An overlapped driver admits and collects while the trainers step, up to one collection ahead; otherwise these
alternate. Every role has devices of its own.

Shapes in names: A staleness, in versions.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.plan.bounds import (
    TokenCounts,
    bounds,
    evaluation_seconds,
    seconds_per_slot,
    train_seconds,
    verify_seconds,
)
from scalerl.plan.generator import SimulatedGenerator, SimulatedGroup
from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates

MOST_DEVICES = 1_000_000
MAX_PENDING = 3
"""Evaluations in progress before training waits for the oldest, as in `scalerl.rl.loop.evaluations`."""
_DRAWN_AT_ONCE = 512


@dataclass(frozen=True)
class SimulationResult:
    """Means per step on a cluster, after the first steps have filled the pipeline."""

    generators: int
    trainers: int
    devices: int
    steps: int
    """Number of steps over which the means are taken."""
    seconds_per_step: float
    tokens_per_second: float
    """Decoded tokens of all generators."""
    generators_idle: float
    """Share of the generators' time."""
    slots_in_use: float
    """Share of the decode slots, over the whole time."""
    trainers_train: float
    """Share of the trainers' time; for the rest they wait, as split below."""
    wait_for_groups: float
    wait_for_verification: float
    wait_for_driver: float
    wait_for_evaluation: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: tuple[float, ...]
    """Share of the trained tokens by staleness, in versions."""
    generating: float
    """Mean groups in flight at the end of a step that are not complete, or not next in order."""
    generated: float
    """Mean groups in flight at the end of a step that are complete and next in order."""
    evaluation_seconds: float
    """Seconds per evaluation."""
    at_least: dict[str, float]
    """Seconds per step if one part alone were the limit; see `bounds`."""

    @property
    def steps_per_hour(self) -> float:
        """Trainer steps per hour."""
        return 3600 / self.seconds_per_step

    @property
    def bound_by(self) -> str:
        """The tightest of the bounds."""
        return max(self.at_least, key=lambda what: self.at_least[what])

    def to_json(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return asdict(self) | {"steps_per_hour": self.steps_per_hour, "bound_by": self.bound_by}


def simulate(
    job: PlannedJob,
    rates: Rates,
    generators: int,
    trainers: int,
    *,
    steps: int | None = None,
    seed: int = 0,
    watch: Callable[[float], None] = lambda share: None,
) -> SimulationResult:
    """Simulate `job` on some generators and trainers.

    Args:
        job: batches, schedule and lengths.
        rates: the speed of the parts.
        generators: their number; each has `job.decode_slots` slots and `rates.devices_per_generator` devices.
        trainers: the number of devices that train.
        steps: steps over which to take the means; by default 5 per batch in flight, but at least 20. Rounded
            up to a multiple of the batches in flight, as steps may come in bursts of that many.
        seed: the seed of the lengths, and of which groups enter the loss.
        watch: called after every step with the share of the steps that is done.

    Raises:
        InputError: a number is out of range.
    """
    in_flight = job.batches_in_flight
    steps = max(5 * in_flight, 20) if steps is None else steps
    for name, value in (("generators", generators), ("trainers", trainers), ("steps", steps)):
        if not 1 <= value <= MOST_DEVICES:
            raise InputError(f"{name}: a number from 1 to {MOST_DEVICES}, found {value}")
    # Leave out the first rounds, which fill the pipeline and in which short completions end first.
    first, n = 2 * in_flight, -(-steps // in_flight) * in_flight
    loop = Simulation(job, rates, generators, trainers, seed)
    # If few evaluations would fall into these steps, make more of them, and each shorter by the same factor.
    if 4 * job.evaluations.every > n:
        loop.evaluate_every = min(job.evaluations.every, max(first / (MAX_PENDING + 2), 1.0))
    loop.run(first, lambda done: watch(done / (first + n)))
    before, began = loop.spent(), loop.now
    loop.totals = Totals()
    loop.run(n, lambda done: watch((first + done) / (first + n)))
    seconds, totals = loop.now - began, loop.totals
    busy, slot_seconds = (loop.spent() - before).tolist()
    staleness_A = np.array([totals.staleness[lag] for lag in range(max(totals.staleness, default=-1) + 1)])
    staleness_A = staleness_A / max(staleness_A.sum(), 1.0)
    shares = {what: spent / seconds for what, spent in totals.seconds.items()}
    return SimulationResult(
        generators=generators,
        trainers=trainers,
        devices=generators * rates.devices_per_generator + trainers,
        steps=n,
        seconds_per_step=seconds / n,
        tokens_per_second=totals.tokens / seconds,
        generators_idle=max(1 - busy / (seconds * generators), 0.0),
        slots_in_use=min(slot_seconds / (seconds * generators * job.decode_slots), 1.0),
        trainers_train=shares.get("training", 0.0),
        wait_for_groups=shares.get("groups", 0.0),
        wait_for_verification=shares.get("verification", 0.0),
        wait_for_driver=shares.get("driver", 0.0),
        wait_for_evaluation=shares.get("evaluation", 0.0),
        staleness_mean=float(staleness_A @ np.arange(len(staleness_A))) if len(staleness_A) else math.nan,
        staleness_max=max(np.flatnonzero(staleness_A > 1e-9).tolist(), default=0),
        staleness_histogram=tuple(staleness_A.tolist()),
        generating=totals.generating / n,
        generated=totals.generated / n,
        evaluation_seconds=loop.evaluation_seconds,
        at_least=bounds(job, rates, generators, trainers),
    )


class Totals:
    """Sums over some steps."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        """Seconds of the trainers, by what they did or waited for."""
        self.tokens = self.generating = self.generated = 0
        self.staleness = defaultdict[int, float](float)
        """Trained tokens by staleness, in versions."""


class Simulation:
    """The loop and its events, in order of time; simultaneous events in the order they were planned."""

    def __init__(self, job: PlannedJob, rates: Rates, generators: int, trainers: int, seed: int) -> None:
        self._job, self._rates, self._trainers = job, rates, trainers
        self._rng = np.random.default_rng(seed)
        self._overlapped = job.overlapped or rates.driver.overlapped
        counts = TokenCounts.of(job, rates)
        slot = seconds_per_slot(rates, counts)
        prompt = rates.decode.prompt * rates.lengths.prompt
        self.generators = [
            SimulatedGenerator(job.decode_slots, rates.decode.base, slot, prompt) for _ in range(generators)
        ]
        self.now, self.totals = 0.0, Totals()
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._planned = 0
        self._lengths = deque[list[int]]()
        self._in_flight = np.zeros(generators, dtype=np.int64)  # groups per generator
        self._order = deque[SimulatedGroup]()  # admitted, and not collected yet
        self.admitted = self._ready = 0
        self._updated = 0
        self._link_free = 0.0
        self._evaluations = deque[float]()  # end times of evaluations in progress
        self.evaluation_seconds = evaluation_seconds(job, rates, counts, generators)
        self.evaluate_every = job.evaluations.every
        """Steps between evaluations; if fewer than the job's, each evaluation is shorter by that factor."""
        self._version = self._steps = 0
        self._batches = deque[list[SimulatedGroup]]()  # left of the collection in training
        self._ahead: list[list[SimulatedGroup]] = []  # of the next collection
        self._stepping = self._collecting = False
        self._state, self._since = "groups", 0.0

    def run(self, steps: int, watch: Callable[[int], None]) -> None:
        """Make `steps` more steps; call `watch` after each with the number made so far."""
        first = self._steps
        self._go()
        while self._steps < first + steps:
            before = self._steps
            self.now, _, act, args = heapq.heappop(self._events)
            if act(*args) is not False:
                self._go()
            if self._steps > before:
                watch(self._steps - first)

    def spent(self) -> np.ndarray:
        """Return the busy seconds of all generators together, and these times the slots in use."""
        for i in range(len(self.generators)):
            self._go_on(i)
        return np.sum([(one.busy, one.slot_seconds) for one in self.generators], axis=0)

    def _at(self, time: float, act: Callable[..., Any], *args: Any) -> None:
        # The number breaks ties, so that simultaneous events stay in order and functions are not compared.
        self._planned += 1
        heapq.heappush(self._events, (time, self._planned, act, args))

    def _enter(self, state: str) -> None:
        """Count the time since the last call, and set what the trainers do or wait for from now on."""
        self.totals.seconds[self._state] += self.now - self._since
        self._state, self._since = state, self.now

    # -- generators ------------------------------------------------------------------------------------

    def _go_on(self, i: int) -> bool:
        """Bring a generator up to now, and plan its next event; return whether a group is complete."""
        generator = self.generators[i]
        done = generator.go_on(self.now)
        self._in_flight[i] -= len(done)
        # Ends planned before are out of date, and told by their stamp, as a heap cannot remove them.
        generator.stamp += 1
        if generator.ends < math.inf:
            self._at(generator.ends, self._ended, i, generator.stamp)
        return bool(done)

    def _ended(self, i: int, stamp: int) -> bool:
        """Handle the end of a completion; return whether the driver has something to check."""
        return stamp == self.generators[i].stamp and self._go_on(i)

    def _arrive(self, version: int) -> None:
        done = []
        for i, generator in enumerate(self.generators):
            done.append(generator.update(self.now, version, self._rates.weights.update))
            self._go_on(i)
        self._at(max(done), self._count_updated, version)

    def _evaluate(self, seconds: float) -> None:
        for i, generator in enumerate(self.generators):
            generator.pause(self.now, seconds)
            self._go_on(i)

    def _count_updated(self, version: int) -> None:
        self._updated = version

    # -- the driver ------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Start whatever the driver can do now."""
        if not self._stepping and (self._batches or self._ahead):
            if not self._batches:
                self._batches, self._ahead = deque(self._ahead), []
            self._start(self._step(self._batches.popleft()))
        if self._stepping and not (self._overlapped and self._state == "training"):
            return
        self._admit()
        self._count_ready()
        wanted = self._job.schedule.at_once(self._job.prompts)
        if not self._collecting and not self._ahead and self._ready >= wanted:
            self._start(self._collect(wanted))

    def _count_ready(self) -> None:
        while self._ready < len(self._order) and not self._order[self._ready].left:
            self._ready += 1

    def _admit(self) -> None:
        prompts = self._job.prompts
        # A version counts once all generators have it: only then no later token can be staler than k.
        n = self._updated * prompts + self._job.schedule.in_flight_limit(prompts) - self.admitted
        touched = set[int]()
        for _ in range(n):
            i = int(self._in_flight.argmin())
            group = SimulatedGroup(self._draw())
            self._in_flight[i] += 1
            self._order.append(group)
            self.generators[i].submit(group)
            touched.add(i)
        self.admitted += max(n, 0)
        for i in sorted(touched):
            self._go_on(i)

    def _draw(self) -> list[int]:
        if not self._lengths:
            drawn_BG = self._rates.lengths.draw(self._rng, _DRAWN_AT_ONCE, self._job.samples, self._job.cut)
            self._lengths.extend(drawn_BG.tolist())
        return self._lengths.popleft()

    def _start(self, process: Iterator[float]) -> None:
        """Run a process of the driver; each time it yields seconds, resume it after these have passed."""
        seconds = next(process, None)
        if seconds is not None:
            self._at(self.now + seconds, self._start, process)

    def _collect(self, n: int) -> Iterator[float]:
        """Verify and collect the next `n` groups."""
        groups = [self._order.popleft() for _ in range(n)]
        self._ready -= n
        self._collecting = True
        if not self._stepping:
            self._enter("verification")
        yield self._job.steps_of_a_phase * verify_seconds(self._job, self._rates)
        if not self._stepping:
            self._enter("driver")
        yield self._rates.driver.completion * n * self._job.samples
        self._collecting = False
        prompts = self._job.prompts
        self._ahead = [groups[i : i + prompts] for i in range(0, n, prompts)]

    def _step(self, groups: list[SimulatedGroup]) -> Iterator[float]:
        """Train on one batch, publish the weights if the schedule says so, and evaluate if that is due."""
        self._enter("training")
        self._stepping = True
        used = [group for group in groups if self._rng.random() < self._rates.trainer.used]
        lengths = [length for group in used for length in group.lengths]
        yield train_seconds(self._rates, self._trainers, sum(lengths), max(lengths, default=0))
        self._enter("driver")
        for group in used:
            for version, tokens in group.tokens.items():
                self.totals.staleness[self._version - version] += tokens
        self.totals.tokens += sum(sum(group.lengths) for group in groups)
        self._version += 1
        publishes = self._job.schedule.publishes(self._version)
        yield self._rates.weights.publish if publishes else 0.0
        if publishes:
            self._link_free = max(self.now, self._link_free) + self._rates.weights.send
            self._at(self._link_free, self._arrive, self._version)
        yield self._rates.driver.step
        yield self._wait_for_evaluations()
        ahead = self._collecting or self._ahead or self._batches
        self._enter("verification" if self._collecting else "driver" if ahead else "groups")
        self._stepping = False
        self._steps += 1
        self._count_ready()
        self.totals.generated += self._ready
        self.totals.generating += len(self._order) - self._ready

    def _wait_for_evaluations(self) -> float:
        """Request an evaluation if one is due; return the seconds until fewer than `MAX_PENDING` are left."""
        every, under_way = self.evaluate_every, self._evaluations
        seconds = self.evaluation_seconds * every / self._job.evaluations.every
        due = math.floor(self._version / every) > math.floor((self._version - 1) / every)
        if not (due and seconds):
            return 0.0
        if self._job.evaluations.by_generators:
            # Starts once they have the version; meanwhile they accept no newer one, and admission waits.
            self._at(max(self.now, self._link_free), self._evaluate, seconds)
            return 0.0
        while under_way and under_way[0] <= self.now:
            under_way.popleft()
        waits = 0.0
        if len(under_way) >= MAX_PENDING:
            self._enter("evaluation")
            waits = under_way[0] - self.now
        under_way.append(max(self.now + waits, under_way[-1] if under_way else 0.0) + seconds)
        return waits
