"""What a forecast has to beat: curves fitted to the same points as a `Fit`, by plain least squares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scalerl.curve.families import POWER_LAW, log_compute
from scalerl.curve.least_squares import least_squares, make_sample
from scalerl.curve.result import Fit

OURS = "scalerl"
"""The name of the fit's own forecast, the mean of its posterior."""

Forecaster = Callable[[np.ndarray], np.ndarray]


def _power_law(result: Fit) -> Forecaster:
    """A - D / C^B with A <= 1, on the evaluations after training has begun."""
    trained = result.points.select(result.points.compute_N > 0)
    return least_squares(make_sample(trained, 0.0), POWER_LAW).curve


def _log_linear(result: Fit) -> Forecaster:
    """a + b log C."""
    points = result.points.select(result.points.compute_N > 0)
    slope, level = np.polyfit(log_compute(points.compute_N), points.pass_rate_N, 1)
    return lambda compute_M: level + slope * log_compute(compute_M)


def _last_value(result: Fit) -> Forecaster:
    last = float(result.points.pass_rate_N[result.points.compute_N == result.points.compute_N.max()].mean())
    return lambda compute_M: np.full(len(compute_M), last)


RIVALS: dict[str, Callable[[Fit], Forecaster]] = {
    "least squares (log-logistic)": lambda result: result.curve,
    "power law": _power_law,
    "log-linear": _log_linear,
    "last value": _last_value,
}
"""Rivals by name; each is given the fit for its points, and returns pass rates (M,) at computes (M,)."""
