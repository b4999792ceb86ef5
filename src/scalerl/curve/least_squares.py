"""Least squares for one family and many runs at once, arranged so that it cannot get stuck.

Given (B, C_mid) the curve is linear in (R_0, A), so the search is over two numbers only (variable projection;
Golub and Pereyra, 1973): a grid over their whole range, then Levenberg-Marquardt from its deepest valleys.

Shapes: S runs, N rows (shorter runs are padded with weight 0), K cells of the grid, M searches under way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Curve, Family
from scalerl.curve.sample import Sample

LOG_B_RANGE = (math.log(0.05), math.log(20.0))
"""Where the point estimate is searched; wider than the prior of the intervals, and flagged when reached."""
C_MID_FACTOR = 100.0
"""C_mid is searched from the smallest positive compute over this to the largest compute times this."""
TOLERANCE = 5.0
"""Log-likelihood below the best at which another minimum is no longer reported."""
_STARTS, _GRID_ROWS, _GRID_B, _STEPS, _CHUNK = 3, 24, 11, 60, 64
_BELOW, _INSIDE, _ABOVE = np.array([0.0, 0.5]), np.linspace(0, 1, 12), np.array([0.15, 0.4, 1.0])
"""Where the grid of log C_mid lies: shares of the way below, inside and above the range of the data."""


@dataclass(frozen=True)
class LeastSquares:
    """The best curve of one family, its sum of squares (replicates included), and the bounds it lies on.

    `basins` are all local minima that were found, the best first, each with its sum of squares.
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
    log_b_range: tuple[float, float] = LOG_B_RANGE,
) -> LeastSquares:
    """Minimise the weighted sum of squares over R_0, A, B and C_mid, with low <= R_0 <= A <= high."""
    return least_squares_many([sample], family, bounds=bounds, log_b_range=log_b_range)[0]


