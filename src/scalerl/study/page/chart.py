"""The arms of a study in the chart of a page: an entry for each, its seeds together."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalerl.study.verdict.arm_fits import ArmSummary
from scalerl.study.verdict.curves import arm_curves
from scalerl.study.verdict.verdict import StudyVerdict
from scalerl.view.figures.overlay_figures import ArmCurve
from scalerl.view.numbers import short_number, short_numbers, unit_for


def study_chart(verdict: StudyVerdict) -> dict[str, Any]:
    """Return arms in the form of `scalerl.view.runs.overlay.overlay`: points of all seeds, a mean curve."""
    unit = unit_for(verdict.axis, verdict.budget)
    arms = {arm.name: arm for arm in verdict.arms}
    curves = arm_curves(verdict, unit)
    return {
        "axis": verdict.axis,
        "axes": [{"key": verdict.axis, "label": unit.name, "size": unit.size}],
        "level": verdict.level,
        "budget": short_number(verdict.budget),
        "target": verdict.study.plan.get("target"),
        "end": short_number(verdict.budget),
        "thinned": False,
        "runs": [_entry(curve, arms[curve.whole_name], verdict.axis, unit.size) for curve in curves],
    }


def _entry(curve: ArmCurve, arm: ArmSummary, axis: str, size: float) -> dict[str, Any]:
    compute_N = np.concatenate([run.compute_N for run in curve.runs])
    pass_rate_N = np.concatenate([run.pass_rate_N for run in curve.runs])
    return {
        "name": arm.name,
        "reason": "" if curve.band is not None else "no curve describes its runs",
        "evaluations": len(compute_N),
        "compute": {axis: short_numbers(compute_N * size)},
        "pass_rate": short_numbers(pass_rate_N),
        "noise": [None] * len(compute_N),
        "step": [None] * len(compute_N),
        "used": [True] * len(compute_N),
        "known": None,
        "fit": _fit(curve, arm, axis, size),
        "forecasts": [],
    }


def _fit(curve: ArmCurve, arm: ArmSummary, axis: str, size: float) -> dict[str, Any] | None:
    if curve.band is None:
        return None
    band, spread = curve.band, {}
    for name in ("A", "B", "C_mid"):
        found = arm.quantities.get(name)
        spread[name] = None if found is None else short_numbers(np.array([found.median, *found.interval]))
    compute = {axis: short_numbers(band.compute_M * size)}
    lines = {"line": band.median_M, "low": band.lo_M, "high": band.hi_M}
    return spread | {
        "identified": arm.identified == len(arm.fits),
        "why": "",
        "misfit": "",
        "change": {axis: None},
        "window": {axis: [compute[axis][0], compute[axis][-1]]},
        "curve": {"compute": compute, **{name: short_numbers(y_M, 4) for name, y_M in lines.items()}},
        "of_part": False,
    }
