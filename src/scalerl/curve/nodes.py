"""Where the nodes of the posterior lie: rows of C_mid, columns of B in each, and (R_0, A) in these cells.

The ridge of every family is followed through the whole range of C_mid. Rows, and the columns of each, are
spaced evenly in the posterior, tempered so that its tails have nodes as well. (R_0, A) follow from the
quadratic of every such cell.

Shapes: as in `scalerl.curve.posterior`; F families, all of which are searched at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from scalerl.curve.families import Family
from scalerl.curve.noise import Noise
from scalerl.curve.prior import Prior, log_mid_range
from scalerl.curve.sample import Sample

_CUT = 10.5  # log-density below the best beyond which a node is left out (3e-5)
_CUT_OWN = 7.0  # the same below the best of a family that is itself far below the others
_TEMPER = 4.0  # rows and columns are spaced evenly in the posterior to the power of 1 over this
WORTH = _CUT + 2.0
"""The same for the best on a ridge, which is rough and has no volume yet."""
# Nodes of A are 1.8 standard deviations apart, which integrates a Gaussian to .5 %; those of R_0 2.4, to 7 %.
# They are shifted from cell to cell, so that what one misses another counts twice.
_ROWS, _COLUMNS, _A_NODES, _R_0_NODES = 17, 11, 4, 3
_SHIFTS = 0.6180339887498949, 0.7548776662466927, 0.5698402909980532  # of B, A and R_0, in widths of a node
_REACH = 3.6  # standard deviations that the nodes of A and R_0 span to either side


@dataclass(frozen=True)
class Ridges:
    """The likeliest `log_b_FM` for every `log_mid_FM`, and its log-density under each noise model."""

    families: tuple[Family, ...]
    log_mid_FM: np.ndarray
    log_b_FM: np.ndarray
    level_PFM: np.ndarray

    @property
    def level(self) -> float:
        """The highest log-density on a ridge."""
        return float(self.level_PFM.max())


def find_ridges(
    sample: Sample, families: tuple[Family, ...], noise: Noise, prior: Prior, log_mid_F: Sequence[float]
) -> Ridges:
    """Follow the ridge of every family, from `log_mid_F` of its least-squares curve."""
    log_mid_FM = np.add.outer(np.clip(log_mid_F, *log_mid_range(sample)), _offsets(0.016, 11))
    log_mid_FM = np.clip(log_mid_FM, *log_mid_range(sample))
    log_b_FMK = np.broadcast_to(np.linspace(*prior.log_b, 11), (*log_mid_FM.shape, 11))
    step = (prior.log_b[1] - prior.log_b[0]) / 10
    # The ridge hardly moves with the correlation, so one noise model finds it for all.
    plain = len(noise.phi_P) // 2
    for last in (False, False, True):  # to 1/27 of the first step
        few = noise if last else noise.only([plain])
        level_PFMK = level_of_cells(sample, families, few, prior, log_b_FMK, log_mid_FM)
        found = level_PFMK[plain if last else 0].argmax(axis=2)[..., None]
        log_b_FM1 = np.take_along_axis(log_b_FMK, found, 2)
        log_b_FMK = np.clip(log_b_FM1 + np.linspace(-step, step, 7), *prior.log_b)
        step /= 3
    return Ridges(families, log_mid_FM, log_b_FM1[..., 0], level_PFMK.max(axis=3))


@dataclass(frozen=True)
class Nodes:
    """Nodes of the posterior, not normalised; arrays without a suffix are (cells, a, r), A (cells, a)."""

    family_cells: np.ndarray
    log_b_cells: np.ndarray
    log_mid_cells: np.ndarray
    log_b_span_cells2: np.ndarray
    """The range of log B that a cell covers, (cells, 2) ..."""
    log_mid_span_cells2: np.ndarray
    """... and that of log C_mid."""
    phi_cells: np.ndarray
    model_cells: np.ndarray
    """The noise model: its number among those of the prior, followed by the changes."""
    place_cells: np.ndarray
    """The place in the grid, from which the quantiles that differ between cells are derived."""
    A: np.ndarray
    R_0: np.ndarray
    place_rss: np.ndarray
    """The place of the sum of squares in the table of `Noise`."""
    log_weight: np.ndarray
    walk: np.ndarray
    """How far the wander is expected to have moved the run by the last evaluation ..."""
    slope: np.ndarray
    """... and the expected slope of a trend there; both only of cells whose model has a walk."""

    @classmethod
    def joined(cls, parts: Sequence[Nodes]) -> Nodes:
        """Return the nodes of several parts as one."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def lay_nodes(sample: Sample, ridges: Ridges, noise: Noise, prior: Prior, best: float) -> Nodes:
    """Lay the nodes of some families around their ridges, for noise models not far below level `best`.

    Their weights do not include the prior of the families.
    """
    families, level_FM = ridges.families, ridges.level_PFM.max(axis=0)
    models = np.flatnonzero(ridges.level_PFM.max(axis=(1, 2)) > min(best, ridges.level) - WORTH)
    few = noise.only(models)
    edge_FM = _edges(ridges.log_mid_FM, level_FM, _ROWS)
    log_mid_FM = _middles(edge_FM)
    known = zip(log_mid_FM, ridges.log_mid_FM, ridges.log_b_FM, strict=True)
    centre_FM = np.stack([np.interp(*columns) for columns in known])
    log_b_FMK = np.sort(np.clip(centre_FM[..., None] + _offsets(0.02, 8), *prior.log_b))
    level_FMK = level_of_cells(sample, families, few, prior, log_b_FMK, log_mid_FM).max(axis=0)
    edge_FMK = _edges(log_b_FMK, level_FMK, _COLUMNS)
    shift_FM1 = (0.5 + _SHIFTS[0] * np.arange(log_mid_FM.size).reshape(*log_mid_FM.shape, 1)) % 1.0
    log_b_FMK = edge_FMK[..., :-1] + shift_FM1 * np.diff(edge_FMK)
    return _linear_nodes(sample, families, few, models, prior, log_b_FMK, edge_FM, edge_FMK)


