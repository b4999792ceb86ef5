"""The noise of evaluations, integrated out: unknown in size, and correlated or with a walk.

    e ~ N(0, sd^2 K)
    K[i, j] = phi^(distance from i to j in usual gaps between evaluations)          correlated
    K = I + W T, T[i, j] = min(t_i, t_j), t = `Sample.clock_N`                      a wander of variance W
    K = I + W T, T[i, j] = m^2 (3 M - m) / 2, m, M of t_i, t_j of `Sample.even_N`   a trend of variance W
    K = I + W T, T[i, j] = d_i d_j, d = `NoiseModel.changed`                        a change of variance W
    RSS = (y - R_0 h - A g)^T K^-1 (y - R_0 h - A g)        g = share of the gain reached, h = 1 - g

The inverse of the correlation is tridiagonal. T is the covariance of a random walk, or of a walk whose slope
is one, and is 1 at the last evaluation. With T = U diag(l) U^T the inverse of K is
I - U diag(W l / (1 + W l)) U^T for every W, and only the few large l matter. Either way RSS is a quadratic in
(R_0, A) that takes one pass over the evaluations. Given its curve, the walk at the last evaluation is normal,
with a mean that is linear in the residuals (as in a Gaussian process).

Shapes: P models of the noise, J values of sd, N points, k columns of U, s = (walk, its slope) at the last
evaluation, T entries of a table over the sum of squares, and `...` any grid of (log B, log C_mid); cells, a
and r as in `scalerl.curve.posterior`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from scalerl.curve.prior import SD_RANGE, NoiseModel, Prior
from scalerl.curve.sample import Sample
from scalerl.quantiles import normal_quantiles

_TINY = 1e-300
_LEAST = 0.01  # variance, in that of one evaluation, below which a wave of a walk is left out
_SOON = 0.3  # compute ahead, as a share of the run's, at which the variance from a changing slope is exact
_EVEN = 4096  # quantiles that stand for a normal distribution
# Multiples of these, modulo 1, fill a cube evenly (Roberts, 2018), with fewer gaps than random draws leave.
_RECURRENCE = 0.8191725133961645, 0.6710436067037893, 0.5497004779019703


@dataclass(frozen=True)
class Walks:
    """The walks of the noise models: variances `wander_P` and `trend_P`, in that of one evaluation.

    They reduce the inverse of K by U diag(`shrink_Pk`) U^T, where U is `wave_Nk`. At the last evaluation the
    expected (walk, slope) is `filter_PsN` times the residuals; its covariance is `left_Pss` sd^2.
    """

    wander_P: np.ndarray
    trend_P: np.ndarray
    wave_Nk: np.ndarray
    shrink_Pk: np.ndarray
    filter_PsN: np.ndarray
    left_Pss: np.ndarray

    def only(self, models: Sequence[int] | np.ndarray) -> Walks:
        """Return the walks of some models, with only the waves that these use."""
        names = ("wander_P", "trend_P", "filter_PsN", "left_Pss")
        kept = {name: getattr(self, name)[models] for name in names}
        shrink_Pk = self.shrink_Pk[models]
        had = shrink_Pk.any(axis=0)
        return replace(self, wave_Nk=self.wave_Nk[:, had], shrink_Pk=shrink_Pk[:, had], **kept)

    def of_model(self, model_cells: np.ndarray) -> np.ndarray:
        """Return the indices of the cells whose model has a walk."""
        return np.flatnonzero(np.abs(self.filter_PsN).sum(axis=(1, 2))[model_cells])

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the expected (walk, slope) at the last evaluation for residuals (..., N), (2, P, ...)."""
        p, s, n = self.filter_PsN.shape
        found = self.filter_PsN.swapaxes(0, 1).reshape(s * p, n) @ values.reshape(-1, n).T
        return found.reshape(s, p, *values.shape[:-1])

    def expected(
        self, model_cells: np.ndarray, y_N: np.ndarray, of_g: np.ndarray, A: np.ndarray, R_0: np.ndarray
    ) -> np.ndarray:
        """Return the expected (walk, slope) at the last evaluation, (2, cells, a, r).

        `of_g` is `of` applied to the share of the gain, (2, cells); A is (cells, a), R_0 (cells, a, r).
        """
        of_g, wide = of_g[..., None, None], (slice(None), model_cells, None, None)
        return self.of(y_N)[wide] - A[:, :, None] * of_g - R_0 * (self.of(np.ones_like(y_N))[wide] - of_g)

    def drawn(
        self, model_cells: np.ndarray, place_cells: np.ndarray, expected: np.ndarray, sd: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the walk, its slope, and how far the wander drifts after it, one quantile for each node.

        `expected` is (2, cells, a, r), for cells whose model has a walk; `sd` is that of one evaluation,
        (cells, a, r). `place_cells` numbers the cells by their place in the grid.
        """
        # The quantiles are even over the nodes and independent of one another. They follow the place in the
        # grid: rounding may add or drop a cell of next to no weight, and must not shift all the others.
        k = place_cells[:, None, None] * sd[0].size + np.arange(sd[0].size).reshape(sd.shape[1:])
        places = (k * step for step in _RECURRENCE)
        here, turn, ahead = (_even_normal()[((at - np.floor(at)) * _EVEN).astype(int)] for at in places)
        left_css = self.left_Pss[model_cells]
        var_c, both_c = np.maximum(left_css[:, 0, 0], 0.0), left_css[:, 0, 1]
        given_c = np.maximum(left_css[:, 1, 1] - both_c**2 / np.maximum(var_c, 1e-12), 0.0)
        given_c = given_c + _SOON * self.trend_P[model_cells]
        by_walk_c = both_c / np.sqrt(np.maximum(var_c, 1e-12))
        wide = (slice(None), None, None)
        walk = expected[0] + sd * np.sqrt(var_c)[wide] * here
        slope = expected[1] + sd * (by_walk_c[wide] * here + np.sqrt(given_c)[wide] * turn)
        return walk, slope, sd * np.sqrt(self.wander_P[model_cells])[wide] * ahead


@dataclass(frozen=True)
class Noise:
    """The noise integrated out: the log of the integral over sd, as a function of the sum of squares.

    `log_rss_T` and `log_weight_T` tabulate it; `sd_given_TJ` is the posterior of the nodes `sd_J`.
    `log_prior_P` is the log prior of a model, less log |K| / 2. The inverse of K is tridiagonal, with
    `diagonal_PN` and `below_PN` (the entry (i, i - 1) at i, 0 at i = 0), less the part of `walks`.
    """

    phi_P: np.ndarray
    walks: Walks
    diagonal_PN: np.ndarray
    below_PN: np.ndarray
    log_prior_P: np.ndarray
    sd_J: np.ndarray
    log_rss_T: np.ndarray
    log_weight_T: np.ndarray
    sd_given_TJ: np.ndarray

    def only(self, models: Sequence[int] | np.ndarray) -> Noise:
        """Return the noise with only some of its models."""
        names = ("phi_P", "diagonal_PN", "below_PN", "log_prior_P")
        kept = {name: getattr(self, name)[models] for name in names}
        return replace(self, walks=self.walks.only(models), **kept)

    def log_weight(self, rss: np.ndarray) -> np.ndarray:
        """Return the log marginal likelihood (up to a constant) of sums of squares (P, ...)."""
        return self.weight_at(self.place(rss)) + self.log_prior_P.reshape(-1, *(1,) * (rss.ndim - 1))

    def weight_at(self, place: np.ndarray) -> np.ndarray:
        """Return the log of the integral over sd at places in the table, without `log_prior_P`."""
        return self._looked_up(self.log_weight_T, place)

    def sd_weights(self, place: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return the posterior of the sd on `sd_J`, given the places in the table and weights of nodes."""
        return np.bincount((place + 0.5).astype(int), weight, len(self.log_rss_T)) @ self.sd_given_TJ

    def sd_at(self, place: np.ndarray) -> np.ndarray:
        """Return the root mean square of sd at places in the table, in their shape."""
        return self._looked_up(np.sqrt(self.sd_given_TJ @ self.sd_J**2), place)

    def place(self, rss: np.ndarray) -> np.ndarray:
        """Return where sums of squares lie in the table, 0 to T - 1."""
        first, each = self.log_rss_T[0], self.log_rss_T[1] - self.log_rss_T[0]
        place = np.log(np.maximum(rss, math.exp(first)))
        place -= first
        place /= each
        return np.minimum(place, len(self.log_rss_T) - 1.0, out=place)

    def _looked_up(self, value_T: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Interpolate in the table, whose places are evenly spaced: several times faster than `np.interp`."""
        index = np.minimum(place.astype(int), len(value_T) - 2)
        return value_T[index] + (place - index) * np.diff(value_T)[index]

    def _times(self, a_N: np.ndarray) -> np.ndarray:
        """Return K^-1 a, shape (P, N)."""
        product = self.diagonal_PN * a_N
        product[:, 1:] += self.below_PN[:, 1:] * a_N[:-1]
        product[:, :-1] += self.below_PN[:, 1:] * a_N[1:]
        return product - (self.walks.shrink_Pk * (a_N @ self.walks.wave_Nk)) @ self.walks.wave_Nk.T

    def quadratic(self, share: np.ndarray, y_N: np.ndarray) -> Quadratic:
        """Return the quadratic of every cell from its shares (..., N)."""
        g = share.reshape(-1, share.shape[-1])
        p, shape = len(self.phi_P), (len(self.phi_P), *share.shape[:-1])
        one_PN, y_PN = self._times(np.ones_like(y_N)), self._times(y_N)
        # As h = 1 - g, everything but g^T K^-1 g is linear in g: matrix products, which are fast.
        g1, gy, waves = np.split(np.concatenate([one_PN, y_PN, self.walks.wave_Nk.T]) @ g.T, [p, 2 * p])
        _, first, alike_P = np.unique(self.phi_P, return_index=True, return_inverse=True)
        gg = self.diagonal_PN[first] @ (g * g).T
        if self.phi_P.any():
            gg += 2 * (self.below_PN[first, 1:] @ (g[:, 1:] * g[:, :-1]).T)
        gg = gg[alike_P]
        if len(waves):
            gg -= self.walks.shrink_Pk @ np.square(waves, out=waves)
        one, y1, yy = (v[:, None] for v in (one_PN.sum(axis=1), one_PN @ y_N, y_PN @ y_N))
        fields = (gg, g1 - gg, one - 2 * g1 + gg, gy, y1 - gy, np.broadcast_to(yy, gg.shape))
        return Quadratic(*(v.reshape(shape) for v in fields))


def make_noise(sample: Sample, floor: float, prior: Prior, changes: Sequence[NoiseModel] = ()) -> Noise:
    """Tabulate the noise models of a prior, then `changes`, for a sample whose sd is at least `floor`."""
    models = (*prior.noise, *changes)
    phi_P = np.array([model.phi for model in models])
    rho_PN = phi_P[:, None] ** sample.gap_N
    rho_PN[:, 0] = 0.0  # the first row has no predecessor, whatever its gap
    inverse_PN = 1.0 / (1.0 - rho_PN**2)
    diagonal_PN = inverse_PN.copy()
    diagonal_PN[:, :-1] += (rho_PN**2 * inverse_PN)[:, 1:]
    diagonal_PN *= sample.weight_N
    root_N = np.sqrt(sample.weight_N)
    below_PN = -rho_PN * inverse_PN * root_N * np.concatenate([[0.0], root_N[:-1]])
    log_prior_P = 0.5 * np.log(inverse_PN).sum(axis=1) + np.log([model.weight for model in models])
    walks = _with_changes(make_walks(sample, models), sample, models, diagonal_PN, below_PN)
    # log |K| of a wander is the sum of log(1 + W l), and shrink is W l / (1 + W l).
    log_prior_P = log_prior_P + 0.5 * np.log1p(-walks.shrink_Pk).sum(axis=1)
    sd_J, log_rss_T, log_weight_T, sd_given_TJ = _table(sample.n_points, floor, prior.sd)
    return Noise(phi_P, walks, diagonal_PN, below_PN, log_prior_P, sd_J, log_rss_T, log_weight_T, sd_given_TJ)


@functools.lru_cache(maxsize=8)
def _table(
    n_points: int, floor: float, prior_sd: tuple[float, float] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return `sd_J`, `log_rss_T`, `log_weight_T` and `sd_given_TJ` of `Noise`, cached and shared."""
    # The integral over sd depends on RSS alone: one table instead of an integral for every node. Beyond its
    # ends (an RSS of nearly 0, or of 4 for every point) it is constant.
    sd_J = np.geomspace(floor, max(SD_RANGE[1], 2 * floor), 80)
    log_rss_T = np.linspace(math.log(1e-3 * floor**2), math.log(4.0 * n_points), 600)
    log_TJ = -n_points * np.log(sd_J) - 0.5 * np.exp(log_rss_T)[:, None] / sd_J**2
    if prior_sd:
        median, log_sd = prior_sd
        log_TJ -= 0.5 * (np.log(sd_J / median) / log_sd) ** 2
    top_T = log_TJ.max(axis=1, keepdims=True)
    weight_TJ = np.exp(log_TJ - top_T)
    total_T = weight_TJ.sum(axis=1, keepdims=True)
    return sd_J, log_rss_T, (top_T + np.log(total_T))[:, 0], weight_TJ / total_T


def make_walks(sample: Sample, models: Sequence[NoiseModel]) -> Walks:
    """Return the walks of noise models, for the rows of a sample."""
    n, p = len(sample), len(models)
    variances = {name: np.array([getattr(model, name) for model in models]) for name in ("wander", "trend")}
    # In units of noise: a row that averages several evaluations has less noise, but the whole walk.
    root_N = np.sqrt(sample.weight_N)
    wave_Nk, shrink_Pk = np.zeros((n, 0)), np.zeros((p, 0))
    filter_PsN, left_Pss = np.zeros((p, 2, n)), np.zeros((p, 2, 2))
    for name, covariance in (("wander", _wander), ("trend", _trend)):
        variance_P = variances[name]
        if not variance_P.any():
            continue
        value_k, U_Nk, last_sN, end_ss = _waves(covariance, sample)
        kept = variance_P.max() * value_k > _LEAST
        value_k, U_Nk = value_k[kept], U_Nk[:, kept]
        own_Pk = variance_P[:, None] * value_k / (1.0 + variance_P[:, None] * value_k)
        seen_sN = root_N * last_sN
        solved_PsN = seen_sN - ((seen_sN @ U_Nk) * own_Pk[:, None]) @ U_Nk.T
        own_PsN = variance_P[:, None, None] * solved_PsN * root_N
        filter_PsN += own_PsN
        left_Pss += variance_P[:, None, None] * (end_ss - own_PsN @ last_sN.T)
        wave_Nk = np.concatenate([wave_Nk, root_N[:, None] * U_Nk], axis=1)
        shrink_Pk = np.concatenate([shrink_Pk, own_Pk], axis=1)
    return Walks(variances["wander"], variances["trend"], wave_Nk, shrink_Pk, filter_PsN, left_Pss)


@functools.lru_cache(maxsize=4)
def _waves(
    covariance: Callable[[Sample], tuple[np.ndarray, np.ndarray, np.ndarray]], sample: Sample
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors of T in units of noise, and the covariances at the last row.

    One fit needs them for several sets of models, and they take most of the time of a fit of 400 rows.
    """
    T_NN, last_sN, end_ss = covariance(sample)
    root_N = np.sqrt(sample.weight_N)
    value_k, U_Nk = np.linalg.eigh(T_NN * root_N[:, None] * root_N)
    return value_k, U_Nk, last_sN, end_ss


def _with_changes(
    walks: Walks,
    sample: Sample,
    models: Sequence[NoiseModel],
    diagonal_PN: np.ndarray,
    below_PN: np.ndarray,
) -> Walks:
    """Add the changes of level: each of rank one, beside any correlation, permanent and without a slope."""
    changed = [at for at, model in enumerate(models) if model.change]
    if not changed:
        return walks
    level_cN = np.stack([models[at].changed(sample.log_c_N) for at in changed])
    seen_cN = diagonal_PN[changed] * level_cN
    seen_cN[:, 1:] += below_PN[changed, 1:] * level_cN[:, :-1]
    seen_cN[:, :-1] += below_PN[changed, 1:] * level_cN[:, 1:]
    total_c, variance_c = np.sum(level_cN * seen_cN, axis=1), np.array([models[at].change for at in changed])
    own_c = variance_c * total_c / (1.0 + variance_c * total_c)
    walks.filter_PsN[changed, 0] = (own_c / total_c)[:, None] * seen_cN
    walks.left_Pss[changed, 0, 0] = variance_c * (1.0 - own_c)
    own_Pc = np.zeros((len(models), len(changed)))
    own_Pc[changed, np.arange(len(changed))] = own_c
    return replace(
        walks,
        wave_Nk=np.concatenate([walks.wave_Nk, (seen_cN / np.sqrt(total_c)[:, None]).T], axis=1),
        shrink_Pk=np.concatenate([walks.shrink_Pk, own_Pc], axis=1),
    )


def _wander(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return T, the covariance of (walk, slope) at the last row with all rows, and that of the two."""
    t_N = sample.clock_N
    return np.minimum(t_N[:, None], t_N), np.stack([t_N, 0.0 * t_N]), np.diag([1.0, 0.0])


def _trend(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the same for a trend: the integral of a walk, with three times its variance."""
    t_N = sample.even_N
    first_NN, later_NN = np.minimum(t_N[:, None], t_N), np.maximum(t_N[:, None], t_N)
    last_sN = np.stack([0.5 * t_N**2 * (3.0 - t_N), 1.5 * t_N**2])
    return 0.5 * first_NN**2 * (3.0 * later_NN - first_NN), last_sN, np.array([[1.0, 1.5], [1.5, 3.0]])


@functools.cache
def _even_normal() -> np.ndarray:
    """Return the quantiles of a normal distribution at even probabilities."""
    return normal_quantiles((np.arange(_EVEN) + 0.5) / _EVEN)


def ar1(white: np.ndarray, rho: np.ndarray | float) -> np.ndarray:
    """Turn independent noise (..., N) into AR(1) noise; `rho`, or rho[i], correlates i with i - 1."""
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
        # Terms without R_0 first: their arrays lack the axis of R_0's nodes.
        of_A, cross = A * (A * self.gg - 2 * self.gy) + self.yy, 2 * (A * self.hg - self.hy)
        return np.maximum(R_0 * (R_0 * self.hh + cross) + of_A, 0.0)

    def best(self, r0: float | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the (R_0, A) of least RSS with 0 <= R_0 <= A <= 1; only A is free where `r0` is given."""
        if r0 is not None:
            A = np.clip((self.gy - r0 * self.hg) / np.maximum(self.gg, _TINY), r0, 1.0)
            return np.full_like(A, r0), A
        # Where the share hardly differs between rows, g and h are collinear: no unconstrained minimum.
        det = self.gg * self.hh - self.hg**2
        sound = det > 1e-12 * self.gg * self.hh
        det = np.where(sound, det, 1.0)
        R_0 = (self.hy * self.gg - self.gy * self.hg) / det
        A = (self.gy * self.hh - self.hy * self.hg) / det
        outside = ~(sound & (R_0 >= 0) & (A >= R_0) & (A <= 1))
        if outside.any():
            index, R_0, A = np.flatnonzero(outside), R_0.ravel(), A.ravel()
            cells = Quadratic(*(sums.ravel()[index] for sums in self))
            R_0[index], A[index] = cells._best_on_edge()
        return R_0.reshape(outside.shape), A.reshape(outside.shape)

    def _best_on_edge(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the best of the edges A = R_0, A = 1 and R_0 = 0."""
        level = np.clip((self.gy + self.hy) / (self.gg + 2 * self.hg + self.hh), 0.0, 1.0)
        one, zero = np.ones_like(level), np.zeros_like(level)
        R_0 = np.stack([level, np.clip((self.hy - self.hg) / np.maximum(self.hh, _TINY), 0.0, 1.0), zero])
        A = np.stack([level, one, np.clip(self.gy / np.maximum(self.gg, _TINY), 0.0, 1.0)])
        edge = np.argmin(self.rss(R_0, A), axis=0)[None]
        return np.take_along_axis(R_0, edge, 0)[0], np.take_along_axis(A, edge, 0)[0]
