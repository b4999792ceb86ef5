"""Where the posterior of one family has mass: nodes in (phi, C_mid, B, A, R_0), and their weights.

For every C_mid of a row of values, and every correlation phi, the range of log B that has mass is found, and
nodes are laid evenly over it; (R_0, A) follow from the quadratic of every such cell. Evenly spaced nodes a
standard deviation apart integrate a Gaussian to nine digits, so that few of them are enough.

Shapes: P correlations, M values of log C_mid, K of log B; cells = what is kept of P x M x K; a = nodes of A,
r = nodes of R_0 for each A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.noise import Noise
from scalerl.curve.quadratic import Quadratic
from scalerl.curve.sample import Sample

B_RANGE = (0.3, 6.0)
PRIOR_REACH = 10.0
"""C_mid lies from the smallest positive compute over this to the largest compute times this."""
AHEAD = 0.5
"""The prior is flat over what the evaluations measure, and would measure in this much more of the compute."""
LOG_B = (math.log(B_RANGE[0]), math.log(B_RANGE[1]))
_CUT = 10.5  # log-density below the best at which a node is not worth its place (3e-5)
_ROWS, _COLUMNS, _A_NODES, _R_0_NODES = 25, 9, 6, 5
_AHEAD_NODES = 6  # stand for the evaluations to come: the curve is smooth there
_REACH = 4.5  # standard deviations that nodes of A and R_0 span to either side


@dataclass(frozen=True)
class Nodes:
    """Unnormalised: `log_weight`, `rss`, `R_0` are (cells, a, r), `A` is (cells, a), the rest (cells,)."""

    log_b: np.ndarray
    log_mid: np.ndarray
    phi: np.ndarray
    A: np.ndarray
    R_0: np.ndarray
    log_weight: np.ndarray
    rss: np.ndarray


def family_nodes(sample: Sample, family: Family, noise: Noise, log_mid: float) -> Nodes:
    """Nodes of one family, found from `log_mid`, the log C_mid of its least-squares curve."""
    log_lo, log_hi = sample.log_c_range
    box = (log_lo - math.log(PRIOR_REACH), log_hi + math.log(PRIOR_REACH))
    seek_M = np.unique(np.clip(log_mid + _offsets(0.004, 12), *box))
    plain = noise.only(len(noise.phi_P) // 2)  # the ridge hardly moves with the correlation
    ridge_M = _ridge(sample, family, plain, seek_M)
    level_M = _level(sample, family, noise, ridge_M[:, None], seek_M).max(axis=(0, 2))
    level_M = level_M + _log_volume(sample, family, ridge_M, seek_M)
    low, high = _extent(seek_M, level_M)
    log_mid_M = np.linspace(low, high, _ROWS)
    centre_M = _ridge(sample, family, plain, log_mid_M)
    log_b_MK = np.sort(np.clip(centre_M[:, None] + _offsets(0.006, 10), *LOG_B), axis=1)
    level_PMK = _level(sample, family, noise, log_b_MK, log_mid_M)
    low_PM, high_PM = _extent(log_b_MK, level_PMK)
    log_b_PMK = low_PM[..., None] + (high_PM - low_PM)[..., None] * np.linspace(0, 1, _COLUMNS)
    area_PM = (log_mid_M[1] - log_mid_M[0]) * (high_PM - low_PM) / (_COLUMNS - 1)
    area_PMK = area_PM[..., None] * _trapezoid(_ROWS)[:, None] * _trapezoid(_COLUMNS)
    quadratics = [
        noise.precision.only(p).quadratic(_share(sample, family, log_b_MK, log_mid_M), sample.y_N)
        for p, log_b_MK in enumerate(log_b_PMK)
    ]
    q = Quadratic(
        *(
            np.concatenate([getattr(one, name) for one in quadratics])
            for name in Quadratic.__dataclass_fields__
        )
    )
    return _linear_nodes(sample, family, noise, q, log_b_PMK, log_mid_M, area_PMK)


def _linear_nodes(
    sample: Sample,
    family: Family,
    noise: Noise,
    q: Quadratic,
    log_b_PMK: np.ndarray,
    log_mid_M: np.ndarray,
    area_PMK: np.ndarray,
) -> Nodes:
    """Nodes of (R_0, A) in every cell worth it, placed by the cell's own quadratic."""
    best = q.rss(*q.best(sample.r0)) + sample.within
    level = noise.log_weight(best) + np.log(np.maximum(area_PMK, 1e-300))
    index = np.nonzero(level > level.max() - _CUT)
    p, m, _ = index
    cell = q.take(index)
    _, A_best = cell.best(sample.r0)
    dof = max(sample.n_points - 2 - sample.n_linear, 1)
    sd = np.sqrt(np.maximum(best[index] / dof, noise.sd_J[0] ** 2))
    hh = np.maximum(cell.hh, 1e-12)
    information = cell.gg if sample.r0 is not None else cell.gg - cell.hg**2 / hh
    spread_A = sd / np.sqrt(np.maximum(information, 1e-12))
    A, dA = _midpoints(A_best, spread_A, np.full_like(A_best, sample.r0 or 0.0), 1.0, _A_NODES)
    if sample.r0 is None:
        centre = np.clip((cell.hy[:, None] - A * cell.hg[:, None]) / hh[:, None], 0, A)
        spread = np.broadcast_to((sd / np.sqrt(hh))[:, None], A.shape)
        R_0, dR_0 = _midpoints(centre, spread, np.zeros_like(A), A, _R_0_NODES)
    else:
        R_0, dR_0 = np.full((*A.shape, 1), sample.r0), np.ones((*A.shape, 1))
    wide = cell.take((slice(None), None, None))
    rss = wide.rss(R_0, A[:, :, None]) + sample.within
    volume = area_PMK[index][:, None, None] * dA[:, :, None] * dR_0
    log_weight = noise.of_rss(rss) + noise.log_prior_P[p][:, None, None]
    log_weight = log_weight + np.log(np.maximum(volume, 1e-300))
    log_weight = log_weight + _log_volume(sample, family, log_b_PMK[index], log_mid_M[m])[:, None, None]
    log_weight = log_weight + 2 * np.log(np.maximum(A[:, :, None] - R_0, 1e-12))
    return Nodes(log_b_PMK[index], log_mid_M[m], noise.phi_P[p], A, R_0, log_weight, rss)


