"""The descent to the least squares of a curve, for many runs and from many starts side by side.

    best_linear   the best (R_0, A), the linear parameters, once the shape of the curve is given
    descend       Levenberg-Marquardt in theta = (log B, log C_mid), the linear parameters projected out
                  (Golub and Pereyra, 1973, with the Jacobian of Kaufman, 1975)

The linear parameters follow from `gram` (., ., M): sums over the rows of the products of h = 1 - g (the
derivative of the curve by R_0), g (by A: the share of the gain), any further columns, and last y.

Shapes: S runs, N rows (shorter runs are padded with weight 0), M searches under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from scalerl.curve.families import Family, of_families
from scalerl.curve.sample import Sample

TOLERANCE = 5.0
"""Log-likelihood below the best beyond which another minimum is not reported."""
_GAUSS_NEWTON = 8  # steps before the second derivatives are used
_CLOSE = 5e-7  # a step in theta shorter than this is the last

# A state is one array (40, M), so that one call takes or replaces all of it. Its rows are theta within its
# bounds; the best (R_0, A) there; how A follows log B and log C_mid, where it is free; then two matrices.
# `_NORMAL` (3, 3) is that of log B, log C_mid and the residual, once what (R_0, A) can follow is projected
# out: its last column holds the gradient and the sum of squares. `_GRAM` (5, 5) holds the sums over the rows
# of products of the derivatives of the curve by R_0, A, log B and log C_mid, and of y. In both, the
# derivatives by log B and log C_mid lack a factor A - R_0.
_THETA, _R_0, _A, _FOLLOW, _NORMAL, _GRAM = slice(2), 2, 3, slice(4, 6), slice(6, 15), slice(15, 40)
_BB, _BC, _CC, _BR, _CR, _RSS = 6, 7, 10, 8, 11, 14  # of the normal matrix, R the residual
_TOWARD = slice(_BR, _CR + 1, _CR - _BR)

# The range of `trust` (2, M), which is Marquardt's damping and the longest step: least, then most, of each.
_TRUSTED = np.array([[[1e-12], [0.0]], [[np.inf], [1.0]]])


def descend(
    rows: RunRows, run: np.ndarray, theta: np.ndarray, box: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Minimise by Levenberg-Marquardt in theta = (log B, log C_mid), inside `box`, M searches side by side.

    Searches end after at most `steps` steps. Returns theta (2, M) where they end, the best (R_0, A) there,
    and the indices of searches that were not abandoned.
    """
    m = len(run)
    ended, kept, active = np.empty((4, m)), np.ones(m, dtype=bool), np.arange(m)
    state, trust = _evaluate(rows, theta), np.ones((2, m))
    trust[0] = 1e-3
    for count in range(1, steps + 1):
        bend = None if count <= _GAUSS_NEWTON else _bend(rows, state)
        trial = clip(state[_THETA] + _step(rows, state, box, trust, bend), *box)
        moved = np.abs(trial - state[_THETA])
        ends = np.maximum(moved[0], moved[1]) < _CLOSE
        new = _evaluate(rows, trial)
        better = new[_RSS] <= state[_RSS] + rows.exact
        # Searches that still run with the second derivatives are in bent valleys: lower their damping slowly.
        relief = 0.03 if bend is None else 0.2
        if np.count_nonzero(better) == len(better):
            state, trust = new, trust * np.array([[relief], [3.0]])
        else:
            state = np.where(better, new, state)
            trust = trust * np.where(better, [[relief], [3.0]], [[10.0], [0.3]])
            ends |= trust[0] > 1e10
        trust = clip(trust, *_TRUSTED)
        if count in (2, 5) and len(active) > 1:
            # By then many starts are in the valley of another, or far behind: further steps would be wasted.
            abandoned = _hopeless(rows, run[active], state)
            kept[active[abandoned]] = False
            ends |= abandoned
        if count == steps:
            ends[:] = True
        if np.count_nonzero(ends):
            ended[:, active[ends]] = state[: len(ended), ends]
            left = np.flatnonzero(~ends)
            if not len(left):
                break
            active, rows = active[left], rows.take(left)
            state, trust, box = state[:, left], trust[:, left], box[:, :, left]
    return ended[_THETA], ended[_R_0], ended[_A], np.flatnonzero(kept)


