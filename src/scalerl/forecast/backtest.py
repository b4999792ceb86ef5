"""Rolling origin: fit the first part of finished runs, forecast the rest, and hold it against what came.

    |---- fitted ----|c|- - - - - - forecast, every later evaluation - - - - -|end|      c: a cut

At every cut the rivals see what the fit sees: the least-squares log-logistic curve, the paper's own grid
search, the bounded power law, the log-linear trend and the last value. They have no intervals, so they are
scored by their errors alone.

Shapes: M later evaluations, K knots of compute, C components of the predictive distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from scalerl._views import view
from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.backtest_text import as_json, as_text
from scalerl.forecast.baselines import fit_last_value, fit_log_linear, fit_power_law
from scalerl.forecast.paper import paper_fit_of
from scalerl.forecast.scores import covered, distance, half_spread, interval_score
from scalerl.frames import of_rows
from scalerl.record.reader import RunRecord

Outcome = Literal["forecast", "too early", "cannot answer"]
"""`too early`: forecast all the same, by a fit that does not call its ceiling identified."""

OURS = "scalerl"
"""The name of the fit's own forecast, its point."""

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

_DRAWS, _COMPONENTS = 8192, 64  # curves of the posterior, and the quantiles of them that stand for it
_KNOTS = 128  # computes at which the fit is asked; between them, forecasts are linear in log C


@dataclass(frozen=True)
class Later:
    """The evaluations after a cut, and what was forecast for each of them.

    `point_M` holds the forecasts of every method that answered, and `no_point` says why another did not.
    `low_M`, `high_M` is the prediction interval, `crps_M` the score of the whole predictive distribution.
    """

    compute_M: np.ndarray
    pass_rate_M: np.ndarray
    point_M: dict[str, np.ndarray]
    no_point: dict[str, str]
    low_M: np.ndarray
    high_M: np.ndarray
    crps_M: np.ndarray

    @property
    def end_M(self) -> np.ndarray:
        """Which of the evaluations are at the largest compute: more than one if it was repeated."""
        return self.compute_M == self.compute_M.max()


@dataclass(frozen=True)
class Cut:
    """One run, fitted up to `compute` and forecast from there. `later` is None where there is no answer."""

    source: str
    fraction: float
    compute: float
    n_fitted: int
    outcome: Outcome
    why: str
    later: Later | None = field(repr=False)


@dataclass(frozen=True)
class PointScore:
    """Errors (forecast less measured) of one method, in pass rate; each of the `runs` runs weighs alike."""

    runs: int
    median_abs: float
    rms: float
    bias: float


@dataclass(frozen=True)
class IntervalScore:
    """How the prediction intervals did over `runs` runs; every run weighs alike.

    `coverage` is the share of evaluations inside, `width` the mean width; `score` (the interval score) and
    `crps` are in pass rate, lower is better.
    """

    runs: int
    coverage: float
    width: float
    score: float
    crps: float


