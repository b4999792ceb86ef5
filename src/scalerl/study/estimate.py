"""What a study will cost, before anything is spent: compute as planned, time as runs like it have taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scalerl.errors import InputError
from scalerl.record import RunRecord
from scalerl.rl.base import model_shape
from scalerl.rl.model_check import cache_bytes
from scalerl.rl.recipe import Recipe
from scalerl.study.plan import Plan

_MASTER_BYTES = 16
"""Of the trainer for each parameter: float32 weights, gradients and the two moments of AdamW."""


@dataclass(frozen=True)
class ArmCost:
    """Of all seeds of an arm, its trials of the learning rate included."""

    arm: str
    runs: int
    compute: float
    """In the unit of the study's budgets."""
    gpu_hours: float | None
    """None where no run has shown how long that takes."""
    memory_bytes: int | None
    """Of one run: weights, gradients, optimiser, KV caches, no activations; None without its model."""


@dataclass(frozen=True)
class StudyCost:
    """Of a study. `wall_hours` is with as many runs at once as the cores allow."""

    arms: tuple[ArmCost, ...]
    wall_hours: float | None
    dollars: float | None

    @property
    def runs(self) -> int:
        """Of all arms."""
        return sum(arm.runs for arm in self.arms)

    @property
    def compute(self) -> float:
        """Of all arms."""
        return sum(arm.compute for arm in self.arms)

    @property
    def gpu_hours(self) -> float | None:
        """Of all arms; None where it is not known of one."""
        hours = [arm.gpu_hours for arm in self.arms]
        return None if None in hours else sum(hour for hour in hours if hour is not None)


def estimate(plan: Plan, folder: Path, like: Sequence[Path], cores: int) -> StudyCost:
    """What the whole study costs, whatever of it is done already.

    Args:
        plan: the study.
        folder: of the study; what has run there shows how long the rest takes, arm by arm.
        like: runs of another study or by themselves that took as long for their compute as these will.
        cores: that may be used at once.

    Raises:
        InputError: a run of `like` cannot be read, or has another axis.
    """
    shown = [_hours_per_unit(RunRecord.read(path), plan.axis) for path in like]
    own = {arm.name: _rates(plan, folder, arm.name) for arm in plan.arms}
    general = shown or [rate for rates in own.values() for rate in rates]
    trials = list(plan.trials())
    costs = []
    for arm in plan.arms:
        tried = [run for run, of, _ in trials if of.name == arm.name]
        tuning = plan.learning_rate.budget if plan.learning_rate else 0.0
        compute = len(plan.seeds) * plan.budgets[-1] + len(tried) * tuning
        rates = own[arm.name] or general
        hours = compute * median(rates) if rates else None
        costs.append(ArmCost(arm.name, len(plan.seeds) + len(tried), compute, hours, _memory(arm.recipe)))
    total = StudyCost(tuple(costs), None, None)
    if (hours := total.gpu_hours) is None:
        return total
    # Device-hours over the devices that compute at once.
    devices = max(cores, plan.arms[0].recipe.placement.devices)
    return StudyCost(total.arms, hours / devices, hours * plan.price if plan.price else None)


def _rates(plan: Plan, folder: Path, arm: str) -> list[float]:
    """GPU-hours for a unit of compute, of the runs of an arm that are there."""
    found = []
    for run in plan.runs:
        if run.arm == arm and (folder / run.folder / "evals.jsonl").is_file():
            record = RunRecord.read(folder / run.folder)
            if len(record.evals) > 1:
                found.append(_hours_per_unit(record, plan.axis))
    return found


def _hours_per_unit(record: RunRecord, axis: str) -> float:
    hours, compute = record.compute("gpu_hours")[-1], record.compute(axis)[-1]
    if not (hours > 0 and compute > 0):
        raise InputError(f"{record.path}: nothing was trained yet, so it shows no time")
    return float(hours / compute)


def _memory(recipe: Recipe) -> int | None:
    try:
        model = model_shape(recipe)
    except InputError:
        return None  # a name that needs the network, say
    weights = sum(parameter.numel() for parameter in model.parameters())
    size = next(model.parameters()).element_size()
    positions = recipe.context.prompt + recipe.context.sampled
    cache = cache_bytes(model, recipe.rows + recipe.evaluation.rows, positions)
    # The generators and the evaluation have the weights in their own precision.
    copies = recipe.placement.processes + 1
    return weights * (_MASTER_BYTES + copies * size) + cache
