"""What the points say about the curve: a posterior by deterministic quadrature, averaged over families.

    y_i = R(C_i; family, A, B, C_mid, R_0) + e_i        e ~ N(0, sd^2 K_phi)       K_phi[i, j] = phi^distance

Priors, flat and stated: A in [0, 1]; R_0 in [0, A] (or given); log B over B in [0.3, 6]; log C_mid from a
tenth of the smallest to ten times the largest compute; log sd from the evaluation noise that is known (else
0.0005) to 0.15; the families alike; and falling, phi in {0, .2, .4, .6, .8} with weights 1 - phi.
For a family and (B, C_mid, phi) the sum of squares is a quadratic in (R_0, A), and the integral over sd
depends on the sum of squares alone, so nothing is sampled: the nodes are laid where the posterior has mass,
and weighed.

Shapes: P correlations, M values of log C_mid, K of log B, cells = what is kept of P x M x K over all
families, a = nodes of A, r = nodes of R_0 for each A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import FAMILIES, Family, log_compute
from scalerl.curve.least_squares import least_squares
from scalerl.curve.noise import PHI, Noise, make_noise
from scalerl.curve.quadratic import Quadratic, quadratic, share_at
from scalerl.curve.sample import Sample

B_RANGE = (0.3, 6.0)
C_MID_FACTOR = 10.0
_LOG_B = (math.log(B_RANGE[0]), math.log(B_RANGE[1]))
_CUT = 11.0  # log-density below the best at which a node is not worth its place (1.7e-5)
_ROWS, _COLUMNS, _A_NODES, _R_0_NODES = 28, 13, 8, 5


@dataclass(frozen=True)
class Draws:
    """Curves of equal weight, all arrays (n,): `family_n` is an index into `families`."""

    families: tuple[Family, ...]
    family_n: np.ndarray
    A_n: np.ndarray
    log_b_n: np.ndarray
    log_mid_n: np.ndarray
    R_0_n: np.ndarray

    def curves_at(self, compute_M: np.ndarray) -> np.ndarray:
        """The mean curves at computes (M,), shape (n, M)."""
        x = log_compute(np.asarray(compute_M, dtype=float)) - self.log_mid_n[:, None]
        b, share = np.exp(self.log_b_n)[:, None], np.empty_like(x)
        for index, family in enumerate(self.families):
            mine = self.family_n == index
            share[mine] = family.share(b[mine], x[mine])
        return self.R_0_n[:, None] + (self.A_n - self.R_0_n)[:, None] * share


@dataclass(frozen=True)
class Posterior:
    """Weighed nodes. `weight` sums to 1; `weight`, its logarithm and `R_0` have the shape (cells, a, r)."""

    family_cells: np.ndarray
    log_b_cells: np.ndarray
    log_mid_cells: np.ndarray
    phi_cells: np.ndarray
    A: np.ndarray
    R_0: np.ndarray
    log_weight: np.ndarray
    weight: np.ndarray
    sd_J: np.ndarray
    sd_weight_J: np.ndarray
    families: tuple[Family, ...]

    @property
    def weight_cells(self) -> np.ndarray:
        """Weight of every cell."""
        return self.weight.sum(axis=(1, 2))

    def family_weights(self) -> dict[str, float]:
        """Posterior probability of every family."""
        mass = np.bincount(self.family_cells, self.weight_cells, len(self.families))
        return {family.name: float(m) for family, m in zip(self.families, mass, strict=True)}

    def only(self, family: int) -> Posterior:
        """The same, given one family, however little weight it has."""
        return self._take(np.flatnonzero(self.family_cells == family))

    def _take(self, keep: np.ndarray) -> Posterior:
        log_weight = _normalised(self.log_weight[keep])
        return Posterior(
            self.family_cells[keep],
            self.log_b_cells[keep],
            self.log_mid_cells[keep],
            self.phi_cells[keep],
            self.A[keep],
            self.R_0[keep],
            log_weight,
            np.exp(log_weight),
            self.sd_J,
            self.sd_weight_J,
            self.families,
        )

    def heaviest(self, mass: float) -> Posterior:
        """The fewest cells that hold `mass` of the posterior, for what is asked at many computes."""
        order = np.argsort(-self.weight_cells, kind="stable")
        held = np.cumsum(self.weight_cells[order])
        return self._take(order[: int(np.searchsorted(held, mass)) + 1])

    def draws(self, n: int, seed: int = 0) -> Draws:
        """n curves of equal weight: a systematic sample of the nodes, shuffled by `seed` (for pairing)."""
        held = np.cumsum(self.weight.ravel())
        at = np.searchsorted(held, (np.arange(n) + 0.5) / n * held[-1])
        cell, a, r = np.unravel_index(np.random.default_rng(seed).permutation(at), self.weight.shape)
        return Draws(
            self.families,
            self.family_cells[cell],
            self.A[cell, a],
            self.log_b_cells[cell],
            self.log_mid_cells[cell],
            self.R_0[cell, a, r],
        )

    def share_cells(self, compute: float) -> np.ndarray:
        """Share of the gain at one compute, for every cell."""
        x = float(log_compute(np.asarray(compute))) - self.log_mid_cells
        b = np.exp(self.log_b_cells)
        out = np.empty_like(x)
        for index, family in enumerate(self.families):
            mine = self.family_cells == index
            out[mine] = family.share(b[mine], x[mine])
        return out

    def curve_at(self, compute: float) -> np.ndarray:
        """The mean curve at one compute for every node, shape (cells, a, r)."""
        g = self.share_cells(compute)[:, None, None]
        return self.R_0 * (1 - g) + self.A[:, :, None] * g

    def compute_to(self, target: float) -> np.ndarray:
        """Compute at which every node's curve reaches `target`; 0 below R_0, infinite above A."""
        A = np.broadcast_to(self.A[:, :, None], self.R_0.shape)
        share = np.clip((target - self.R_0) / np.maximum(A - self.R_0, 1e-12), 1e-12, 1 - 1e-12)
        cells = np.broadcast_to(np.arange(len(self.family_cells))[:, None, None], share.shape)
        b, x = np.exp(self.log_b_cells)[cells], np.empty(share.shape)
        for index, family in enumerate(self.families):
            mine = self.family_cells == index
            x[mine] = family.inverse(b[mine], share[mine])
        log_c = self.log_mid_cells[cells] + x
        compute = np.exp(np.clip(log_c, -700, 700))
        return np.where(target <= self.R_0, 0.0, np.where(target >= A, np.inf, compute))


