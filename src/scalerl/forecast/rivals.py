"""Rivals of a saturating fit: other forecasts of the evaluations that a run has still to come.

`RIVALS` are functions from compute to pass rate, without an interval; `BANK_RIVALS` have one:

    least squares, Wald        the log-logistic, normal by the delta method, as SciPy's `curve_fit`
    least squares, bootstrap   the same curve, refitted to resampled residuals
    power law, Wald            A - D / C^B with A <= 1
    random walk                the last value, with a variance that grows with the compute since
    last value, other runs     the last value, with the errors that other runs had about theirs

The first three assume independent evaluations, and that their own family is the truth.

Shapes: N rows fitted, K computes, Q probabilities, B replicates.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np

from scalerl.curve.families import LOG_LOGISTIC, POWER_LAW, Curve, Family, log_compute
from scalerl.curve.least_squares import LeastSquares, least_squares, least_squares_many
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.curve.sample import Sample, make_sample
from scalerl.errors import CannotAnswerError, counted
from scalerl.forecast.paper import paper_fit_of
from scalerl.forecast.standard_errors import standard_errors

PointForecast = Callable[[np.ndarray | float], np.ndarray]
"""Pass rates at computes, shape as given."""
_REPLICATES = 200
_LEAST_OTHERS = 2  # runs whose errors are needed for a band


def fit_last_value(points: Points) -> PointForecast:
    """Forecast the mean of the evaluations at the largest compute, at every compute.

    Raises:
        CannotAnswerError: there are no points.
    """
    require(points, 1)
    last = float(points.pass_rate_N[points.compute_N == points.compute_N.max()].mean())
    return lambda compute_N: np.full(np.shape(compute_N), last)


def fit_log_linear(points: Points) -> PointForecast:
    """Fit a + b log C by least squares to the points with C > 0: no ceiling, and no bounds of [0, 1].

    Raises:
        CannotAnswerError: fewer than two points at distinct compute above 0.
    """
    chosen = points.select(points.compute_N > 0)
    require(chosen, 2)
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
    require(chosen, 3)
    return least_squares(make_sample(chosen, 0.0), POWER_LAW).curve


def require(points: Points, least: int) -> None:
    """Raise a CannotAnswerError unless there are points at `least` distinct computes."""
    n = len(np.unique(points.compute_N))
    if n < least:
        had = counted(n, "evaluation")
        raise CannotAnswerError(f"{points.source}: {had} at distinct compute, {least} are needed")


RIVALS: dict[str, Callable[[Fit], PointForecast]] = {
    "least squares (log-logistic)": lambda result: result.paper_curve,
    # The authors exclude 1,500 GPU-hours; here the fit's own points take the place of that.
    "paper's grid search": lambda result: paper_fit_of(result, min_compute=0.0).curve,
    "power law": lambda result: fit_power_law(result.points),
    "log-linear": lambda result: fit_log_linear(result.points),
    "last value": lambda result: fit_last_value(result.points),
}
"""Rivals by name: functions from a fit, for its points, to forecasts (M,) at computes (M,)."""


@dataclass(frozen=True)
class Part:
    """A run cut at `compute`: its evaluations up to there and those after, each by compute."""

    compute: float
    early: Points
    rest: Points


@dataclass(frozen=True)
class Seen:
    """What a rival may use: nothing of the run itself that was measured after the cut at `compute`."""

    points: Points
    """The evaluations up to the cut, by compute."""
    compute: float
    r0: float | None
    """R_0 where it was given."""
    fit: Fit | None
    """The fit of `points`; None where it cannot answer."""
    why_not: str
    """Why the fit cannot answer; else empty."""
    others: Sequence[Part]
    """The other runs, whole, cut at the same share of their compute."""


@dataclass(frozen=True)
class Predicted:
    """Forecasts of an evaluation at K computes: points (K,), and quantiles, noise included."""

    point_K: np.ndarray
    value_QK: np.ndarray | None = None
    """(Q, K), ascending along Q; None where a rival has only points."""


Rival = Callable[[Seen, np.ndarray, np.ndarray], Predicted]
"""Forecast at computes (K,), ascending and above 0, with quantiles at probabilities (Q,), ascending.

