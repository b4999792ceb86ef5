"""The rivals of a saturating fit: what anybody would forecast with without the paper's curve.

Each is called with compute and gives the pass rate. They forecast a point and no interval. Shapes: N points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import POWER_LAW, Curve, Gompertz, log_compute
from scalerl.curve.least_squares import least_squares
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.curve.sample import make_sample
from scalerl.errors import CannotAnswerError, counted
from scalerl.forecast.paper import paper_fit_of


@dataclass(frozen=True)
class LastValue:
    """R(C) = the pass rate at the largest compute: nothing more will come."""

    pass_rate: float

    def __call__(self, compute_N: np.ndarray | float) -> np.ndarray:
        """The same at every compute, shape as given."""
        return np.full(np.shape(compute_N), self.pass_rate)


@dataclass(frozen=True)
class LogLinear:
    """R(C) = a + b log C, for C > 0: as much again from every doubling, and no ceiling."""

    a: float
    b: float
    """Gain in pass rate for a factor e of compute."""

    def __call__(self, compute_N: np.ndarray | float) -> np.ndarray:
        """a + b log C at every compute, shape as given; it is not kept within [0, 1]."""
        return self.a + self.b * log_compute(np.asarray(compute_N))


def fit_last_value(points: Points) -> LastValue:
    """The mean of the evaluations at the largest compute.

    Raises:
        CannotAnswerError: there are no points.
    """
    _require(points, points.compute_N, 1)
    return LastValue(float(points.pass_rate_N[points.compute_N == points.compute_N.max()].mean()))


def fit_log_linear(points: Points) -> LogLinear:
    """Least squares of a + b log C on the points with C > 0.

    Raises:
        CannotAnswerError: fewer than two points at distinct compute above 0.
    """
    chosen = points.select(points.compute_N > 0)
    _require(points, chosen.compute_N, 2)
    log_c_N = np.log(chosen.compute_N)
    centred_N = log_c_N - log_c_N.mean()
    b = float(centred_N @ chosen.pass_rate_N / (centred_N @ centred_N))
    return LogLinear(float(chosen.pass_rate_N.mean() - b * log_c_N.mean()), b)


def fit_power_law(points: Points) -> Curve:
    """Least squares of A - D / C^B with A <= 1 on the points with C > 0, the rival of arXiv 2510.13786.

    It is the power-law family with R_0 = 0, and D = A C_mid^B / 2.

    Raises:
        CannotAnswerError: fewer than three points at distinct compute above 0.
    """
    chosen = points.select(points.compute_N > 0)
    _require(points, chosen.compute_N, 3)
    return least_squares(make_sample(chosen, 0.0), POWER_LAW).curve


def fit_gompertz(points: Points, r0: float | None = None) -> Curve:
    """Least squares of the Gompertz curve, a sigmoid in C; R_0 is its lower asymptote, free unless given.

    Raises:
        CannotAnswerError: fewer points at distinct compute than parameters.
    """
    _require(points, points.compute_N, 4 if r0 is None else 3)
    return least_squares(make_sample(points, r0), Gompertz()).curve


def _require(points: Points, compute_N: np.ndarray, least: int) -> None:
    n = len(np.unique(compute_N))
    if n < least:
        had = counted(n, "evaluation")
        raise CannotAnswerError(f"{points.source}: {had} at distinct compute, {least} are needed")


PointForecast = Callable[[np.ndarray], np.ndarray]


RIVALS: dict[str, Callable[[Fit], PointForecast]] = {
    "least squares (log-logistic)": lambda result: result.curve,
    # The fit's points stand in for the authors' exclusion of 1,500 GPU-hours.
    "paper's grid search": lambda result: paper_fit_of(result, min_compute=0.0).curve,
    "power law": lambda result: fit_power_law(result.points),
    "log-linear": lambda result: fit_log_linear(result.points),
    "last value": lambda result: fit_last_value(result.points),
}
"""Rivals by name: each is given a fit for its points, and forecasts pass rates (M,) at computes (M,)."""