def _linear_nodes(
    sample: Sample,
    families: tuple[Family, ...],
    noise: Noise,
    models: np.ndarray,
    prior: Prior,
    log_b_FMK: np.ndarray,
    edge_FM: np.ndarray,
    edge_FMK: np.ndarray,
) -> Nodes:
    """Lay nodes of (R_0, A) in every cell that has mass, placed by the cell's own quadratic.

    `models` numbers those of `noise` in the prior; the edges are those of the cells in log C_mid and log B.
    """
    log_mid_FM, area_FMK = _middles(edge_FM), np.diff(edge_FM)[..., None] * np.diff(edge_FMK)
    share = _share(sample, families, log_b_FMK, log_mid_FM)
    q = noise.quadratic(share, sample.y_N)
    R_0, A = q.best(sample.r0)
    best = q.rss(R_0, A) + sample.within
    density_FMK = _log_density(sample, families, prior, log_b_FMK, log_mid_FM)
    density_FMK = density_FMK + np.log(np.maximum(area_FMK, 1e-300))
    level = noise.log_weight(best) + density_FMK
    # Each family keeps cells near its own best, however little its weight: answers may be for it alone.
    top_F = level.max(axis=(0, 2, 3), keepdims=True)
    index = np.nonzero(level > np.clip(top_F.max() - _CUT, top_F - _CUT, top_F - _CUT_OWN))
    p, f, m, k = index
    place = np.ravel_multi_index((models[p], f, m, k), (models[-1] + 1, *level.shape[1:]))
    cell, A_best = q.take(index), A[index]
    dof = max(sample.n_points - 2 - sample.n_linear, 1)
    sd = np.sqrt(np.maximum(best[index] / dof, noise.sd_J[0] ** 2))
    hh = np.maximum(cell.hh, 1e-12)
    information = cell.gg if sample.r0 is not None else cell.gg - cell.hg**2 / hh
    spread_A = sd / np.sqrt(np.maximum(information, 1e-12))
    A, dA = _even(A_best, spread_A, sample.r0 or 0.0, 1.0, _A_NODES, place * _SHIFTS[1])
    if prior.certain:
        # A node for A = 1 itself, which has a probability but no width.
        one = np.ones((len(A), 1))
        dA = np.concatenate([np.broadcast_to(dA, A.shape), one], axis=1)
        A = np.concatenate([A, one], axis=1)
    if sample.r0 is None:
        centre = np.clip((cell.hy[:, None] - A * cell.hg[:, None]) / hh[:, None], 0, A)
        spread = np.broadcast_to((sd / np.sqrt(hh))[:, None], A.shape)
        place_A = place[:, None] * A.shape[1] + np.arange(A.shape[1])
        R_0, dR_0 = _even(centre, spread, 0.0, A, _R_0_NODES, place_A * _SHIFTS[2])
    else:
        R_0, dR_0 = np.full((*A.shape, 1), sample.r0), np.ones((*A.shape, 1))
    rss = cell.take((slice(None), None, None)).rss(R_0, A[:, :, None])
    place_rss = noise.place(rss + sample.within)
    of_cells = (noise.log_prior_P[p] + density_FMK[f, m, k])[:, None, None]
    log_weight = noise.weight_at(place_rss) + (np.log(np.maximum(dA[:, :, None] * dR_0, 1e-300)) + of_cells)
    walks = noise.walks.of_model(p)
    of_g = noise.walks.of(share)[:, *(one[walks] for one in index)]
    walk, slope = noise.walks.expected(p[walks], sample.y_N, of_g, A[walks], R_0[walks])
    return Nodes(
        family_cells=f,
        log_b_cells=log_b_FMK[f, m, k],
        log_mid_cells=log_mid_FM[f, m],
        log_b_span_cells2=np.stack([edge_FMK[f, m, k], edge_FMK[f, m, k + 1]], axis=-1),
        log_mid_span_cells2=np.stack([edge_FM[f, m], edge_FM[f, m + 1]], axis=-1),
        phi_cells=noise.phi_P[p],
        model_cells=models[p],
        place_cells=place,
        A=A,
        R_0=R_0,
        place_rss=place_rss,
        log_weight=log_weight + prior.log_ends(A[:, :, None], R_0),
        walk=walk,
        slope=slope,
    )


