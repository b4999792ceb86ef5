"""How many of some devices should generate, and how many train."""

from __future__ import annotations

from dataclasses import replace

from scalerl.errors import InputError
from scalerl.plan.job import PlannedJob
from scalerl.plan.rates import Rates
from scalerl.plan.simulate import SimulationResult, simulate

_ALL = 12
"""Trainers up to which every number of them is tried."""
_AROUND = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
"""Of the number of trainers at which both roles would be busy all of the time."""


def splits(
    job: PlannedJob, rates: Rates, devices: int, *, steps: int | None = None, seed: int = 0
) -> tuple[SimulationResult, ...]:
    """Splits of `devices` devices, each simulated, by their trainers; devices left over do nothing.

    Raises:
        InputError: there are too few devices for a generator and a trainer.
    """
    each = rates.devices_per_generator
    most = devices - each
    if most < 1:
        raise InputError(f"devices: a generator takes {each} and a trainer 1, so {each + 1} are needed")
    tried = range(1, most + 1) if most <= _ALL else _near(job, rates, devices, seed)
    found = [
        simulate(job, rates, (devices - trainers) // each, trainers, steps=steps, seed=seed)
        for trainers in tried
    ]
    return tuple(replace(one, devices=devices) for one in found)


def best(found: tuple[SimulationResult, ...]) -> SimulationResult:
    """The split with the most steps an hour; of those within a percent of it the one that generates most."""
    fastest = max(one.steps_per_hour for one in found)
    return next(one for one in found if one.steps_per_hour >= 0.99 * fastest)


def _near(job: PlannedJob, rates: Rates, devices: int, seed: int) -> list[int]:
    """Numbers of trainers about the one at which generating and training take as long."""
    each = rates.devices_per_generator
    half = max(devices // 2, 1)
    first = simulate(job, rates, max((devices - half) // each, 1), half, seed=seed, steps=1)
    generate = first.at_least["generation"] * first.generators * each
    train = (first.at_least["training"] - rates.trainer.fixed) * half
    even = devices * train / (generate + train) if generate + train else half
    return sorted({min(max(round(even * share), 1), devices - each) for share in _AROUND})
