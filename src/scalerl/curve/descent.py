"""The descent: Levenberg-Marquardt with the linear parameters projected out, many searches side by side.

theta = (log B, log C_mid). Golub and Pereyra (1973), with Kaufman's (1975) Jacobian.

Shapes: M searches under way, N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.linear import Rows, best_linear, clip, eliminate, projected

TOLERANCE = 5.0
"""Log-likelihood below the best at which another minimum is no longer reported."""
_STEPS, _GAUSS_NEWTON = 300, 8  # most steps of a search, and those before the second derivatives join
_CLOSE = 5e-7  # a step in theta so short is the last


def descend(
    rows: Rows, run: np.ndarray, family: Family, theta: np.ndarray, box: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg-Marquardt in theta = (log B, log C_mid), inside `box`, for M searches side by side.

    Returns which were not given up, and theta (2, M) of all.
    """
    result, kept, active = theta.copy(), np.ones(len(run), dtype=bool), np.arange(len(run))
    state, trust = _evaluate(rows, family, theta), _Trust(np.full(len(run), 1e-3), np.ones(len(run)))
    for count in range(1, _STEPS + 1):
        bend = None if count <= _GAUSS_NEWTON else _bend(rows, family, state)
        trial = clip(state.theta + _step(rows, state, box, trust, bend), *box)
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


def _spare(rows: Rows, run: np.ndarray, state: _State) -> np.ndarray:
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
        return _State(*(v[:, index] if v.ndim == 2 else v[index] for v in self))

    def where(self, better: np.ndarray, other: _State) -> _State:
        """This where it is better, the other elsewhere."""
        if better.all():
            return self
        by = {1: better, 2: better, 3: better[:, None, None]}
        return _State(*(np.where(by[new.ndim], new, old) for new, old in zip(self, other, strict=True)))


def _evaluate(rows: Rows, family: Family, theta: np.ndarray) -> _State:
    basis = np.empty((theta.shape[1], 5, rows.y.shape[1]))
    g, basis[:, 2], by_log_c = family.slopes(np.exp(theta[0])[:, None], rows.log_c - theta[1][:, None])
    np.subtract(1.0, g, out=basis[:, 0])
    basis[:, 1] = g
    np.negative(by_log_c, out=basis[:, 3])
    basis[:, 4] = rows.y
    gram = (basis * rows.w[:, None]) @ basis.transpose(0, 2, 1)
    R_0, A, inside, rest, over = best_linear(rows, gram)
    normal = eliminate(rest, over) if inside.all() else projected(rows, gram, R_0, A)
    return _State(theta, R_0, A, normal[:, 2, 2], normal, rest[:, 0, 1:3].T * ((R_0 - A) * over), gram)


def _step(rows: Rows, state: _State, box: np.ndarray, trust: _Trust, bend: np.ndarray | None) -> np.ndarray:
    """The damped Gauss-Newton step in theta, (R_0, A) following along where they are free; (2, M)."""
    step = _solve(state.normal, state.A - state.R_0, state.theta, box, trust, bend)
    follow = state.follow * step
    beyond = (state.A + follow[0] + follow[1] > rows.high) & (rows.high > state.A)
    if beyond.any():  # A would follow beyond its bound: the step along the bound instead
        gram, A = state.gram, rows.high
        R_0 = (gram[:, 0, 4] - A * gram[:, 0, 1]) / np.maximum(gram[:, 0, 0], 1e-300)
        R_0 = clip(R_0, rows.low, A) if rows.free else state.R_0
        along = _solve(projected(rows, gram, R_0, A), A - R_0, state.theta, box, trust, bend)
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
    if on_bound(theta, *box).any():
        held = ((theta <= box[0]) & (toward < 0)) | ((theta >= box[1]) & (toward > 0))
        toward, across = np.where(held, 0.0, toward), np.where(held[0] | held[1], 0.0, across)
    more = 1.0 + trust.damping
    bb, cc = bb * more + 1e-300, cc * more + 1e-300
    det = bb * cc
    det = np.maximum(det - across * across, 1e-14 * det + 1e-300) * gain
    step = np.array([toward[0] * cc - across * toward[1], toward[1] * bb - across * toward[0]]) / det
    far = np.maximum(np.abs(step[0]), np.abs(step[1]) * (0.5 * np.exp(theta[0])))
    return step * (trust.reach / np.maximum(far, trust.reach))


def _bend(rows: Rows, family: Family, state: _State) -> np.ndarray:
    """What the Hessian of half the sum of squares has beyond Gauss-Newton's, by differences; (3, M).

    By (log B, log B), (log B, log C_mid) and (log C_mid, log C_mid). Most searches end before they need it;
    where residuals are large or the valley is bent it saves hundreds of steps.
    """
    m = state.theta.shape[1]
    # To the side where A stays on its bound, or off it: across, another function begins.
    h = np.where((state.follow > 0) == (rows.high > state.A), -1e-7, 1e-7)
    near = np.concatenate([state.theta, state.theta], axis=1)
    near[0, :m] += h[0]
    near[1, m:] += h[1]
    there = _evaluate(rows.take(np.tile(np.arange(m), 2)), family, near)
    gain = state.A - state.R_0
    slope = ((there.A - there.R_0) * there.normal[:, :2, 2].T).reshape(2, 2, m)
    (bb, bc), (cb, cc) = ((gain * state.normal[:, :2, 2].T)[:, None] - slope) / h
    normal = gain * gain * state.normal[:, :2, :2].T
    return np.array([bb - normal[0, 0], 0.5 * (bc + cb) - normal[0, 1], cc - normal[1, 1]])


def on_bound(theta: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Which of theta lie on their bounds."""
    return (theta <= low) | (theta >= high)
