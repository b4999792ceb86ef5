"""Rolling origin: fit the first part of finished runs, forecast the rest, and score it by what came.

    |---- fitted ----|c|- - - - - - forecast, every later evaluation - - - - -|end|      c: a cut

At every cut the rivals get what the fit gets: the least-squares log-logistic curve, the paper's own grid
search, the bounded power law, the log-linear trend and the last value. They have no intervals, so they are
scored by their errors alone.

Shapes: M later evaluations, K knots of compute, C components of the predictive distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.backtest_result import OURS, Backtest, Cut, Later
from scalerl.forecast.baselines import RIVALS
from scalerl.forecast.scores import distance, half_spread
from scalerl.record.reader import RunRecord

_DRAWS, _COMPONENTS = 8192, 64  # curves of the posterior, and the quantiles of them that stand for it
_KNOTS = 128  # computes at which forecasts are made; between them they are linear in log C


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
        watch: called after each cut with the number done and the number in all.

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
    """Return runs that differ in their points, whatever the order of the rows; and the others' sources."""
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
    # Forecast all the same: how good answers are that nobody should act on is scored apart.
    outcome = "forecast" if result.identified else "too early"
    return Cut(run.source, fraction, compute, result.n_points, outcome, result.why, _later(result, rest))


def _later(result: Fit, rest: Points) -> Later:
    """Forecast the later evaluations, by the fit and by its rivals."""
    compute_M, knot_K = rest.compute_N, _knots(rest.compute_N)
    forecasts = [(mean, *ends) for mean, ends in (result.evaluation(float(c)) for c in knot_K)]
    mean_M, low_M, high_M = (_between(knot_K, value_K, compute_M) for value_K in np.array(forecasts).T)
    point_M, no_point = {OURS: mean_M}, {}
    for name, rival in RIVALS.items():
        try:
            point_M[name] = rival(result)(compute_M)
        # With its reason: a rival that answers at fewer cuts is scored on easier ones.
        except (CannotAnswerError, InputError) as error:
            no_point[name] = str(error).removeprefix(f"{rest.source}: ")
    crps_M = _crps(result, compute_M, rest.pass_rate_N)
    return Later(compute_M, rest.pass_rate_N, point_M, no_point, low_M, high_M, crps_M)


def _knots(compute_M: np.ndarray) -> np.ndarray:
    """Return every compute where these are few, else `_KNOTS` from the first to the last; (K,), rising."""
    distinct = np.unique(compute_M)
    return distinct if len(distinct) <= _KNOTS else np.geomspace(distinct[0], distinct[-1], _KNOTS)


def _between(knot_K: np.ndarray, value_K: np.ndarray, compute_M: np.ndarray) -> np.ndarray:
    return np.interp(np.log(compute_M), np.log(knot_K), value_K)


def _crps(result: Fit, compute_M: np.ndarray, pass_rate_M: np.ndarray) -> np.ndarray:
    """Score the predictive distribution: the curves of the posterior, each with the noise about it."""
    knot_K = _knots(compute_M)
    curve_CK = np.sort(result.posterior.draws(_DRAWS).curves_at(knot_K), axis=0)
    curve_CK = curve_CK.reshape(_COMPONENTS, -1, len(knot_K)).mean(axis=1)
    sd_C, weight_C = np.full(_COMPONENTS, result.noise.sd), np.ones(_COMPONENTS)
    curve_CM = np.array([_between(knot_K, value_K, compute_M) for value_K in curve_CK])
    spread_K = np.array([half_spread(mean_C, sd_C, weight_C) for mean_C in curve_CK.T])
    return distance(curve_CM, sd_C, weight_C, pass_rate_M) - _between(knot_K, spread_K, compute_M)
