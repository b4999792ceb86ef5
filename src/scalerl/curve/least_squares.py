"""Least squares for one family and many runs at once, arranged so that it cannot get stuck.

Given (B, C_mid) the curve is linear in (R_0, A), so the search is over two numbers only (variable projection;
Golub and Pereyra, 1973): a grid over their whole range, then Levenberg-Marquardt from its deepest valleys.

Shapes: S runs, N rows (shorter runs are padded with weight 0), K cells of the grid, M searches under way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scalerl.curve.families import Curve, Family
from scalerl.curve.sample import Sample

LOG_B_RANGE = (math.log(0.05), math.log(20.0))
"""Where the point estimate is searched; wider than the prior of the intervals, and flagged when reached."""
C_MID_FACTOR = 100.0
"""C_mid is searched from the smallest positive compute over this to the largest compute times this."""
TOLERANCE = 5.0
"""Log-likelihood below the best at which another minimum is no longer reported."""
_STARTS, _GRID_ROWS, _GRID_B, _CHUNK = 3, 24, 11, 64
_STEPS, _GAUSS_NEWTON = 300, 8  # most steps of a search, and those before the second derivatives join
_CLOSE = 5e-7  # a step in theta so short is the last
_EVEN = np.linspace(0, 1, _GRID_B)
_ALONG = np.concatenate([[0.0, 0.0], np.linspace(0, 1, 12), [1.0, 1.0, 1.0]])
_BEYOND = np.concatenate([[-1.0, -0.5], np.zeros(12), [0.15, 0.4, 1.0]])
"""Where the grid of log C_mid lies: the share along the range of the data, and beyond it of the reach."""


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


class _Rows(NamedTuple):
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
        count = np.array([len(s) for s in samples], dtype=float)
        yy, low, high = (w * y * y).sum(axis=1), bounds[0] - base, bounds[1] - base
        return cls(log_c, y, w, one, yy, 1e-14 * yy + 1e-300, count, base, low, high, free)

    def take(self, index: np.ndarray) -> _Rows:
        if len(index) == 1 == len(self.y):
            return self
        return _Rows(*[v[index] for v in self[:-1]], free=self.free)

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
        return self._replace(log_c=wx * over, y=wy * over, w=w)


def _on(theta: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (theta <= low) | (theta >= high)


def _clip(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(value, low), high)  # np.clip is slow on small arrays


def _search(
    samples: Sequence[Sample], rows: _Rows, family: Family, log_b_range: tuple[float, float]
) -> list[LeastSquares]:
    """Grid, valleys, descent; then the distinct minima of every run."""
    reach, span = math.log(C_MID_FACTOR), np.array([s.log_c_range for s in samples])
    box = np.empty((2, 2, len(samples)))  # low and high of theta
    box[:, 0] = np.array(log_b_range)[:, None]
    box[0, 1], box[1, 1] = span[:, 0] - reach, span[:, 1] + reach
    run, theta = _valleys(rows.coarse(), family, span, log_b_range)
    rows, box = rows.take(run), box[:, :, run]
    kept, theta = _descend(rows, run, family, theta, box)
    rows, box, run, theta = rows.take(kept), box[:, :, kept], run[kept], theta[:, kept]
    (log_b, log_mid), at = theta, np.exp(theta)
    basis = np.empty((len(run), 3, rows.y.shape[1]))
    basis[:, 1] = g = family.share(at[0][:, None], rows.log_c - log_mid[:, None])
    basis[:, 0], basis[:, 2] = 1.0 - g, rows.y
    R_0, A, *_ = _linear(rows, (basis * rows.w[:, None]) @ basis.transpose(0, 2, 1))
    residual = rows.y - R_0[:, None] - (A - R_0)[:, None] * g
    rss = (rows.w * residual * residual).sum(axis=1)
    bounds = np.array([rows.high <= A, *_on(theta, *box), (rows.low >= R_0) & rows.free]).T.tolist()
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
    names = (name for name, on in zip(("A", "B", "C_mid", "R_0"), bounds, strict=True) if on)
    return LeastSquares(curve, rss, tuple(f"{n} = {getattr(curve, n):.3g}" for n in names), tuple(basins))


def _valleys(
    rows: _Rows, family: Family, span: np.ndarray, log_b_range: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Where to start from: for every run the deepest local minima of the grid; (run (M,), theta (2, M))."""
    log_mid = span[:, :1] + (span[:, 1:] - span[:, :1]) * _ALONG + math.log(C_MID_FACTOR) * _BEYOND
    log_b = log_b_range[0] + (log_b_range[1] - log_b_range[0]) * _EVEN
    s, nb, nm = len(span), len(log_b), log_mid.shape[1]
    x = rows.log_c[:, None] - log_mid[:, :, None]
    g = family.share(np.exp(log_b)[:, None, None], x[:, None]).reshape(s, nb * nm, -1)
    rss = np.full((s, nb + 2, nm + 2), np.inf)
    inner = rss[:, 1:-1, 1:-1]
    inner[...] = _rough_rss(rows, g).reshape(s, nb, nm)
    low = np.minimum(np.minimum(rss[:, :-2], rss[:, 2:]), rss[:, 1:-1])
    low = np.minimum(np.minimum(low[:, :, :-2], low[:, :, 2:]), low[:, :, 1:-1])
    depth = np.where(inner <= low, inner, np.inf).reshape(s, -1)
    each = np.arange(s)[:, None]
    cells = np.argsort(depth, axis=1)[:, :_STARTS]
    run, rank = np.nonzero(depth[each, cells] < np.inf)
    cell = cells[run, rank]
    return run, np.array([log_b[cell // nm], log_mid[run, cell % nm]])


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
) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg-Marquardt in theta = (log B, log C_mid), inside `box`, for M searches side by side.

    Returns which were not given up, and theta (2, M) of all.
    """
    result, kept, active = theta.copy(), np.ones(len(run), dtype=bool), np.arange(len(run))
    state, trust = _evaluate(rows, family, theta), _Trust(np.full(len(run), 1e-3), np.ones(len(run)))
    for count in range(1, _STEPS + 1):
        bend = None if count <= _GAUSS_NEWTON else _bend(rows, family, state)
        trial = _clip(state.theta + _step(rows, state, box, trust, bend), *box)
        moved = np.abs(trial - state.theta).max(axis=0)
        close = moved < _CLOSE
        ends = close | (trust.damping > 1e10)
        if count in (3, 6) and len(active) > 1:
            spare = _spare(rows, run[active], state)
            kept[active[spare]] = False
            ends |= spare
        if count == _STEPS:
            ends[:] = True
        if ends.any():
            result[:, active] = np.where(close, trial, state.theta)
            left = np.flatnonzero(~ends)
            if not len(left):
                break
            active, rows, state, trust = active[left], rows.take(left), state.take(left), trust.take(left)
            trial, box = trial[:, left], box[:, :, left]
        new = _evaluate(rows, family, trial)
        better = new.rss <= state.rss + rows.exact
        state, trust = new.where(better, state), trust.after(better, 0.03 if bend is None else 0.2)
    return np.flatnonzero(kept), result


def _spare(rows: _Rows, run: np.ndarray, state: _State) -> np.ndarray:
    """Searches less likely than the best of their run by far more than `TOLERANCE`, or on its heels."""
    order = np.lexsort((state.rss, run))
    first = run[1:] != run[:-1]  # `run` is sorted
    first = np.concatenate([[True], first])
    best = order[first][np.cumsum(first) - 1]
    rss = np.maximum(state.rss, 0.0) + rows.exact
    far = rows.n * np.log(rss / rss[best]) > 4 * TOLERANCE
    apart = np.abs(state.theta - state.theta[:, best])
    near = (apart[0] < 0.1) & (apart[1] * np.exp(state.theta[0]) < 0.1)
    near[best] = False
    return far | near


class _Trust(NamedTuple):
    """How far the model is believed, for every search: Marquardt's damping, and the longest step."""

    damping: np.ndarray
    reach: np.ndarray

    def after(self, better: np.ndarray, relief: float) -> _Trust:
        """After a step that was better or not."""
        damping = np.maximum(self.damping * np.where(better, relief, 10.0), 1e-12)
        return _Trust(damping, np.minimum(self.reach * np.where(better, 3.0, 0.3), 1.0))

    def take(self, index: np.ndarray) -> _Trust:
        return _Trust(self.damping[index], self.reach[index])


class _State(NamedTuple):
    """Where M searches are: `theta` (2, M) within its bounds, the best (R_0, A) there, and the model of it.

    `gram` (M, 5, 5) holds the sums over the rows of products of the derivatives of the curve by R_0, A,
    log B and log C_mid, the last two less a factor A - R_0, and of y. `normal` (M, 3, 3) is that of log B,
    log C_mid and the residual, once what (R_0, A) can follow is projected out: its last column holds the
    gradient and the sum of squares. `follow` (2, M) is how A follows theta, where it is free.
    """

    theta: np.ndarray
    R_0: np.ndarray
    A: np.ndarray
    rss: np.ndarray
    normal: np.ndarray
    follow: np.ndarray
    gram: np.ndarray

    def take(self, index: np.ndarray) -> _State:
        return _State(*(v[:, index] if len(v) == 2 and v.ndim == 2 else v[index] for v in self))

    def where(self, better: np.ndarray, other: _State) -> _State:
        """This where it is better, the other elsewhere."""
        if better.all():
            return self
        by = {1: better, 2: better, 3: better[:, None, None]}
        return _State(*(np.where(by[new.ndim], new, old) for new, old in zip(self, other, strict=True)))


def _evaluate(rows: _Rows, family: Family, theta: np.ndarray) -> _State:
    basis = np.empty((theta.shape[1], 5, rows.y.shape[1]))
    g, basis[:, 2], by_log_c = family.slopes(np.exp(theta[0])[:, None], rows.log_c - theta[1][:, None])
    np.subtract(1.0, g, out=basis[:, 0])
    basis[:, 1] = g
    np.negative(by_log_c, out=basis[:, 3])
    basis[:, 4] = rows.y
    gram = (basis * rows.w[:, None]) @ basis.transpose(0, 2, 1)
    R_0, A, inside, rest, over = _linear(rows, gram)
    normal = _eliminate(rest, over) if inside.all() else _projected(rows, gram, R_0, A)
    return _State(theta, R_0, A, normal[:, 2, 2], normal, rest[:, 0, 1:3].T * ((R_0 - A) * over), gram)


def _linear(
    rows: _Rows, gram: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The best (R_0, A) within the bounds, and where that is the best of all; then the rest of the products
    once R_0 is projected out, and one over the first of them."""
    if rows.free:
        over_hh = 1.0 / np.maximum(gram[:, 0, 0], 1e-300)
        rest = _eliminate(gram, over_hh)
        over = 1.0 / np.maximum(rest[:, 0, 0], 1e-13 * gram[:, 1, 1] + 1e-300)
        A = rest[:, 0, -1] * over
        R_0 = (gram[:, 0, -1] - A * gram[:, 0, 1]) * over_hh
        inside = (rows.low <= R_0) & (R_0 <= A) & (rows.high >= A)
    else:
        rest = gram[:, 1:, 1:]
        over = 1.0 / np.maximum(rest[:, 0, 0], 1e-300)
        A = rest[:, 0, -1] * over
        R_0, inside = np.zeros_like(A), (A >= 0) & (rows.high >= A)
    if not inside.all():
        edge_R_0, edge_A = _on_edge(rows, gram)
        R_0, A = np.where(inside, R_0, edge_R_0), np.where(inside, A, edge_A)
    return R_0, A, inside, rest, over


def _eliminate(gram: np.ndarray, over: np.ndarray) -> np.ndarray:
    """The products of all columns but the first, once they are orthogonal to it; `over` is 1 / its square."""
    with_first = gram[:, 1:, 0]
    return gram[:, 1:, 1:] - with_first[:, :, None] * (with_first * over[:, None])[:, None]


def _on_edge(rows: _Rows, gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best (R_0, A) where the best of all is outside of the bounds: A = R_0, A = high or R_0 = low."""
    (hh, hg, hy), (gg, gy) = gram[:, 0, (0, 1, -1)].T, gram[:, 1, (1, -1)].T
    low, high = rows.low, rows.high
    zero = np.zeros_like(gg)
    if not rows.free:
        return zero, _clip(gy / np.maximum(gg, 1e-300), zero, high)
    level = _clip(zero, low, high)  # the mean of y is 0
    edges = [(level, level)]
    if np.isfinite(high).all():
        edges.append((_clip((hy - high * hg) / np.maximum(hh, 1e-300), low, high), high))
    if np.isfinite(low).all():
        edges.append((low, _clip((gy - low * hg) / np.maximum(gg, 1e-300), low, high)))
    R_0, A = np.array(edges).transpose(1, 0, 2)
    rss = R_0 * (R_0 * hh + 2 * A * hg - 2 * hy) + A * (A * gg - 2 * gy)
    best = rss.argmin(axis=0), np.arange(len(gg))
    return R_0[best], A[best]


def _projected(rows: _Rows, gram: np.ndarray, R_0: np.ndarray, A: np.ndarray) -> np.ndarray:
    """The normal matrix of a state; those of (R_0, A) that lie on a bound follow nothing."""
    gram = gram.copy()
    gram[:, :, 4] -= R_0[:, None] * gram[:, :, 0] + A[:, None] * gram[:, :, 1]  # y is now the residual
    gram[:, 4, 4] -= R_0 * gram[:, 0, 4] + A * gram[:, 1, 4]
    gram[:, 4, :4] = gram[:, :4, 4]
    free_R_0, free_A = (rows.low < R_0) & rows.free, rows.high > A
    scale = gram[:, 1, 1]
    gram = _eliminate(gram, free_R_0 / np.maximum(gram[:, 0, 0], 1e-300))
    return _eliminate(gram, free_A / np.maximum(gram[:, 0, 0], 1e-13 * scale + 1e-300))


def _step(rows: _Rows, state: _State, box: np.ndarray, trust: _Trust, bend: np.ndarray | None) -> np.ndarray:
    """The damped Gauss-Newton step in theta, (R_0, A) following along where they are free; (2, M)."""
    step = _solve(state.normal, state.A - state.R_0, state.theta, box, trust, bend)
    follow = state.follow * step
    beyond = (state.A + follow[0] + follow[1] > rows.high) & (rows.high > state.A)
    if beyond.any():  # A would follow beyond its bound: the step along the bound instead
        gram, A = state.gram, rows.high
        R_0 = (gram[:, 0, 4] - A * gram[:, 0, 1]) / np.maximum(gram[:, 0, 0], 1e-300)
        R_0 = _clip(R_0, rows.low, A) if rows.free else state.R_0
        along = _solve(_projected(rows, gram, R_0, A), A - R_0, state.theta, box, trust, bend)
        step = np.where(beyond, along, step)
    return step


def _solve(
    normal: np.ndarray,
    gain: np.ndarray,
    theta: np.ndarray,
    box: np.ndarray,
    trust: _Trust,
    bend: np.ndarray | None,
) -> np.ndarray:
    """The step in theta (2, M) of a normal matrix: what lies on a bound and wants to go beyond is held."""
    bb, across, cc = normal[:, 0, 0], normal[:, 0, 1], normal[:, 1, 1]
    toward, gain = normal[:, :2, 2].T, np.maximum(gain, 1e-12)
    if bend is not None:
        whole = np.array([bb, across, cc]) + bend / (gain * gain)
        convex = (whole[0] > 0) & (whole[0] * whole[2] > whole[1] * whole[1])
        bb, across, cc = np.where(convex, whole, [bb, across, cc])
    if _on(theta, *box).any():
        held = ((theta <= box[0]) & (toward < 0)) | ((theta >= box[1]) & (toward > 0))
        toward, across = np.where(held, 0.0, toward), np.where(held[0] | held[1], 0.0, across)
    more = 1.0 + trust.damping
    bb, cc = bb * more + 1e-300, cc * more + 1e-300
    det = bb * cc
    det = np.maximum(det - across * across, 1e-14 * det + 1e-300) * gain
    step = np.array([toward[0] * cc - across * toward[1], toward[1] * bb - across * toward[0]]) / det
    far = np.maximum(np.abs(step[0]), np.abs(step[1]) * (0.5 * np.exp(theta[0])))
    return step * (trust.reach / np.maximum(far, trust.reach))


def _bend(rows: _Rows, family: Family, state: _State) -> np.ndarray:
    """What the Hessian of half the sum of squares has beyond Gauss-Newton's, by differences; (3, M).

    By (log B, log B), (log B, log C_mid) and (log C_mid, log C_mid). Most searches end before they need it;
    where residuals are large or the valley is bent it saves hundreds of steps.
    """
    m, h = state.theta.shape[1], 1e-5
    near = np.concatenate([state.theta, state.theta], axis=1)
    near[0, :m] += h
    near[1, m:] += h
    there = _evaluate(rows.take(np.tile(np.arange(m), 2)), family, near)
    gain = state.A - state.R_0
    slope = ((there.A - there.R_0) * there.normal[:, :2, 2].T).reshape(2, 2, m)
    (bb, bc), (cb, cc) = ((gain * state.normal[:, :2, 2].T)[:, None] - slope) / h
    normal = gain * gain * state.normal[:, :2, :2].T
    return np.array([bb - normal[0, 0], 0.5 * (bc + cb) - normal[0, 1], cc - normal[1, 1]])
