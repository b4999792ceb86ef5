"""A backtest as text for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalerl.forecast.backtest import Backtest, Cut, Outcome

_ANSWERED: tuple[Outcome, ...] = ("forecast", "too early")
_OUTCOMES: tuple[Outcome, ...] = (*_ANSWERED, "cannot answer")
PLACES = ((False, "every later evaluation"), (True, "the end"))
"""Where forecasts are scored: whether it is at the end alone, and in words."""
COLUMNS = ("runs", "|error|", "rms", "bias", "inside", "width", "score", "CRPS")


def as_text(test: Backtest) -> str:
    """One block per fraction: what became of the runs, then scores at every later evaluation and the end."""
    lines = heads(test)
    for fraction in test.fractions:
        lines += ["", f"first {fraction_text(fraction)} of the compute: {fates(test, fraction)}"]
        for why, count in _reasons(test, fraction).most_common():
            lines.append(f"  {count} x {why}")
        for end, title in PLACES:
            rows = score_rows(test, fraction, end)
            if rows:
                rows.insert(0, (title, COLUMNS))
                lines += [f"  {label:<28}" + "".join(f"{cell:>9}" for cell in cells) for label, cells in rows]
    return "\n".join(lines)


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


def as_json(test: Backtest) -> dict[str, Any]:
    """Runs, pooled scores per fraction (null where there is none), and every cut with its forecasts."""
    return {
        "axis": test.axis,
        "level": test.level,
        "runs": list(test.sources),
        "dropped": list(test.dropped),
        "pooled": [_pooled(test, fraction) for fraction in test.fractions],
        "cuts": [_cut(cut) for cut in test.cuts],
    }


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
