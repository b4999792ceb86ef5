"""From points to an answer: the fitted curve, what is known of its ceiling, the forecast, the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from scalerl.curve.families import FAMILIES, LOG_LOGISTIC, Curve
from scalerl.curve.least_squares import Sample, least_squares, make_sample
from scalerl.curve.points import Points
from scalerl.curve.posterior import B_RANGE, C_MID_FACTOR, SD_RANGE, Posterior, posterior
from scalerl.curve.quantiles import noisy_quantiles, weighted_quantiles
from scalerl.errors import CannotAnswerError, InputError
from scalerl.record import RunRecord

MIN_POINTS = 5
MAX_WIDTH_A, MAX_WIDTH_OF_GAIN = 0.20, 0.5
"""A ceiling is identified when its 95 % interval is no wider than this, nor than this share of A - R_0 ..."""
MIN_RATIO = 1.5
"""... and when the data reach this many times C_mid."""
GO, NO_GO = 0.95, 0.05

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
    """The least-squares log-logistic curve (the paper's)."""
    rmse: float
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

    def forecast(self, compute: float) -> Forecast:
        """Forecast at `compute`, in the unit of the axis.

        Raises:
            InputError: `compute` is negative or not finite.
        """
        _check_compute(compute, "a compute to forecast at")
        post, at_Q = self.posterior, _tails(self.intervals.level)
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
        at_Q = np.array([0.5, *_tails(self.intervals.level)])
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
        post, (low, high) = self.posterior, _tails(self.intervals.level)
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
        """The object that `scalerl fit --json` prints; what is not computed is None."""
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
            "families": {**self.families, "power_law": None},
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
        low, high = self.intervals.A
        state = "identified" if self.identified else "not identified"
        return (
            f"{self.curve}  rmse {self.rmse:.3g}  ({self.n_points} points on {self.axis})\n"
            f"A {self.intervals.level:.0%} [{low:.3f}, {high:.3f}], {state}: {self.why}"
        )


def fit(
    data: RunRecord | Points,
    *,
    x: str = "gpu_hours",
    r0: float | Literal["free"] | None = None,
    min_compute: float = 0.0,
    level: float = 0.95,
    price: float | None = None,
) -> Fit:
    """Fit R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B) (arXiv 2510.13786, equation 1), with honest intervals.

    Args:
        data: a run, or points, whose axis is then theirs.
        x: the compute axis of a run, one of `record.AXES`.
        r0: R_0 where it is known. By default the evaluations at compute 0 enter as data, and R_0 is free;
            "free" says the same where there are none.
        min_compute: positive compute below this is left out (the paper leaves out the first epoch).
        level: of the intervals.
        price: dollars per GPU-hour, for the axis `dollars`.

    Raises:
        InputError: an argument or the data are not valid.
        CannotAnswerError: fewer than five points, or a curve that does not rise.
    """
    if not 0 < level < 1:
        raise InputError(f"the level of the intervals is between 0 and 1, found {level:g}")
    if isinstance(r0, float | int) and not 0 <= r0 < 1:
        raise InputError(f"R_0 is a pass rate in [0, 1), found {r0:g}")
    points = Points.from_record(data, x, price) if isinstance(data, RunRecord) else data
    points = points.select(np.lexsort((points.pass_rate_N, points.compute_N)))
    keep_N = (points.compute_N == 0) | (points.compute_N >= min_compute)
    points, excluded = points.select(keep_N), points.select(~keep_N)
    _check_enough(points)
    zero_N = points.compute_N == 0
    fixed = None if r0 is None or r0 == "free" else float(r0)
    if fixed is not None:
        # A given R_0 takes the place of the evaluation at compute 0, where the curve is R_0 whatever it is.
        points, zero_N = points.select(~zero_N), zero_N[~zero_N]
        _check_enough(points)
    sample = make_sample(points, fixed)
    best = least_squares(sample, LOG_LOGISTIC)
    floor = _noise_floor(points)
    _check_rise(points, fixed, math.sqrt(best.rss / max(len(points) - 2, 1)), floor)
    post = posterior(sample, SD_RANGE[0] if math.isnan(floor) else max(floor, SD_RANGE[0]))
    intervals = _intervals(post, level)
    ratio = float(points.compute_N[-1]) / best.curve.C_mid
    identified, why = _identified(post, ratio, sample)
    measured = bool(zero_N.any())
    bounds = [f"the fitted curve lies on a bound ({name})" for name in best.at_bounds]
    return Fit(
        axis=points.axis,
        min_compute=min_compute,
        r0_value=(
            fixed
            if fixed is not None
            else float(points.pass_rate_N[zero_N].mean())
            if measured
            else best.curve.R_0
        ),
        r0_source="given" if fixed is not None else "measured" if measured else "fitted",
        curve=best.curve,
        rmse=math.sqrt(best.rss / len(points)),
        intervals=intervals,
        families=post.family_weights(),
        noise=NoiseEstimate(
            float(post.sd_J @ post.sd_weight_J), float(post.phi_cells @ post.weight_cells), floor
        ),
        identified=identified,
        why=why,
        c_max_over_c_mid=ratio,
        warnings=(*points.warnings, *bounds),
        points=points,
        excluded=excluded,
        posterior=post,
    )


def _check_enough(points: Points) -> None:
    n = len(np.unique(points.compute_N[points.compute_N > 0])) + int((points.compute_N == 0).any())
    if n < MIN_POINTS:
        raise CannotAnswerError(
            f"{points.source}: {n} evaluations at distinct compute are too few to fit a curve: "
            f"at least {MIN_POINTS} are needed"
        )


def _check_rise(points: Points, r0: float | None, sd: float, floor: float) -> None:
    """A curve with nothing to forecast: the last third is not above the first by twice its error."""
    third = max(len(points) // 3, 1)
    first = points.pass_rate_N[:third].mean() if r0 is None else r0
    last = points.pass_rate_N[-third:].mean()
    sd = max(sd, 0.0 if math.isnan(floor) else floor)
    error = sd * math.sqrt((1 if r0 is None else 0) / third + 1 / third)
    if last - first < -2 * error:
        what = "the pass rate falls"
    elif last - first <= 2 * error:
        what = "the pass rate does not rise"
    else:
        return
    raise CannotAnswerError(
        f"{points.source}: {what}: {first:.3f} in the first third, {last:.3f} in the last, "
        f"with noise {sd:.3f}; there is no saturating curve to fit"
    )


def _noise_floor(points: Points) -> float:
    """Root mean square of the evaluation noise that is known, NaN if none is."""
    known = points.noise_sd_N[np.isfinite(points.noise_sd_N)]
    return float(np.sqrt(np.mean(known**2))) if len(known) else math.nan


def _intervals(post: Posterior, level: float) -> Intervals:
    """Intervals of the parameters; the paper's family is the first."""
    at_Q = _tails(level)

    def interval(post: Posterior, value: np.ndarray) -> Interval:
        if not len(value):
            return math.nan, math.nan
        low, high = weighted_quantiles(value, post.weight if value.ndim == 3 else post.weight_cells, at_Q)
        return float(low), float(high)

    def ceiling(post: Posterior) -> Interval:
        return interval(post, np.broadcast_to(post.A[:, :, None], post.weight.shape))

    own = post.only(FAMILIES.index(LOG_LOGISTIC))
    log_b, log_mid = interval(own, own.log_b_cells), interval(own, own.log_mid_cells)
    return Intervals(
        level,
        ceiling(post),
        ceiling(own),
        (math.exp(log_b[0]), math.exp(log_b[1])),
        (math.exp(log_mid[0]), math.exp(log_mid[1])),
    )


def _identified(post: Posterior, ratio: float, sample: Sample) -> tuple[bool, str]:
    """Whether the data fix the ceiling, and one sentence that says why."""
    low, high = _intervals(post, 0.95).A
    span = f"the data reach {ratio:.2g} C_mid and the 95 % interval of A is [{low:.3f}, {high:.3f}]"
    if ratio < MIN_RATIO:
        return False, f"{span}: below {MIN_RATIO:g} C_mid the bend has hardly been seen"
    gain = float(np.sum((post.A[:, :, None] - post.R_0) * post.weight))
    widest = min(MAX_WIDTH_A, MAX_WIDTH_OF_GAIN * gain)
    if high - low > widest:
        return False, f"{span}: wider than {widest:.2g}"
    weight = post.weight_cells
    log_lo, log_hi = sample.log_c_range
    edges = (
        ("B", post.log_b_cells, math.log(B_RANGE[0]), math.log(B_RANGE[1])),
        ("C_mid", post.log_mid_cells, log_lo - math.log(C_MID_FACTOR), log_hi + math.log(C_MID_FACTOR)),
    )
    for name, value, start, stop in edges:
        near = float(weight[(value < start + 0.05) | (value > stop - 0.05)].sum())
        if near > 0.05:
            return False, f"{span}, but {near:.0%} of the probability of {name} lies on the edge of its prior"
    return True, f"{span}: the bend has been seen"


def _tails(level: float) -> np.ndarray:
    return np.array([(1 - level) / 2, (1 + level) / 2])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _check_compute(compute: float, what: str) -> None:
    if not (math.isfinite(compute) and compute >= 0):
        raise InputError(f"{what} is a number of 0 or more, found {compute:g}")
