"""The posterior of the curve by deterministic quadrature, averaged over families.

    y_i = R(C_i; family, A, B, C_mid, R_0) + e_i        e ~ N(0, sd^2 K_phi)       K_phi[i, j] = phi^distance

The prior is in `scalerl.curve.prior`. For a family and (B, C_mid, phi) the sum of squares is a quadratic in
(R_0, A), and the integral over sd depends on the sum of squares alone, so nothing is sampled: nodes are laid
where the posterior has mass. For every C_mid of a row of values, and every correlation phi, the range of
log B with mass is found and covered evenly; (R_0, A) follow from the quadratic of every such cell.

Shapes: P correlations, M values of log C_mid, K of log B; cells (B, C_mid, phi) = what is kept of P x M x K,
over all families; a = nodes of A, r = nodes of R_0 for each A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.families import Family, log_compute, log_compute_to, of_families
from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.noise import Noise, Quadratic, make_noise
from scalerl.curve.prior import LOG_B, PHI, log_mid_range, log_volume
from scalerl.curve.quantiles import tails
from scalerl.curve.sample import Sample

_CUT = 10.5  # log-density below the best at which a node is not worth its place (3e-5)
# Evenly spaced nodes a standard deviation apart integrate a Gaussian to nine digits: few are enough.
_ROWS, _COLUMNS, _A_NODES, _R_0_NODES = 25, 9, 6, 5
_REACH = 4.5  # standard deviations that nodes of A and R_0 span to either side
_DRAWS = 256
_MASS = 0.999  # of the posterior: its heaviest cells, for answers at many computes
_STOP_WITHIN = 32.0  # times the compute so far, up to which is searched
_CELLS = ("family_cells", "log_b_cells", "log_mid_cells", "phi_cells", "A", "R_0")
_DRAWN = ("family_n", "A_n", "log_b_n", "log_mid_n", "R_0_n")


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
        """Return the mean curves at computes (M,), shape (n, M)."""
        x = log_compute(np.asarray(compute_M, dtype=float)) - self.log_mid_n[:, None]
        share = of_families(self.families, self.family_n, "share", np.exp(self.log_b_n)[:, None], x)
        return self.R_0_n[:, None] + (self.A_n - self.R_0_n)[:, None] * share

    def log_compute_to(self, target: float) -> np.ndarray:
        """Return log C at which the mean curves reach `target`: -inf up to R_0, inf from A on."""
        b_n = np.exp(self.log_b_n)
        return log_compute_to(self.families, self.family_n, self.A_n, b_n, self.log_mid_n, self.R_0_n, target)

    def thinned(self, n: int) -> Draws:
        """Return about n of the draws, evenly spaced, for quantities that are costly per draw."""
        every = max(len(self.A_n) // n, 1)
        return replace(self, **{name: getattr(self, name)[::every] for name in _DRAWN})

    @classmethod
    def joined(cls, parts: Sequence[Draws]) -> Draws:
        """Return the draws of several parts as one; the parts have the same families."""
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _DRAWN}
        return replace(parts[0], **arrays)


@dataclass(frozen=True)
class Posterior:
    """Weighted nodes. `weight` sums to 1; `weight`, its logarithm and `R_0` have the shape (cells, a, r)."""

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
        """Return the weight of every cell."""
        return self.weight.sum(axis=(1, 2))

    def family_weights(self) -> dict[str, float]:
        """Return the posterior probability of every family."""
        mass = np.bincount(self.family_cells, self.weight_cells, len(self.families))
        return {family.name: float(m) for family, m in zip(self.families, mass, strict=True)}

    def only(self, family: int) -> Posterior:
        """Return the posterior given one family, however little weight that has."""
        return self._take(np.flatnonzero(self.family_cells == family))

    def reweighted(self, log_weight: np.ndarray) -> Posterior:
        """Return the same nodes with other log-weights, which are normalised here; sd_weight_J stays."""
        log_weight = _normalised(log_weight)
        return replace(self, log_weight=log_weight, weight=np.exp(log_weight))

    def _take(self, keep: np.ndarray) -> Posterior:
        kept = {name: getattr(self, name)[keep] for name in _CELLS}
        return replace(self, **kept).reweighted(self.log_weight[keep])

    def heaviest(self, mass: float) -> Posterior:
        """Return the fewest cells that hold `mass` of the posterior, for answers at many computes."""
        order = np.argsort(-self.weight_cells, kind="stable")
        held = np.cumsum(self.weight_cells[order])
        return self._take(order[: int(np.searchsorted(held, mass)) + 1])

    def draws(self, n: int, seed: int = 0) -> Draws:
        """Draw n curves of equal weight: a systematic sample of the nodes, shuffled by `seed` (for pairing).

        Systematic, so that quantiles of the draws have less error than those of independent draws.
        """
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

    def curve_at(self, compute: float) -> np.ndarray:
        """Return the mean curve at one compute for every node, shape (cells, a, r)."""
        x = float(log_compute(np.asarray(compute))) - self.log_mid_cells
        g = of_families(self.families, self.family_cells, "share", np.exp(self.log_b_cells), x)[:, None, None]
        return self.R_0 * (1 - g) + self.A[:, :, None] * g

    def compute_to(self, target: float) -> np.ndarray:
        """Return the compute at which every node's curve reaches `target`; 0 below R_0, infinite above A."""
        b, log_mid = np.exp(self.log_b_cells)[:, None, None], self.log_mid_cells[:, None, None]
        A = self.A[:, :, None]
        log_c = log_compute_to(self.families, self.family_cells, A, b, log_mid, self.R_0, target)
        return np.exp(np.where(np.isinf(log_c), log_c, np.clip(log_c, -700, 700)))


