"""The answer of a backtest: its cuts and their scores, as text, JSON and a data frame."""

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
COLUMNS = ("runs", "|error|", "rms", "bias", "inside", "width", "score", "CRPS")
"""The columns of a table of scores."""
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

    def to_json(self) -> dict[str, Any]:
        """Return all fields, the later evaluations by column."""
        row, later = {name: value for name, value in vars(self).items() if name != "later"}, self.later
        if later is None:
            return {**row, "later": None}
        # By column: a run may have thousands of later evaluations.
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


@dataclass(frozen=True)
class PointScore:
    """Errors (forecast less measured) of one method, in pass rate; all `runs` weigh the same."""

    runs: int
    median_abs: float
    rms: float
    bias: float


@dataclass(frozen=True)
class IntervalScore:
    """Scores of the prediction intervals over `runs` runs, each of which weighs the same.

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
        """The methods that are scored: the fit itself, then its rivals."""
        return (OURS, *RIVALS)

    def select(self, fraction: float | None = None, outcome: Outcome | None = None) -> tuple[Cut, ...]:
        """Return the cuts at a fraction, with an outcome; None stands for any."""
        return tuple(
            cut
            for cut in self.cuts
            if (fraction is None or cut.fraction == fraction) and (outcome is None or cut.outcome == outcome)
        )

    def point_score(
        self, method: str, fraction: float, outcome: Outcome | None = None, end: bool = False
    ) -> PointScore | None:
        """Score a method (`OURS` or a name in `RIVALS`) at all later evaluations, or at the end alone.

        None if no cut has its forecast.
        """
        answered = [cut.later for cut in self.select(fraction, outcome) if cut.later is not None]
        parts = [later for later in answered if method in later.point_M]
        if not parts:
            return None
        weight_E = _weights(parts, end)
        error_E = np.concatenate([later.point_M[method] - later.pass_rate_M for later in parts])
        rms = float(np.sqrt(weight_E @ error_E**2))
        return PointScore(len(parts), _median(np.abs(error_E), weight_E), rms, float(weight_E @ error_E))

    def interval_score(
        self, fraction: float, outcome: Outcome | None = None, end: bool = False
    ) -> IntervalScore | None:
        """Score the prediction intervals at all later evaluations, or the end alone; None without any."""
        answered = [cut.later for cut in self.select(fraction, outcome) if cut.later is not None]
        if not answered:
            return None
        weight_E = _weights(answered, end)
        low_E, high_E, y_E, crps_E = (
            np.concatenate([getattr(later, name) for later in answered])
            for name in ("low_M", "high_M", "pass_rate_M", "crps_M")
        )
        score_E = interval_score(low_E, high_E, y_E, self.level)
        values = covered(low_E, high_E, y_E), high_E - low_E, score_E, crps_E
        return IntervalScore(len(answered), *(float(weight_E @ value_E) for value_E in values))

    def heads(self) -> list[str]:
        """Return a line or two on what was tested."""
        n = len(self.sources)
        lines = [f"{n} run{'s' if n > 1 else ''} on {self.axis}, {self.level:.0%} prediction intervals"]
        if self.dropped:
            lines.append(f"counted once, as their points are those of another: {', '.join(self.dropped)}")
        return lines

    def outcomes(self, fraction: float) -> str:
        """Return one line: a cut, as 1/8 rather than 0.125, and how many runs had which outcome there."""
        # 1/3 was given as a fraction, and is a float by now.
        simple = Fraction(fraction).limit_denominator(64)
        part = str(simple) if abs(simple - fraction) < 1e-12 else f"{fraction:g}"
        counts = ", ".join(f"{len(self.select(fraction, outcome))} {outcome}" for outcome in _OUTCOMES)
        return f"first {part} of the compute: {counts}"

    def tables(self, fraction: float) -> list[tuple[str, list[tuple[str, Sequence[str]]]]]:
        """Return tables of scores at a cut, at every later evaluation and at the end: a title, and rows.

        A row for the fit, over all runs and by outcome where both occur, and one for every rival. Each has a
        label and, in the order of `COLUMNS`, the cells that there are.
        """
        ours, *rivals = self.methods
        wanted: list[tuple[str, str, Outcome | None]] = [(ours, ours, None)]
        # With one outcome alone the rows would repeat the line above.
        if all(self.select(fraction, outcome) for outcome in _ANSWERED):
            wanted.extend((f"  {outcome}", ours, outcome) for outcome in _ANSWERED)
        wanted.extend((name, name, None) for name in rivals)
        tables = []
        for end, title in ((False, "every later evaluation"), (True, "the end")):
            rows: list[tuple[str, Sequence[str]]] = []
            for label, method, outcome in wanted:
                if point := self.point_score(method, fraction, outcome, end):
                    cells = [f"{point.runs}", f"{point.median_abs:.4f}", f"{point.rms:.4f}"]
                    cells.append(f"{point.bias:+.4f}")
                    # Rivals are points: they have no interval to score.
                    if method == ours and (found := self.interval_score(fraction, outcome, end)):
                        cells.append(f"{found.coverage:.3f}")
                        cells += [f"{value:.4f}" for value in (found.width, found.score, found.crps)]
                    rows.append((label, cells))
            if rows:
                tables.append((title, rows))
        return tables

    def to_frame(self) -> Any:
        """Make a `pandas.DataFrame` with a row for every later evaluation of every cut; NaN without forecast.

        Columns: `source`, `fraction`, `cut` (the compute so far), `outcome`, `compute`, `measured`, `low` and
        `high` (the prediction interval), `crps`, and the forecast of each of `methods` under its name.

        Raises:
            InputError: pandas is not installed.
        """
        of_cut, of_later = (
            ("source", "fraction", "cut", "outcome"),
            ("compute", "measured", "low", "high", "crps"),
        )
        rows: list[dict[str, Any]] = []
        for cut in self.cuts:
            head = dict(zip(of_cut, (cut.source, cut.fraction, cut.compute, cut.outcome), strict=True))
            if (later := cut.later) is None:
                rows.append(head)
                continue
            values = later.compute_M, later.pass_rate_M, later.low_M, later.high_M, later.crps_M
            columns = dict(zip(of_later, values, strict=True)) | later.point_M
            rows += [
                head | {name: float(value_M[i]) for name, value_M in columns.items()}
                for i in range(len(later.compute_M))
            ]
        return of_rows(rows, (*of_cut, *of_later, *self.methods))

    def _repr_html_(self) -> str:
        return view("backtest_html", self)

    def to_json(self) -> dict[str, Any]:
        """Return runs, pooled scores per fraction (null where there is none), and every cut."""
        return {
            "axis": self.axis,
            "level": self.level,
            "runs": list(self.sources),
            "dropped": list(self.dropped),
            "pooled": [self._pooled(fraction) for fraction in self.fractions],
            "cuts": [cut.to_json() for cut in self.cuts],
        }

    def _pooled(self, fraction: float) -> dict[str, Any]:
        def scores(end: bool, outcome: Outcome | None = None) -> dict[str, Any]:
            interval = self.interval_score(fraction, outcome, end)
            points = {name: self.point_score(name, fraction, outcome, end) for name in self.methods}
            return {
                "errors": {name: asdict(point) if point else None for name, point in points.items()},
                "intervals": asdict(interval) if interval else None,
            }

        return {
            "fraction": fraction,
            "outcomes": {outcome: len(self.select(fraction, outcome)) for outcome in _OUTCOMES},
            "later": scores(False),
            "end": scores(True),
            "end_by_outcome": {outcome: scores(True, outcome) for outcome in _ANSWERED},
        }

    def __str__(self) -> str:
        """One block per fraction: the outcomes of the runs, why some have no forecast, and the scores."""
        lines = self.heads()
        for fraction in self.fractions:
            # Without their figures, which differ from run to run, the reasons are few.
            reasons: Counter[str] = Counter()
            # Cuts without an answer of our own first: `most_common` keeps the order of equal counts.
            for cut in sorted(self.select(fraction), key=lambda cut: cut.later is not None):
                missing = {"": cut.why} if cut.later is None else cut.later.no_point
                for name, why in missing.items():
                    reasons[f"{name} cannot answer: {why.split(': ', maxsplit=1)[0]}".lstrip()] += 1
            lines += ["", self.outcomes(fraction)]
            lines += [f"  {count} x {why}" for why, count in reasons.most_common()]
            for title, rows in self.tables(fraction):
                for label, cells in [(title, COLUMNS), *rows]:
                    lines.append(f"  {label:<28}" + "".join(f"{cell:>9}" for cell in cells))
        return "\n".join(lines)


def _weights(parts: Sequence[Later], end: bool) -> np.ndarray:
    """Return weights of all evaluations in turn, which sum to 1: every run weighs the same, long or short.

    The end is the evaluations at the largest compute: more than one if it was repeated.
    """
    chosen = [
        later.compute_M == later.compute_M.max() if end else np.ones(len(later.compute_M)) for later in parts
    ]
    # Evaluations of one run are correlated: ten times as many of them are not ten times the evidence.
    return np.concatenate([chosen_M / chosen_M.sum() for chosen_M in chosen]) / len(parts)


def _median(value_E: np.ndarray, weight_E: np.ndarray) -> float:
    """Return the weighted median: where half of the weight is reached, half-way if half lies below."""
    order = np.argsort(value_E, kind="stable")
    held = np.cumsum(weight_E[order])
    # 1e-12 as sums of weights such as 1/3 miss .5 by rounding, and the median would jump to one side.
    low, high = np.searchsorted(held, [0.5 - 1e-12, 0.5 + 1e-12])
    return float(value_E[order[low]] + value_E[order[min(high, len(order) - 1)]]) / 2
