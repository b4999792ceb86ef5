"""The posterior of the curve by deterministic quadrature, averaged over families.

    y_i = R(C_i; family, A, B, C_mid, R_0) + e_i        e ~ N(0, sd^2 K_phi)       K_phi[i, j] = phi^distance

The prior is in `scalerl.curve.prior`. For a family, (B, C_mid) and a model of the noise the sum of squares is
a quadratic in (R_0, A), and the integral over sd depends on the sum of squares alone, so nothing is sampled:
nodes are laid where the posterior has mass (`scalerl.curve.nodes`).

A wander is part of the run's mean curve: a node's curve is moved to where its walk is at the last evaluation,
and goes on with the square root of the clock, each by one quantile of its normal distribution. Together the
nodes have the right distribution at every compute.

Shapes: P models of the noise, M values of log C_mid, K of log B; cells (B, C_mid, noise) = what is kept of
P x M x K, over all families; a = nodes of A, r = nodes of R_0 for each A.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.families import Family, log_compute, log_compute_to, of_families
from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.nodes import family_nodes
from scalerl.curve.noise import Noise, make_noise
from scalerl.curve.prior import Prior
from scalerl.curve.quantiles import normal_quantiles
from scalerl.curve.sample import Sample, clock

_EVEN = 4096  # quantiles that stand for a normal distribution
_CELLS = ("family_cells", "log_b_cells", "log_mid_cells", "phi_cells", "A", "R_0", "drift")
_DRAWN = ("family_n", "A_n", "log_b_n", "log_mid_n", "R_0_n", "drift_n")


@dataclass(frozen=True)
class Draws:
    """Curves of equal weight, all arrays (n,): `family_n` is an index into `families`.

    `drift_n` is where the wander goes after the last evaluation, over the root of the clock since then.
    """

    families: tuple[Family, ...]
    family_n: np.ndarray
    A_n: np.ndarray
    log_b_n: np.ndarray
    log_mid_n: np.ndarray
    R_0_n: np.ndarray
    drift_n: np.ndarray
    log_c_range: tuple[float, float]
    """Logarithms of the smallest positive and the largest compute of the run."""

    def curves_at(self, compute_M: np.ndarray) -> np.ndarray:
        """Return the mean curves at computes (M,), shape (n, M)."""
        x = log_compute(np.asarray(compute_M, dtype=float)) - self.log_mid_n[:, None]
        share = of_families(self.families, self.family_n, "share", np.exp(self.log_b_n)[:, None], x)
        drift = self.drift_n[:, None] * _since(compute_M, self.log_c_range)
        return np.clip(self.R_0_n[:, None] + (self.A_n - self.R_0_n)[:, None] * share + drift, 0.0, 1.0)

    def log_compute_to(self, target: float) -> np.ndarray:
        """Return log C at which the curves reach `target` without more wander: -inf up to R_0, inf from A."""
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
    """Weighted nodes. `weight` sums to 1; it, its logarithm, `A`, `R_0` and `drift` are (cells, a, r).

    `drift` is as of `Draws`.
    """

    family_cells: np.ndarray
    log_b_cells: np.ndarray
    log_mid_cells: np.ndarray
    phi_cells: np.ndarray
    A: np.ndarray
    R_0: np.ndarray
    drift: np.ndarray
    log_weight: np.ndarray
    weight: np.ndarray
    sd_J: np.ndarray
    sd_weight_J: np.ndarray
    families: tuple[Family, ...]
    prior: Prior
    wander: float
    """Where the wander is at the last evaluation, in pass rate: its posterior mean."""
    log_c_range: tuple[float, float]

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
            self.A[cell, a, r],
            self.log_b_cells[cell],
            self.log_mid_cells[cell],
            self.R_0[cell, a, r],
            self.drift[cell, a, r],
            self.log_c_range,
        )

    def curve_at(self, compute: float) -> np.ndarray:
        """Return the mean curve at one compute for every node, shape (cells, a, r)."""
        x = float(log_compute(np.asarray(compute))) - self.log_mid_cells
        g = of_families(self.families, self.family_cells, "share", np.exp(self.log_b_cells), x)[:, None, None]
        value = self.R_0 * (1 - g) + self.A * g
        since = float(_since(np.asarray(compute), self.log_c_range))
        # The walk knows no bounds; a pass rate does.
        return np.clip(value + self.drift * since, 0.0, 1.0) if since else value

    def compute_to(self, target: float) -> np.ndarray:
        """Return the compute at which every node's curve reaches `target`; 0 below R_0, infinite above A.

        The wander stays where it is: a walk that goes on crosses any target at some time.
        """
        b, log_mid = np.exp(self.log_b_cells)[:, None, None], self.log_mid_cells[:, None, None]
        log_c = log_compute_to(self.families, self.family_cells, self.A, b, log_mid, self.R_0, target)
        return np.exp(np.where(np.isinf(log_c), log_c, np.clip(log_c, -700, 700)))


def posterior(sample: Sample, floor: float, best: Sequence[LeastSquares], prior: Prior) -> Posterior:
    """Integrate over the families of `best` and the noise of `prior`, and normalise over all of them.

    `best` holds the least-squares curve of every family, from which the search for its nodes starts. `floor`
    is the least sd of the noise.
    """
    noise = make_noise(sample, floor, prior)
    families, prior_F = prior.families([found.curve.family for found in best])
    parts = []
    for found in best:
        if found.curve.family in families:
            part = family_nodes(sample, found.curve.family, noise, prior, math.log(found.curve.C_mid))
            part["family_cells"] = np.full(len(part["A"]), len(parts))
            part["log_weight"] = part["log_weight"] + math.log(prior_F[len(parts)])
            parts.append(part)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rss, log_weight = joined.pop("rss"), _normalised(joined.pop("log_weight"))
    model_cells, wander = joined.pop("model_cells"), joined.pop("wander")
    weight = np.exp(log_weight)
    sd_weight_J = noise.sd_weights(rss.ravel(), weight.ravel())
    joined |= _wandered(noise, joined, model_cells, wander, rss)
    return Posterior(
        **joined,
        log_weight=log_weight,
        weight=weight,
        sd_J=noise.sd_J,
        sd_weight_J=sd_weight_J,
        families=families,
        prior=prior,
        wander=float(np.sum(wander * weight)),
        log_c_range=sample.log_c_range,
    )


def _wandered(
    noise: Noise, nodes: dict[str, np.ndarray], model_cells: np.ndarray, wander: np.ndarray, rss: np.ndarray
) -> dict[str, np.ndarray]:
    """Return `A`, `R_0` and `drift` with each node's wander; `wander` is its mean at the last evaluation."""
    A, R_0 = np.tile(nodes["A"][:, :, None], rss.shape[2]), nodes["R_0"].copy()
    drift, mine = np.zeros_like(rss), np.flatnonzero(noise.wander_P[model_cells])
    if len(mine):
        # Quantiles that are even over the nodes in any order, and independent of one another: an additive
        # recurrence on two irrational numbers (Roberts, 2018), which leaves fewer gaps than draws would.
        k, steps = (
            np.arange(rss[mine].size).reshape(rss[mine].shape),
            (0.7548776662466927, 0.5698402909980532),
        )
        here, ahead = (_even_normal()[((k * step) % 1.0 * _EVEN).astype(int)] for step in steps)
        sd, model = noise.sd_at(rss[mine]), model_cells[mine]
        moved = wander[mine] + here * sd * np.sqrt(noise.left_P[model])[:, None, None]
        A[mine], R_0[mine] = np.clip(A[mine] + moved, 0.0, 1.0), np.clip(R_0[mine] + moved, 0.0, 1.0)
        drift[mine] = ahead * sd * np.sqrt(noise.wander_P[model])[:, None, None]
    return {"A": A, "R_0": R_0, "drift": drift}


@functools.cache
def _even_normal() -> np.ndarray:
    """Return the quantiles of a normal distribution at even probabilities."""
    return normal_quantiles((np.arange(_EVEN) + 0.5) / _EVEN)


def _since(compute: np.ndarray, log_c_range: tuple[float, float]) -> np.ndarray:
    """Return the root of the wander's clock since the last evaluation, 0 before it; shape as given."""
    return np.sqrt(np.maximum(clock(compute, *log_c_range) - 1.0, 0.0))


def _normalised(log_weight: np.ndarray) -> np.ndarray:
    """Return the logarithms of the weights, scaled to sum to 1."""
    top = log_weight.max()
    return log_weight - top - np.log(np.exp(log_weight - top).sum())
