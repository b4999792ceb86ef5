"""Measured pass rates of a study's arms, without a curve; `scalerl.forecast.measured` compares them.

Shapes: M computes.
"""

import math
from collections.abc import Sequence

import numpy as np

from scalerl.forecast.measured import NEAR, MeasuredDifference, MeasuredRates, paired_differences
from scalerl.study.verdict.arm_fits import ArmSummary


def measured_differences(
    arms: Sequence[ArmSummary], base: str, axis: str, compute: float, level: float
) -> dict[str, MeasuredDifference]:
    """Return the paired difference of every arm to the base at `compute`, by the name of the arm."""
    recipes = {}
    for arm in arms:
        rates = {seed: float(rate_1[0]) for seed, rate_1 in rates_at(arm, axis, np.array([compute])).items()}
        recipes[arm.name] = MeasuredRates(rates, models_of(arm), completions_of(arm))
    return paired_differences(recipes, base, level)


def rates_at(arm: ArmSummary, axis: str, compute_M: np.ndarray) -> dict[int, np.ndarray]:
    """Return the pass rates at `compute_M`, (M,), by seed; NaN beyond the end of a run."""
    found = {}
    for run in arm.runs:
        record = run.run.record
        if record is None or not record.evals or axis not in record.logged_axes():
            continue
        compute_N = record.training_compute(axis)
        rate_M = np.interp(compute_M, compute_N, [point.pass_rate for point in record.evals])
        # np.interp would continue the last value beyond the end of the run.
        found[run.run.plan.seed] = np.where(compute_M <= compute_N[-1] * (1 + NEAR), rate_M, math.nan)
    return found


def completions_of(arm: ArmSummary) -> float:
    """Return the fewest completions in any evaluation of the arm's runs; infinite if not known."""
    records = [run.run.record for run in arm.runs if run.run.record is not None]
    return min(
        (n for of in records for point in of.evals if (n := point.total_samples) > 0), default=math.inf
    )


def models_of(arm: ArmSummary) -> dict[int, str]:
    """Return the base model of every seed."""
    return {run.run.plan.seed: run.run.plan.model for run in arm.runs}
