"""Where the nodes of the posterior lie: a grid along the ridge of every family, and (R_0, A) in its cells.

For every C_mid of a row of values, and every model of the noise, the range of log B with mass is found and
covered evenly; (R_0, A) follow from the quadratic of every such cell.

Shapes: as in `scalerl.curve.posterior`.
"""

from __future__ import annotations

import math

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.noise import Noise, Quadratic
from scalerl.curve.prior import Prior, log_mid_range
from scalerl.curve.sample import Sample

_CUT = 10.5  # log-density below the best at which a node is not worth its place (3e-5)
# Evenly spaced nodes a standard deviation apart integrate a Gaussian to nine digits: few are enough.
_ROWS, _COLUMNS, _A_NODES, _R_0_NODES = 17, 9, 8, 4
_REACH = 4.5  # standard deviations that nodes of A and R_0 span to either side


def family_nodes(
    sample: Sample, family: Family, noise: Noise, prior: Prior, log_mid: float
) -> dict[str, np.ndarray]:
    """Lay the nodes of one family around the ridge through `log_mid`, that of its least-squares curve.

    Returns the columns of `Posterior`, not yet normalised, the sum of squares `rss`, the `walk` and `slope`
    that are expected at the last evaluation (cells, a, r), and the model of the noise of every cell.
    """
    seek_M = np.unique(np.clip(log_mid + _offsets(0.004, 12), *log_mid_range(sample)))
    # The ridge hardly moves with the correlation, so that one of them finds it for all.
    plain = noise.only(len(noise.phi_P) // 2)
    ridge_M = _ridge(sample, family, plain, prior, seek_M)
    level_M = _level(sample, family, noise, ridge_M[:, None], seek_M).max(axis=(0, 2))
    level_M = level_M + prior.log_cells(sample, family, ridge_M, seek_M)
    low, high = _extent(seek_M, level_M)
    log_mid_M = np.linspace(low, high, _ROWS)
    centre_M = _ridge(sample, family, plain, prior, log_mid_M)
    log_b_MK = np.sort(np.clip(centre_M[:, None] + _offsets(0.006, 10), *prior.log_b), axis=1)
    level_PMK = _level(sample, family, noise, log_b_MK, log_mid_M)
    low_PM, high_PM = _extent(log_b_MK, level_PMK)
    log_b_PMK = low_PM[..., None] + (high_PM - low_PM)[..., None] * np.linspace(0, 1, _COLUMNS)
    area_PM = (log_mid_M[1] - log_mid_M[0]) * (high_PM - low_PM) / (_COLUMNS - 1)
    area_PMK = np.tile(area_PM[..., None], _COLUMNS)
    area_PMK[:, [0, -1]] *= 0.5  # the trapezoid rule, along log C_mid and along log B
    area_PMK[:, :, [0, -1]] *= 0.5
    quadratics = [
        noise.only(p).quadratic(_share(sample, family, log_b_MK, log_mid_M), sample.y_N)
        for p, log_b_MK in enumerate(log_b_PMK)
    ]
    q = Quadratic(*(np.concatenate(sums) for sums in zip(*quadratics, strict=True)))
    return _linear_nodes(sample, family, noise, prior, q, log_b_PMK, log_mid_M, area_PMK)


def _linear_nodes(
    sample: Sample,
    family: Family,
    noise: Noise,
    prior: Prior,
    q: Quadratic,
    log_b_PMK: np.ndarray,
    log_mid_M: np.ndarray,
    area_PMK: np.ndarray,
) -> dict[str, np.ndarray]:
    """Lay nodes of (R_0, A) in every cell that has mass, placed by the cell's own quadratic."""
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
    if prior.certain:
        # A node for A = 1 itself: it has a probability, and no width.
        one = np.ones((len(A), 1))
        dA = np.concatenate([np.broadcast_to(dA, A.shape), one], axis=1)
        A = np.concatenate([A, one], axis=1)
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
    log_b_cells, log_mid_cells = log_b_PMK[index], log_mid_M[m]
    log_weight = log_weight + prior.log_cells(sample, family, log_b_cells, log_mid_cells)[:, None, None]
    log_weight = log_weight + prior.log_ends(A[:, :, None], R_0)
    nodes = {
        "log_b_cells": log_b_cells,
        "log_mid_cells": log_mid_cells,
        "phi_cells": noise.phi_P[p],
        "A": A,
        "R_0": R_0,
        "log_weight": log_weight,
        "rss": rss,
        "model_cells": p,
        "place_cells": np.ravel_multi_index(index, level.shape),
    }
    return nodes | _expected(sample, family, noise, nodes)


def _expected(
    sample: Sample, family: Family, noise: Noise, nodes: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `walk` and `slope` expected at the last evaluation, given each node's curve, (cells, a, r)."""
    found = np.zeros((2, *nodes["R_0"].shape))
    mine = noise.walks.of_model(nodes["model_cells"])
    if len(mine):
        names = ("model_cells", "log_b_cells", "log_mid_cells", "A", "R_0")
        cell = {name: nodes[name][mine] for name in names}
        x_cN = sample.log_c_N - cell["log_mid_cells"][:, None]
        share_cN = family.share(np.exp(cell["log_b_cells"])[:, None], x_cN)
        found[:, mine] = noise.walks.expected(
            cell["model_cells"], sample.y_N, share_cN, cell["A"], cell["R_0"]
        )
    return {"walk": found[0], "slope": found[1]}


def _midpoints(
    centre: np.ndarray, spread: np.ndarray, low: np.ndarray, high: np.ndarray | float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return n even nodes over centre +- `_REACH` spread within [low, high] (..., n), and their width."""
    start = np.clip(centre - _REACH * spread, low, high)[..., None]
    each = (np.clip(centre + _REACH * spread, low, high)[..., None] - start) / n
    return start + each * (np.arange(n) + 0.5), each


def _ridge(sample: Sample, family: Family, noise: Noise, prior: Prior, log_mid_M: np.ndarray) -> np.ndarray:
    """Return the likeliest log B for every C_mid, (M,)."""
    nodes = np.broadcast_to(np.linspace(*prior.log_b, 13), (len(log_mid_M), 13))
    step = (prior.log_b[1] - prior.log_b[0]) / 12
    best_M = np.zeros(len(log_mid_M))
    for _ in range(3):  # to 1/27 of the first step
        level = _level(sample, family, noise, nodes, log_mid_M).max(axis=0)
        best_M = np.take_along_axis(nodes, level.argmax(axis=1)[:, None], 1)[:, 0]
        nodes = np.clip(best_M[:, None] + np.linspace(-step, step, 7), *prior.log_b)
        step /= 3
    return best_M


def _level(
    sample: Sample, family: Family, noise: Noise, log_b_MK: np.ndarray, log_mid_M: np.ndarray
) -> np.ndarray:
    """Return the log-likelihood of every cell at its best (R_0, A), with the prior of phi; (P, M, K)."""
    q = noise.quadratic(_share(sample, family, log_b_MK, log_mid_M), sample.y_N)
    return noise.log_weight(q.rss(*q.best(sample.r0)) + sample.within)


def _share(sample: Sample, family: Family, log_b_MK: np.ndarray, log_mid_M: np.ndarray) -> np.ndarray:
    """Return the share of the gain at every evaluation for every cell, (M, K, N)."""
    return family.share(np.exp(log_b_MK)[..., None], (sample.log_c_N - log_mid_M[:, None])[:, None])


def _offsets(first: float, n: int) -> np.ndarray:
    """Return 0 and +- first * 2^k, k < n, rising: the width of a ridge is not known beforehand."""
    far = first * 2.0 ** np.arange(n)
    return np.concatenate([-far[::-1], [0.0], far])


def _extent(nodes: np.ndarray, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the level has fallen by `_CUT` on either side of its maximum along the last axis.

    `nodes` broadcasts to `level`; both ends have its shape without the last axis.
    """
    nodes = np.broadcast_to(nodes, level.shape)
    drop = level.max(axis=-1, keepdims=True) - level
    worth = drop < _CUT
    n = level.shape[-1]
    first, last = worth.argmax(axis=-1), n - 1 - worth[..., ::-1].argmax(axis=-1)
    ends = []
    for inner, outer in ((first[..., None], -1), (last[..., None], 1)):
        beyond = np.clip(inner + outer, 0, n - 1)
        x0, x1 = (np.take_along_axis(nodes, i, -1)[..., 0] for i in (inner, beyond))
        # Drops grow as a square about the best: their roots are interpolated.
        d0, d1 = (np.sqrt(np.take_along_axis(drop, i, -1)[..., 0]) for i in (inner, beyond))
        part = np.where(d1 > d0, (math.sqrt(_CUT) - d0) / np.maximum(d1 - d0, 1e-12), 1.0)
        ends.append(x0 + (x1 - x0) * np.clip(part, 0.0, 1.0))
    low, high = ends
    return low, np.maximum(high, low + 1e-9)
