"""Splitting devices into generators and trainers."""

from collections.abc import Callable
from dataclasses import replace

from scalerl.errors import InputError
from scalerl.plan.bounds import bounds
from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates
from scalerl.plan.simulate import SimulationResult, simulate

_ALL = 12
"""The most trainers for which every number of them is tried."""
_AROUND = (0.7, 0.85, 1.0, 1.2, 1.5)
"""Candidates, as multiples of the number of trainers that minimises the larger bound of both roles."""


def splits(
    job: PlannedJob,
    rates: Rates,
    devices: int,
    *,
    steps: int | None = None,
    seed: int = 0,
    watch: Callable[[float], None] = lambda share: None,
) -> tuple[SimulationResult, ...]:
    """Simulate splits of `devices` devices, by number of trainers; devices left over do nothing.

    `watch` is called after every simulated step with the share of all steps that is done.

    Raises:
        InputError: there are too few devices for a generator and a trainer.
    """
    each = rates.devices_per_generator
    most = devices - each
    if most < 1:
        raise InputError(f"devices: a generator takes {each} and a trainer 1, so {each + 1} are needed")
    tried = list(range(1, most + 1)) if most <= _ALL else _near(job, rates, devices)
    found = []
    for i, trainers in enumerate(tried):

        def watch_all(share: float, before: int = i) -> None:
            watch((before + share) / len(tried))

        generators = (devices - trainers) // each
        found.append(simulate(job, rates, generators, trainers, steps=steps, seed=seed, watch=watch_all))
    return tuple(replace(one, devices=devices) for one in found)


def quick_split(
    job: PlannedJob, rates: Rates, devices: int, excess: Callable[[int, int], int], each: int = 1
) -> tuple[int, int]:
    """Return numbers of generators and trainers on `devices` devices by their bounds, without a simulation.

    It is the split with the lowest bound among those that fit; if none fits, the one that lacks the least
    memory. One device may be left over, for evaluations.

    Args:
        excess: bytes that the fullest device of a split lacks; 0 if all of it fits.
        each: devices per generator, which is assumed to be this many times as fast as in `rates`.

    Raises:
        InputError: there are too few devices for a generator and a trainer.
    """
    if devices < each + 1:
        raise InputError(f"devices: a generator takes {each} and a trainer 1, and there are {devices}")

    def worst_first(split: tuple[int, int]) -> tuple[int, float]:
        return excess(*split), max(bounds(job, rates, each * split[0], split[1]).values())

    return min(
        (
            ((used - trainers) // each, trainers)
            for used in (devices, devices - 1)
            for trainers in range(1, used - each + 1)
        ),
        key=worst_first,
    )


def best(found: tuple[SimulationResult, ...]) -> SimulationResult:
    """Return the split with the fewest trainers among those within a percent of the most steps per hour."""
    fastest = max(one.steps_per_hour for one in found)
    return next(one for one in found if one.steps_per_hour >= 0.99 * fastest)


def _near(job: PlannedJob, rates: Rates, devices: int) -> list[int]:
    """Return numbers of trainers around that at which generation and training have equal bounds."""
    each = rates.devices_per_generator
    low, high = 1, devices - each
    while low < high:  # bisection: with more trainers generation takes longer, and training does not
        trainers = (low + high) // 2
        least = bounds(job, rates, (devices - trainers) // each, trainers)
        low, high = (low, trainers) if least["generation"] >= least["training"] else (trainers + 1, high)
    return sorted({min(max(round(low * share), 1), devices - each) for share in _AROUND})
