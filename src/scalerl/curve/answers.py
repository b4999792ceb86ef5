"""The parts of a fit's answer: parameters, identification of the ceiling, noise, forecasts, verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scalerl._views import views
from scalerl.curve.families import FAMILIES, LOG_LOGISTIC
from scalerl.curve.misfit import MIN_POINTS
from scalerl.curve.posterior import Posterior
from scalerl.curve.prior import log_mid_range
from scalerl.curve.sample import Sample
from scalerl.errors import InputError, number_of
from scalerl.frames import data_frame
from scalerl.numbers import chance_text, percent
from scalerl.quantiles import Interval, span_quantiles, tails, weighted_quantiles

GO, NO_GO = 0.95, 0.05
"""Probability of reaching the target from which the verdict is go, and up to which it is no-go."""
BENT = 1.0
"""Data that reach this many times C_mid (posterior median) show a bend: no-go needs one, go does not."""
MAX_WIDTH_A, MAX_WIDTH_OF_GAIN = 0.25, 1.0
"""A ceiling is identified if its 95 % interval is no wider than this, nor than this share of A - R_0 ..."""
MIN_RATIO, MIN_RATIO_LOW = 1.5, 1.0
"""... if the data reach this many times C_mid by its median, and this many by its 97.5 % quantile ..."""
MIN_EVALUATIONS = MIN_POINTS
"""... with at least this many evaluations: fewer determine neither the noise nor a misfit ..."""
MAX_AT_BOUND = 0.05
"""... if no more than this share of the posterior is at an edge of the prior of B or of C_mid ..."""
MAX_WANDER = 0.2
"""... if the run has wandered off the curve by no more than this share of A - R_0 ..."""
FAR, MAX_FAR = 10.0, 0.1
"""... and if the forecast at this many times the compute is within this share of A - R_0 of the ceiling."""

Verdict = Literal["go", "no-go", "too close", "too early", "training reward"]
"""The last if what was fitted is not a held-out metric: there can be no go and no no-go then."""


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
    """Posterior medians, the points beside the intervals, conditioned as those of `Intervals`.

    The least-squares curve has other parameters, which may lie outside the intervals where the log-logistic
    family misfits or the noise is correlated.
    """

    A: float
    A_given_family: float
    B: float
    C_mid: float


@dataclass(frozen=True)
class Identification:
    """Whether the data identify the ceiling, why in one sentence, and the figures behind it."""

    identified: bool
    why: str
    ratio: float
    """C_max / C_mid: posterior median over all families."""
    ratio_interval: Interval
    at_bounds: dict[str, float]
    """Share of the posterior against a bound: A at 1, B and C_mid at either edge of their prior."""
    widest: float
    """The width of A's 95 % interval up to which the ceiling is identified."""
    waits: bool = False
    """Whether only evaluations at more compute are missing, as far as the present curve shows."""


@dataclass(frozen=True)
class NoiseEstimate:
    """Posterior means of the noise of one evaluation, and what is known from outside the run.

    `phi` is the correlation of neighbours, `wander` how far the run is permanently off its curve at the
    last evaluation (`scalerl.curve.noise`), `floor` the sampling noise on fixed prompts, NaN where not known,
    `seed_sd` the sd of A from seed to seed that the intervals of a rerun assume (`scalerl.curve.seeds`), and
    `floor_from` the source of the floor: the number of samples, or how prompts differ between evaluations
    (`scalerl.record.prompts`); None where the floor is not known.
    """

    sd: float
    phi: float
    wander: float
    floor: float
    seed_sd: float
    floor_from: Literal["samples", "prompts"] | None


@dataclass(frozen=True)
class Forecast:
    """Forecast of the pass rate at `compute`.

    `median` is the posterior median of the mean curve, `paper_point` the least-squares log-logistic curve.
    `interval` is for the mean curve of this run, `prediction` for one more evaluation of it with its noise,
    `rerun` for the mean curve of another run of the recipe with another seed.
    """

    compute: float
    median: float
    paper_point: float
    interval: Interval
    prediction: Interval
    rerun: Interval
    axis: str = "compute"
    """The compute axis that `compute` is on."""

    def __str__(self) -> str:
        parts = {"curve": self.interval, "evaluation": self.prediction, "rerun": self.rerun}
        spans = "  ".join(f"{name} {span(ends)}" for name, ends in parts.items())
        return f"at {self.compute:g}: {self.median:.3f}  {spans}  paper {self.paper_point:.3f}"

    def to_json(self) -> dict[str, Any]:
        """Return the entry of `forecast` in the JSON output."""
        # `axis` is a key of the fit, which holds these entries.
        found = {name: value for name, value in vars(self).items() if name != "axis"}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def _repr_html_(self) -> str:
        return views().forecast_html(self)


