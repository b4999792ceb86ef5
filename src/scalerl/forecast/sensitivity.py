"""How the answer depends on how much of the start is left out: the same fit over several cuts.

The paper leaves out the first 1,500 GPU-hours, about one epoch, and shows how B and A move when it does not
(arXiv 2510.13786, appendix): the start may follow another curve, from warm-up or from prompts not yet seen.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from scalerl.curve.answers import Forecast, span
from scalerl.curve.families import Family
from scalerl.curve.fit import fit
from scalerl.curve.points import Points
from scalerl.errors import CannotAnswerError
from scalerl.quantiles import Interval

SHARES = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Shares of the largest compute that are left out by default."""
_SAME = 1e-9  # relative: a cut at an evaluation keeps it


@dataclass(frozen=True)
class SensitivityRow:
    """The fit without the positive compute below `min_compute`; without a fit, `why` gives the reason.

    Medians and intervals are as in `Fit`: A averages the families, B and C_mid are the log-logistic's. A is
    None also where no family describes the run. With a fit, `why` says whether the ceiling is identified.
    """

    min_compute: float
    points: int
    why: str
    A: float | None = None
    A_interval: Interval | None = None
    B: float | None = None
    C_mid: float | None = None
    forecast: Forecast | None = None
    identified: bool = False


@dataclass(frozen=True)
class Move:
    """The largest difference between the cuts, and the width of their narrowest interval."""

    by: float
    width: float

    def __str__(self) -> str:
        return f"by {self.by:.3f} (its narrowest interval is {self.width:.3f} wide)"


@dataclass(frozen=True)
class Sensitivity:
    """One row for each cut, by the compute that is left out. Made by `sensitivity`."""

    axis: str
    level: float
    at: float
    """The compute of the forecast."""
    rows: tuple[SensitivityRow, ...]

    @property
    def moves(self) -> dict[str, Move | None]:
        """How `A` and the `forecast` at `at` move over the cuts; None with fewer than two fits."""
        A = [(row.A, row.A_interval) for row in self.rows if row.A is not None and row.A_interval]
        forecasts = [(one.median, one.interval) for one in (row.forecast for row in self.rows) if one]
        return {"A": _move(A), "forecast": _move(forecasts)}

    @property
    def said(self) -> str:
        """One sentence: by how much the answer moves, and how wide its narrowest interval is."""
        A, forecast = self.moves.values()
        if forecast is None:
            return "fewer than two cuts can be fitted: nothing can be said of what the start changes"
        ceiling = "A is withheld" if A is None else f"A {A}"
        return f"over the cuts the forecast at {self.at:g} moves {forecast}, and {ceiling}"

    def to_json(self) -> dict[str, Any]:
        """Return all rows, and how far the answers move."""
        rows = [
            asdict(row) | {"forecast": row.forecast.to_json() if row.forecast else None} for row in self.rows
        ]
        return {
            "axis": self.axis,
            "level": self.level,
            "at": self.at,
            "rows": rows,
            "moves": {name: asdict(move) if move else None for name, move in self.moves.items()},
            "said": self.said,
        }

    def __str__(self) -> str:
        head = f"{'from ' + self.axis:>16} {'points':>6}  {'A':<22} {'B':>5} {'C_mid':>10}  at {self.at:g}"
        return "\n".join([head, *map(_line, self.rows), self.said])


def sensitivity(
    points: Points,
    *,
    cuts: Sequence[float] | None = None,
    at: float | None = None,
    r0: float | Literal["free"] | None = None,
    max_compute: float = math.inf,
    level: float = 0.95,
    prior: Literal["default", "flat"] = "default",
    extra_families: Sequence[Family] = (),
) -> Sensitivity:
    """Fit the run several times, with more and more of its start left out.

    Args:
        points: evaluations of one run.
        cuts: computes below which evaluations are left out (never the one at compute 0). By default
            `SHARES` of the largest compute; a cut that leaves out no more than the one before is skipped.
        at: compute to forecast, by default twice the largest.
        r0: as for `fit`, as are `max_compute`, `level`, `prior` and `extra_families`.

    Raises:
        InputError: as for `fit`. A cut that cannot be fitted raises no error: its row says why.
    """
    # Before the shares are taken, as they are shares of the compute that is fitted.
    points = points.select(points.compute_N <= max_compute)
    top = float(points.compute_N.max(initial=0.0))
    wanted = [share * top for share in SHARES] if cuts is None else cuts
    # The same compute at every cut, so that only what was left out differs.
    compute = 2 * top if at is None else at
    rows, counts = [], set()
    for cut in sorted(wanted):
        count = int(np.count_nonzero(points.kept_from(cut * (1 - _SAME))))
        # A cut that leaves out nothing more gives the same fit, and would look like further evidence.
        if count in counts:
            continue
        counts.add(count)
        own = {"r0": r0, "level": level, "prior": prior, "extra_families": extra_families}
        rows.append(_row(points, cut, count, compute, **own))
    return Sensitivity(points.axis, level, compute, tuple(rows))


def _row(points: Points, cut: float, count: int, at: float, **options: Any) -> SensitivityRow:
    try:
        found = fit(points, min_compute=cut * (1 - _SAME), **options)
    except CannotAnswerError as error:
        return SensitivityRow(cut, count, str(error).removeprefix(f"{points.source}: "))
    # A run may be a misfit only because of its start: each cut is judged by itself.
    interval = None if found.misfit else found.intervals.A
    A, B, C_mid, forecast = found.ceiling, found.median.B, found.median.C_mid, found.forecast(at)
    return SensitivityRow(cut, found.n_points, found.why, A, interval, B, C_mid, forecast, found.identified)


def _move(values: Sequence[tuple[float, Interval]]) -> Move | None:
    if len(values) < 2:
        return None
    points = [point for point, _ in values]
    # The narrowest: a move beyond it shows that one of the fits was too sure.
    return Move(max(points) - min(points), min(high - low for _, (low, high) in values))


def _line(row: SensitivityRow) -> str:
    start = f"{row.min_compute:>16.6g} {row.points:>6}  "
    if row.forecast is None:
        return start + row.why
    A = "withheld" if row.A_interval is None else f"{row.A:.3f} {span(row.A_interval)}"
    forecast = f"{row.forecast.median:.3f} {span(row.forecast.interval)}"
    doubt = "" if row.identified else "  not identified"
    return f"{start}{A:<22} {row.B:>5.2f} {row.C_mid:>10.4g}  {forecast}{doubt}"