def posterior(sample: Sample, floor: float, families: tuple[Family, ...] = FAMILIES) -> Posterior:
    """Integrate over every family, and normalise over all of them."""
    noise = make_noise(sample, floor)
    parts = [_family_nodes(sample, family, noise) for family in families]
    rss = np.concatenate([part.rss.ravel() for part in parts])
    log_weight = _normalised(np.concatenate([part.log_weight for part in parts]))
    weight = np.exp(log_weight)
    return Posterior(
        np.concatenate([np.full(len(part.log_b), i) for i, part in enumerate(parts)]),
        np.concatenate([part.log_b for part in parts]),
        np.concatenate([part.log_mid for part in parts]),
        np.concatenate([part.phi for part in parts]),
        np.concatenate([part.A for part in parts]),
        np.concatenate([part.R_0 for part in parts]),
        log_weight,
        weight,
        noise.sd_J,
        noise.sd_weights(rss, weight.ravel()),
        families,
    )


def _normalised(log_weight: np.ndarray) -> np.ndarray:
    top = log_weight.max()
    return log_weight - top - np.log(np.exp(log_weight - top).sum())


@dataclass(frozen=True)
class _Nodes:
    log_b: np.ndarray
    log_mid: np.ndarray
    phi: np.ndarray
    A: np.ndarray
    R_0: np.ndarray
    log_weight: np.ndarray
    rss: np.ndarray


def _family_nodes(sample: Sample, family: Family, noise: Noise) -> _Nodes:
    """Nodes of one family: rows of C_mid where there is mass, in every row B where there is mass."""
    log_lo, log_hi = sample.log_c_range
    box = (log_lo - math.log(C_MID_FACTOR), log_hi + math.log(C_MID_FACTOR))
    centre = least_squares(sample, family, log_b_range=_LOG_B).curve
    seek = np.unique(np.clip(math.log(centre.C_mid) + _offsets(0.004, 13), *box))
    _, _, level_M = _row_extent(sample, family, noise, seek)
    low, high = _extent(seek[None], level_M[None])
    log_mid_M = np.linspace(low[0], high[0], _ROWS)
    low_M, high_M, _ = _row_extent(sample, family, noise, log_mid_M)
    fraction_K = np.linspace(0, 1, _COLUMNS)
    log_b_MK = low_M[:, None] + (high_M - low_M)[:, None] * fraction_K
    area_MK = (log_mid_M[1] - log_mid_M[0]) * (high_M - low_M)[:, None] / (_COLUMNS - 1)
    area_MK = area_MK * _trapezoid(_ROWS)[:, None] * _trapezoid(_COLUMNS)
    q = quadratic(
        share_at(family, log_b_MK, np.broadcast_to(log_mid_M[:, None], log_b_MK.shape), sample.log_c_N),
        sample.y_N,
        noise.precision,
    )
    return _linear_nodes(sample, noise, q, log_b_MK, log_mid_M, area_MK)


