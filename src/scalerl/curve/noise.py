"""The noise of evaluations: unknown in size, correlated between neighbours or with a wander, integrated out.

    e ~ N(0, sd^2 K)
    K[i, j] = phi^(distance from i to j in usual steps between evaluations)         correlated
    K = I + W T, T[i, j] = min(t_i, t_j), t = `Sample.clock_N`                      a wander of variance W
    RSS = (y - R_0 h - A g)^T K^-1 (y - R_0 h - A g)        g = share of the gain reached, h = 1 - g

The inverse of the correlation is tridiagonal. T is that of a random walk: with T = U diag(l) U^T the inverse
is I - U diag(W l / (1 + W l)) U^T for every W, of which the few large l matter. Either way RSS is a quadratic
in (R_0, A) that takes one pass over the evaluations.

Shapes: P models of the noise, J values of sd, N points, k columns of U, T entries of a table over the sum of
squares, and `...` any grid of (log B, log C_mid).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from scalerl.curve.prior import SD_RANGE, Prior
from scalerl.curve.sample import Sample

_TINY = 1e-300
_LEAST = 0.01  # variance of a wave of the walk, in that of an evaluation, below which it is left out


@dataclass(frozen=True)
class Noise:
    """The noise integrated out: log of the integral over sd as a function of the sum of squares.

    `log_rss_T`, `log_weight_T` tabulate it; `sd_given_TJ` is the posterior of the nodes `sd_J`.
    `log_prior_P` is the prior of the model, with the determinant of K. The inverse of K is tridiagonal,
    `diagonal_PN` and `below_PN` with the entry of (i, i - 1) at i, 0 at i = 0, less a wander's
    U diag(`shrink_Pk`) U^T, `wave_Nk` being U. At the last evaluation a wander is expected at `filter_PN`
    times the residuals, with variance `left_P` sd^2; it grows by `wander_P` sd^2 on the clock.
    """

    phi_P: np.ndarray
    wander_P: np.ndarray
    wave_Nk: np.ndarray
    shrink_Pk: np.ndarray
    filter_PN: np.ndarray
    left_P: np.ndarray
    diagonal_PN: np.ndarray
    below_PN: np.ndarray
    log_prior_P: np.ndarray
    sd_J: np.ndarray
    log_rss_T: np.ndarray
    log_weight_T: np.ndarray
    sd_given_TJ: np.ndarray

    def only(self, p: int) -> Noise:
        """Return the noise given one model, P = 1."""
        names = ("phi_P", "wander_P", "shrink_Pk", "filter_PN", "left_P", "diagonal_PN", "below_PN")
        names = (*names, "log_prior_P")
        return replace(self, **{name: getattr(self, name)[p : p + 1] for name in names})

    def log_weight(self, rss: np.ndarray) -> np.ndarray:
        """Return the log marginal likelihood (up to a constant) of sums of squares (P, ...)."""
        return self.of_rss(rss) + self.log_prior_P.reshape(-1, *(1,) * (rss.ndim - 1))

    def of_rss(self, rss: np.ndarray) -> np.ndarray:
        """Return the same given phi."""
        return np.interp(np.log(np.maximum(rss, 1e-300)), self.log_rss_T, self.log_weight_T)

    def sd_weights(self, rss: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return the posterior of the sd on `sd_J`, from the sums of squares of weighted nodes."""
        step = self.log_rss_T[1] - self.log_rss_T[0]
        index = np.round((np.log(np.maximum(rss, 1e-300)) - self.log_rss_T[0]) / step).astype(int)
        index = np.clip(index, 0, len(self.log_rss_T) - 1)
        return np.bincount(index, weight, len(self.log_rss_T)) @ self.sd_given_TJ

    def sd_at(self, rss: np.ndarray) -> np.ndarray:
        """Return the root mean square of sd given sums of squares, in their shape."""
        sd_T = np.sqrt(self.sd_given_TJ @ self.sd_J**2)
        return np.interp(np.log(np.maximum(rss, 1e-300)), self.log_rss_T, sd_T)

    def _times(self, a_N: np.ndarray) -> np.ndarray:
        """Return K^-1 a, shape (P, N)."""
        product = self.diagonal_PN * a_N
        product[:, 1:] += self.below_PN[:, 1:] * a_N[:-1]
        product[:, :-1] += self.below_PN[:, 1:] * a_N[1:]
        return product - (self.shrink_Pk * (a_N @ self.wave_Nk)) @ self.wave_Nk.T

    def quadratic(self, share: np.ndarray, y_N: np.ndarray) -> Quadratic:
        """Return the quadratic of every cell from its shares (..., N)."""
        g = share.reshape(-1, share.shape[-1])
        shape = (len(self.diagonal_PN), *share.shape[:-1])
        one_PN, y_PN = self._times(np.ones_like(y_N)), self._times(y_N)
        # As h = 1 - g, all but g^T K^-1 g are linear in g: matrix products, which are quick.
        gg = self.diagonal_PN @ (g * g).T
        if self.phi_P.any():
            gg += 2 * (self.below_PN[:, 1:] @ (g[:, 1:] * g[:, :-1]).T)
        if self.wander_P.any():
            gg -= self.shrink_Pk @ ((g @ self.wave_Nk) ** 2).T
        g1, gy = one_PN @ g.T, y_PN @ g.T
        one, y1, yy = (v[:, None] for v in (one_PN.sum(axis=1), one_PN @ y_N, y_PN @ y_N))
        fields = (gg, g1 - gg, one - 2 * g1 + gg, gy, y1 - gy, np.broadcast_to(yy, gg.shape))
        return Quadratic(*(v.reshape(shape) for v in fields))