@dataclass(frozen=True, eq=False)
class Forecasts:
    """Forecasts at M computes: the fields of `Forecast` as arrays (M,), intervals as pairs of arrays.

    `axes.fill_between(found.compute, *found.interval)` draws the interval of the mean curve.
    """

    compute: np.ndarray
    median: np.ndarray
    paper_point: np.ndarray
    interval: tuple[np.ndarray, np.ndarray]
    prediction: tuple[np.ndarray, np.ndarray]
    rerun: tuple[np.ndarray, np.ndarray]
    axis: str = "compute"

    @classmethod
    def of(cls, found: Sequence[Forecast], axis: str) -> Forecasts:
        """Stack forecasts on one axis."""

        def column(name: str) -> np.ndarray:
            return np.array([getattr(one, name) for one in found], dtype=float)

        def ends(name: str) -> tuple[np.ndarray, np.ndarray]:
            low_M, high_M = column(name).reshape(-1, 2).T
            return low_M, high_M

        points = column("compute"), column("median"), column("paper_point")
        return cls(*points, ends("interval"), ends("prediction"), ends("rerun"), axis)

    def to_frame(self) -> Any:
        """Make a `pandas.DataFrame` of `to_dict`.

        Raises:
            InputError: pandas is not installed.
        """
        return data_frame(self.to_dict())

    def to_dict(self) -> dict[str, np.ndarray]:
        """Return arrays (M,) by name: the computes under the axis name, each interval as two arrays."""
        columns: dict[str, np.ndarray] = {self.axis: self.compute, "median": self.median}
        columns["paper_point"] = self.paper_point
        for name in ("interval", "prediction", "rerun"):
            low_M, high_M = getattr(self, name)
            columns |= {f"{name}_low": low_M, f"{name}_high": high_M}
        return columns


@dataclass(frozen=True)
class Chance:
    """Whether a target is reached at a budget, by this run and by a rerun with another seed."""

    probability: float
    probability_rerun: float
    verdict: Verdict
    verdict_rerun: Verdict
    why: str
    """One sentence: why the verdict for this run is what it is."""
    withheld: bool = False
    """Whether no curve supports the probabilities: a misfit, no held-out metric, or a NaN at the end."""

    @property
    def answer(self) -> str:
        """The verdict in capitals, with the probability unless it is withheld."""
        return self._answer(self.verdict, self.probability)

    @property
    def answer_rerun(self) -> str:
        """The verdict for a rerun with another seed, in the form of `answer`."""
        return self._answer(self.verdict_rerun, self.probability_rerun)

    def _answer(self, verdict: Verdict, probability: float) -> str:
        return verdict.upper() + ("" if self.withheld else f", {chance_text(probability)}")


def span(interval: tuple[float | None, float | None], spec: str = ".3f") -> str:
    """Format an interval as `[low, high]`; an end that is None is open."""
    low, high = ("open" if end is None else f"{end:{spec}}" for end in interval)
    return f"[{low}, {high}]"


def check_level(level: float) -> None:
    """Raise an InputError unless `level` is between 0 and 1."""
    if not 0 < number_of(level, "the level of the intervals") < 1:
        raise InputError(f"the level of the intervals must be between 0 and 1, found {level:g}")


def check_compute(compute: float, what: str) -> None:
    """Raise an InputError unless `compute` is a finite number of 0 or more; `what` names it."""
    if not (math.isfinite(number_of(compute, what)) and compute >= 0):
        raise InputError(f"{what} must be a number of 0 or more, found {compute:g}")


def check_target(target: float, budget: float) -> None:
    """Raise an InputError unless `target` is a pass rate, and `budget` an amount of compute."""
    if not 0 <= number_of(target, "the target") <= 1:
        raise InputError(f"the target must be a pass rate in [0, 1], found {target:g}")
    check_compute(budget, "the budget")