def _hopeless(rows: RunRows, run: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Return which searches are far less likely than the best of their run, or in its valley, (M,)."""
    order = np.lexsort((state[_RSS], run))
    first = np.concatenate([[True], run[1:] != run[:-1]])  # `run` is sorted
    best = order[first][np.cumsum(first) - 1]
    rss = np.maximum(state[_RSS], 0.0) + rows.exact
    far = rows.n * np.log(rss / rss[best]) > 4 * TOLERANCE
    theta = state[_THETA]
    apart = np.abs(theta - theta[:, best])
    near = (apart[0] < 0.1) & (apart[1] * np.exp(theta[0]) < 0.1)
    near[best] = False
    return far | near


def _evaluate(rows: RunRows, theta: np.ndarray) -> np.ndarray:
    """Return the state (40, M) at theta (2, M)."""
    m, n = rows.y.shape
    basis, state = np.empty((m, 5, n)), np.empty((40, m))
    g, basis[:, 2], by_log_c = rows.slopes(np.exp(theta[0])[:, None], rows.log_c - theta[1][:, None])
    np.subtract(1.0, g, out=basis[:, 0])
    basis[:, 1] = g
    np.negative(by_log_c, out=basis[:, 3])
    basis[:, 4] = rows.y
    gram = state[_GRAM].reshape(5, 5, m)
    gram[...] = ((basis * rows.w[:, None]) @ basis.transpose(0, 2, 1)).transpose(1, 2, 0)
    state[_THETA] = theta
    state[_R_0], state[_A], inside, rest, over = best_linear(rows, gram)
    if np.count_nonzero(inside) == m:
        state[_NORMAL] = eliminate(rest, over).reshape(9, m)
    else:
        state[_NORMAL] = projected(rows, gram, state[_R_0], state[_A]).reshape(9, m)
    np.multiply(rest[0, 1:3], (state[_R_0] - state[_A]) * over, out=state[_FOLLOW])
    return state


def _step(
    rows: RunRows, state: np.ndarray, box: np.ndarray, trust: np.ndarray, bend: np.ndarray | None
) -> np.ndarray:
    """Return the damped Gauss-Newton step in theta (2, M), (R_0, A) following along where free."""
    A, R_0 = state[_A], state[_R_0]
    step = _solve(state, state[_NORMAL], A - R_0, box, trust, bend)
    by_b, by_c = state[_FOLLOW] * step
    beyond = (A + by_b + by_c > rows.high) & (rows.high > A)
    if np.count_nonzero(beyond):
        # A would follow beyond its bound: the step along the bound instead
        gram, A = state[_GRAM].reshape(5, 5, -1), rows.high
        if rows.free:
            R_0 = clip((gram[0, 4] - A * gram[0, 1]) / np.maximum(gram[0, 0], 1e-300), rows.low, A)
        along = projected(rows, gram, R_0, A).reshape(9, -1)
        step = np.where(beyond, _solve(state, along, A - R_0, box, trust, bend), step)
    return step


def _solve(
    state: np.ndarray,
    normal: np.ndarray,
    gain: np.ndarray,
    box: np.ndarray,
    trust: np.ndarray,
    bend: np.ndarray | None,
) -> np.ndarray:
    """Solve the normal matrix for a step in theta (2, M); a parameter that would leave the box is held."""
    bb, bc, toward_b, _, cc, toward_c = normal[:6]
    gain = np.maximum(gain, 1e-12)
    if bend is not None:
        whole = np.array([bb, bc, cc]) + bend / (gain * gain)
        convex = (whole[0] > 0) & (whole[0] * whole[2] > whole[1] * whole[1])
        bb, bc, cc = np.where(convex, whole, [bb, bc, cc])
    theta = state[_THETA]
    low, high = theta <= box[0], theta >= box[1]
    if np.count_nonzero(low) or np.count_nonzero(high):
        toward = np.array([toward_b, toward_c])
        held = (low & (toward < 0)) | (high & (toward > 0))
        toward_b, toward_c = np.where(held, 0.0, toward)
        bc = np.where(held.any(axis=0), 0.0, bc)
    damping, reach = trust
    more = 1.0 + damping
    bb, cc = bb * more + 1e-300, cc * more + 1e-300
    det = bb * cc
    det = np.maximum(det - bc * bc, 1e-14 * det + 1e-300) * gain
    step = np.empty_like(theta)
    step[0], step[1] = toward_b * cc - bc * toward_c, toward_c * bb - bc * toward_b
    step /= det
    far = np.maximum(np.abs(step[0]), np.abs(step[1]) * (0.5 * np.exp(theta[0])))
    return step * (reach / np.maximum(far, reach))


def _bend(rows: RunRows, state: np.ndarray) -> np.ndarray:
    """Return, by differences, what Gauss-Newton omits in the Hessian of half the sum of squares, (3, M).

    By (log B, log B), (log B, log C_mid) and (log C_mid, log C_mid). Most searches end before they need it.
    It saves hundreds of steps where residuals are large or the valley is bent.
    """
    m = state.shape[1]
    gain = state[_A] - state[_R_0]
    # To the side where A stays on its bound, or stays off it: across the bound the function is another.
    h = np.where((state[_FOLLOW] > 0) == (rows.high > state[_A]), -1e-7, 1e-7)
    near = np.concatenate([state[_THETA], state[_THETA]], axis=1)
    near[0, :m] += h[0]
    near[1, m:] += h[1]
    there = _evaluate(rows.take(np.tile(np.arange(m), 2)), near)
    slope = ((there[_A] - there[_R_0]) * there[_TOWARD]).reshape(2, 2, m)
    (bb, bc), (cb, cc) = ((gain * state[_TOWARD])[:, None] - slope) / h
    bend = np.array([bb, 0.5 * (bc + cb), cc])
    return bend - gain * gain * state[[_BB, _BC, _CC]]


GRID_ROWS = 24
"""The most rows, after averaging, that the grid search works on."""


def rows_averaged(n: int) -> int:
    """Return how many consecutive rows of n the grid search averages into one."""
    return -(-n // GRID_ROWS)


class RunRows(NamedTuple):
    """Runs side by side, each with a curve of the family that `family` indexes.

    `y` and the bounds `low` and `high` of (R_0, A), pass rates of 0 and 1, are measured from `base`: the mean
    of the run or its given R_0.
    """

    log_c: np.ndarray
    y: np.ndarray
    w: np.ndarray
    one: np.ndarray  # sums of w and of w y^2
    yy: np.ndarray
    exact: np.ndarray  # rounding error of a sum of squares
    n: np.ndarray
    base: np.ndarray
    low: np.ndarray
    high: np.ndarray
    family: np.ndarray
    families: tuple[Family, ...]
    free: bool

    @classmethod
    def stack(cls, samples: Sequence[Sample], each: Sequence[Family]) -> RunRows:
        """Pad and stack runs, each with the family at its place in `each`."""
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
        yy, low, high = (w * y * y).sum(axis=1), 0.0 - base, 1.0 - base
        families = tuple(dict.fromkeys(each))
        family = np.array([families.index(one) for one in each])
        return cls(log_c, y, w, one, yy, 1e-14 * yy + 1e-300, count, base, low, high, family, families, free)

    def take(self, index: np.ndarray) -> RunRows:
        """Return the rows of the runs `index`, with repetitions."""
        if len(index) == 1 == len(self.y):
            return self
        return RunRows(*[v[index] for v in self[:-2]], families=self.families, free=self.free)

    def share(self, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return `Family.share` of every run, along the first axis of both."""
        if len(self.families) == 1:
            return self.families[0].share(b, x)
        return of_families(self.families, self.family, "share", b, x)

    def slopes(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, ...] | np.ndarray:
        """Return `Family.slopes` of every run, along the first axis of both."""
        if len(self.families) == 1:
            return self.families[0].slopes(b, x)
        found = np.empty((3, *x.shape))
        for index, family in enumerate(self.families):
            mine = self.family == index
            found[0, mine], found[1, mine], found[2, mine] = family.slopes(b[mine], x[mine])
        return found

    def coarse(self) -> RunRows:
        """Average consecutive rows to `GRID_ROWS` or fewer, for the grid search."""
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
    rows: RunRows, gram: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the best (R_0, A) within the bounds, and where that is also the best without bounds.

    Also returns the products that are left once R_0 is projected out, and one over the first of them.
    """
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


def _on_edge(rows: RunRows, gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best (R_0, A) on an edge of the bounds: A = R_0, A = high or R_0 = low."""
    hh, hg, hy, gg, gy = gram[0, 0], gram[0, 1], gram[0, -1], gram[1, 1], gram[1, -1]
    low, high = rows.low, rows.high
    zero = np.zeros_like(gg)
    if not rows.free:
        return zero, clip(gy / np.maximum(gg, 1e-300), zero, high)
    level = clip(zero, low, high)  # the mean of y is 0
    under_high = clip((hy - high * hg) / np.maximum(hh, 1e-300), low, high)
    over_low = clip((gy - low * hg) / np.maximum(gg, 1e-300), low, high)
    R_0, A = np.array([level, under_high, low]), np.array([level, high, over_low])
    rss = R_0 * (R_0 * hh + 2 * A * hg - 2 * hy) + A * (A * gg - 2 * gy)
    best = rss.argmin(axis=0), np.arange(len(gg))
    return R_0[best], A[best]


def projected(rows: RunRows, gram: np.ndarray, R_0: np.ndarray, A: np.ndarray) -> np.ndarray:
    """Return the normal matrix (3, 3, M) of a state; an R_0 or A on its bound does not follow."""
    gram = gram.copy()
    gram[:, 4] -= R_0 * gram[:, 0] + A * gram[:, 1]  # y is now the residual
    gram[4, 4] -= R_0 * gram[0, 4] + A * gram[1, 4]
    gram[4, :4] = gram[:4, 4]
    free_R_0, free_A = (rows.low < R_0) & rows.free, rows.high > A
    scale = gram[1, 1]
    gram = eliminate(gram, free_R_0 / np.maximum(gram[0, 0], 1e-300))
    return eliminate(gram, free_A / np.maximum(gram[0, 0], 1e-13 * scale + 1e-300))


def eliminate(gram: np.ndarray, over: np.ndarray) -> np.ndarray:
    """Project the first column out of the products of the others; `over` is 1 over its square."""
    with_first = gram[0, 1:]
    return gram[1:, 1:] - with_first[:, None] * (with_first * over)


def clip(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Clip as `np.clip`, which is slow on small arrays."""
    return np.minimum(np.maximum(value, low), high)
