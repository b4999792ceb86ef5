"""What a backtest found: its cuts and their scores, as text for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from scalerl._views import view
from scalerl.forecast.baselines import RIVALS
from scalerl.forecast.scores import covered, interval_score
from scalerl.frames import of_rows

Outcome = Literal["forecast", "too early", "cannot answer"]
"""`too early`: forecast all the same, by a fit that does not call its ceiling identified."""

_ANSWERED: tuple[Outcome, ...] = ("forecast", "too early")
_OUTCOMES: tuple[Outcome, ...] = (*_ANSWERED, "cannot answer")
PLACES = ((False, "every later evaluation"), (True, "the end"))
"""Where forecasts are scored: whether it is at the end alone, and in words."""
COLUMNS = ("runs", "|error|", "rms", "bias", "inside", "width", "score", "CRPS")


def heads(test: Backtest) -> list[str]:
    """What was tested, a line or two."""
    n = len(test.sources)
    lines = [f"{n} run{'s' if n > 1 else ''} on {test.axis}, {test.level:.0%} prediction intervals"]
    if test.dropped:
        lines.append(f"counted once, as their points are those of another: {', '.join(test.dropped)}")
    return lines


def fates(test: Backtest, fraction: float) -> str:
    """What became of the runs at a cut."""
    return ", ".join(f"{len(test.select(fraction, outcome))} {outcome}" for outcome in _OUTCOMES)


def _reasons(test: Backtest, fraction: float) -> Counter[str]:
    """Why there is no forecast, by the fit or by a rival, and how often."""
    reasons = Counter(f"cannot answer: {_head(cut.why)}" for cut in test.select(fraction, "cannot answer"))
    for cut in test.select(fraction):
        if cut.later is not None:
            reasons.update(f"{name} cannot answer: {_head(why)}" for name, why in cut.later.no_point.items())
    return reasons


def _head(why: str) -> str:
    """The reason without its figures, which differ from run to run."""
    return why.split(": ", maxsplit=1)[0]


def score_rows(test: Backtest, fraction: float, end: bool) -> list[tuple[str, Sequence[str]]]:
    """A row for the fit, over all runs and by outcome where both occur, and one for every rival.

    Each has a label and, in the order of `COLUMNS`, the cells that there are.
    """
    ours, *rivals = test.methods
    wanted: list[tuple[str, str, Outcome | None]] = [(ours, ours, None)]
    if all(test.select(fraction, outcome) for outcome in _ANSWERED):
        wanted.extend((f"  {outcome}", ours, outcome) for outcome in _ANSWERED)
    wanted.extend((name, name, None) for name in rivals)
    rows: list[tuple[str, Sequence[str]]] = []
    for label, method, outcome in wanted:
        point = test.point_score(method, fraction, outcome, end)
        if point is None:
            continue
        cells = [f"{point.runs}", f"{point.median_abs:.4f}", f"{point.rms:.4f}", f"{point.bias:+.4f}"]
        interval = test.interval_score(fraction, outcome, end) if method == ours else None
        if interval is not None:
            values = (interval.width, interval.score, interval.crps)
            cells += [f"{interval.coverage:.3f}", *(f"{v:.4f}" for v in values)]
        rows.append((label, cells))
    return rows


def fraction_text(fraction: float) -> str:
    """1/8 rather than 0.125, where it is a simple fraction."""
    simple = Fraction(fraction).limit_denominator(64)
    return str(simple) if abs(simple - fraction) < 1e-12 else f"{fraction:g}"


def _pooled(test: Backtest, fraction: float) -> dict[str, Any]:
    def scores(end: bool, outcome: Outcome | None = None) -> dict[str, Any]:
        interval = test.interval_score(fraction, outcome, end)
        points = {name: test.point_score(name, fraction, outcome, end) for name in test.methods}
        return {
            "errors": {name: asdict(point) if point else None for name, point in points.items()},
            "intervals": asdict(interval) if interval else None,
        }

    return {
        "fraction": fraction,
        "outcomes": {outcome: len(test.select(fraction, outcome)) for outcome in _OUTCOMES},
        "later": scores(False),
        "end": scores(True),
        "end_by_outcome": {outcome: scores(True, outcome) for outcome in _ANSWERED},
    }


def _cut(cut: Cut) -> dict[str, Any]:
    row = {
        name: getattr(cut, name) for name in ("source", "fraction", "compute", "n_fitted", "outcome", "why")
    }
    later = cut.later
    if later is None:
        return {**row, "later": None}
    columns = {
        "compute": later.compute_M.tolist(),
        "measured": later.pass_rate_M.tolist(),
        "forecast": {name: point_M.tolist() for name, point_M in later.point_M.items()},
        "cannot_answer": dict(later.no_point),
        "low": later.low_M.tolist(),
        "high": later.high_M.tolist(),
        "crps": later.crps_M.tolist(),
    }
    return {**row, "later": columns}


OURS = "scalerl"
"""The name of the fit's own forecast, its point."""


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
        """Runs, pooled scores per fraction (null where there is none), and every cut with its forecasts."""
        return {
            "axis": self.axis,
            "level": self.level,
            "runs": list(self.sources),
            "dropped": list(self.dropped),
            "pooled": [_pooled(self, fraction) for fraction in self.fractions],
            "cuts": [_cut(cut) for cut in self.cuts],
        }

    def __str__(self) -> str:
        """One block per fraction: what became of the runs, and how their forecasts scored."""
        lines = heads(self)
        for fraction in self.fractions:
            lines += ["", f"first {fraction_text(fraction)} of the compute: {fates(self, fraction)}"]
            lines += [f"  {count} x {why}" for why, count in _reasons(self, fraction).most_common()]
            for end, title in PLACES:
                rows = score_rows(self, fraction, end)
                for label, cells in [(title, COLUMNS), *rows] if rows else []:
                    lines.append(f"  {label:<28}" + "".join(f"{cell:>9}" for cell in cells))
        return "\n".join(lines)


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