def parameters_of(post: Posterior, level: float) -> tuple[Medians, Intervals]:
    """Return the medians of the parameters, and their central intervals at `level`."""
    low, high = tails(level)
    at_Q = np.array([low, 0.5, high])
    # B means something else in each family, so an average of it over families would be no curve's B.
    own = post.only(FAMILIES.index(LOG_LOGISTIC))
    B_Q, C_mid_Q = (
        np.exp(span_quantiles(span_cells2, own.weight_cells, at_Q))
        for span_cells2 in (own.log_b_span_cells2, own.log_mid_span_cells2)
    )
    A_Q, own_A_Q = (weighted_quantiles(one.A, one.weight, at_Q) for one in (post, own))
    low_4, median_4, high_4 = np.array([A_Q, own_A_Q, B_Q, C_mid_Q]).T.tolist()
    return Medians(*median_4), Intervals(level, *zip(low_4, high_4, strict=True))


def identify(post: Posterior, sample: Sample, suspected: str, level: float) -> Identification:
    """Decide from the posteriors of A and C_max / C_mid, always at 95 %, and from the forecast at `FAR`.

    A sentence in `suspected` names a change of slope, which prevents identification; it is empty without one.
    The reason says "at 95 %" where the fit reports another `level`.
    """
    # At 95 % whatever level a fit reports: a verdict must not change with the width that a reader prefers.
    at_Q = np.array([0.025, 0.5, 0.975])
    log_mid = span_quantiles(post.log_mid_span_cells2, post.weight_cells, at_Q)
    least, ratio, most = np.exp(sample.log_c_range[1] - log_mid[::-1]).tolist()
    low, middle, high = weighted_quantiles(post.A, post.weight, at_Q).tolist()
    value = post.curve_at(FAR * math.exp(sample.log_c_range[1]))
    far = float(weighted_quantiles(value, post.weight, np.array([0.5]))[0])
    edges = {
        "B": (post.log_b_cells, *post.prior.log_b),
        "C_mid": (post.log_mid_cells, *log_mid_range(sample)),
    }
    # "Near an edge" is .05 in logs or .01 for A: nodes lie inside a range, not on its ends.
    at_bounds = {"A": float(post.weight[post.A > 0.99].sum())}
    for name, (value, start, stop) in edges.items():
        at_bounds[name] = float(post.weight_cells[(value < start + 0.05) | (value > stop - 0.05)].sum())
    gain = float(np.sum((post.A - post.R_0) * post.weight))
    # Otherwise a run that has gained little would pass by the absolute width, whatever its ceiling.
    widest = min(MAX_WIDTH_A, MAX_WIDTH_OF_GAIN * gain)
    # A is not among them: 1 is the bound of every pass rate, not of a prior, and a run may truly end there.
    name = max(("B", "C_mid"), key=lambda n: at_bounds[n])
    identified, waits = False, True
    # At 1 from the start there is no room to rise: an unlikely fall makes the mean negative.
    if gain < 0 and float(post.weight[post.A < post.R_0].sum()) > post.prior.falls:
        why, waits = ": the run falls", False
    elif gain <= 0 or ratio < MIN_RATIO or least < MIN_RATIO_LOW:
        why = ": the bend has hardly been seen"
    elif len(sample) < MIN_EVALUATIONS:
        why = f", but {len(sample)} evaluations are too few to tell: {MIN_EVALUATIONS} are needed"
    elif high - low > widest:
        why = f": wider than {widest:.2g}"
    elif abs(post.moved) > MAX_WANDER * gain:
        why, waits = f", but the run has wandered by {post.moved:+.3f} off any saturating curve", False
    elif abs(middle - far) > MAX_FAR * gain:
        why = f", and {FAR:g} times the compute is forecast at {far:.3f}: the ceiling is far beyond the data"
        waits = False
    elif at_bounds[name] > MAX_AT_BOUND:
        why = f", but {percent(at_bounds[name])} of the probability of {name} lies on the edge of its prior"
        waits = False
    elif suspected:
        why, waits = f", but perhaps {suspected}", False
    else:
        identified, waits, why = True, False, ": the bend has been seen"
    reach = "{} C_mid [{}, {}]".format(*(f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in (ratio, least, most)))
    at = "" if level == 0.95 else " at 95 %"
    why = f"the data reach {reach}, A is in [{low:.3f}, {high:.3f}]{at}{why}"
    return Identification(identified, why, ratio, (least, most), at_bounds, widest, waits)