def _linear_nodes(
    sample: Sample,
    noise: Noise,
    q: Quadratic,
    log_b_MK: np.ndarray,
    log_mid_M: np.ndarray,
    area_MK: np.ndarray,
) -> _Nodes:
    """Nodes of (R_0, A) in every cell worth it, placed by the cell's own quadratic."""
    best = q.rss(*q.best(sample.r0)) + sample.within
    level = noise.log_weight(best) + np.log(np.maximum(area_MK, 1e-300))
    p, m, k = np.nonzero(level > level.max() - _CUT)
    cell = Quadratic(*(getattr(q, name)[p, m, k] for name in ("gg", "hg", "hh", "gy", "hy", "yy")))
    _, A_best = cell.best(sample.r0)
    dof = max(sample.n_points - 2 - sample.n_linear, 1)
    sd = np.sqrt(np.maximum(best[p, m, k] / dof, noise.sd_J[0] ** 2))
    tiny = 1e-12
    spread_R_0 = sd / np.sqrt(np.maximum(cell.hh, tiny))
    information = cell.gg if sample.r0 is not None else cell.gg - cell.hg**2 / np.maximum(cell.hh, tiny)
    spread_A = sd / np.sqrt(np.maximum(information, tiny))
    A, dA = _gauss_legendre(A_best, spread_A, np.full_like(A_best, sample.r0 or 0.0), 1.0, _A_NODES)
    if sample.r0 is None:
        centre = np.clip((cell.hy[:, None] - A * cell.hg[:, None]) / np.maximum(cell.hh[:, None], tiny), 0, A)
        spread = np.broadcast_to(spread_R_0[:, None], A.shape)
        R_0, dR_0 = _gauss_legendre(centre, spread, np.zeros_like(A), A, _R_0_NODES)
    else:
        R_0, dR_0 = np.full((*A.shape, 1), sample.r0), np.ones((*A.shape, 1))
    wide = Quadratic(*(v[:, None, None] for v in (cell.gg, cell.hg, cell.hh, cell.gy, cell.hy, cell.yy)))
    rss = wide.rss(R_0, A[:, :, None]) + sample.within
    volume = area_MK[m, k][:, None, None] * dA[:, :, None] * dR_0
    log_weight = noise.of_rss(rss) + noise.log_prior_P[p][:, None, None]
    log_weight = log_weight + np.log(np.maximum(volume, 1e-300))
    return _Nodes(log_b_MK[m, k], log_mid_M[m], np.array(PHI)[p], A, R_0, log_weight, rss)


def _gauss_legendre(
    centre: np.ndarray, spread: np.ndarray, low: np.ndarray, high: np.ndarray | float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """n nodes and weights over centre +- 4.5 spread within [low, high]; adds a last axis."""
    x, w = np.polynomial.legendre.leggauss(n)
    start = np.clip(centre - 4.5 * spread, low, high)[..., None]
    stop = np.clip(centre + 4.5 * spread, low, high)[..., None]
    return start + (stop - start) * (x + 1) / 2, (stop - start) * w / 2


def _row_extent(
    sample: Sample, family: Family, noise: Noise, log_mid_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every C_mid the range of log B that has mass, and the best level in it."""
    nodes = np.broadcast_to(np.linspace(*_LOG_B, 15), (len(log_mid_M), 15))
    step = (_LOG_B[1] - _LOG_B[0]) / 14
    best_M = np.zeros(len(log_mid_M))
    for _ in range(3):  # to 1/64 of the first step
        level = _level(sample, family, noise, nodes, log_mid_M)
        best_M = np.take_along_axis(nodes, level.argmax(axis=1)[:, None], 1)[:, 0]
        nodes = np.clip(best_M[:, None] + np.linspace(-step, step, 9), *_LOG_B)
        step /= 4
    nodes = np.sort(np.clip(best_M[:, None] + _offsets(0.01, 10), *_LOG_B), axis=1)
    level = _level(sample, family, noise, nodes, log_mid_M)
    low_M, high_M = _extent(nodes, level)
    return low_M, high_M, level.max(axis=1)


def _level(
    sample: Sample, family: Family, noise: Noise, log_b_MK: np.ndarray, log_mid_M: np.ndarray
) -> np.ndarray:
    """Log-likelihood of every cell at its best (R_0, A) and phi."""
    log_mid = np.broadcast_to(log_mid_M[:, None], log_b_MK.shape)
    q = quadratic(share_at(family, log_b_MK, log_mid, sample.log_c_N), sample.y_N, noise.precision)
    return noise.log_weight(q.rss(*q.best(sample.r0)) + sample.within).max(axis=0)


def _offsets(first: float, n: int) -> np.ndarray:
    """0 and +- first * 2^k: near and far alike."""
    far = first * 2.0 ** np.arange(n)
    return np.concatenate([-far[::-1], [0.0], far])


def _extent(nodes: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per row, the nodes just outside of those within `_CUT` of the row's best."""
    worth = level > level.max(axis=1, keepdims=True) - _CUT
    first = np.maximum(worth.argmax(axis=1) - 1, 0)
    last = np.minimum(nodes.shape[1] - worth[:, ::-1].argmax(axis=1), nodes.shape[1] - 1)
    rows = np.arange(len(nodes))
    return nodes[rows, first], nodes[rows, last]


def _trapezoid(n: int) -> np.ndarray:
    weight = np.ones(n)
    weight[[0, -1]] = 0.5
    return weight
