"""Least squares for one family and many runs at once, arranged so that it cannot get stuck.

Given (B, C_mid) the curve is linear in (R_0, A), so the search is over two numbers only (variable projection;
Golub and Pereyra, 1973): a grid over their whole range (`starts`), then Levenberg-Marquardt from its deepest
valleys (`descent`), with the best (R_0, A) at every place (`linear`).

Shapes: S runs, N rows (shorter runs are padded with weight 0), M searches under way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Curve, Family
from scalerl.curve.sample import Sample
from scalerl.curve.solver import SEARCH_REACH, TOLERANCE, RunRows, descend, on_bound, rows_averaged, starts

__all__ = ["LOG_B_RANGE", "SEARCH_REACH", "TOLERANCE", "LeastSquares", "least_squares", "least_squares_many"]

LOG_B_RANGE = (math.log(0.05), math.log(20.0))
"""Where the point estimate is searched; wider than the prior of the intervals, and flagged when reached."""
_CHUNK = 64  # runs at a time


@dataclass(frozen=True)
class LeastSquares:
    """The best curve of one family, its sum of squares (replicates included), and the bounds it lies on.

    `at_bounds` names the parameters that do. `basins` are all local minima that were found, the best first,
    each with its sum of squares.
    """

    curve: Curve
    rss: float
    at_bounds: tuple[str, ...]
    basins: tuple[tuple[Curve, float], ...]


def least_squares(
    sample: Sample,
    family: Family,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> LeastSquares:
    """Minimise the weighted sum of squares over R_0, A, B and C_mid, with low <= R_0 <= A <= high."""
    return least_squares_many([sample], family, bounds=bounds)[0]


def least_squares_many(
    samples: Sequence[Sample],
    family: Family,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> list[LeastSquares]:
    """`least_squares` of every run; R_0 must be free in all of them, or given in all of them."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    found: list[LeastSquares] = [None] * len(samples)  # pyright: ignore[reportAssignmentType]
    # Together go runs that the grid averages alike, so that the company of others changes no answer.
    for _, alike in itertools.groupby(order, key=lambda i: rows_averaged(len(samples[i]))):
        mine = list(alike)
        for first in range(0, len(mine), _CHUNK):
            chunk = mine[first : first + _CHUNK]
            together = [samples[i] for i in chunk]
            results = _search(together, RunRows.stack(together, bounds), family)
            for i, result in zip(chunk, results, strict=True):
                found[i] = result
    return found


def _search(samples: Sequence[Sample], rows: RunRows, family: Family) -> list[LeastSquares]:
    """Grid, valleys, descent; then the distinct minima of every run."""
    reach, span = math.log(SEARCH_REACH), np.array([s.log_c_range for s in samples])
    box = np.empty((2, 2, len(samples)))  # low and high of theta
    box[:, 0] = np.array(LOG_B_RANGE)[:, None]
    box[0, 1], box[1, 1] = span[:, 0] - reach, span[:, 1] + reach
    run, theta = starts(rows, family, span, LOG_B_RANGE)
    if len(run) > 1:
        rows, box = rows.take(run), box[:, :, run]
    theta, R_0, A, kept = descend(rows, run, family, theta, box)
    if len(kept) < len(run):
        rows, box, run = rows.take(kept), box[:, :, kept], run[kept]
        theta, R_0, A = theta[:, kept], R_0[kept], A[kept]
    (log_b, log_mid), at = theta, np.exp(theta)
    g = family.share(at[0][:, None], rows.log_c - log_mid[:, None])
    residual = rows.y - R_0[:, None] - (A - R_0)[:, None] * g
    rss = (rows.w * residual * residual).sum(axis=1)
    near = box + 1e-6 * np.array([1.0, -1.0])[:, None, None]  # a descent may end a last step before its bound
    bounds = np.array([rows.high <= A, *on_bound(theta, *near), (rows.low >= R_0) & rows.free]).T.tolist()
    curves = np.array([rows.base + A, *at, rows.base + R_0]).T.tolist()
    found: list[list[int]] = [[] for _ in samples]
    for i in np.lexsort((rss, run)).tolist():
        mine = found[run[i]]
        if all(max(abs(log_b[i] - log_b[j]), abs(log_mid[i] - log_mid[j])) > 1e-3 for j in mine):
            mine.append(i)
    return [
        _result([(Curve(family, *curves[i]), float(rss[i]) + sample.within) for i in mine], bounds[mine[0]])
        for sample, mine in zip(samples, found, strict=True)
    ]


def _result(basins: list[tuple[Curve, float]], bounds: list[bool]) -> LeastSquares:
    curve, rss = basins[0]
    names = tuple(name for name, on in zip(("A", "B", "C_mid", "R_0"), bounds, strict=True) if on)
    return LeastSquares(curve, rss, names, tuple(basins))
