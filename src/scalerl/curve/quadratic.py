"""The sum of squares as a quadratic in what is linear, (R_0, A), for correlated evaluations.

    RSS = (y - R_0 h - A g)^T K^-1 (y - R_0 h - A g)        g = share of the gain reached, h = 1 - g

Shapes: N evaluations, P noise correlations, and `...` any grid of (log B, log C_mid).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_TINY = 1e-300


@dataclass(frozen=True)
class Quadratic:
    """RSS = yy - 2 (R_0 hy + A gy) + R_0^2 hh + 2 R_0 A hg + A^2 gg; all fields shape (P, ...)."""

    gg: np.ndarray
    hg: np.ndarray
    hh: np.ndarray
    gy: np.ndarray
    hy: np.ndarray
    yy: np.ndarray

    def take(self, index: Any) -> Quadratic:
        """The quadratics of some cells."""
        return Quadratic(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def rss(self, R_0: np.ndarray | float, A: np.ndarray | float) -> np.ndarray:
        """Residual sum of squares at (R_0, A)."""
        square = self.yy - 2 * (R_0 * self.hy + A * self.gy)
        square = square + R_0 * R_0 * self.hh + 2 * R_0 * A * self.hg + A * A * self.gg
        return np.maximum(square, 0.0)

    def best(self, r0: float | None) -> tuple[np.ndarray, np.ndarray]:
        """(R_0, A) of the least RSS within 0 <= R_0 <= A <= 1, or of A alone where `r0` is given."""
        if r0 is not None:
            A = np.clip((self.gy - r0 * self.hg) / np.maximum(self.gg, _TINY), r0, 1.0)
            return np.full_like(A, r0), A
        det = self.gg * self.hh - self.hg**2
        sound = det > 1e-12 * self.gg * self.hh
        det = np.where(sound, det, 1.0)
        R_0 = (self.hy * self.gg - self.gy * self.hg) / det
        A = (self.gy * self.hh - self.hy * self.hg) / det
        outside = ~(sound & (R_0 >= 0) & (A >= R_0) & (A <= 1))
        if outside.any():
            index = np.nonzero(outside)
            R_0[index], A[index] = self.take(index)._best_on_edge()
        return R_0, A

    def _best_on_edge(self) -> tuple[np.ndarray, np.ndarray]:
        """The best of the edges A = R_0, A = 1 and R_0 = 0."""
        level = np.clip((self.gy + self.hy) / (self.gg + 2 * self.hg + self.hh), 0.0, 1.0)
        one, zero = np.ones_like(level), np.zeros_like(level)
        R_0 = np.stack([level, np.clip((self.hy - self.hg) / np.maximum(self.hh, _TINY), 0.0, 1.0), zero])
        A = np.stack([level, one, np.clip(self.gy / np.maximum(self.gg, _TINY), 0.0, 1.0)])
        edge = np.argmin(self.rss(R_0, A), axis=0)[None]
        return np.take_along_axis(R_0, edge, 0)[0], np.take_along_axis(A, edge, 0)[0]


@dataclass(frozen=True)
class Precision:
    """Inverse noise correlations: tridiagonal, as consecutive evaluations are correlated as AR(1).

    `diagonal_PN`, and `below_PN` with the entry of (i, i - 1) at i, 0 at i = 0.
    """

    diagonal_PN: np.ndarray
    below_PN: np.ndarray

    def only(self, p: int) -> Precision:
        """That of one correlation, P = 1."""
        return Precision(self.diagonal_PN[p : p + 1], self.below_PN[p : p + 1])

    def times(self, a_N: np.ndarray) -> np.ndarray:
        """K^-1 a, shape (P, N)."""
        product = self.diagonal_PN * a_N
        product[:, 1:] += self.below_PN[:, 1:] * a_N[:-1]
        product[:, :-1] += self.below_PN[:, 1:] * a_N[1:]
        return product

    def quadratic(self, share: np.ndarray, y_N: np.ndarray) -> Quadratic:
        """The quadratic of every cell from its shares (..., N); only g^T K^-1 g is no plain product."""
        g = share.reshape(-1, share.shape[-1])
        shape = (len(self.diagonal_PN), *share.shape[:-1])
        one_PN, y_PN = self.times(np.ones_like(y_N)), self.times(y_N)
        gg = self.diagonal_PN @ (g * g).T
        gg += 2 * (self.below_PN[:, 1:] @ (g[:, 1:] * g[:, :-1]).T)
        g1, gy = one_PN @ g.T, y_PN @ g.T
        one, y1, yy = (v[:, None] for v in (one_PN.sum(axis=1), one_PN @ y_N, y_PN @ y_N))
        fields = (gg, g1 - gg, one - 2 * g1 + gg, gy, y1 - gy, np.broadcast_to(yy, gg.shape))
        return Quadratic(*(v.reshape(shape) for v in fields))
