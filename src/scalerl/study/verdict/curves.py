"""The mean curve of every arm over its seeds, and the evaluations that are drawn beside it.

Shapes: N evaluations of a run, M computes of a curve.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scalerl.curve.posterior import Draws
from scalerl.curve.quantiles import tails
from scalerl.study.verdict.arm_fits import ArmSummary
from scalerl.study.verdict.verdict import StudyVerdict
from scalerl.view.facts.frozen import Band
from scalerl.view.figures.overlay_figures import ArmCurve, RunPoints
from scalerl.view.numbers import Unit
from scalerl.view.style import short_names

_DRAWS = 2048
_MOST_POINTS = 2400
"""Evaluations that are drawn in one figure, all runs together; more are thinned."""


def arm_curves(verdict: StudyVerdict, unit: Unit) -> list[ArmCurve]:
    """Return the curves of the arms that have evaluations, with compute in `unit`; the base comes first."""
    count = sum(run.run.record is not None for arm in verdict.arms for run in arm.runs)
    most = max(_MOST_POINTS // max(count, 1), 6)
    names = short_names([arm.name for arm in verdict.arms])
    found = []
    for arm in verdict.arms:
        runs = tuple(_points(verdict, arm, unit, most))
        if not runs:
            continue
        # Beyond what its own runs have measured a curve is a forecast, which the tables give.
        compute_M = _grid(runs)
        band = None
        # A band around a curve that does not describe the runs would lend it a precision that it has not.
        if arm.draws is not None and len(compute_M) and not any(fit.misfit for fit in arm.fits):
            band = _band(arm.draws, compute_M, unit, verdict.level)
        is_base = arm.name == verdict.study.plan["base"]
        found.append(ArmCurve(names[arm.name], is_base, runs, band, whole_name=arm.name))
    return sorted(found, key=lambda arm: not arm.base)


def _band(draws: Draws, compute_M: np.ndarray, unit: Unit, level: float) -> Band:
    low, high = tails(level)
    curve_nM = draws.thinned(_DRAWS).curves_at(compute_M * unit.size)
    return Band(compute_M, *np.quantile(curve_nM, [0.5, low, high], axis=0))


def _grid(runs: tuple[RunPoints, ...]) -> np.ndarray:
    compute_N = np.concatenate([run.compute_N for run in runs])
    positive_N = compute_N[compute_N > 0]
    return np.geomspace(positive_N.min(), positive_N.max(), 81) if positive_N.size else positive_N


def _points(verdict: StudyVerdict, arm: ArmSummary, unit: Unit, most: int) -> list[RunPoints]:
    found = []
    for fitted in arm.runs:
        record, fit = fitted.run.record, fitted.fit
        if fit is not None:
            compute_N, pass_rate_N = fit.points.compute_N, fit.points.pass_rate_N
        elif record is not None and record.evals and verdict.axis in record.logged_axes():
            # Without a fit its evaluations are drawn all the same: a run that failed is part of the arm.
            compute_N = record.training_compute(verdict.axis)
            pass_rate_N = np.array([point.pass_rate for point in record.evals])
        else:
            continue
        keep_N = np.unique(np.linspace(0, len(compute_N) - 1, min(most, len(compute_N))).round().astype(int))
        curve = None
        if fit is not None and not fit.misfit:
            curve = replace(fit.curve, C_mid=fit.curve.C_mid / unit.size)
        found.append(RunPoints(compute_N[keep_N] / unit.size, pass_rate_N[keep_N], curve))
    return found
