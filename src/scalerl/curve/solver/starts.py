"""Where to start from: the deepest valleys of a grid over all shapes, and the best step of all.

Shapes: S runs, N rows, K cells of the grid, M starts.
"""

from __future__ import annotations

import math

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.solver.descent import TOLERANCE
from scalerl.curve.solver.linear import Rows

SEARCH_REACH = 100.0
"""C_mid is searched from the smallest positive compute over this to the largest compute times this."""
_STARTS = 3
_EVEN = np.linspace(0, 1, 11)
"""Where the grid of log B lies in its range."""
_ALONG = np.concatenate([[0.0, 0.0], np.linspace(0, 1, 12), [1.0, 1.0, 1.0]])
_BEYOND = np.concatenate([[-1.0, -0.5], np.zeros(12), [0.15, 0.4, 1.0]])
"""Where that of log C_mid lies: the share along the range of the data, and beyond it of the reach."""


def starts(
    rows: Rows, family: Family, span: np.ndarray, log_b_range: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """For every run the deepest local minima of the grid, and a step; (run (M,), theta (2, M))."""
    coarse = rows.coarse()
    log_mid = span[:, :1] + (span[:, 1:] - span[:, :1]) * _ALONG + math.log(SEARCH_REACH) * _BEYOND
    log_b = log_b_range[0] + (log_b_range[1] - log_b_range[0]) * _EVEN
    s, nb, nm = len(span), len(log_b), log_mid.shape[1]
    x = coarse.log_c[:, None] - log_mid[:, :, None]
    g = family.share(np.exp(log_b)[:, None, None], x[:, None]).reshape(s, nb * nm, -1)
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


def _steps(rows: Rows, rss: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The runs that a step describes nearly as well as the grid did, with `rss`, and where; (M,) each.

    Steep curves have valleys as narrow as the distance of two evaluations, which a grid passes over.
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


def _rough_rss(rows: Rows, g: np.ndarray) -> np.ndarray:
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