def least_squares_many(
    samples: Sequence[Sample],
    family: Family,
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    log_b_range: tuple[float, float] = LOG_B_RANGE,
) -> list[LeastSquares]:
    """`least_squares` of every run; R_0 must be free in all of them, or given in all of them."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    found: list[LeastSquares] = [None] * len(samples)  # pyright: ignore[reportAssignmentType]
    for first in range(0, len(order), _CHUNK):
        mine = order[first : first + _CHUNK]
        chunk = [samples[i] for i in mine]
        for i, result in zip(
            mine, _search(chunk, _Rows.stack(chunk, bounds), family, log_b_range), strict=True
        ):
            found[i] = result
    return found


@dataclass(frozen=True)
class _Rows:
    """Runs side by side; `y` is measured from `base`, the mean of the run or its given R_0."""

    log_c: np.ndarray
    y: np.ndarray
    w: np.ndarray
    one: np.ndarray  # sums of w and of w y^2
    yy: np.ndarray
    base: np.ndarray
    low: np.ndarray
    high: np.ndarray
    free: bool

    @classmethod
    def stack(cls, samples: Sequence[Sample], bounds: tuple[float, float]) -> _Rows:
        n = max(len(s) for s in samples)
        n = -(-n // (-(-n // _GRID_ROWS))) * -(-n // _GRID_ROWS)  # a multiple of what the grid averages over
        log_c, y, w = np.zeros((3, len(samples), n))
        for i, s in enumerate(samples):
            log_c[i, : len(s)], y[i, : len(s)], w[i, : len(s)] = s.log_c_N, s.y_N, s.weight_N
        free = samples[0].r0 is None
        one = w.sum(axis=1)
        base = (w * y).sum(axis=1) / one if free else np.array([s.r0 for s in samples], dtype=float)
        y -= base[:, None]
        return cls(log_c, y, w, one, (w * y * y).sum(axis=1), base, bounds[0] - base, bounds[1] - base, free)

    def take(self, index: np.ndarray) -> _Rows:
        if len(index) == 1 == len(self.y):
            return self
        arrays = (self.log_c, self.y, self.w, self.one, self.yy, self.base, self.low, self.high)
        return _Rows(*[v[index] for v in arrays], free=self.free)

    def coarse(self) -> _Rows:
        """Consecutive rows averaged to `_GRID_ROWS` or fewer, for the grid."""
        s, n = self.y.shape
        each = -(-n // _GRID_ROWS)
        if each == 1:
            return self
        w, wx, wy = (
            v.reshape(s, -1, each).sum(axis=2) for v in (self.w, self.w * self.log_c, self.w * self.y)
        )
        over = 1.0 / np.maximum(w, 1e-300)
        return _Rows(wx * over, wy * over, w, self.one, self.yy, self.base, self.low, self.high, self.free)


def _linear(
    rows: _Rows, g1: np.ndarray, gg: np.ndarray, gy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Best (R_0, A), measured from `base`, within the bounds, and the sum of squares.

    From the sums of w g, w g^2 and w g y over the rows, all (S, K), as are the three results.
    """
    yy, one, low, high = rows.yy[:, None], rows.one[:, None], rows.low[:, None], rows.high[:, None]
    if not rows.free:
        A = np.minimum(np.maximum(gy / np.maximum(gg, 1e-300), 0.0), high)
        return np.zeros_like(A), A, yy - A * (2 * gy - A * gg)
    gain = gy / np.maximum(gg - g1 * g1 / one, 1e-13 * gg + 1e-300)  # y has mean 0
    R_0 = -gain * g1 / one
    A, rss = R_0 + gain, yy - gain * gy
    inside = (gain >= 0) & (low <= R_0) & (high >= A)
    if inside.all():
        return R_0, A, rss
    # Outside, the best is on an edge: A = R_0, A = high or R_0 = low.
    gh, hh = g1 - gg, one - 2 * g1 + gg
    level = _clip(np.zeros_like(gy), low, high)
    best = [
        np.where(inside, v, e)
        for v, e in zip((R_0, A, rss), (level, level, yy + one * level**2), strict=True)
    ]
    edges = []
    if np.isfinite(high).all():
        edges.append((_clip((-gy - high * gh) / np.maximum(hh, 1e-300), low, high), high))
    if np.isfinite(low).all():
        edges.append((low, _clip((gy - low * gh) / np.maximum(gg, 1e-300), low, high)))
    for R_0, A in edges:
        rss = yy + 2 * (R_0 - A) * gy + R_0 * R_0 * hh + 2 * R_0 * A * gh + A * A * gg
        lower = ~inside & (rss < best[2])
        best = [np.where(lower, v, kept) for v, kept in zip((R_0, A, rss), best, strict=True)]
    return best[0], best[1], best[2]


def _clip(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(value, low), high)  # np.clip is slow on small arrays


def _search(
    samples: Sequence[Sample], rows: _Rows, family: Family, log_b_range: tuple[float, float]
) -> list[LeastSquares]:
    """Grid, valleys, descent; then the distinct minima of every run."""
    span = np.array([s.log_c_range for s in samples])
    reach = math.log(C_MID_FACTOR)
    box = np.empty((len(samples), 2, 2))
    box[:, 0], box[:, 1, 0], box[:, 1, 1] = log_b_range, span[:, 0] - reach, span[:, 1] + reach
    run, theta = _valleys(rows.coarse(), family, span, box)
    theta, R_0, A = _descend(rows.take(run), run, family, theta, box[run])
    g = family.share(np.exp(theta[:, :1]), rows.log_c[run] - theta[:, 1:])
    residual = rows.y[run] - R_0[:, None] - (A - R_0)[:, None] * g
    rss = (rows.w[run] * residual * residual).sum(axis=1)
    found: list[list[int]] = [[] for _ in samples]
    for i in np.argsort(rss, kind="stable").tolist():
        mine = found[run[i]]
        if all(np.abs(theta[i] - theta[j]).max() > 1e-3 for j in mine):
            mine.append(i)
    base = rows.base[run]
    numbers = np.stack([base + A, *np.exp(theta.T), base + R_0, rss], axis=1).tolist()
    results = []
    for s, sample in enumerate(samples):
        basins = tuple((Curve(family, *numbers[i][:4]), numbers[i][4] + sample.within) for i in found[s])
        i = found[s][0]
        names = _bounds(
            basins[0][0], rows.free and R_0[i] <= rows.low[s], A[i] >= rows.high[s], theta[i], box[s]
        )
        results.append(LeastSquares(*basins[0], names, basins))
    return results


