"""The rivals of a saturating fit: functions from compute to pass rate, without an interval.

Shapes: N points.
"""

from collections.abc import Callable

import numpy as np

from scalerl.curve.families import POWER_LAW, Curve, log_compute
from scalerl.curve.least_squares import least_squares
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.curve.sample import make_sample
from scalerl.errors import CannotAnswerError, counted
from scalerl.forecast.paper import paper_fit_of

PointForecast = Callable[[np.ndarray | float], np.ndarray]
"""Pass rates at computes, shape as given."""


def fit_last_value(points: Points) -> PointForecast:
    """Forecast the mean of the evaluations at the largest compute, at every compute.

    Raises:
        CannotAnswerError: there are no points.
    """
    require(points, points.compute_N, 1)
    last = float(points.pass_rate_N[points.compute_N == points.compute_N.max()].mean())
    return lambda compute_N: np.full(np.shape(compute_N), last)


def fit_log_linear(points: Points) -> PointForecast:
    """Fit a + b log C by least squares to the points with C > 0: no ceiling, nor bounds of [0, 1].

    Raises:
        CannotAnswerError: fewer than two points at distinct compute above 0.
    """
    chosen = points.select(points.compute_N > 0)
    require(points, chosen.compute_N, 2)
    log_c_N = np.log(chosen.compute_N)
    centred_N = log_c_N - log_c_N.mean()
    b = float(centred_N @ chosen.pass_rate_N / (centred_N @ centred_N))
    a = float(chosen.pass_rate_N.mean() - b * log_c_N.mean())
    return lambda compute_N: a + b * log_compute(np.asarray(compute_N))


def fit_power_law(points: Points) -> Curve:
    """Fit A - D / C^B with A <= 1 by least squares to the points with C > 0 (arXiv 2510.13786).

    It is the power-law family with R_0 = 0, and D = A C_mid^B / 2.

    Raises:
        CannotAnswerError: fewer than three points at distinct compute above 0.
    """
    chosen = points.select(points.compute_N > 0)
    require(points, chosen.compute_N, 3)
    return least_squares(make_sample(chosen, 0.0), POWER_LAW).curve


def require(points: Points, compute_N: np.ndarray, least: int) -> None:
    """Raise a CannotAnswerError unless there are `least` distinct values in `compute_N`, of these points."""
    n = len(np.unique(compute_N))
    if n < least:
        had = counted(n, "evaluation")
        raise CannotAnswerError(f"{points.source}: {had} at distinct compute, {least} are needed")


RIVALS: dict[str, Callable[[Fit], PointForecast]] = {
    "least squares (log-logistic)": lambda result: result.paper_curve,
    # The fit's points stand in for the authors' exclusion of 1,500 GPU-hours.
    "paper's grid search": lambda result: paper_fit_of(result, min_compute=0.0).curve,
    "power law": lambda result: fit_power_law(result.points),
    "log-linear": lambda result: fit_log_linear(result.points),
    "last value": lambda result: fit_last_value(result.points),
}
"""Rivals by name: from a fit, for its points, to forecasts of pass rates (M,) at computes (M,)."""
