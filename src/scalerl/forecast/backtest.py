"""Rolling origin: fit the first part of finished runs, forecast the rest, and score it by what came.

    |---- fitted ----|c|- - - - - - forecast, every later evaluation - - - - -|end|      c: a cut

At every cut the rivals get what the fit gets, and nothing that came later in the run. By default they are the
least-squares log-logistic curve, the paper's own grid search, the bounded power law, the log-linear trend and
the last value. These have no intervals and are scored by their errors alone.

Shapes: M later evaluations, K knots of compute, Q probabilities.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from scalerl.curve.answers import GO, NO_GO
from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.curve.result import Fit
from scalerl.errors import CannotAnswerError, InputError, number_of
from scalerl.forecast.backtest_result import OURS, Backtest, CallScore, Cut, Later
from scalerl.forecast.rivals import POINT_RIVALS, Part, Predicted, Rival, Seen
from scalerl.forecast.scores import crps, levels
from scalerl.quantiles import tails
from scalerl.record.left_out import NONE
from scalerl.record.reader import RunRecord

TARGET_OFF = 0.05
"""Distance of the two targets of a call, below and above, from the pass rate measured at the end."""
_LEVELS = levels(100)  # of the quantiles that stand for a predictive distribution
_CHUNK = 4096  # later evaluations that are scored at once
_KNOTS = 128  # computes at which forecasts are made; between them they are linear in log C


def backtest(
    runs: Iterable[Points | RunRecord] | Points | RunRecord,
    *,
    x: str | None = None,
    fractions: Sequence[float] | float = (1 / 8, 1 / 4, 1 / 2, 3 / 4),
    level: float = 0.95,
    r0: float | Literal["free"] | None = None,
    min_compute: float = 0.0,
    price: float | None = None,
    prior: Literal["default", "flat"] = "default",
    rivals: Mapping[str, Rival] = POINT_RIVALS,
    watch: Callable[[int, int], None] | None = None,
) -> Backtest:
    """Forecast the rest of every run from its first part, as if the rest had not been seen.

    Args:
        runs: finished runs, or points; runs with the same points are counted once.
        x: compute axis of run records, as for `fit`.
        fractions: shares of each run's largest compute, in (0, 1), at which it is cut.
        level: of the prediction intervals.
        r0: as for `fit`.
        min_compute: as for `fit`; cuts remain fractions of the whole compute.
        price: dollars per GPU-hour, for the axis `dollars`.
        prior: as for `fit`.
        rivals: methods that are scored beside the fit, by name (`scalerl.forecast.rivals`).
        watch: called after each cut with the number done and the total.

    Raises:
        InputError: no run, a fraction outside of (0, 1), another argument that `fit` does not take, or a
            run that cannot be read on the axis. What the data cannot answer is an outcome, not an error.
    """
    cut_at = tuple(sorted({number_of(one, "a fraction of the compute") for one in np.atleast_1d(fractions)}))
    if not cut_at or not all(0 < fraction < 1 for fraction in cut_at):
        raise InputError(f"the cuts are fractions of the compute between 0 and 1, found {fractions}")
    # A generator would be used up by the check of its runs, and leave none to test.
    runs = list(runs) if isinstance(runs, Iterable) else [runs]
    if not runs:
        raise InputError("no run to test: give at least one run or file")
    for run in runs:
        if not isinstance(run, RunRecord | Points):
            raise InputError(
                "backtest takes runs (scalerl.load_run(path)) and points (scalerl.read_table(path)), found "
                + type(run).__name__
            )
    points = [
        Points.from_record(run, x or run.default_axis, price) if isinstance(run, RunRecord) else run
        for run in runs
    ]
    distinct, dropped = _distinct(points)
    kept = [run.select(np.argsort(run.compute_N, kind="stable")) for run in distinct]
    options = {"r0": r0, "min_compute": min_compute, "level": level, "prior": prior}
    cuts: dict[tuple[int, float], Cut] = {}
    for fraction in cut_at:
        parts = [_part(run, fraction) for run in kept]
        for i, part in enumerate(parts):
            others = parts[:i] + parts[i + 1 :]
            cuts[i, fraction] = _cut(part, fraction, others, rivals, **options)
            if watch:
                watch(len(cuts), len(kept) * len(cut_at))
    sources = tuple(run.source for run in kept)
    axis = ", ".join(dict.fromkeys(run.axis for run in kept))
    return Backtest(
        axis, level, cut_at, sources, dropped, tuple(rivals), tuple(cuts[key] for key in sorted(cuts))
    )


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


def _part(run: Points, fraction: float) -> Part:
    compute = fraction * float(run.compute_N.max(initial=0.0))
    early_N = run.compute_N <= compute * (1 + 1e-9)  # an evaluation right at the cut is seen
    # What the log left out concerns the whole run, and may be of a later time.
    return Part(compute, replace(run.select(early_N), left_out=NONE), run.select(~early_N))


def _cut(
    part: Part, fraction: float, others: Sequence[Part], rivals: Mapping[str, Rival], **options: Any
) -> Cut:
    early, r0 = part.early, options["r0"]
    try:
        result = fit(early, **options)
    except CannotAnswerError as error:
        result, outcome, why = None, "cannot answer", _reason(error, early)
    else:
        # A fit that is not identified forecasts too: its answers, which decide nothing, are scored apart.
        outcome, why = "forecast" if result.identified else "too early", result.why
    chosen = early.select(early.kept_from(options["min_compute"]) & ((r0 is None) | (early.compute_N > 0)))
    known = chosen.select(np.lexsort((chosen.pass_rate_N, chosen.compute_N)))
    given = None if r0 is None or r0 == "free" else float(r0)
    seen = Seen(known, part.compute, given, result, "" if result else why, others)
    later = _later(seen, part.rest, options["level"], rivals)
    n_fitted = result.n_points if result else len(early)
    return Cut(early.source, fraction, part.compute, n_fitted, outcome, why, later)


def _reason(error: Exception, run: Points) -> str:
    return str(error).removeprefix(f"{run.source}: ")


def _later(seen: Seen, rest: Points, level: float, rivals: Mapping[str, Rival]) -> Later | None:
    """Forecast the later evaluations by the fit and its rivals; None where none of them can."""
    if not len(rest):
        return None
    compute_M, knot_K = rest.compute_N, np.unique(rest.compute_N)
    if len(knot_K) > _KNOTS:
        knot_K = np.geomspace(knot_K[0], knot_K[-1], _KNOTS)
    at_Q = np.concatenate([tails(level), [1 - GO, 1 - NO_GO], _LEVELS])
    order_Q = np.argsort(at_Q, kind="stable")
    later = Later(compute_M, rest.pass_rate_N)
    for name, rival in {OURS: _ours, **rivals}.items():
        try:
            found = rival(seen, knot_K, at_Q[order_Q])
        # The reason is kept: a rival that answers at fewer cuts is scored on easier ones.
        except (CannotAnswerError, InputError) as error:
            later.no_point[name] = _reason(error, rest)
            continue
        later.point_M[name] = _between(knot_K, found.point_K, compute_M)
        if found.value_QK is None:
            continue
        value_QK = np.empty_like(found.value_QK)
        value_QK[order_Q] = np.clip(found.value_QK, 0.0, 1.0)  # no evaluation can be elsewhere
        later.low_M[name], later.high_M[name] = (_between(knot_K, end_K, compute_M) for end_K in value_QK[:2])
        later.crps_M[name] = _crps(knot_K, value_QK[4:], rest)
        later.calls[name] = _calls(seen.fit if name == OURS else None, value_QK[2:4, -1], rest)
    return later if later.point_M else None


def _ours(seen: Seen, compute_K: np.ndarray, at_Q: np.ndarray) -> Predicted:
    if seen.fit is None:
        raise CannotAnswerError(seen.why_not)
    medians, values = zip(*(seen.fit.predicted(float(c), at_Q) for c in compute_K), strict=True)
    return Predicted(np.array(medians), np.array(values).T)


def _between(knot_K: np.ndarray, value_K: np.ndarray, compute_M: np.ndarray) -> np.ndarray:
    return np.interp(np.log(compute_M), np.log(knot_K), value_K)


def _crps(knot_K: np.ndarray, value_QK: np.ndarray, rest: Points) -> np.ndarray:
    """Return the CRPS of every later evaluation, (M,)."""
    scores = []
    for first in range(0, len(rest), _CHUNK):  # all at once would take `_LEVELS` times the memory of a run
        compute_M, pass_rate_M = (v[first : first + _CHUNK] for v in (rest.compute_N, rest.pass_rate_N))
        scores.append(crps(np.array([_between(knot_K, v_K, compute_M) for v_K in value_QK]), pass_rate_M))
    return np.concatenate(scores)


def _calls(fit: Fit | None, value_2: np.ndarray, rest: Points) -> CallScore:
    """Return the calls of go and no-go for a target below and one above what was measured at the end.

    A rival calls by its quantiles there, at 1 - `GO` and 1 - `NO_GO`, and never "too early".
    """
    end = float(rest.compute_N.max())
    measured = float(rest.pass_rate_N[rest.compute_N == end].mean())
    right = wrong = 0
    for target, truth in ((measured - TARGET_OFF, "go"), (measured + TARGET_OFF, "no-go")):
        if not 0 < target < 1:
            continue  # nothing to call: every pass rate is above 0 and below 1
        call = "go" if value_2[0] >= target else "no-go" if value_2[1] < target else "too close"
        if fit is not None:
            call = fit.verdict(target, end)
        right += call == truth
        wrong += call != truth and call in ("go", "no-go")
    return CallScore(right, wrong)