def posterior(
    sample: Sample, floor: float, best: Sequence[LeastSquares], phi: tuple[float, ...] = PHI
) -> Posterior:
    """Integrate over the families of `best` and the correlations `phi`, and normalise over all of them.

    `best` holds the least-squares curve of every family, from which the search for its nodes starts. `floor`
    is the least sd of the noise.
    """
    noise = make_noise(sample, floor, phi)
    families = tuple(found.curve.family for found in best)
    parts = [_family_nodes(sample, found.curve.family, noise, math.log(found.curve.C_mid)) for found in best]
    for i, part in enumerate(parts):
        part["family_cells"] = np.full(len(part["A"]), i)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in (*_CELLS, "log_weight", "rss")}
    rss, log_weight = joined.pop("rss"), _normalised(joined.pop("log_weight"))
    weight = np.exp(log_weight)
    sd_weight_J = noise.sd_weights(rss.ravel(), weight.ravel())
    return Posterior(
        **joined,
        log_weight=log_weight,
        weight=weight,
        sd_J=noise.sd_J,
        sd_weight_J=sd_weight_J,
        families=families,
    )


def _normalised(log_weight: np.ndarray) -> np.ndarray:
    """Return the logarithms of the weights, scaled to sum to 1."""
    top = log_weight.max()
    return log_weight - top - np.log(np.exp(log_weight - top).sum())


