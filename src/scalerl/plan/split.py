"""How many of some devices should generate, and how many train."""

from collections.abc import Callable
from dataclasses import replace

from scalerl.errors import InputError
from scalerl.plan.bounds import bounds
from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates
from scalerl.plan.simulate import SimulationResult, simulate

_ALL = 12
"""Trainers up to which every number of them is tried."""
_AROUND = (0.7, 0.85, 1.0, 1.2, 1.5)
"""Candidates: multiples of the number of trainers at which the larger bound of both roles is the least."""


def splits(
    job: PlannedJob,
    rates: Rates,
    devices: int,
    *,
    steps: int | None = None,
    seed: int = 0,
    watch: Callable[[float], None] = lambda share: None,
) -> tuple[SimulationResult, ...]:
    """Splits of `devices` devices, each simulated, by their trainers; devices left over do nothing.

    `watch` is called after every simulated step with the share of them that is done.

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

    Of the splits that fit, the one whose step has the least bound; where none does, the one that needs the
    least more. One device may be left over, for evaluations, where nothing else fits.

    Args:
        excess: bytes that the fullest device of a split lacks; 0 where all of it fits.
        each: devices of a generator, which is taken for so many times as fast as `rates` has it.

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
    """The split with the most steps an hour; of those within a percent of it the one that generates most."""
    fastest = max(one.steps_per_hour for one in found)
    return next(one for one in found if one.steps_per_hour >= 0.99 * fastest)


def _near(job: PlannedJob, rates: Rates, devices: int) -> list[int]:
    """Numbers of trainers about the one at which generating and training take as long, by their bounds."""
    each = rates.devices_per_generator
    low, high = 1, devices - each
    while low < high:  # generation takes longer with more trainers, and training does not
        trainers = (low + high) // 2
        least = bounds(job, rates, (devices - trainers) // each, trainers)
        low, high = (low, trainers) if least["generation"] >= least["training"] else (trainers + 1, high)
    return sorted({min(max(round(low * share), 1), devices - each) for share in _AROUND})