def make_noise(sample: Sample, floor: float, prior: Prior) -> Noise:
    """Tabulate the models of the noise of a prior, for a sample whose sd is at least `floor`."""
    models = prior.noise
    phi_P, wander_P = (np.array([getattr(model, name) for model in models]) for name in ("phi", "wander"))
    rho_PN = phi_P[:, None] ** sample.gap_N
    rho_PN[:, 0] = 0.0  # the first row has no predecessor, whatever its gap
    inverse_PN = 1.0 / (1.0 - rho_PN**2)
    diagonal_PN = inverse_PN.copy()
    diagonal_PN[:, :-1] += (rho_PN**2 * inverse_PN)[:, 1:]
    diagonal_PN *= sample.weight_N
    root_N = np.sqrt(sample.weight_N)
    below_PN = -rho_PN * inverse_PN * root_N * np.concatenate([[0.0], root_N[:-1]])
    log_prior_P = 0.5 * np.log(inverse_PN).sum(axis=1) + np.log([model.weight for model in models])
    wave_Nk, shrink_Pk, filter_PN, left_P = _wander(sample.clock_N, root_N, wander_P)
    # log |K| of a wander is the sum of log(1 + W l), and shrink is W l / (1 + W l).
    log_prior_P = log_prior_P + 0.5 * np.log1p(-shrink_Pk).sum(axis=1)
    # The integral over sd depends on RSS alone: one table instead of an integral for every node. Beyond its
    # ends (an RSS of nearly 0, or of 4 for every point) it is constant.
    sd_J = np.geomspace(floor, max(SD_RANGE[1], 2 * floor), 80)
    log_rss_T = np.linspace(math.log(1e-3 * floor**2), math.log(4.0 * sample.n_points), 600)
    log_TJ = -sample.n_points * np.log(sd_J) - 0.5 * np.exp(log_rss_T)[:, None] / sd_J**2
    if prior.sd:
        median, log_sd = prior.sd
        log_TJ -= 0.5 * (np.log(sd_J / median) / log_sd) ** 2
    top_T = log_TJ.max(axis=1, keepdims=True)
    weight_TJ = np.exp(log_TJ - top_T)
    total_T = weight_TJ.sum(axis=1, keepdims=True)
    log_weight_T = (top_T + np.log(total_T))[:, 0]
    return Noise(
        phi_P,
        wander_P,
        wave_Nk,
        shrink_Pk,
        filter_PN,
        left_P,
        diagonal_PN,
        below_PN,
        log_prior_P,
        sd_J,
        log_rss_T,
        log_weight_T,
        weight_TJ / total_T,
    )


