"""What the design of a study says beyond its pairs: effects of switches, and how to split a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from scalerl.errors import CannotAnswerError
from scalerl.forecast.effect_tables import Effects
from scalerl.forecast.effects import DesignRun, effects
from scalerl.forecast.splits.allocation import GridRun, allocate
from scalerl.forecast.splits.table import Allocation
from scalerl.study.record import ArmPlan, StudyRecord
from scalerl.study.verdict.arm_fits import FittedRun
from scalerl.view.numbers import as_mapping

LEAST_VALUES = 3
"""Of prompts or of completions per prompt: two have no middle."""

Fitted = Mapping[str, Sequence[FittedRun]]


def effects_of_switches(study: StudyRecord, runs: Fitted, level: float) -> Effects | str | None:
    """Of a factorial: the effect of every switch and of pairs of them, or why they are not told.

    None of another study.
    """
    design = study.plan.get("design")
    if not design:
        return None
    found = [
        DesignRun(arm, run.run.plan.seed, run.fit)
        for arm, of_arm in runs.items()
        for run in of_arm
        if run.fit is not None and arm in design["levels"]
    ]
    try:
        return effects(found, design, level=level)
    except CannotAnswerError as error:
        return f"The effects of the switches are not told: {error}."


def allocation_of_batches(
    study: StudyRecord, runs: Fitted, axis: str, level: float
) -> Allocation | str | None:
    """Where the arms differ in their batch alone: the best split at every budget, or why it is not told.

    None of another study.
    """
    batches = {arm.name: _batch(arm) for arm in study.arms}
    others = {repr(_without_batch(arm)) for arm in study.arms}
    values = [len({batch[i] for batch in batches.values()}) for i in (0, 1)]
    if len(others) > 1 or max(values) < LEAST_VALUES or None in batches.values():
        return None
    fitted = [(arm, run) for arm, of_arm in runs.items() for run in of_arm if run.fit and not run.fit.misfit]
    grid = [GridRun.of(run.fit, *batches[arm]) for arm, run in fitted if run.fit]
    costs = [_cost(run, axis) for _, run in fitted]
    try:
        if not grid:
            raise CannotAnswerError("no run could be fitted")
        return allocate(grid, median(costs), level=level)
    except CannotAnswerError as error:
        return f"The best batch is not told: {error}."


def _batch(arm: ArmPlan) -> tuple[int, int]:
    batch = as_mapping(arm.recipe.get("batch"))
    return int(batch.get("prompts", 0)), int(batch.get("samples", 0))


def _without_batch(arm: ArmPlan) -> dict[str, Any]:
    kept = {key: value for key, value in arm.recipe.items() if key not in ("batch", "name")}
    batch = as_mapping(arm.recipe.get("batch"))
    return kept | {"batch": {k: v for k, v in batch.items() if k not in ("prompts", "samples")}}


def _cost(run: FittedRun, axis: str) -> float:
    """Compute of one completion of a run."""
    record = run.run.record
    assert record is not None  # it has a fit
    return float(record.compute(axis)[-1] / record.evals[-1].samples)