@dataclass(frozen=True)
class Backtest:
    """Every cut of every run, and their scores pooled. Made by `backtest`."""

    axis: str
    """The compute axis; all of them, where the runs differ."""
    level: float
    fractions: tuple[float, ...]
    sources: tuple[str, ...]
    """The runs, each once."""
    dropped: tuple[str, ...]
    """Runs left out because their points are those of another that is counted."""
    cuts: tuple[Cut, ...] = field(repr=False)

    @property
    def methods(self) -> tuple[str, ...]:
        """What is scored: the fit itself, then its rivals."""
        return (OURS, *RIVALS)

    def select(self, fraction: float | None = None, outcome: Outcome | None = None) -> tuple[Cut, ...]:
        """The cuts at a fraction, with an outcome; None stands for any."""
        return tuple(
            cut
            for cut in self.cuts
            if (fraction is None or cut.fraction == fraction) and (outcome is None or cut.outcome == outcome)
        )

    def point_score(
        self, method: str, fraction: float, outcome: Outcome | None = None, end: bool = False
    ) -> PointScore | None:
        """Errors of a method (`OURS` or a name in `RIVALS`) at all later evaluations, or at the end alone.

        None if no cut has its forecast.
        """
        answered = [cut.later for cut in self.select(fraction, outcome) if cut.later is not None]
        parts = [(later, later.point_M[method]) for later in answered if method in later.point_M]
        if not parts:
            return None
        weight_E = _weights([later for later, _ in parts], end)
        error_E = np.concatenate([point_M - later.pass_rate_M for later, point_M in parts])
        rms = float(np.sqrt(weight_E @ error_E**2))
        return PointScore(len(parts), _median(np.abs(error_E), weight_E), rms, float(weight_E @ error_E))

    def interval_score(
        self, fraction: float, outcome: Outcome | None = None, end: bool = False
    ) -> IntervalScore | None:
        """Scores of the prediction intervals at all later evaluations, or the end alone; None without any."""
        answered = [cut.later for cut in self.select(fraction, outcome) if cut.later is not None]
        if not answered:
            return None
        weight_E = _weights(answered, end)
        low_E, high_E, y_E, crps_E = (
            np.concatenate([getattr(later, name) for later in answered])
            for name in ("low_M", "high_M", "pass_rate_M", "crps_M")
        )
        return IntervalScore(
            len(answered),
            float(weight_E @ covered(low_E, high_E, y_E)),
            float(weight_E @ (high_E - low_E)),
            float(weight_E @ interval_score(low_E, high_E, y_E, self.level)),
            float(weight_E @ crps_E),
        )

    def to_frame(self) -> Any:
        """Every later evaluation of every cut as a row of a `pandas.DataFrame`; NaN where a method had none.

        Columns: `source`, `fraction`, `cut` (the compute so far), `outcome`, `compute`, `measured`, `low` and
        `high` (the prediction interval), `crps`, and the forecast of each of `methods` under its name.

        Raises:
            InputError: pandas is not installed.
        """
        rows: list[dict[str, Any]] = []
        for cut in self.cuts:
            of_cut = {
                "source": cut.source,
                "fraction": cut.fraction,
                "cut": cut.compute,
                "outcome": cut.outcome,
            }
            if (later := cut.later) is None:
                rows.append(of_cut)
                continue
            columns = {"compute": later.compute_M, "measured": later.pass_rate_M, "low": later.low_M}
            columns |= {"high": later.high_M, "crps": later.crps_M, **later.point_M}
            rows += [
                of_cut | {name: float(value_M[i]) for name, value_M in columns.items()}
                for i in range(len(later.compute_M))
            ]
        names = ("source", "fraction", "cut", "outcome", "compute", "measured", "low", "high", "crps")
        return of_rows(rows, (*names, *self.methods))

    def _repr_html_(self) -> str:
        return view("backtest_html", self)

    def to_json(self) -> dict[str, Any]:
        """The object that `scalerl backtest --json` prints."""
        return as_json(self)

    def __str__(self) -> str:
        return as_text(self)


def backtest(
    runs: Sequence[Points | RunRecord],
    *,
    x: str | None = None,
    fractions: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 3 / 4),
    level: float = 0.95,
    r0: float | Literal["free"] | None = None,
    min_compute: float = 0.0,
    price: float | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Backtest:
    """Forecast the rest of every run from its first part, as if it had not been seen.

    Args:
        runs: finished runs, or points; those with the same points are counted once.
        x: compute axis of run records, as for `fit`.
        fractions: of each run's largest compute, in (0, 1), at which it is cut.
        level: of the prediction intervals.
        r0: as for `fit`.
        min_compute: as for `fit`; cuts are fractions of the whole compute all the same.
        price: dollars per GPU-hour, for the axis `dollars`.
        watch: is told the cuts done and the cuts to do, after each.

    Raises:
        InputError: no run, a fraction outside of (0, 1), another argument that `fit` does not take, or a run
            that cannot be read on the axis. What the data cannot answer is no error, but an outcome.
    """
    cut_at = tuple(sorted({float(fraction) for fraction in fractions}))
    if not cut_at or not all(0 < fraction < 1 for fraction in cut_at):
        raise InputError(f"the cuts are fractions of the compute between 0 and 1, found {list(fractions)}")
    if not runs:
        raise InputError("no run to test: give at least one run or file")
    points = [
        Points.from_record(run, x or run.default_axis, price) if isinstance(run, RunRecord) else run
        for run in runs
    ]
    kept, dropped = _distinct(points)
    cuts = []
    for run in kept:
        for fraction in cut_at:
            cuts.append(_cut(run, fraction, r0, min_compute, level))
            if watch:
                watch(len(cuts), len(kept) * len(cut_at))
    sources = tuple(run.source for run in kept)
    axis = ", ".join(dict.fromkeys(run.axis for run in kept))
    return Backtest(axis, level, cut_at, sources, dropped, tuple(cuts))


