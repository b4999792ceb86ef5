"""The simulation of a job on a number of generators and trainers, and what it shows.

Shapes in names: A ages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.plan.clock import Clock
from scalerl.plan.driver import SimulatedDriver, SimulatedStep
from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates

MOST_GENERATORS = 1_000_000


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
    rows_in_use: float
    """Share of the rows, over all of the time."""
    trainers_train: float
    """Share of the trainers' time. In the rest of it they wait: for groups, or for the driver."""
    wait_for_groups: float
    wait_for_verification: float
    wait_for_driver: float
    wait_for_evaluation: float
    age_mean: float
    age_max: int
    age_histogram: tuple[float, ...]
    """Share of the trained tokens by age, in versions."""
    generating: float
    """Groups in flight at the end of a step, on average: not complete, or not next in order."""
    generated: float
    """Complete and next in order."""
    core_seconds_per_step: float
    """Of all roles that share cores; 0 where none do."""
    cores_of_others: float
    """That jobs of others keep busy."""
    at_least: dict[str, float]
    """Seconds that a step would take at the least if one thing alone bounded it; see `_bounds`."""

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
    job: PlannedJob, rates: Rates, generators: int, trainers: int, *, steps: int | None = None, seed: int = 0
) -> SimulationResult:
    """Run `job` on so many generators and trainers.

    Args:
        job: what is asked of the loop.
        rates: how fast the parts are.
        generators: of `job.rows` rows, and `rates.devices_per_generator` devices, each.
        trainers: devices that train.
        steps: that the figures are from; the default is 5 for each batch in flight, 20 at the least. They are
            made whole multiples of the batches in flight, as steps may come in bursts of so many.
        seed: of the lengths, and of which groups are trained.

    Raises:
        InputError: a number is out of range.
    """
    in_flight = job.schedule.in_flight_limit(job.prompts) // job.prompts
    steps = max(5 * in_flight, 20) if steps is None else steps
    for name, value, most in (
        ("generators", generators, MOST_GENERATORS),
        ("trainers", trainers, MOST_GENERATORS),
        ("steps", steps, MOST_GENERATORS),
    ):
        if not 1 <= value <= most:
            raise InputError(f"{name}: a number from 1 to {most}, found {value}")
    first = 2 * in_flight
    last = first + -(-steps // in_flight) * in_flight
    clock = Clock(rates.machine.cores, rates.machine.together, rates.machine.others)
    driver = SimulatedDriver(job, rates, generators, trainers, last, seed, clock)
    driver.go()
    clock.run(lambda: len(driver.steps) >= first)
    before = _spent(driver, clock)
    clock.run(lambda: len(driver.steps) >= last)
    return _outcome(job, rates, trainers, driver, first, _spent(driver, clock) - before)


def _spent(driver: SimulatedDriver, clock: Clock) -> np.ndarray:
    """Of all generators together: busy seconds, and those times rows in use. Of all cores: those that roles
    held, and other jobs."""
    busy, row_seconds = np.sum([replica.spent(clock.now) for replica in driver.replicas], axis=0)
    return np.array([busy, row_seconds, clock.held, clock.held_by_others])


def _outcome(
    job: PlannedJob, rates: Rates, trainers: int, driver: SimulatedDriver, first: int, spent: np.ndarray
) -> SimulationResult:
    steps, generators = driver.steps[first:], len(driver.replicas)
    seconds = steps[-1].time - driver.steps[first - 1].time
    busy, row_seconds, held, held_by_others = (float(value) for value in spent)

    def share(name: str) -> float:
        return sum(getattr(step, name) for step in steps) / seconds

    ages = np.zeros(max(len(step.age_A) for step in steps))
    for step in steps:
        ages[: len(step.age_A)] += step.age_A
    ages /= max(ages.sum(), 1)
    return SimulationResult(
        generators=generators,
        trainers=trainers,
        devices=generators * rates.devices_per_generator + trainers,
        steps=len(steps),
        seconds_per_step=seconds / len(steps),
        tokens_per_second=sum(step.tokens for step in steps) / seconds,
        generators_idle=max(1 - busy / (seconds * generators), 0.0),
        rows_in_use=min(row_seconds / (seconds * generators * job.rows), 1.0),
        trainers_train=share("trained"),
        wait_for_groups=share("waited"),
        wait_for_verification=share("verified"),
        wait_for_driver=share("handled"),
        wait_for_evaluation=share("evaluated"),
        age_mean=float(ages @ np.arange(len(ages))) if len(ages) else math.nan,
        age_max=int(np.flatnonzero(ages)[-1]) if ages.any() else 0,
        age_histogram=tuple(ages.tolist()),
        generating=float(np.mean([step.generating for step in steps])),
        generated=float(np.mean([step.generated for step in steps])),
        core_seconds_per_step=held / len(steps),
        cores_of_others=held_by_others / seconds,
        at_least=_bounds(job, rates, driver, steps),
    )


def _bounds(
    job: PlannedJob, rates: Rates, driver: SimulatedDriver, steps: Sequence[SimulatedStep]
) -> dict[str, float]:
    """Seconds of a step, if there were nothing else but

    generation     all rows of all generators, always in use
    training       what the trainers do
    driver         what the driver does by itself
    verification
    broadcast      of the weights, one after the other
    in order       the longest completion of a batch, at the pace of decoding that was seen: a batch is
                   admitted when the weights of k + 1 steps before are installed, so that the time of the
                   longest, of the broadcast and of a step's other parts fits into k + 1 steps
    """
    mean = {
        name: float(np.mean([getattr(step, name) for step in steps]))
        for name in ("trained", "driven", "judged", "tokens", "longest")
    }
    arrive_R, sending = driver.broadcast
    weights, in_flight = rates.weights, job.schedule.in_flight_limit(job.prompts) // job.prompts
    completion = mean["tokens"] / job.completions
    seen = [replica.seconds_per_step for replica in driver.replicas if replica.seconds_per_step]
    decode_step = float(np.mean(seen)) if seen else 0.0
    positions = job.rows * (rates.lengths.prompt + completion / 2)
    rate = job.rows / rates.decode.seconds(1, job.rows, round(positions))
    prefills = rates.prefill.token * rates.lengths.prompt * job.prompts
    generation = mean["tokens"] / rate + prefills
    after = mean["trained"] + mean["driven"] + mean["judged"] + float(arrive_R[-1]) + weights.install
    phases = 1 if job.schedule.publishes(1) else job.schedule.k
    # With OffPolicy the k steps of a phase come after its generation.
    if phases > 1:
        after += (phases - 1) * (mean["trained"] + mean["driven"] + mean["judged"])
    return {
        "generation": generation / len(driver.replicas),
        "training": mean["trained"],
        "driver": mean["driven"],
        "verification": mean["judged"],
        "broadcast": sending / phases,
        "in order": (mean["longest"] * decode_step + after) / in_flight,
    }
