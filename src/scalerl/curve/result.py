"""The answer of a fit: the curve, what is known of its ceiling, forecasts, the verdict, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from scalerl.curve.families import Curve
from scalerl.curve.points import Points
from scalerl.curve.posterior import Posterior
from scalerl.curve.quantiles import noisy_quantiles, tails, weighted_quantiles
from scalerl.errors import InputError

GO, NO_GO = 0.95, 0.05
"""Probability of reaching the target from which the verdict is go, and to which it is no-go."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Intervals:
    """Central intervals at `level`. `A` averages the families; the others are given the paper's family."""

    level: float
    A: Interval
    A_given_family: Interval
    B: Interval
    C_mid: Interval


@dataclass(frozen=True)
class Medians:
    """Posterior medians, each with the meaning and the conditioning of its namesake in `Intervals`.

    They are the points that stand beside the intervals. The least-squares curve has other parameters, which
    may lie outside of the intervals where the log-logistic family misfits or the noise is correlated.
    """

    A: float
    A_given_family: float
    B: float
    C_mid: float


@dataclass(frozen=True)
class NoiseEstimate:
    """Posterior means of the noise of one evaluation; `floor` is the known sampling noise, or NaN."""

    sd: float
    phi: float
    floor: float


@dataclass(frozen=True)
class Forecast:
    """What an evaluation at `compute` should show.

    `mean` is the posterior mean of the mean curve, `paper_point` the least-squares log-logistic curve,
    `interval` holds the mean curve, and `prediction` one more evaluation with its noise.
    """

    compute: float
    mean: float
    paper_point: float
    interval: Interval
    prediction: Interval

    def __str__(self) -> str:
        (low, high), (least, most) = self.interval, self.prediction
        return (
            f"at {self.compute:g}: {self.mean:.3f}  curve [{low:.3f}, {high:.3f}]  "
            f"evaluation [{least:.3f}, {most:.3f}]  paper {self.paper_point:.3f}"
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of `forecast` in the JSON output."""
        return {
            "compute": self.compute,
            "mean": self.mean,
            "paper_point": self.paper_point,
            "interval": list(self.interval),
            "prediction": list(self.prediction),
            "rerun": None,
        }


@dataclass(frozen=True)
class Fit:
    """A fitted compute-performance curve, and what the data say of it. Made by `fit`."""

    axis: str
    min_compute: float
    r0_value: float
    r0_source: Literal["given", "measured", "fitted"]
    curve: Curve
    """The least-squares log-logistic curve (the paper's); the intervals are not about it."""
    rmse: float
    """Root mean square of the residuals of `curve`."""
    median: Medians
    intervals: Intervals
    families: dict[str, float]
    """Posterior weight of every family."""
    noise: NoiseEstimate
    identified: bool
    why: str
    c_max_over_c_mid: float
    warnings: tuple[str, ...]
    points: Points = field(repr=False)
    """The points that were fitted, by compute."""
    excluded: Points = field(repr=False)
    """The points below `min_compute`, which were not."""
    posterior: Posterior = field(repr=False)

    @property
    def n_points(self) -> int:
        """How many points were fitted."""
        return len(self.points)

    @property
    def ceiling(self) -> float:
        """Posterior median of A, the families averaged: the point that belongs to `intervals.A`."""
        return self.median.A

    @property
    def least_squares(self) -> str:
        """The paper's point estimate in one line, to stand apart from the intervals."""
        curve = self.curve
        return f"A {curve.A:.3f}  B {curve.B:.3g}  C_mid {curve.C_mid:.4g}  rmse {self.rmse:.2g}"

    def forecast(self, compute: float) -> Forecast:
        """Forecast at `compute`, in the unit of the axis.

        Raises:
            InputError: `compute` is negative or not finite.
        """
        _check_compute(compute, "a compute to forecast at")
        post, at_Q = self.posterior, tails(self.intervals.level)
        value = post.curve_at(compute)
        low, high = weighted_quantiles(value, post.weight, at_Q)
        noisy = noisy_quantiles(value, post.weight, post.sd_J, post.sd_weight_J, at_Q)
        return Forecast(
            float(compute),
            float(np.sum(value * post.weight)),
            float(self.curve(compute)),
            (float(low), float(high)),
            (max(float(noisy[0]), 0.0), min(float(noisy[1]), 1.0)),
        )

    def band(self, compute_M: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Median and interval of the mean curve at every compute, three arrays (M,), for plots."""
        post = self.posterior.heaviest(0.999)
        at_Q = np.array([0.5, *tails(self.intervals.level)])
        rows = [weighted_quantiles(post.curve_at(float(c)), post.weight, at_Q) for c in compute_M]
        median_M, low_M, high_M = np.array(rows).reshape(-1, 3).T
        return median_M, low_M, high_M

    def probability(self, target: float, budget: float) -> float:
        """Probability that the mean curve at compute `budget` is at or above the pass rate `target`.

        Raises:
            InputError: `target` is no share in [0, 1], or `budget` is negative.
        """
        if not 0 <= target <= 1:
            raise InputError(f"the target is a pass rate in [0, 1], found {target:g}")
        _check_compute(budget, "the budget")
        post = self.posterior
        return float(min(1.0, np.sum(post.weight[post.curve_at(budget) >= target])))

    def compute_to(self, target: float) -> Interval:
        """Interval of the compute at which the mean curve reaches `target`; infinite where it never does."""
        post, (low, high) = self.posterior, tails(self.intervals.level)
        value, weight = post.compute_to(target).ravel(), post.weight.ravel()
        order = np.argsort(value, kind="stable")
        held = np.cumsum(weight[order])
        last = len(order) - 1
        ends = [value[order[min(int(np.searchsorted(held, q * held[-1])), last)]] for q in (low, high)]
        return float(ends[0]), float(ends[1])

    def verdict(self, target: float, budget: float) -> Literal["go", "no-go", "too close", "too early"]:
        """Is `target` reached at `budget`? Go from P = .95, no-go to .05, if the ceiling is identified."""
        if not self.identified:
            return "too early"
        probability = self.probability(target, budget)
        if probability >= GO:
            return "go"
        return "no-go" if probability <= NO_GO else "too close"

    def to_json(
        self, at: Sequence[float] = (), target: float | None = None, budget: float | None = None
    ) -> dict[str, Any]:
        """The object that `scalerl fit --json` prints; what is not computed is None.

        "fit" is the least-squares curve. "median" and "intervals" are of the posterior: A over all families,
        and A_given_family, B and C_mid given the log-logistic.
        """
        intervals = self.intervals
        return {
            "points": self.n_points,
            "axis": self.axis,
            "min_compute": self.min_compute,
            "r0": {"value": self.r0_value, "source": self.r0_source},
            "fit": {
                "family": self.curve.family.name,
                "A": self.curve.A,
                "B": self.curve.B,
                "C_mid": self.curve.C_mid,
                "R_0": self.curve.R_0,
                "rmse": self.rmse,
            },
            "intervals": {
                "level": intervals.level,
                "A": list(intervals.A),
                "A_given_family": list(intervals.A_given_family),
                "B": list(intervals.B),
                "C_mid": list(intervals.C_mid),
            },
            "median": asdict(self.median),
            "families": dict(self.families),
            "prior": "flat",
            "noise": {
                "sd": self.noise.sd,
                "phi": self.noise.phi,
                "floor": _finite(self.noise.floor),
                "seed_sd": None,
            },
            "identified": self.identified,
            "why": self.why,
            "c_max_over_c_mid": self.c_max_over_c_mid,
            "lack_of_fit": None,
            "forecast": [self.forecast(compute).to_json() for compute in at],
            "target": self._target_json(target, budget),
            "warnings": list(self.warnings),
        }

    def _target_json(self, target: float | None, budget: float | None) -> dict[str, Any] | None:
        if target is None or budget is None:
            return None
        return {
            "reward": target,
            "budget": budget,
            "probability": self.probability(target, budget),
            "probability_rerun": None,
            "compute_to_target": [_finite(c) for c in self.compute_to(target)],
            "verdict": self.verdict(target, budget),
        }

    def __str__(self) -> str:
        median, intervals = self.median, self.intervals
        state = "identified" if self.identified else "not identified"
        return (
            f"A {median.A:.3f}  {intervals.level:.0%} {_span(intervals.A, '.3f')}, {state}: {self.why}\n"
            f"B {median.B:.3g}  {_span(intervals.B, '.3g')}   "
            f"C_mid {median.C_mid:.4g}  {_span(intervals.C_mid, '.4g')}   given log_logistic\n"
            f"least squares (paper)  {self.least_squares}  ({self.n_points} points on {self.axis})"
        )


def _span(interval: Interval, spec: str) -> str:
    return f"[{interval[0]:{spec}}, {interval[1]:{spec}}]"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _check_compute(compute: float, what: str) -> None:
    if not (math.isfinite(compute) and compute >= 0):
        raise InputError(f"{what} is a number of 0 or more, found {compute:g}")
