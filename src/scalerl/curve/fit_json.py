"""A fit as the one JSON object that `scalerl fit --json` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.curve.families import Curve
    from scalerl.curve.result import Fit


def fit_json(fit: Fit, at: Sequence[float], target: float | None, budget: float | None) -> dict[str, Any]:
    """All of a fit; what is not computed, or withheld because no family describes the run, is None.

    "fit" is the least-squares curve. "median" and "intervals" are of the posterior: A over all families, and
    A_given_family, B and C_mid given the log-logistic.
    """
    level = fit.intervals.level
    intervals = {name: list(ends) for name, ends in asdict(fit.intervals).items() if name != "level"}
    return {
        "points": fit.n_points,
        "axis": fit.axis,
        "min_compute": fit.min_compute,
        "max_compute": _finite(fit.max_compute),
        "r0": {"value": fit.r0_value, "source": fit.r0_source},
        "fit": {**_curve(fit.curve), "rmse": fit.rmse} | _withheld(fit, "A"),
        "basins": [_curve(curve) | {"rss": rss} | _withheld(fit, "A") for curve, rss in fit.basins],
        "intervals": {"level": level, **intervals, **_withheld(fit, "A", "A_given_family")},
        "median": asdict(fit.median) | _withheld(fit, "A", "A_given_family"),
        "families": dict(fit.families),
        "prior": fit.prior,
        "noise": {
            "sd": fit.noise.sd,
            "phi": fit.noise.phi,
            "floor": _finite(fit.noise.floor),
            "seed_sd": fit.noise.seed_sd,
        },
        "identified": fit.identified,
        "why": fit.why,
        "c_max_over_c_mid": fit.c_max_over_c_mid,
        "c_max_over_c_mid_interval": list(fit.identification.ratio_interval),
        "at_bounds": dict(fit.identification.at_bounds),
        "compute_to_tell": None if fit.misfit else fit.compute_to_tell,
        "lack_of_fit": fit.lack_of_fit,
        "part_that_holds": list(fit.misfit.keep) if fit.misfit and fit.misfit.keep else None,
        "forecast": [fit.forecast(compute).to_json() for compute in at],
        "target": _target(fit, target, budget),
        "campaign": fit_json(fit.campaign, at, target, budget) if fit.campaign else None,
        "left_out": fit.left_out.to_json(),
        "warnings": list(fit.warnings),
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {"family": curve.family.name, "A": curve.A, "B": curve.B, "C_mid": curve.C_mid, "R_0": curve.R_0}


def _withheld(fit: Fit, *names: str) -> dict[str, None]:
    return dict.fromkeys(names) if fit.misfit else {}


def _target(fit: Fit, target: float | None, budget: float | None) -> dict[str, Any] | None:
    if target is None or budget is None:
        return None
    reached = [_finite(compute) for compute in fit.compute_to(target)]
    return {"reward": target, "budget": budget, "compute_to_target": reached} | asdict(
        fit.chance(target, budget)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