def _family_nodes(sample: Sample, family: Family, noise: Noise, log_mid: float) -> dict[str, np.ndarray]:
    """Lay the nodes of one family around the ridge through `log_mid`, that of its least-squares curve.

    Returns the columns of `Posterior`, not yet normalised, and the sum of squares `rss` (cells, a, r).
    """
    seek_M = np.unique(np.clip(log_mid + _offsets(0.004, 12), *log_mid_range(sample)))
    # The ridge hardly moves with the correlation, so that one of them finds it for all.
    plain = noise.only(len(noise.phi_P) // 2)
    ridge_M = _ridge(sample, family, plain, seek_M)
    level_M = _level(sample, family, noise, ridge_M[:, None], seek_M).max(axis=(0, 2))
    level_M = level_M + log_volume(sample, family, ridge_M, seek_M)
    low, high = _extent(seek_M, level_M)
    log_mid_M = np.linspace(low, high, _ROWS)
    centre_M = _ridge(sample, family, plain, log_mid_M)
    log_b_MK = np.sort(np.clip(centre_M[:, None] + _offsets(0.006, 10), *LOG_B), axis=1)
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
    return _linear_nodes(sample, family, noise, q, log_b_PMK, log_mid_M, area_PMK)


def _linear_nodes(
    sample: Sample,
    family: Family,
    noise: Noise,
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
    log_weight = log_weight + log_volume(sample, family, log_b_PMK[index], log_mid_M[m])[:, None, None]
    # The derivatives by log B and log C_mid in the prior's volume have a factor A - R_0 each.
    log_weight = log_weight + 2 * np.log(np.maximum(A[:, :, None] - R_0, 1e-12))
    return {
        "log_b_cells": log_b_PMK[index],
        "log_mid_cells": log_mid_M[m],
        "phi_cells": noise.phi_P[p],
        "A": A,
        "R_0": R_0,
        "log_weight": log_weight,
        "rss": rss,
    }


def _midpoints(
    centre: np.ndarray, spread: np.ndarray, low: np.ndarray, high: np.ndarray | float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return n even nodes over centre +- `_REACH` spread within [low, high] (..., n), and their width."""
    start = np.clip(centre - _REACH * spread, low, high)[..., None]
    each = (np.clip(centre + _REACH * spread, low, high)[..., None] - start) / n
    return start + each * (np.arange(n) + 0.5), each


def _ridge(sample: Sample, family: Family, noise: Noise, log_mid_M: np.ndarray) -> np.ndarray:
    """Return the likeliest log B for every C_mid, (M,)."""
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


def gain_per_unit(post: Posterior, compute_M: np.ndarray) -> np.ndarray:
    """Return the expected dR/dC of the mean curve at computes (M,) above 0, per unit of compute."""
    post, step = post.heaviest(_MASS), 1e-3
    up_M, down_M = (
        np.array([np.sum(post.curve_at(float(c)) * post.weight) for c in compute_M * math.exp(s)])
        for s in (step, -step)
    )
    return (up_M - down_M) / (2 * step * compute_M)


def stop_at(post: Posterior, now: float, worth: float) -> float:
    """Return the compute from which a further unit is expected to gain less than `worth`; at least `now`.

    The expected gain can rise before it falls: this is where it falls for good, infinite if not within 32
    times the compute so far.
    """
    compute_M = now * np.geomspace(1.0, _STOP_WITHIN, 161)
    pays_M = gain_per_unit(post, compute_M) >= worth
    if pays_M[-1]:
        return math.inf
    if not pays_M.any():
        return now
    last = int(np.flatnonzero(pays_M)[-1])
    low, high = compute_M[last : last + 2].tolist()
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain_per_unit(post, np.array([middle]))[0] >= worth else (low, middle)
    return high


def expected_width(
    post: Posterior, sample: Sample, sd: float, phi: float, compute_M: np.ndarray, level: float
) -> np.ndarray:
    """Return the expected width of A's interval if the run goes on to computes (M,), evaluated as so far.

    Each of 256 draws in turn is taken for the truth, and the others are weighted by the likelihood that the
    further evaluations would give them: exp(-sum of squared differences / (2 sd^2 inflated)), the variance
    inflated by (1 + phi) / (1 - phi) for the correlation of neighbours.
    """
    draws = post.draws(_DRAWS)
    now = math.exp(sample.log_c_range[1])
    rows = int(np.isfinite(sample.log_c_N).sum())
    each = (now - math.exp(sample.log_c_range[0])) / max(rows - 1, 1) / sample.each
    most = float(np.max(compute_M))
    evaluations = (most - now) / max(each, 1e-6 * now)
    points = int(np.clip(evaluations, 1, 128))
    further_F = now + (most - now) / points * np.arange(1, points + 1)
    count = evaluations / points  # behind each of the points
    curve_nF = draws.curves_at(further_F) * math.sqrt(count * (1 - phi) / (1 + phi)) / sd
    return np.array([_width(draws, curve_nF[:, further_F <= c], level) for c in compute_M])


def _width(draws: Draws, curve_nF: np.ndarray, level: float) -> float:
    # |a - b|^2 by a matrix product: an array of all differences, (n, n, F), would take 67 MB.
    square_n = (curve_nF**2).sum(axis=1)
    apart_nn = square_n[:, None] + square_n - 2 * curve_nF @ curve_nF.T
    weight_nn = np.exp(-0.5 * np.maximum(apart_nn, 0.0))
    order = np.argsort(draws.A_n)
    held_nn = np.cumsum(weight_nn[:, order], axis=1)
    held_nn /= held_nn[:, -1:]
    A_n = draws.A_n[order]
    ends = [A_n[np.minimum((held_nn < q).sum(axis=1), len(A_n) - 1)] for q in tails(level)]
    return float(np.mean(ends[1] - ends[0]))
