"""The sum of squares as a quadratic in what is linear, (R_0, A), for correlated evaluations.

Shapes: N points at distinct compute, P noise correlations, and `...` any grid of (log B, log C_mid).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Family


@dataclass(frozen=True)
class Quadratic:
    """The residual sum of squares of every cell as a quadratic in (R_0, A); all fields shape (P, ...).

    RSS = yy - 2 (R_0 hy + A gy) + R_0^2 hh + 2 R_0 A hg + A^2 gg, with g the share reached and h = 1 - g.
    """

    gg: np.ndarray
    hg: np.ndarray
    hh: np.ndarray
    gy: np.ndarray
    hy: np.ndarray
    yy: np.ndarray

    def rss(self, R_0: np.ndarray | float, A: np.ndarray | float) -> np.ndarray:
        """Residual sum of squares at (R_0, A)."""
        square = self.yy - 2 * (R_0 * self.hy + A * self.gy)
        square = square + R_0 * R_0 * self.hh + 2 * R_0 * A * self.hg + A * A * self.gg
        return np.maximum(square, 0.0)

    def best(self, r0: float | None) -> tuple[np.ndarray, np.ndarray]:
        """(R_0, A) of the least RSS within 0 <= R_0 <= A <= 1, or of A alone where `r0` is given."""
        tiny = 1e-300
        if r0 is not None:
            A = np.clip((self.gy - r0 * self.hg) / np.maximum(self.gg, tiny), r0, 1.0)
            return np.full_like(A, r0), A
        det = self.gg * self.hh - self.hg**2
        sound = det > 1e-12 * self.gg * self.hh
        det = np.where(sound, det, 1.0)
        R_0 = (self.hy * self.gg - self.gy * self.hg) / det
        A = (self.gy * self.hh - self.hy * self.hg) / det
        level = (self.gy + self.hy) / (self.gg + 2 * self.hg + self.hh)  # the best constant: A = R_0
        inside = sound & (R_0 >= 0) & (A >= R_0) & (A <= 1)
        # Outside, the best is on an edge: A = 1, R_0 = 0 or A = R_0.
        R_0_at_1 = np.clip((self.hy - self.hg) / np.maximum(self.hh, tiny), 0.0, 1.0)
        A_at_0 = np.clip(self.gy / np.maximum(self.gg, tiny), 0.0, 1.0)
        edges_R_0 = np.stack([np.clip(level, 0, 1), R_0_at_1, np.zeros_like(A)])
        edges_A = np.stack([np.clip(level, 0, 1), np.ones_like(A), A_at_0])
        edge = np.argmin(self.rss(edges_R_0, edges_A), axis=0)[None]
        R_0 = np.where(inside, R_0, np.take_along_axis(edges_R_0, edge, 0)[0])
        A = np.where(inside, A, np.take_along_axis(edges_A, edge, 0)[0])
        return R_0, A


@dataclass(frozen=True)
class Precision:
    """Inverse noise correlations: tridiagonal, as consecutive evaluations are correlated as AR(1).

    `diagonal_PN`, and `below_PN` with the entry of (i, i - 1) at i, 0 at i = 0.
    """

    diagonal_PN: np.ndarray
    below_PN: np.ndarray

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a^T K^-1 b for every pair of rows of `a` (cells, N) and `b` (cells, N) or (N,): (P, cells)."""
        across = a[:, 1:] * b[..., :-1] + a[:, :-1] * b[..., 1:]
        return self.diagonal_PN @ (a * b).T + self.below_PN[:, 1:] @ across.T


def quadratic(share: np.ndarray, y_N: np.ndarray, precision: Precision) -> Quadratic:
    """The quadratic of every cell, from the shares (..., N) and the inverse noise correlations."""
    g = share.reshape(-1, share.shape[-1])
    h = 1.0 - g
    shape = (len(precision.diagonal_PN), *share.shape[:-1])
    yy = precision.product(y_N[None], y_N).reshape(-1, *(1,) * (share.ndim - 1))
    pairs = {"gg": (g, g), "hg": (h, g), "hh": (h, h), "gy": (g, y_N), "hy": (h, y_N)}
    products = {name: precision.product(a, b).reshape(shape) for name, (a, b) in pairs.items()}
    return Quadratic(yy=np.broadcast_to(yy, shape), **products)


def share_at(family: Family, log_b: np.ndarray, log_mid: np.ndarray, log_c_N: np.ndarray) -> np.ndarray:
    """Share of the gain at every point for every cell: broadcast(log_b, log_mid).shape + (N,)."""
    return family.share(np.exp(log_b)[..., None], log_c_N - log_mid[..., None])
