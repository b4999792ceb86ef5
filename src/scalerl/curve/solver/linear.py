"""Runs side by side, and what is linear in them: the best (R_0, A) once the shape of the curve is given.

All of it follows from `gram` (., ., M), the sums over the rows of the products of h = 1 - g (the derivative
of the curve by R_0), g (by A, the share of the gain), whatever else is asked about, and y, which is last.

Shapes: S runs, N rows (shorter runs are padded with weight 0), M searches under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl.curve.sample import Sample

GRID_ROWS = 24
"""The grid sees the rows averaged to so many, or fewer."""


def rows_averaged(n: int) -> int:
    """How many consecutive ones of n rows the grid averages to one."""
    return -(-n // GRID_ROWS)


class Rows(NamedTuple):
    """Runs side by side; `y` is measured from `base`, the mean of the run or its given R_0."""

    log_c: np.ndarray
    y: np.ndarray
    w: np.ndarray
    one: np.ndarray  # sums of w and of w y^2
    yy: np.ndarray
    exact: np.ndarray  # what rounding leaves of a sum of squares
    n: np.ndarray
    base: np.ndarray
    low: np.ndarray
    high: np.ndarray
    free: bool

    @classmethod
    def stack(cls, samples: Sequence[Sample], bounds: tuple[float, float]) -> Rows:
        """Runs with `bounds` of (R_0, A), either of which may be infinite."""
        n = max(len(s) for s in samples)
        n += -n % rows_averaged(n)
        log_c, y, w = np.zeros((3, len(samples), n))
        for i, s in enumerate(samples):
            log_c[i, : len(s)], y[i, : len(s)], w[i, : len(s)] = s.log_c_N, s.y_N, s.weight_N
        free = samples[0].r0 is None
        one = w.sum(axis=1)
        base = (w * y).sum(axis=1) / one if free else np.array([s.r0 for s in samples], dtype=float)
        y -= base[:, None]
        count = np.array([len(s) for s in samples], dtype=float)
        yy, low, high = (w * y * y).sum(axis=1), bounds[0] - base, bounds[1] - base
        return cls(log_c, y, w, one, yy, 1e-14 * yy + 1e-300, count, base, low, high, free)

    def take(self, index: np.ndarray) -> Rows:
        """Those of some runs, or of a run several times."""
        if len(index) == 1 == len(self.y):
            return self
        return Rows(*[v[index] for v in self[:-1]], free=self.free)

    def coarse(self) -> Rows:
        """Consecutive rows averaged to `GRID_ROWS` or fewer, for the grid."""
        s, n = self.y.shape
        each = rows_averaged(n)
        if each == 1:
            return self
        w, wx, wy = (
            v.reshape(s, -1, each).sum(axis=2) for v in (self.w, self.w * self.log_c, self.w * self.y)
        )
        over = 1.0 / np.maximum(w, 1e-300)
        return self._replace(log_c=wx * over, y=wy * over, w=w)


def best_linear(
    rows: Rows, gram: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The best (R_0, A) within the bounds, and where that is the best of all; then the rest of the products
    once R_0 is projected out, and one over the first of them."""
    if rows.free:
        over_hh = 1.0 / np.maximum(gram[0, 0], 1e-300)
        rest = eliminate(gram, over_hh)
        over = 1.0 / np.maximum(rest[0, 0], 1e-13 * gram[1, 1] + 1e-300)
        A = rest[0, -1] * over
        R_0 = (gram[0, -1] - A * gram[0, 1]) * over_hh
        inside = (rows.low <= R_0) & (R_0 <= A) & (rows.high >= A)
    else:
        rest = gram[1:, 1:]
        over = 1.0 / np.maximum(rest[0, 0], 1e-300)
        A = rest[0, -1] * over
        R_0, inside = np.zeros_like(A), (A >= 0) & (rows.high >= A)
    if np.count_nonzero(inside) < len(inside):
        edge_R_0, edge_A = _on_edge(rows, gram)
        R_0, A = np.where(inside, R_0, edge_R_0), np.where(inside, A, edge_A)
    return R_0, A, inside, rest, over


def _on_edge(rows: Rows, gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best (R_0, A) where the best of all is outside of the bounds: A = R_0, A = high or R_0 = low."""
    hh, hg, hy, gg, gy = gram[0, 0], gram[0, 1], gram[0, -1], gram[1, 1], gram[1, -1]
    low, high = rows.low, rows.high
    zero = np.zeros_like(gg)
    if not rows.free:
        return zero, clip(gy / np.maximum(gg, 1e-300), zero, high)
    level = clip(zero, low, high)  # the mean of y is 0
    edges = [(level, level)]
    if np.isfinite(high).all():
        edges.append((clip((hy - high * hg) / np.maximum(hh, 1e-300), low, high), high))
    if np.isfinite(low).all():
        edges.append((low, clip((gy - low * hg) / np.maximum(gg, 1e-300), low, high)))
    R_0, A = np.array(edges).transpose(1, 0, 2)
    rss = R_0 * (R_0 * hh + 2 * A * hg - 2 * hy) + A * (A * gg - 2 * gy)
    best = rss.argmin(axis=0), np.arange(len(gg))
    return R_0[best], A[best]


def projected(rows: Rows, gram: np.ndarray, R_0: np.ndarray, A: np.ndarray) -> np.ndarray:
    """The normal matrix (3, 3, M) of a state; those of (R_0, A) that lie on a bound follow nothing."""
    gram = gram.copy()
    gram[:, 4] -= R_0 * gram[:, 0] + A * gram[:, 1]  # y is now the residual
    gram[4, 4] -= R_0 * gram[0, 4] + A * gram[1, 4]
    gram[4, :4] = gram[:4, 4]
    free_R_0, free_A = (rows.low < R_0) & rows.free, rows.high > A
    scale = gram[1, 1]
    gram = eliminate(gram, free_R_0 / np.maximum(gram[0, 0], 1e-300))
    return eliminate(gram, free_A / np.maximum(gram[0, 0], 1e-13 * scale + 1e-300))


def eliminate(gram: np.ndarray, over: np.ndarray) -> np.ndarray:
    """The products of all columns but the first, once they are orthogonal to it; `over` is 1 / its square."""
    with_first = gram[0, 1:]
    return gram[1:, 1:] - with_first[:, None] * (with_first * over)


def clip(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """`np.clip`, which is slow on small arrays."""
    return np.minimum(np.maximum(value, low), high)