def _distinct(runs: Sequence[Points]) -> tuple[list[Points], tuple[str, ...]]:
    """Runs that differ in their points, whatever the order of the rows; and the sources of the others."""
    seen: set[bytes] = set()
    kept, dropped = [], []
    for run in runs:
        order = np.lexsort((run.pass_rate_N, run.compute_N))
        content = np.stack([run.compute_N[order], run.pass_rate_N[order]]).tobytes()
        (dropped if content in seen else kept).append(run)
        seen.add(content)
    return kept, tuple(run.source for run in dropped)


def _cut(
    run: Points, fraction: float, r0: float | Literal["free"] | None, min_compute: float, level: float
) -> Cut:
    top = float(run.compute_N.max(initial=0.0))
    compute = fraction * top
    early_N = run.compute_N <= compute * (1 + 1e-9)  # an evaluation right at the cut is seen
    seen, rest = run.select(early_N), run.select(~early_N)
    try:
        result = fit(seen, r0=r0, min_compute=min_compute, level=level)
    except CannotAnswerError as error:
        why = str(error).removeprefix(f"{run.source}: ")
        return Cut(run.source, fraction, compute, len(seen), "cannot answer", why, None)
    outcome = "forecast" if result.identified else "too early"
    return Cut(run.source, fraction, compute, result.n_points, outcome, result.why, _later(result, rest))


def _later(result: Fit, rest: Points) -> Later:
    """Forecasts of the later evaluations, by the fit and by its rivals."""
    compute_M, knot_K = rest.compute_N, _knots(rest.compute_N)
    forecasts = [result.evaluation(float(compute)) for compute in knot_K]
    asked = [(mean, *prediction) for mean, prediction in forecasts]
    mean_M, low_M, high_M = (_between(knot_K, value_K, compute_M) for value_K in np.array(asked).T)
    point_M = {OURS: mean_M}
    no_point = {}
    for name, rival in RIVALS.items():
        try:
            point_M[name] = rival(result)(compute_M)
        except (CannotAnswerError, InputError) as error:
            no_point[name] = str(error).removeprefix(f"{rest.source}: ")
    crps_M = _crps(result, compute_M, rest.pass_rate_N)
    return Later(compute_M, rest.pass_rate_N, point_M, no_point, low_M, high_M, crps_M)


def _knots(compute_M: np.ndarray) -> np.ndarray:
    """Every compute where these are few, else `_KNOTS` from the first to the last; (K,), rising."""
    distinct = np.unique(compute_M)
    return distinct if len(distinct) <= _KNOTS else np.geomspace(distinct[0], distinct[-1], _KNOTS)


def _between(knot_K: np.ndarray, value_K: np.ndarray, compute_M: np.ndarray) -> np.ndarray:
    return np.interp(np.log(compute_M), np.log(knot_K), value_K)


def _crps(result: Fit, compute_M: np.ndarray, pass_rate_M: np.ndarray) -> np.ndarray:
    """Score of the predictive distribution: the curves of the posterior, each with the noise about it."""
    knot_K = _knots(compute_M)
    curve_CK = np.sort(result.posterior.draws(_DRAWS).curves_at(knot_K), axis=0)
    curve_CK = curve_CK.reshape(_COMPONENTS, -1, len(knot_K)).mean(axis=1)
    sd_C, weight_C = np.full(_COMPONENTS, result.noise.sd), np.ones(_COMPONENTS)
    curve_CM = np.array([_between(knot_K, value_K, compute_M) for value_K in curve_CK])
    spread_K = np.array([half_spread(mean_C, sd_C, weight_C) for mean_C in curve_CK.T])
    return distance(curve_CM, sd_C, weight_C, pass_rate_M) - _between(knot_K, spread_K, compute_M)


def _weights(parts: Sequence[Later], end: bool) -> np.ndarray:
    """Weights of all evaluations in turn, which sum to 1: every run weighs alike, however many it has."""
    chosen = [later.end_M if end else np.ones(len(later.compute_M)) for later in parts]
    return np.concatenate([chosen_M / chosen_M.sum() for chosen_M in chosen]) / len(parts)


def _median(value_E: np.ndarray, weight_E: np.ndarray) -> float:
    """The weighed median: where half of the weight is reached, half-way if exactly half lies below."""
    order = np.argsort(value_E, kind="stable")
    held = np.cumsum(weight_E[order])
    low, high = np.searchsorted(held, [0.5 - 1e-12, 0.5 + 1e-12])
    return float(value_E[order[low]] + value_E[order[min(high, len(order) - 1)]]) / 2