A rival raises a CannotAnswerError where it cannot answer."""


def normal(mean_K: np.ndarray, sd_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    """Return the forecast of an evaluation that is normal, with mean and sd (K,)."""
    z_Q = np.array([NormalDist().inv_cdf(float(at)) for at in at_Q])
    return Predicted(mean_K, mean_K + z_Q[:, None] * sd_K)


def _of_fit(rival: Callable[[Fit], PointForecast]) -> Rival:
    """Return one of `RIVALS` as a rival that forecasts only where the fit does."""

    def predict(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
        if seen.fit is None:
            raise CannotAnswerError(seen.why_not)
        return Predicted(rival(seen.fit)(compute_K))

    return predict


def _wald(family: Family, seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    sample, best = _least_squares(family, seen)
    errors, log_c_K = standard_errors(sample, best), np.log(compute_K)
    # From derivatives by log B and log C_mid to those by B and C_mid. What lies on a bound is held.
    jacobian_K4 = best.curve.jacobian(log_c_K) / np.array([1.0, best.curve.B, best.curve.C_mid, 1.0])
    covariance_44 = np.nan_to_num(errors.covariance_44)
    variance_K = np.einsum("ki,ij,kj->k", jacobian_K4, covariance_44, jacobian_K4)
    return normal(best.curve.at_log(log_c_K), np.sqrt(np.maximum(variance_K, 0.0) + errors.sd**2), at_Q)


def _bootstrap(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    sample, best = _least_squares(LOG_LOGISTIC, seen)
    rng, free = np.random.default_rng(0), 4 - len(best.at_bounds) - (sample.r0 is not None)
    fitted_N, root_N = best.curve.at_log(sample.log_c_N), np.sqrt(sample.weight_N)
    # Residuals are smaller than errors, as parameters were fitted to them.
    error_N = (sample.y_N - fitted_N) * root_N * math.sqrt(len(sample) / max(len(sample) - free, 1))
    drawn_BN = fitted_N + rng.choice(error_N - error_N.mean(), (_REPLICATES, len(sample))) / root_N
    again = least_squares_many([replace(sample, y_N=y_N) for y_N in drawn_BN], LOG_LOGISTIC)
    value_BK = np.array([one.curve(compute_K) for one in again])
    value_BK = value_BK + rng.choice(error_N - error_N.mean(), value_BK.shape)
    return Predicted(best.curve(compute_K), np.quantile(value_BK, at_Q, axis=0))


def _least_squares(family: Family, seen: Seen) -> tuple[Sample, LeastSquares]:
    """Fit a family by least squares; it takes one evaluation more than there are parameters."""
    # The bare power law has no R_0, and no value at compute 0.
    r0 = 0.0 if family is POWER_LAW else seen.r0
    points = seen.points.select(seen.points.compute_N > 0) if family is POWER_LAW else seen.points
    require(points, 5 if r0 is None else 4)
    sample = make_sample(points, r0)
    return sample, least_squares(sample, family)


def _random_walk(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    point = fit_last_value(seen.points)
    require(seen.points, 3)
    compute_N, first_N = np.unique(seen.points.compute_N, return_inverse=True)
    value_N = np.bincount(first_N, seen.points.pass_rate_N) / np.bincount(first_N)
    # Sum of squared steps over the compute that they took, which is unbiased. Maximum likelihood, the mean of
    # each step's own ratio, is the same at even spacing; at log spacing early steps would widen everything.
    variance = float(np.sum(np.diff(value_N) ** 2)) / float(compute_N[-1] - compute_N[0])
    return normal(point(compute_K), np.sqrt(variance * (compute_K - compute_N[-1])), at_Q)


def _last_value(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    point_K = fit_last_value(seen.points)(compute_K)
    error_RK = [
        np.interp(compute_K / seen.compute, other.rest.compute_N / other.compute, other.rest.pass_rate_N)
        - fit_last_value(other.early)(compute_K)
        for other in seen.others
        if len(other.early) and len(other.rest)
    ]
    if len(error_RK) < _LEAST_OTHERS:
        raise CannotAnswerError(f"{len(error_RK)} other runs, {_LEAST_OTHERS} are needed for a band")
    # One more for the run itself, whose own error is unknown.
    sd_K = np.sqrt(np.mean(np.square(error_RK), axis=0) * (1 + 1 / len(error_RK)))
    return normal(point_K, sd_K, at_Q)


POINT_RIVALS: Mapping[str, Rival] = {name: _of_fit(rival) for name, rival in RIVALS.items()}
"""The rivals of a backtest: those of `RIVALS`, without intervals."""
BANK_RIVALS: Mapping[str, Rival] = {
    "least squares, Wald": partial(_wald, LOG_LOGISTIC),
    "least squares, bootstrap": _bootstrap,
    "power law, Wald": partial(_wald, POWER_LAW),
    "random walk": _random_walk,
    "last value, other runs": _last_value,
}
"""The rivals of a bank, which also answer where the fit does not."""