def _valleys(rows: _Rows, family: Family, span: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where to start from: for every run the deepest local minima of the grid; (run (M,), theta (M, 2))."""
    first, last = span[:, :1], span[:, 1:]
    log_mid = np.concatenate(
        [
            box[:, 1, :1] + (first - box[:, 1, :1]) * _BELOW,
            first + (last - first) * _INSIDE,
            last + (box[:, 1, 1:] - last) * _ABOVE,
        ],
        axis=1,
    )
    log_b = np.linspace(box[0, 0, 0], box[0, 0, 1], _GRID_B)
    s, nb, nm = len(span), len(log_b), log_mid.shape[1]
    x = rows.log_c[:, None] - log_mid[:, :, None]
    g = family.share(np.exp(log_b)[:, None, None], x[:, None]).reshape(s, nb * nm, -1)
    rss = np.full((s, nb + 2, nm + 2), np.inf)
    inner = rss[:, 1:-1, 1:-1]
    inner[...] = _rough_rss(rows, g).reshape(s, nb, nm)
    low = np.minimum(np.minimum(rss[:, :-2], rss[:, 2:]), rss[:, 1:-1])
    low = np.minimum(np.minimum(low[:, :, :-2], low[:, :, 2:]), low[:, :, 1:-1])
    depth = np.where(inner <= low, inner, np.inf).reshape(s, -1)
    cell = np.argsort(depth, axis=1, kind="stable")[:, :_STARTS]
    run, rank = np.nonzero(np.isfinite(np.take_along_axis(depth, cell, 1)))
    cell = cell[run, rank]
    return run, np.stack([log_b[cell // nm], log_mid[run, cell % nm]], axis=1)


def _rough_rss(rows: _Rows, g: np.ndarray) -> np.ndarray:
    """Sums of squares (S, K), less a constant, of shares (S, K, N); a gain beyond the bounds is cut."""
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


def _descend(
    rows: _Rows, run: np.ndarray, family: Family, theta: np.ndarray, box: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levenberg-Marquardt in theta = (log B, log C_mid), inside `box`, for M searches side by side.

    Returns theta (M, 2), and R_0 and A measured from `base`, (M,) each.
    """
    result = theta.copy(), np.empty(len(theta)), np.empty(len(theta))
    active, damping = np.arange(len(theta)), np.full(len(theta), 1e-3)
    low, high = box[:, :, 0], box[:, :, 1]
    state = _evaluate(rows, family, theta)
    for count in range(_STEPS):
        trial = np.minimum(np.maximum(theta + _step(rows, state, theta, low, high, damping), low), high)
        new = _evaluate(rows, family, trial)
        moved = np.abs(trial - theta).max(axis=1)
        better = new[2] <= state[2] + 1e-14 * rows.yy
        done = (moved < 2e-6) | (damping > 1e10)
        damping = np.where(better, np.maximum(damping * 0.03, 1e-12), damping * 10)
        if better.all():
            theta, state = trial, new
        else:
            theta = np.where(better[:, None], trial, theta)
            state = tuple(
                np.where(better.reshape(-1, *(1,) * (n.ndim - 1)), n, o)
                for n, o in zip(new, state, strict=True)
            )
        if count in (2, 5):
            done |= _hopeless(rows, run[active], state[2])
        if count == _STEPS - 1:
            done[:] = True
        if done.any():
            for out, value in zip(result, (theta, state[0], state[1]), strict=True):
                out[active[done]] = value[done]
            if done.all():
                break
            keep = np.flatnonzero(~done)
            active, damping, theta, rows = active[keep], damping[keep], theta[keep], rows.take(keep)
            low, high, state = low[keep], high[keep], tuple(v[keep] for v in state)
    return result


def _hopeless(rows: _Rows, run: np.ndarray, rss: np.ndarray) -> np.ndarray:
    """Searches that are in a valley less likely than the best of their run by `TOLERANCE`."""
    best = np.full(run[-1] + 1, np.inf)
    np.minimum.at(best, run, rss)
    count = (rows.w > 0).sum(axis=1)
    exact = 1e-14 * rows.yy + 1e-300  # what rounding leaves of a sum of squares
    ratio = (np.maximum(rss, 0) + exact) / (np.maximum(best[run], 0) + exact)
    return count * np.log(ratio) > 4 * TOLERANCE


_State = tuple[np.ndarray, ...]
"""(R_0, A, rss, gradient, normal matrix): (M,) three times, (M, 4), (M, 4, 4) by (R_0, A, log B, log C_mid).

The last two columns lack the factor A - R_0.
"""


def _evaluate(rows: _Rows, family: Family, theta: np.ndarray) -> _State:
    basis = np.empty((len(theta), 4, rows.y.shape[1]))
    g, basis[:, 2], by_log_c = family.slopes(np.exp(theta[:, :1]), rows.log_c - theta[:, 1:])
    np.subtract(1.0, g, out=basis[:, 0])
    basis[:, 1] = g
    np.negative(by_log_c, out=basis[:, 3])
    weighted = basis * rows.w[:, None]
    normal = weighted @ basis.transpose(0, 2, 1)
    with_y = (weighted @ rows.y[:, :, None])[:, :, 0]
    gg = normal[:, 1, 1:2]
    R_0, A, rss = _linear(rows, normal[:, 0, 1:2] + gg, gg, with_y[:, 1:2])
    gradient = with_y - normal[:, 0] * R_0 - normal[:, 1] * A
    return R_0[:, 0], A[:, 0], rss[:, 0], gradient, normal


def _step(
    rows: _Rows, state: _State, theta: np.ndarray, low: np.ndarray, high: np.ndarray, damping: np.ndarray
) -> np.ndarray:
    """The damped Gauss-Newton step in theta, (R_0, A) following along where they are free; (M, 2)."""
    R_0, A, _, gradient, normal = state
    # What lies on a bound is held there: (R_0, A) by the inner solution, theta where it wants to go beyond.
    free = np.empty(gradient.shape, dtype=bool)
    free[:, 0] = (rows.low < R_0) & rows.free
    free[:, 1] = rows.high > A
    free[:, 2:] = ((theta > low) | (gradient[:, 2:] > 0)) & ((theta < high) | (gradient[:, 2:] < 0))
    normal = normal.copy() if free.all() else normal * (free[:, :, None] & free[:, None, :])
    diagonal = np.einsum("mii->mi", normal)
    diagonal[:, 2:] *= 1.0 + damping[:, None]
    diagonal += np.where(free, 1e-14 * diagonal.max(axis=1, keepdims=True) + 1e-300, 1.0)
    step = np.linalg.solve(normal, (gradient * free)[:, :, None])[:, 2:, 0]
    step /= np.maximum(A - R_0, 1e-12)[:, None]
    return step / np.maximum(np.abs(step).max(axis=1, keepdims=True), 1.0)  # a factor e at most


def _bounds(curve: Curve, r0_low: bool, a_high: bool, theta: np.ndarray, box: np.ndarray) -> tuple[str, ...]:
    low, high = box[:, 0], box[:, 1]
    held = {"A": a_high, "R_0": r0_low}
    held |= dict(zip(("B", "C_mid"), ((theta <= low) | (theta >= high)).tolist(), strict=True))
    return tuple(f"{name} = {getattr(curve, name):.3g}" for name in held if held[name])
