"""The simulation of a job on a number of generators and trainers: the training loop as one event loop.

It is the loop of `scalerl.rl.loop.pipeline`, with parts that only take time:

    admit     as many groups as the schedule allows at the version that all generators have installed, each
              to the generator with the fewest groups in flight
    collect   as many groups, in order of admission, as the schedule wants at once; they are verified, and
              the driver takes them
    step      of one batch; then the weights are published, where the schedule says so

Where the driver is overlapped it admits and collects while the trainers step, one collection ahead; else it
does one after the other. Every role has devices of its own.

Shapes in names: A staleness, in versions.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.plan.bounds import TokenCounts, bounds, decode_row, train_seconds, verify_seconds
from scalerl.plan.generator import SimulatedGenerator, SimulatedGroup
from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates

MOST_DEVICES = 1_000_000
MAX_PENDING = 3
"""Evaluations under way before training waits for the oldest, as in `scalerl.rl.loop.evaluations`."""
_DRAWN_AT_ONCE = 512


@dataclass(frozen=True)
class SimulationResult:
    """What a cluster does, over the steps after the first ones, which fill the pipeline."""

    generators: int
    trainers: int
    devices: int
    steps: int
    """That the figures are from."""
    seconds_per_step: float
    tokens_per_second: float
    """Decoded."""
    generators_idle: float
    """Share of their time."""
    slots_in_use: float
    """Share of the rows, over all of the time."""
    trainers_train: float
    """Share of the trainers' time. In the rest of it they wait: for groups, or for the driver."""
    wait_for_groups: float
    wait_for_verification: float
    wait_for_driver: float
    wait_for_evaluation: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: tuple[float, ...]
    """Share of the trained tokens by staleness, in versions."""
    generating: float
    """Groups in flight at the end of a step, on average: not complete, or not next in order."""
    generated: float
    """Complete and next in order."""
    at_least: dict[str, float]
    """Seconds that a step would take at the least if one thing alone bounded it; see `bounds`."""

    @property
    def steps_per_hour(self) -> float:
        """Trainer steps."""
        return 3600 / self.seconds_per_step

    @property
    def bound_by(self) -> str:
        """What bounds the step the most."""
        return max(self.at_least, key=lambda what: self.at_least[what])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """Run `job` on so many generators and trainers.

    Args:
        job: what is asked of the loop.
        rates: how fast the parts are.
        generators: of `job.decode_slots` rows, and `rates.devices_per_generator` devices, each.
        trainers: devices that train.
        steps: that the figures are from; the default is 5 for each batch in flight, 20 at the least. They are
            made whole multiples of the batches in flight, as steps may come in bursts of so many.
        seed: of the lengths, and of which groups are trained.
        watch: called after every step with the share of the steps that is done.

    Raises:
        InputError: a number is out of range.
    """
    in_flight = job.batches_in_flight
    steps = max(5 * in_flight, 20) if steps is None else steps
    for name, value in (("generators", generators), ("trainers", trainers), ("steps", steps)):
        if not 1 <= value <= MOST_DEVICES:
            raise InputError(f"{name}: a number from 1 to {MOST_DEVICES}, found {value}")
    first, n = 2 * in_flight, -(-steps // in_flight) * in_flight
    loop = Simulation(job, rates, generators, trainers, seed)
    loop.run(first, lambda done: watch(done / (first + n)))
    before, began = loop.spent(), loop.now
    loop.totals = Totals()
    loop.run(n, lambda done: watch((first + done) / (first + n)))
    seconds, totals = loop.now - began, loop.totals
    busy, row_seconds = (loop.spent() - before).tolist()
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
        slots_in_use=min(row_seconds / (seconds * generators * job.decode_slots), 1.0),
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
        at_least=bounds(job, rates, generators, trainers),
    )