def _log_volume(sample: Sample, family: Family, log_b: np.ndarray, log_mid: np.ndarray) -> np.ndarray:
    """Log-density of the prior (Jeffreys) over (R_0, A, log B, log C_mid), less 2 log(A - R_0).

    sqrt(det J^T J), with J the derivatives of the curve at the evaluations and at those to come: how much
    of what could be measured a step in the parameters covers. Parameters that change nothing cover nothing.
    """
    log_c_D, weight_D = _design(sample)
    g, by_log_b, by_log_c = family.slopes(np.exp(log_b)[:, None], log_c_D - log_mid[:, None])
    free = [g, by_log_b, by_log_c] if sample.r0 is not None else [1.0 - g, g, by_log_b, by_log_c]
    basis = np.stack(free, axis=1)
    gram = (basis * weight_D) @ basis.transpose(0, 2, 1)
    scale = np.sqrt(np.maximum(np.einsum("cii->ci", gram), 1e-300))
    gram = gram / (scale[:, :, None] * scale[:, None]) + 1e-13 * np.eye(len(free))
    return 0.5 * np.linalg.slogdet(gram)[1] + np.log(scale).sum(axis=1)


def _design(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Log computes and weights (D,): the evaluations, and those in `AHEAD` times the compute to come."""
    ahead_K = 1.0 + AHEAD * (np.arange(_AHEAD_NODES) + 0.5) / _AHEAD_NODES
    trained_N = np.isfinite(sample.log_c_N)
    each = AHEAD * float(sample.weight_N[trained_N].sum()) / _AHEAD_NODES
    log_c_D = np.concatenate([sample.log_c_N, sample.log_c_range[1] + np.log(ahead_K)])
    return log_c_D, np.concatenate([sample.weight_N, np.full(_AHEAD_NODES, each)])


def _midpoints(
    centre: np.ndarray, spread: np.ndarray, low: np.ndarray, high: np.ndarray | float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """n nodes evenly over centre +- `_REACH` spread within [low, high], and what each stands for (..., n)."""
    start = np.clip(centre - _REACH * spread, low, high)[..., None]
    each = (np.clip(centre + _REACH * spread, low, high)[..., None] - start) / n
    return start + each * (np.arange(n) + 0.5), each


def _ridge(sample: Sample, family: Family, noise: Noise, log_mid_M: np.ndarray) -> np.ndarray:
    """The best log B for every C_mid."""
    nodes = np.broadcast_to(np.linspace(*LOG_B, 13), (len(log_mid_M), 13))
    step = (LOG_B[1] - LOG_B[0]) / 12
    best_M = np.zeros(len(log_mid_M))
    for _ in range(3):  # to 1/27 of the first step
        level = _level(sample, family, noise, nodes, log_mid_M).max(axis=0)
        best_M = np.take_along_axis(nodes, level.argmax(axis=1)[:, None], 1)[:, 0]
        nodes = np.clip(best_M[:, None] + np.linspace(-step, step, 7), *LOG_B)
        step /= 3
    return best_M


def _level(
    sample: Sample, family: Family, noise: Noise, log_b_MK: np.ndarray, log_mid_M: np.ndarray
) -> np.ndarray:
    """Log-likelihood of every cell at its best (R_0, A), with the prior of phi; (P, M, K)."""
    q = noise.precision.quadratic(_share(sample, family, log_b_MK, log_mid_M), sample.y_N)
    return noise.log_weight(q.rss(*q.best(sample.r0)) + sample.within)


def _share(sample: Sample, family: Family, log_b_MK: np.ndarray, log_mid_M: np.ndarray) -> np.ndarray:
    """Share of the gain at every evaluation for every cell, (M, K, N)."""
    return family.share(np.exp(log_b_MK)[..., None], (sample.log_c_N - log_mid_M[:, None])[:, None])


def _offsets(first: float, n: int) -> np.ndarray:
    """0 and +- first * 2^k: near and far alike."""
    far = first * 2.0 ** np.arange(n)
    return np.concatenate([-far[::-1], [0.0], far])


def _extent(nodes: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the level has fallen by `_CUT` to either side of its best, interpolated along the last axis.

    `nodes` broadcasts to `level`; the results have its shape without the last axis.
    """
    nodes = np.broadcast_to(nodes, level.shape)
    drop = level.max(axis=-1, keepdims=True) - level
    worth = drop < _CUT
    n = level.shape[-1]
    ends = []
    for inner, outer in (
        (worth.argmax(axis=-1), -1),
        (n - 1 - worth[..., ::-1].argmax(axis=-1), 1),
    ):
        inner = inner[..., None]
        beyond = np.clip(inner + outer, 0, n - 1)
        x0, x1 = (np.take_along_axis(nodes, i, -1)[..., 0] for i in (inner, beyond))
        # Drops grow as a square about the best: their roots are interpolated.
        d0, d1 = (np.sqrt(np.take_along_axis(drop, i, -1)[..., 0]) for i in (inner, beyond))
        part = np.where(d1 > d0, (math.sqrt(_CUT) - d0) / np.maximum(d1 - d0, 1e-12), 1.0)
        ends.append(x0 + (x1 - x0) * np.clip(part, 0.0, 1.0))
    low, high = ends
    return low, np.maximum(high, low + 1e-9)


def _trapezoid(n: int) -> np.ndarray:
    weight = np.ones(n)
    weight[[0, -1]] = 0.5
    return weight