def _wander(
    clock_N: np.ndarray, root_N: np.ndarray, wander_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return `wave_Nk`, `shrink_Pk`, `filter_PN` and `left_P` of `Noise`; `root_N` are roots of weights."""
    n, p = len(clock_N), len(wander_P)
    if not wander_P.any():
        return np.zeros((n, 0)), np.zeros((p, 0)), np.zeros((p, n)), np.zeros(p)
    # Of rows that average several evaluations the noise is less, and the walk is not: both in units of noise.
    value_k, wave_Nk = np.linalg.eigh(np.minimum(clock_N[:, None], clock_N) * root_N[:, None] * root_N)
    kept = wander_P.max() * value_k > _LEAST
    value_k, wave_Nk = value_k[kept], wave_Nk[:, kept]
    shrink_Pk = wander_P[:, None] * value_k / (1.0 + wander_P[:, None] * value_k)
    # At the last evaluation the walk is W t^T K^-1 of the residuals (as of a Gaussian process).
    t_N = root_N * clock_N
    solved_PN = root_N * (t_N - (shrink_Pk * (t_N @ wave_Nk)) @ wave_Nk.T)
    filter_PN = wander_P[:, None] * solved_PN
    left_P = wander_P * clock_N[-1] - wander_P * (filter_PN @ clock_N)
    return root_N[:, None] * wave_Nk, shrink_Pk, filter_PN, np.maximum(left_P, 0.0)


def ar1(white: np.ndarray, rho: np.ndarray | float) -> np.ndarray:
    """Make independent noise (..., N) AR(1): `rho`, or rho[i], is the correlation of i with i - 1."""
    noise, rho_N = np.array(white), np.broadcast_to(rho, white.shape[-1:])
    for i in range(1, len(rho_N)):
        noise[..., i] = rho_N[i] * noise[..., i - 1] + math.sqrt(1 - rho_N[i] ** 2) * noise[..., i]
    return noise


class Quadratic(NamedTuple):
    """RSS = yy - 2 (R_0 hy + A gy) + R_0^2 hh + 2 R_0 A hg + A^2 gg; all fields shape (P, ...)."""

    gg: np.ndarray
    hg: np.ndarray
    hh: np.ndarray
    gy: np.ndarray
    hy: np.ndarray
    yy: np.ndarray

    def take(self, index: Any) -> Quadratic:
        """Return the quadratics of some cells."""
        return Quadratic(*(sums[index] for sums in self))

    def rss(self, R_0: np.ndarray | float, A: np.ndarray | float) -> np.ndarray:
        """Return the residual sum of squares at (R_0, A)."""
        square = self.yy - 2 * (R_0 * self.hy + A * self.gy)
        square = square + R_0 * R_0 * self.hh + 2 * R_0 * A * self.hg + A * A * self.gg
        return np.maximum(square, 0.0)

    def best(self, r0: float | None) -> tuple[np.ndarray, np.ndarray]:
        """Return (R_0, A) of the least RSS within 0 <= R_0 <= A <= 1, or of A alone where `r0` is given."""
        if r0 is not None:
            A = np.clip((self.gy - r0 * self.hg) / np.maximum(self.gg, _TINY), r0, 1.0)
            return np.full_like(A, r0), A
        # Where the share hardly differs between rows g and h are collinear: no unconstrained minimum.
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
        """Return the best of the edges A = R_0, A = 1 and R_0 = 0."""
        level = np.clip((self.gy + self.hy) / (self.gg + 2 * self.hg + self.hh), 0.0, 1.0)
        one, zero = np.ones_like(level), np.zeros_like(level)
        R_0 = np.stack([level, np.clip((self.hy - self.hg) / np.maximum(self.hh, _TINY), 0.0, 1.0), zero])
        A = np.stack([level, one, np.clip(self.gy / np.maximum(self.gg, _TINY), 0.0, 1.0)])
        edge = np.argmin(self.rss(R_0, A), axis=0)[None]
        return np.take_along_axis(R_0, edge, 0)[0], np.take_along_axis(A, edge, 0)[0]