def _even(
    centre: np.ndarray,
    spread: np.ndarray,
    low: np.ndarray | float,
    high: np.ndarray | float,
    n: int,
    shift: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return n even nodes over centre +- `_REACH` spread, within [low, high] (..., n), and their width."""
    start = np.clip(centre - _REACH * spread, low, high)[..., None]
    each = (np.clip(centre + _REACH * spread, low, high)[..., None] - start) / n
    first = 0.5 + shift[..., None]
    return start + each * (np.arange(n) + (first - np.floor(first))), each


def level_of_cells(
    sample: Sample,
    families: tuple[Family, ...],
    noise: Noise,
    prior: Prior,
    log_b_FMK: np.ndarray,
    log_mid_FM: np.ndarray,
) -> np.ndarray:
    """Return the log-density of every cell at its best (R_0, A), without the prior of these; (P, F, M, K)."""
    q = noise.quadratic(_share(sample, families, log_b_FMK, log_mid_FM), sample.y_N)
    level = noise.log_weight(q.rss(*q.best(sample.r0)) + sample.within)
    return level + _log_density(sample, families, prior, log_b_FMK, log_mid_FM)


def _log_density(
    sample: Sample, families: tuple[Family, ...], prior: Prior, log_b_FMK: np.ndarray, log_mid_FM: np.ndarray
) -> np.ndarray:
    """Return the prior of (log B, log C_mid) in every cell, (F, M, K)."""
    log_mid_FMK = np.broadcast_to(log_mid_FM[..., None], log_b_FMK.shape)
    cells = zip(families, log_b_FMK, log_mid_FMK, strict=True)
    found = [prior.log_cells(sample, family, b.ravel(), mid.ravel()) for family, b, mid in cells]
    return np.concatenate(found).reshape(log_b_FMK.shape)


def _share(
    sample: Sample, families: tuple[Family, ...], log_b_FMK: np.ndarray, log_mid_FM: np.ndarray
) -> np.ndarray:
    """Return the share of the gain at every evaluation for every cell, (F, M, K, N)."""
    b_FMK1, x_FM1N = np.exp(log_b_FMK)[..., None], (sample.log_c_N - log_mid_FM[..., None])[:, :, None]
    share = np.empty((*log_b_FMK.shape, len(sample)))
    for f, family in enumerate(families):
        share[f] = family.share(b_FMK1[f], x_FM1N[f])
    return share


def _offsets(first: float, n: int) -> np.ndarray:
    """Return 0 and +- first * 2^k, k < n, ascending: the width of a ridge is not known beforehand."""
    far = first * 2.0 ** np.arange(n)
    return np.concatenate([-far[::-1], [0.0], far])


def _edges(nodes: np.ndarray, level: np.ndarray, n: int) -> np.ndarray:
    """Return the edges (..., n + 1) of n parts that hold equally much of exp(level / `_TEMPER`)."""
    between, shape = _between(nodes.shape[-1]), nodes.shape[:-1]
    fine, density = nodes @ between, np.exp((level - level.max(axis=-1, keepdims=True)) / _TEMPER @ between)
    held = np.cumsum(0.5 * (density[..., 1:] + density[..., :-1]) * np.diff(fine), axis=-1)
    held = np.concatenate([np.zeros((*shape, 1)), held], axis=-1).reshape(-1, between.shape[1])
    wanted, fine = held[:, -1:] * np.linspace(0.0, 1.0, n + 1), fine.reshape(held.shape)
    return np.stack([np.interp(*row) for row in zip(wanted, held, fine, strict=True)]).reshape(*shape, n + 1)


def _middles(edge_FM: np.ndarray) -> np.ndarray:
    """Return the middle of every two neighbouring edges."""
    return 0.5 * (edge_FM[:, 1:] + edge_FM[:, :-1])


@functools.cache
def _between(n: int) -> np.ndarray:
    """Return the matrix (n, 8 (n - 1) + 1) that interpolates seven values between every two of n."""
    at_F = np.arange(8 * (n - 1) + 1) / 8.0
    return np.maximum(1.0 - np.abs(at_F - np.arange(n)[:, None]), 0.0)