class Totals:
    """Sums over some steps."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        """Of the trainers, by what they did or waited for."""
        self.tokens = self.generating = self.generated = 0
        self.staleness = defaultdict[int, float](float)
        """Trained tokens by staleness, in versions."""


class Simulation:
    """The loop and its events, in order of their time; those of one time in the order they were planned."""

    def __init__(self, job: PlannedJob, rates: Rates, generators: int, trainers: int, seed: int) -> None:
        self._job, self._rates, self._trainers = job, rates, trainers
        self._rng = np.random.default_rng(seed)
        self._overlapped = job.overlapped or rates.driver.overlapped
        row = decode_row(rates, TokenCounts.of(job, rates))
        prompt = rates.decode.prompt * rates.lengths.prompt
        self.generators = [
            SimulatedGenerator(job.decode_slots, rates.decode.base, row, prompt) for _ in range(generators)
        ]
        self.now, self.totals = 0.0, Totals()
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._planned = 0
        self._lengths = deque[list[int]]()
        self._in_flight = np.zeros(generators, dtype=np.int64)  # groups of each generator
        self._order = deque[SimulatedGroup]()  # admitted and not taken
        self.admitted = self._ready = 0
        self._installed = 0
        self._installing = Counter[int]()  # generators that have a version, until all have
        self._link_free = 0.0
        self._evaluations = deque[float]()  # when those under way end
        self._version = self._steps = 0
        self._batches = deque[list[SimulatedGroup]]()  # of the collection that is trained
        self._ahead: list[list[SimulatedGroup]] = []  # of the next one
        self._stepping = self._collecting = False
        self._state, self._since = "groups", 0.0

    def run(self, steps: int, watch: Callable[[int], None]) -> None:
        """Make so many steps more; `watch` is called with how many there are."""
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
        """Of all generators together: busy seconds, and those times slots in use."""
        for i in range(len(self.generators)):
            self._go_on(i)
        return np.sum([(one.busy, one.row_seconds) for one in self.generators], axis=0)

    def _after(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        self._at(self.now + seconds, act, *args)

    def _at(self, time: float, act: Callable[..., Any], *args: Any) -> None:
        self._planned += 1
        heapq.heappush(self._events, (time, self._planned, act, args))

    def _is(self, state: str) -> None:
        """The trainers do this, or wait for it, from now on."""
        self.totals.seconds[self._state] += self.now - self._since
        self._state, self._since = state, self.now

    # -- generators ------------------------------------------------------------------------------------

    def _go_on(self, i: int) -> bool:
        """Bring a generator up to now, and plan its next event; returns whether a group is complete."""
        generator = self.generators[i]
        done = generator.go_on(self.now)
        self._in_flight[i] -= len(done)
        generator.stamp += 1
        if generator.ends < math.inf:
            self._at(generator.ends, self._ended, i, generator.stamp)
        return bool(done)

    def _ended(self, i: int, stamp: int) -> bool:
        """False where nothing comes of it for the driver."""
        return stamp == self.generators[i].stamp and self._go_on(i)

    def _arrive(self, version: int) -> None:
        for i, generator in enumerate(self.generators):
            done = generator.install(self.now, version, self._rates.weights.install)
            self._go_on(i)
            self._at(done, self._note, version)

    def _note(self, version: int) -> None:
        """One more generator has installed a version."""
        self._installing[version] += 1
        if self._installing[version] == len(self.generators):
            del self._installing[version]
            self._installed = version

    # -- the driver ------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Do whatever there is to do now."""
        if not self._stepping and (self._batches or self._ahead):
            if not self._batches:
                self._batches, self._ahead = deque(self._ahead), []
            self._step(self._batches.popleft())
        if self._stepping and not (self._overlapped and self._state == "training"):
            return
        self._admit()
        self._count_ready()
        wanted = self._job.schedule.at_once(self._job.prompts)
        if not self._collecting and not self._ahead and self._ready >= wanted:
            self._collect(wanted)

    def _count_ready(self) -> None:
        while self._ready < len(self._order) and not self._order[self._ready].left:
            self._ready += 1

    def _admit(self) -> None:
        prompts = self._job.prompts
        n = self._installed * prompts + self._job.schedule.in_flight_limit(prompts) - self.admitted
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

    def _collect(self, n: int) -> None:
        """Have the next groups verified, and take them."""
        groups = [self._order.popleft() for _ in range(n)]
        self._ready -= n
        self._collecting = True
        if not self._stepping:
            self._is("verification")
        self._after(self._job.steps_of_a_phase * verify_seconds(self._job, self._rates), self._take, groups)

    def _take(self, groups: list[SimulatedGroup]) -> None:
        if not self._stepping:
            self._is("driver")
        seconds = self._rates.driver.completion * len(groups) * self._job.samples
        self._after(seconds, self._taken, groups)

    def _taken(self, groups: list[SimulatedGroup]) -> None:
        n = self._job.prompts
        self._collecting = False
        self._ahead = [groups[i : i + n] for i in range(0, len(groups), n)]

    # -- a step ----------------------------------------------------------------------------------------

    def _step(self, groups: list[SimulatedGroup]) -> None:
        self._is("training")
        self._stepping = True
        used = [group for group in groups if self._rng.random() < self._rates.trainer.used]
        lengths = [length for group in used for length in group.lengths]
        seconds = train_seconds(self._rates, self._trainers, sum(lengths), max(lengths, default=0))
        self._after(seconds, self._trained, groups, used)

    def _trained(self, groups: list[SimulatedGroup], used: list[SimulatedGroup]) -> None:
        self._is("driver")
        for group in used:
            for version, tokens in group.tokens.items():
                self.totals.staleness[self._version - version] += tokens
        self.totals.tokens += sum(sum(group.lengths) for group in groups)
        self._version += 1
        publishes = self._job.schedule.publishes(self._version)
        self._after(self._rates.weights.publish if publishes else 0.0, self._published, publishes)

    def _published(self, publishes: bool) -> None:
        if publishes:
            self._link_free = max(self.now, self._link_free) + self._rates.weights.send
            self._at(self._link_free, self._arrive, self._version)
        self._after(self._rates.driver.step, self._evaluate)

    def _evaluate(self) -> None:
        """Ask for an evaluation if one is due; where too many are under way, wait for the oldest before."""
        every, seconds, under_way = self._job.evaluate_every, self._rates.evaluate, self._evaluations
        due = math.floor(self._version / every) > math.floor((self._version - 1) / every)
        waits = 0.0
        if due and seconds:
            while under_way and under_way[0] <= self.now:
                under_way.popleft()
            if len(under_way) >= MAX_PENDING:
                self._is("evaluation")
                waits = under_way[0] - self.now
            under_way.append(max(self.now + waits, under_way[-1] if under_way else 0.0) + seconds)
        self._after(waits, self._end)

    def _end(self) -> None:
        ahead = self._collecting or self._ahead or self._batches
        self._is("verification" if self._collecting else "driver" if ahead else "groups")
        self._stepping = False
        self._steps += 1
        self._count_ready()
        self.totals.generated += self._ready
        self.totals.generating += len(self._order) - self._ready
