"""The descent: Levenberg-Marquardt with the linear parameters projected out, many searches side by side.

theta = (log B, log C_mid). Golub and Pereyra (1973), with Kaufman's (1975) Jacobian.

Shapes: M searches under way, N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.solver.linear import Rows, best_linear, clip, eliminate, projected

TOLERANCE = 5.0
"""Log-likelihood below the best at which another minimum is no longer reported."""
_STEPS, _GAUSS_NEWTON = 300, 8  # most steps of a search, and those before the second derivatives join
_CLOSE = 5e-7  # a step in theta so short is the last

# A state is one array (40, M), so that one call takes or replaces all of it. By rows: theta within its
# bounds; the best (R_0, A) there; how A follows log B and log C_mid, where it is free; then two matrices.
# `_NORMAL` (3, 3) is that of log B, log C_mid and the residual, once what (R_0, A) can follow is projected
# out: its last column holds the gradient and the sum of squares. `_GRAM` (5, 5) holds the sums over the rows
# of products of the derivatives of the curve by R_0, A, log B and log C_mid, and of y. In both, the
# derivatives by log B and log C_mid lack a factor A - R_0.
_THETA, _R_0, _A, _FOLLOW, _NORMAL, _GRAM = slice(2), 2, 3, slice(4, 6), slice(6, 15), slice(15, 40)
_BB, _BC, _CC, _BR, _CR, _RSS = 6, 7, 10, 8, 11, 14  # of the normal matrix, R the residual
_TOWARD = slice(_BR, _CR + 1, _CR - _BR)

# How far the model is believed, (2, M): Marquardt's damping, and the longest step; and their least and most.
_TRUSTED = np.array([[[1e-12], [0.0]], [[np.inf], [1.0]]])


class Found(NamedTuple):
    """Where searches ended: theta (2, M), the best (R_0, A) there, and which were not given up."""

    theta: np.ndarray
    R_0: np.ndarray
    A: np.ndarray
    kept: np.ndarray


def descend(rows: Rows, run: np.ndarray, family: Family, theta: np.ndarray, box: np.ndarray) -> Found:
    """Levenberg-Marquardt in theta = (log B, log C_mid), inside `box`, for M searches side by side."""
    m = len(run)
    ended, kept, active = np.empty((4, m)), np.ones(m, dtype=bool), np.arange(m)
    state, trust = _evaluate(rows, family, theta), np.ones((2, m))
    trust[0] = 1e-3
    for count in range(1, _STEPS + 1):
        bend = None if count <= _GAUSS_NEWTON else _bend(rows, family, state)
        trial = clip(state[_THETA] + _step(rows, state, box, trust, bend), *box)
        moved = np.abs(trial - state[_THETA])
        ends = np.maximum(moved[0], moved[1]) < _CLOSE
        new = _evaluate(rows, family, trial)
        better = new[_RSS] <= state[_RSS] + rows.exact
        relief = 0.03 if bend is None else 0.2
        if np.count_nonzero(better) == len(better):
            state, trust = new, trust * np.array([[relief], [3.0]])
        else:
            state = np.where(better, new, state)
            trust = trust * np.where(better, [[relief], [3.0]], [[10.0], [0.3]])
            ends |= trust[0] > 1e10
        trust = clip(trust, *_TRUSTED)
        if count in (2, 5) and len(active) > 1:
            spare = _spare(rows, run[active], state)
            kept[active[spare]] = False
            ends |= spare
        if count == _STEPS:
            ends[:] = True
        if np.count_nonzero(ends):
            ended[:, active[ends]] = state[: len(ended), ends]
            left = np.flatnonzero(~ends)
            if not len(left):
                break
            active, rows = active[left], rows.take(left)
            state, trust, box = state[:, left], trust[:, left], box[:, :, left]
    return Found(ended[_THETA], ended[_R_0], ended[_A], np.flatnonzero(kept))


def _spare(rows: Rows, run: np.ndarray, state: np.ndarray) -> np.ndarray:
    """Searches less likely than the best of their run by far more than `TOLERANCE`, or on its heels."""
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


def _evaluate(rows: Rows, family: Family, theta: np.ndarray) -> np.ndarray:
    m, n = rows.y.shape
    basis, state = np.empty((m, 5, n)), np.empty((40, m))
    g, basis[:, 2], by_log_c = family.slopes(np.exp(theta[0])[:, None], rows.log_c - theta[1][:, None])
    np.subtract(1.0, g, out=basis[:, 0])
    basis[:, 1] = g
    np.negative(by_log_c, out=basis[:, 3])
    basis[:, 4] = rows.y
    gram = state[_GRAM].reshape(5, 5, m)
    gram[...] = ((basis * rows.w[:, None]) @ basis.transpose(0, 2, 1)).transpose(1, 2, 0)
    state[_THETA] = theta
    state[_R_0], state[_A], inside, rest, over = best_linear(rows, gram)
    normal = (
        eliminate(rest, over)
        if np.count_nonzero(inside) == m
        else projected(rows, gram, state[_R_0], state[_A])
    )
    state[_NORMAL] = normal.reshape(9, m)
    np.multiply(rest[0, 1:3], (state[_R_0] - state[_A]) * over, out=state[_FOLLOW])
    return state


def _step(
    rows: Rows, state: np.ndarray, box: np.ndarray, trust: np.ndarray, bend: np.ndarray | None
) -> np.ndarray:
    """The damped Gauss-Newton step in theta, (R_0, A) following along where they are free; (2, M)."""
    A, R_0 = state[_A], state[_R_0]
    step = _solve(state, state[_NORMAL], A - R_0, box, trust, bend)
    by_b, by_c = state[_FOLLOW] * step
    beyond = (A + by_b + by_c > rows.high) & (rows.high > A)
    if np.count_nonzero(beyond):
        # A would follow beyond its bound: the step along the bound instead
        gram, A = state[_GRAM].reshape(5, 5, -1), rows.high
        R_0 = (
            clip((gram[0, 4] - A * gram[0, 1]) / np.maximum(gram[0, 0], 1e-300), rows.low, A)
            if rows.free
            else R_0
        )
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
    """The step in theta (2, M) of a normal matrix: what lies on a bound and wants to go beyond is held."""
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


def _bend(rows: Rows, family: Family, state: np.ndarray) -> np.ndarray:
    """What the Hessian of half the sum of squares has beyond Gauss-Newton's, by differences; (3, M).

    By (log B, log B), (log B, log C_mid) and (log C_mid, log C_mid). Most searches end before they need it;
    where residuals are large or the valley is bent it saves hundreds of steps.
    """
    m = state.shape[1]
    gain = state[_A] - state[_R_0]
    # To the side where A stays on its bound, or off it: across, another function begins.
    h = np.where((state[_FOLLOW] > 0) == (rows.high > state[_A]), -1e-7, 1e-7)
    near = np.concatenate([state[_THETA], state[_THETA]], axis=1)
    near[0, :m] += h[0]
    near[1, m:] += h[1]
    there = _evaluate(rows.take(np.tile(np.arange(m), 2)), family, near)
    slope = ((there[_A] - there[_R_0]) * there[_TOWARD]).reshape(2, 2, m)
    (bb, bc), (cb, cc) = ((gain * state[_TOWARD])[:, None] - slope) / h
    bend = np.array([bb, 0.5 * (bc + cb), cc])
    return bend - gain * gain * state[[_BB, _BC, _CC]]


def on_bound(theta: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Which of theta lie on their bounds."""
    return (theta <= low) | (theta >= high)
