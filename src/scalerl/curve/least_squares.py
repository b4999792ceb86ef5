"""Least squares for many runs at once, by a global search.

Given (B, C_mid) the curve is linear in (R_0, A), so only two numbers are searched (variable projection; Golub
and Pereyra, 1973): first a grid over their whole range, then Levenberg-Marquardt from its deepest valleys
(`scalerl.curve.solver`).

Shapes: S runs, N rows (shorter runs are padded with weight 0), K cells of the grid, M searches under way.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Curve, Family
from scalerl.curve.sample import Sample
from scalerl.curve.solver import TOLERANCE, RunRows, descend, rows_averaged

LOG_B_RANGE = (math.log(0.05), math.log(20.0))
"""The range of log B of the point estimate: wider than the prior, and reported when reached."""
SEARCH_REACH = 100.0
"""C_mid is searched from the smallest positive compute over this to the largest compute times this."""
_EVEN = np.linspace(0, 1, 11)  # the grid of log B, as shares of its range
# The grid of log C_mid, as shares of the range of the data, and of the reach beyond that.
_ALONG = np.concatenate([[0.0, 0.0], np.linspace(0, 1, 12), [1.0, 1.0, 1.0]])
_BEYOND = np.concatenate([[-1.0, -0.5], np.zeros(12), [0.15, 0.4, 1.0]])
_STARTS = 3
STEPS = 300
"""Most steps of a search."""
_CHUNK = 64  # runs at a time


@dataclass(frozen=True)
class LeastSquares:
    """The best curve of one family, its sum of squares (replicates included), and the bounds it lies on.

    `at_bounds` names the parameters on a bound. `basins` are all local minima that were found, the best
    first, each with its sum of squares.
    """

    curve: Curve
    rss: float
    at_bounds: tuple[str, ...]
    basins: tuple[tuple[Curve, float], ...]


def least_squares(sample: Sample, family: Family, *, steps: int = STEPS) -> LeastSquares:
    """Minimise the weighted sum of squares over R_0, A, B and C_mid, with 0 <= R_0 <= A <= 1.

    A search ends after at most `steps` steps. Few steps leave it near the minimum of a long flat valley,
    which is enough as a start for something else.
    """
    return least_squares_many([sample], family, steps=steps)[0]


def least_squares_many(
    samples: Sequence[Sample],
    family: Family | Sequence[Family],
    *,
    steps: int = STEPS,
) -> list[LeastSquares]:
    """Fit every run as `least_squares` does, with one family for all or one for each.

    R_0 must be free in all runs, or given in all of them.
    """
    each = [family] * len(samples) if isinstance(family, Family) else family
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    found: list[LeastSquares] = [None] * len(samples)  # pyright: ignore[reportAssignmentType]
    # Runs that the grid averages alike go together, so that other runs do not change the answer of one.
    for _, alike in itertools.groupby(order, key=lambda i: rows_averaged(len(samples[i]))):
        mine = list(alike)
        for first in range(0, len(mine), _CHUNK):
            chunk = mine[first : first + _CHUNK]
            together, curves = [samples[i] for i in chunk], [each[i] for i in chunk]
            results = _search(together, curves, RunRows.stack(together, curves), steps)
            for i, result in zip(chunk, results, strict=True):
                found[i] = result
    return found


def _search(
    samples: Sequence[Sample], families: Sequence[Family], rows: RunRows, steps: int
) -> list[LeastSquares]:
    """Search a grid, descend from its valleys, and return the distinct minima of every run."""
    reach, span = math.log(SEARCH_REACH), np.array([s.log_c_range for s in samples])
    box = np.empty((2, 2, len(samples)))  # low and high of theta
    box[:, 0] = np.array(LOG_B_RANGE)[:, None]
    box[0, 1], box[1, 1] = span[:, 0] - reach, span[:, 1] + reach
    run, theta = _starts(rows, span)
    if len(run) > 1:
        rows, box = rows.take(run), box[:, :, run]
    theta, R_0, A, kept = descend(rows, run, theta, box, steps)
    if len(kept) < len(run):
        rows, box, run = rows.take(kept), box[:, :, kept], run[kept]
        theta, R_0, A = theta[:, kept], R_0[kept], A[kept]
    (log_b, log_mid), at = theta, np.exp(theta)
    g = rows.share(at[0][:, None], rows.log_c - log_mid[:, None])
    residual = rows.y - R_0[:, None] - (A - R_0)[:, None] * g
    rss = (rows.w * residual * residual).sum(axis=1)
    # A descent may end its last step short of a bound.
    on_B, on_C_mid = (theta <= box[0] + 1e-6) | (theta >= box[1] - 1e-6)
    bounds = np.array([rows.high <= A, on_B, on_C_mid, (rows.low >= R_0) & rows.free]).T.tolist()
    curves = np.array([rows.base + A, *at, rows.base + R_0]).T.tolist()
    # Minima within .1 % in B and C_mid are one, reached from two starts.
    found: list[list[int]] = [[] for _ in samples]
    for i in np.lexsort((rss, run)).tolist():
        mine = found[run[i]]
        if all(max(abs(log_b[i] - log_b[j]), abs(log_mid[i] - log_mid[j])) > 1e-3 for j in mine):
            mine.append(i)
    results = []
    for sample, family, mine in zip(samples, families, found, strict=True):
        basins = tuple((Curve(family, *curves[i]), float(rss[i]) + sample.within) for i in mine)
        on_bound = zip(("A", "B", "C_mid", "R_0"), bounds[mine[0]], strict=True)
        results.append(LeastSquares(*basins[0], tuple(name for name, on in on_bound if on), basins))
    return results


def _starts(rows: RunRows, span: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return starts: the deepest grid minima of every run, maybe a step; (run (M,), theta (2, M))."""
    coarse = rows.coarse()
    log_mid = span[:, :1] + (span[:, 1:] - span[:, :1]) * _ALONG + math.log(SEARCH_REACH) * _BEYOND
    log_b = LOG_B_RANGE[0] + (LOG_B_RANGE[1] - LOG_B_RANGE[0]) * _EVEN
    s, nb, nm = len(span), len(log_b), log_mid.shape[1]
    x = np.broadcast_to(
        (coarse.log_c[:, None] - log_mid[:, :, None])[:, None], (s, nb, nm, coarse.y.shape[1])
    )
    g = rows.share(np.broadcast_to(np.exp(log_b)[:, None, None], (s, nb, 1, 1)), x).reshape(s, nb * nm, -1)
    rss = np.full((s, nb + 2, nm + 2), np.inf)
    inner = rss[:, 1:-1, 1:-1]
    inner[...] = _rough_rss(coarse, g).reshape(s, nb, nm)
    low = np.minimum(np.minimum(rss[:, :-2], rss[:, 2:]), rss[:, 1:-1])
    low = np.minimum(np.minimum(low[:, :, :-2], low[:, :, 2:]), low[:, :, 1:-1])
    depth = np.where(inner <= low, inner, np.inf).reshape(s, -1)
    each = np.arange(s)[:, None]
    cells = np.argsort(depth, axis=1, kind="stable")[:, :_STARTS]
    run, rank = np.nonzero(depth[each, cells] < np.inf)
    cell = cells[run, rank]
    theta = np.array([log_b[cell // nm], log_mid[run, cell % nm]])
    stepped, step_mid = _steps(rows, depth.min(axis=1))
    if not len(stepped):
        return run, theta
    run = np.concatenate([run, stepped])
    theta = np.concatenate([theta, [np.full(len(stepped), log_b[-1]), step_mid]], axis=1)
    order = np.argsort(run, kind="stable")
    return run[order], theta[:, order]


def _steps(rows: RunRows, rss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs that a step describes nearly as well as the grid did (`rss`), and its place; (M,) each.

    Steep curves have valleys as narrow as the gap between two evaluations, which a grid misses.
    """
    weight, total = np.cumsum(rows.w, axis=1), np.cumsum(rows.w * rows.y, axis=1)
    before, after = weight[:, :-1], rows.one[:, None] - weight[:, :-1]
    y_before, y_after = total[:, :-1], total[:, -1:] - total[:, :-1]
    sound = (after > 1e-9 * rows.one[:, None]) & (rows.log_c[:, :-1] > -np.inf)
    mean_before, mean_after = y_before / before, y_after / np.where(sound, after, 1.0)
    if not rows.free:
        mean_before = np.zeros_like(before)
    gain = y_before * mean_before + y_after * mean_after
    gain = np.where(sound & (mean_after > mean_before), gain, 0.0)
    best = gain.argmax(axis=1)
    each = np.arange(len(best))
    gain = gain[each, best]
    left = np.maximum(rows.yy - gain, rows.exact) / np.maximum(rows.yy + rss, rows.exact)
    run = np.flatnonzero((gain > 0) & (rows.n * np.log(left) < 4 * TOLERANCE))
    log_mid = 0.5 * (rows.log_c[each, best] + rows.log_c[each, best + 1])
    return run, log_mid[run]


def _rough_rss(rows: RunRows, g: np.ndarray) -> np.ndarray:
    """Return sums of squares (S, K) up to a constant, for shares (S, K, N); the gain is clipped to bounds."""
    w, one = rows.w[:, :, None], rows.one[:, None]
    gy = (g @ (w * rows.y[:, :, None]))[:, :, 0]
    gg = ((g * g) @ w)[:, :, 0]
    gain_max = rows.high[:, None]
    if rows.free:
        mean = (g @ w)[:, :, 0] / one
        gg -= mean * mean * one
        gain_max = np.minimum(gain_max / (1.0 - mean + 1e-9), -rows.low[:, None] / (mean + 1e-9))
    gain = np.minimum(np.maximum(gy / (gg + 1e-12 * one), 0.0), gain_max)
    return gain * (gain * gg - 2 * gy)
