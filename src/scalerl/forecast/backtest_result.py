"""The answer of a backtest: its cuts and their scores, as text, JSON and a data frame."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np

from scalerl._views import views
from scalerl.forecast.scores import covered, interval_score
from scalerl.frames import columns_of, data_frame
from scalerl.numbers import percent

Outcome = Literal["forecast", "too early", "cannot answer"]
"""`too early` has a forecast too, by a fit that does not call its ceiling identified."""

ANSWERED: tuple[Outcome, ...] = ("forecast", "too early")
"""The outcomes in which the fit has a forecast."""
_OUTCOMES: tuple[Outcome, ...] = (*ANSWERED, "cannot answer")
COLUMNS = ("runs", "|error|", "rms", "bias", "inside", "width", "score", "CRPS")
"""The columns of a table of scores."""
OURS = "scalerl"
"""The name of the fit's own forecast."""


class CallScore(NamedTuple):
    """Calls of go and no-go for two targets, .05 below and .05 above the pass rate measured at the end."""

    right: int
    wrong: int


@dataclass(frozen=True)
class Later:
    """The evaluations after a cut, and what each method forecast for them.

    `point_M` holds the forecasts of every method that answered, and `no_point` the reasons of the others. For
    those with quantiles, `low_M` and `high_M` are the prediction interval, `crps_M` the score of the whole
    predictive distribution, and `calls` what the method would have decided.
    """

    compute_M: np.ndarray
    pass_rate_M: np.ndarray
    point_M: dict[str, np.ndarray] = field(default_factory=dict)
    no_point: dict[str, str] = field(default_factory=dict)
    low_M: dict[str, np.ndarray] = field(default_factory=dict)
    high_M: dict[str, np.ndarray] = field(default_factory=dict)
    crps_M: dict[str, np.ndarray] = field(default_factory=dict)
    calls: dict[str, CallScore] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """One run, fitted up to `compute` and forecast from there; `later` is None if no method can answer."""

    source: str
    fraction: float
    compute: float
    n_fitted: int
    outcome: Outcome
    why: str
    later: Later | None = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with the later evaluations by column."""
        row, later = {name: value for name, value in vars(self).items() if name != "later"}, self.later
        if later is None:
            return {**row, "later": None}
        # By column: a run may have thousands of later evaluations.
        columns = {
            "compute": later.compute_M.tolist(),
            "measured": later.pass_rate_M.tolist(),
            "forecast": _lists(later.point_M),
            "cannot_answer": dict(later.no_point),
            "low": _lists(later.low_M),
            "high": _lists(later.high_M),
            "crps": _lists(later.crps_M),
        }
        return {**row, "later": columns}


@dataclass(frozen=True)
class PointScore:
    """Errors (forecast minus measured) of one method, in pass rate; all `runs` have equal weight."""

    runs: int
    median_abs: float
    rms: float
    bias: float


@dataclass(frozen=True)
class IntervalScore:
    """Scores of the prediction intervals over `runs` runs, which have equal weight.

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
    """The compute axis; all of them if the runs differ."""
    level: float
    fractions: tuple[float, ...]
    sources: tuple[str, ...]
    """The runs, each once."""
    dropped: tuple[str, ...]
    """Runs left out because they have the same points as a run that is counted."""
    rivals: tuple[str, ...]
    cuts: tuple[Cut, ...] = field(repr=False)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are scored: the fit itself, then its rivals."""
        return (OURS, *self.rivals)

    def select(self, fraction: float | None = None, outcome: Outcome | None = None) -> tuple[Cut, ...]:
        """Return the cuts at a fraction and with an outcome; None stands for any."""
        return tuple(
            cut
            for cut in self.cuts
            if (fraction is None or cut.fraction == fraction) and (outcome is None or cut.outcome == outcome)
        )

    def point_score(
        self, method: str, fraction: float, outcome: Outcome | None = None, end: bool = False
    ) -> PointScore | None:
        """Score one of `methods` at all later evaluations, or at the end alone.

        Return None if no cut has its forecast.
        """
        parts = self.later("point_M", method, fraction, outcome)
        if not parts:
            return None
        weight_E = _weights(parts, end)
        error_E = np.concatenate([later.point_M[method] - later.pass_rate_M for later in parts])
        rms = float(np.sqrt(weight_E @ error_E**2))
        return PointScore(len(parts), _median(np.abs(error_E), weight_E), rms, float(weight_E @ error_E))

    def interval_score(
        self, method: str, fraction: float, outcome: Outcome | None = None, end: bool = False
    ) -> IntervalScore | None:
        """Score a method's prediction intervals, as `point_score` does its points; None if it has none."""
        parts = self.later("crps_M", method, fraction, outcome)
        if not parts:
            return None
        weight_E = _weights(parts, end)
        low_E, high_E, crps_E = (
            np.concatenate([getattr(later, name)[method] for later in parts])
            for name in ("low_M", "high_M", "crps_M")
        )
        y_E = np.concatenate([later.pass_rate_M for later in parts])
        score_E = interval_score(low_E, high_E, y_E, self.level)
        values = covered(low_E, high_E, y_E), high_E - low_E, score_E, crps_E
        return IntervalScore(len(parts), *(float(weight_E @ value_E) for value_E in values))

    def later(self, what: str, method: str, fraction: float, outcome: Outcome | None = None) -> list[Later]:
        """Return what came after those cuts where a method has `what`, a field of `Later`."""
        found = [cut.later for cut in self.select(fraction, outcome) if cut.later is not None]
        return [later for later in found if method in getattr(later, what)]

    def heads(self) -> list[str]:
        """Return a line or two on what was tested."""
        n = len(self.sources)
        lines = [f"{n} run{'s' if n > 1 else ''} on {self.axis}, {percent(self.level)} prediction intervals"]
        if self.dropped:
            lines.append(f"counted once, as their points are those of another: {', '.join(self.dropped)}")
        return lines

    def outcomes(self, fraction: float) -> str:
        """Return one line: a cut, as 1/8 rather than 0.125, and how many runs had each outcome there."""
        # 1/3 was given as a fraction, and is a float by now.
        simple = Fraction(fraction).limit_denominator(64)
        part = str(simple) if abs(simple - fraction) < 1e-12 else f"{fraction:g}"
        counts = ", ".join(f"{len(self.select(fraction, outcome))} {outcome}" for outcome in _OUTCOMES)
        return f"first {part} of the compute: {counts}"

    def tables(self, fraction: float) -> list[tuple[str, list[tuple[str, Sequence[str]]]]]:
        """Return tables of scores at a cut, for every later evaluation and for the end: a title, and rows.

        There is a row for the fit over all runs, one by outcome if both occur, and one for every rival. A row
        has a label and its cells in the order of `COLUMNS`; cells without a value at the end are left out.
        """
        ours, *rivals = self.methods
        wanted: list[tuple[str, str, Outcome | None]] = [(ours, ours, None)]
        # With only one outcome the rows would repeat the one above.
        if all(self.select(fraction, outcome) for outcome in ANSWERED):
            wanted.extend((f"  {outcome}", ours, outcome) for outcome in ANSWERED)
        wanted.extend((name, name, None) for name in rivals)
        tables = []
        for end, title in ((False, "every later evaluation"), (True, "the end")):
            rows: list[tuple[str, Sequence[str]]] = []
            for label, method, outcome in wanted:
                if point := self.point_score(method, fraction, outcome, end):
                    cells = [f"{point.runs}", f"{point.median_abs:.4f}", f"{point.rms:.4f}"]
                    cells.append(f"{point.bias:+.4f}")
                    if found := self.interval_score(method, fraction, outcome, end):
                        cells.append(f"{found.coverage:.3f}")
                        cells += [f"{value:.4f}" for value in (found.width, found.score, found.crps)]
                    rows.append((label, cells))
            if rows:
                tables.append((title, rows))
        return tables

    def to_frame(self) -> Any:
        """Make a `pandas.DataFrame` of `to_dict`.

        Raises:
            InputError: pandas is not installed.
        """
        return data_frame(self.to_dict())

    def to_dict(self) -> dict[str, list[Any]]:
        """Return columns with an entry for each later evaluation of each cut; None or NaN without a forecast.

        Columns: `source`, `fraction`, `cut` (the compute so far), `outcome`, `compute`, `measured`, `low` and
        `high` (the fit's prediction interval), `crps`, and the forecast of each of `methods` under its name.
        """
        names = ("source", "fraction", "cut", "outcome", "compute", "measured", "low", "high", "crps")
        rows: list[dict[str, Any]] = []
        for cut in self.cuts:
            head: dict[str, Any] = dict(
                zip(names, (cut.source, cut.fraction, cut.compute, cut.outcome), strict=False)
            )
            if (later := cut.later) is None:
                rows.append(head)
                continue
            columns = {"compute": later.compute_M, "measured": later.pass_rate_M} | later.point_M
            for name, of_method in (("low", later.low_M), ("high", later.high_M), ("crps", later.crps_M)):
                columns |= {name: of_method[OURS]} if OURS in of_method else {}
            rows += [
                head | {name: float(value_M[i]) for name, value_M in columns.items()}
                for i in range(len(later.compute_M))
            ]
        return columns_of(rows, (*names, *self.methods))

    def _repr_html_(self) -> str:
        return views().backtest_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return the runs, pooled scores per fraction (null where there is none), and every cut."""
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
            def of_methods(score: Callable[..., Any]) -> dict[str, Any]:
                found = {name: score(name, fraction, outcome, end) for name in self.methods}
                return {name: one and asdict(one) for name, one in found.items()}

            return {"errors": of_methods(self.point_score), "intervals": of_methods(self.interval_score)}

        return {
            "fraction": fraction,
            "outcomes": {outcome: len(self.select(fraction, outcome)) for outcome in _OUTCOMES},
            "later": scores(False),
            "end": scores(True),
            "end_by_outcome": {outcome: scores(True, outcome) for outcome in ANSWERED},
        }

    def __str__(self) -> str:
        """One block per fraction: the outcomes of the runs, why some have no forecast, and the scores."""
        lines = self.heads()
        for fraction in self.fractions:
            # Cut off before their figures, which differ from run to run, the reasons are few.
            reasons: Counter[str] = Counter()
            # Cuts without an answer of the fit first: `most_common` keeps the order of equal counts.
            for cut in sorted(self.select(fraction), key=lambda cut: cut.outcome in ANSWERED):
                missing = cut.later.no_point if cut.outcome in ANSWERED and cut.later else {"": cut.why}
                for name, why in missing.items():
                    reasons[f"{name} cannot answer: {why.split(': ', maxsplit=1)[0]}".lstrip()] += 1
            lines += ["", self.outcomes(fraction)]
            lines += [f"  {count} x {why}" for why, count in reasons.most_common()]
            for title, rows in self.tables(fraction):
                lines += [table_line(label, cells) for label, cells in [(title, COLUMNS), *rows]]
        return "\n".join(lines)


def table_line(label: str, cells: Iterable[str]) -> str:
    """Return a line of a table of scores."""
    return f"  {label:<28}" + "".join(f"{cell:>9}" for cell in cells)


def _lists(of_method: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: value_M.tolist() for name, value_M in of_method.items()}


def _weights(parts: Sequence[Later], end: bool) -> np.ndarray:
    """Return weights of all evaluations in turn, which sum to 1: every run has equal weight, long or short.

    The end is the evaluations at the largest compute: more than one if it was repeated.
    """
    chosen = [
        later.compute_M == later.compute_M.max() if end else np.ones(len(later.compute_M)) for later in parts
    ]
    # Evaluations of one run are correlated: ten times as many are not ten times the evidence.
    return np.concatenate([chosen_M / chosen_M.sum() for chosen_M in chosen]) / len(parts)


def _median(value_E: np.ndarray, weight_E: np.ndarray) -> float:
    """Return the weighted median: where half of the weight is reached, half-way if half lies below."""
    order = np.argsort(value_E, kind="stable")
    held = np.cumsum(weight_E[order])
    # 1e-12: sums of weights such as 1/3 miss .5 by rounding, and the median would jump to one side.
    low, high = np.searchsorted(held, [0.5 - 1e-12, 0.5 + 1e-12])
    return float(value_E[order[low]] + value_E[order[min(high, len(order) - 1)]]) / 2
