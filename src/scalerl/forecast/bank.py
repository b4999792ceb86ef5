"""A bank of finished runs: which method forecasts their ends best, at each share of their compute.

It is a `Backtest` with a row for every method instead of one for every cut. It includes the methods that
answer where the fit does not, and what each method would have decided.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalerl.forecast.backtest_result import ANSWERED, OURS, Backtest, table_line
from scalerl.forecast.scores import covered

COLUMNS = ("runs", "|error|", "inside", "width", "score", "CRPS", "later", "right", "wrong")


@dataclass(frozen=True)
class BankRow:
    """One method at one share of the compute, over the runs for which it has an answer.

    Errors and scores are of the evaluation at the end, in pass rate: the median absolute error, and the mean
    coverage, width, interval score and CRPS of the prediction interval. `later` is the coverage of all later
    evaluations. Figures of an interval are None without one. Among the calls of go and no-go
    (`scalerl.forecast.backtest_result.CallScore`), `wrong` are the confident misses.
    """

    method: str
    fraction: float
    runs: int
    refused: dict[str, int]
    """The reasons for no answer, and the number of runs of each."""
    error: float | None
    coverage: float | None
    width: float | None
    score: float | None
    crps: float | None
    later: float | None
    right: int
    wrong: int

    def cells(self) -> list[str]:
        """Return the cells of a table, in the order of `COLUMNS`."""
        scores = ((self.error, 4), (self.coverage, 3), (self.width, 4), (self.score, 4), (self.crps, 4))
        shown = ["" if value is None else f"{value:.{n}f}" for value, n in (*scores, (self.later, 3))]
        asked = self.runs + sum(self.refused.values())
        return [f"{self.runs}/{asked}", *shown, f"{self.right}", f"{self.wrong}"]


@dataclass(frozen=True)
class Bank:
    """The rows of a backtest, over all of its runs and over those that the fit answers."""

    test: Backtest

    def rows(self, fraction: float, answered: bool = False) -> list[BankRow]:
        """Return a row for every method; with `answered` over the runs that the fit answers at this cut."""
        test = self.test
        if answered:
            test = replace(test, cuts=tuple(cut for cut in test.cuts if cut.outcome in ANSWERED))
        return [_row(test, method, fraction) for method in test.methods]

    def missed(self, fraction: float) -> tuple[int, int]:
        """Return how often the fit calls the ceiling identified, and how often the end is then outside."""
        found = self.test.later("low_M", OURS, fraction, "forecast")
        outside = 0
        for later in found:
            end_M = later.compute_M == later.compute_M.max()
            outside += not covered(later.low_M[OURS], later.high_M[OURS], later.pass_rate_M)[end_M].all()
        return len(found), outside

    def to_json(self) -> list[dict[str, Any]]:
        """Return an entry for every share of the compute."""
        return [
            {
                "fraction": fraction,
                "identified": identified,
                "identified_missed": missed,
                "rows": [_json(row) for row in self.rows(fraction)],
                "answered": [_json(row) for row in self.rows(fraction, answered=True)],
            }
            for fraction in self.test.fractions
            for identified, missed in [self.missed(fraction)]
        ]

    def __str__(self) -> str:
        lines = self.test.heads()
        for fraction in self.test.fractions:
            ends = "  ends forecast with an identified ceiling: {}, outside of the interval {}"
            lines += ["", self.test.outcomes(fraction), ends.format(*self.missed(fraction))]
            rows = self.rows(fraction)
            tables = [("the end", rows)]
            if 0 < rows[0].runs < max(row.runs for row in rows):
                tables.append((f"of the {rows[0].runs} with scalerl", self.rows(fraction, answered=True)))
            for title, of_table in tables:
                lines.append(table_line(title, COLUMNS))
                lines += [table_line(row.method, row.cells()) for row in of_table]
            refused = ((row.method, why, n) for row in rows for why, n in row.refused.items())
            lines += [f"  {n} x {method} cannot answer: {why}" for method, why, n in refused]
        return "\n".join(lines)


def _row(test: Backtest, method: str, fraction: float) -> BankRow:
    point = test.point_score(method, fraction, end=True)
    end, later = (test.interval_score(method, fraction, end=end) for end in (True, False))
    calls = [found.calls[method] for found in test.later("calls", method, fraction)]
    reasons: Counter[str] = Counter()
    for cut in test.select(fraction):
        if cut.later is None or method not in cut.later.point_M:
            why = cut.why if cut.later is None else cut.later.no_point[method]
            # Cut off before their figures, which differ from run to run, the reasons are few.
            why = re.sub(r"^\d+ evaluations?", "too few evaluations", why)
            reasons[re.split(r": | from \d", why, maxsplit=1)[0]] += 1
    return BankRow(
        method,
        fraction,
        point.runs if point else 0,
        dict(reasons.most_common()),
        point and point.median_abs,
        *((end.coverage, end.width, end.score, end.crps) if end else (None,) * 4),
        later=later and later.coverage,
        right=int(np.sum([one.right for one in calls])),
        wrong=int(np.sum([one.wrong for one in calls])),
    )


def _json(row: BankRow) -> dict[str, Any]:
    refused = [{"reason": why, "runs": count} for why, count in row.refused.items()]
    return {name: value for name, value in vars(row).items() if name != "fraction"} | {"refused": refused}
