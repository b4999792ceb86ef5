"""What the points say about the curve: a posterior by deterministic quadrature, averaged over families.

    y_i = R(C_i; family, A, B, C_mid, R_0) + e_i        e ~ N(0, sd^2 K_phi)       K_phi[i, j] = phi^distance

The prior is flat over what is measured, and over what half as much compute again would measure: equal prior
mass for curves that differ equally at the evaluations and at those to come (Jeffreys, 1946: the density
sqrt(det J^T J), J the derivatives of the curve there by R_0, A, log B, log C_mid), within 0 <= R_0 <= A <= 1,
B in [0.3, 6], and C_mid from a tenth of the smallest positive to ten times the largest compute. Flat in A,
log B and log C_mid, most of the prior lies where a higher ceiling, later, changes nothing that was measured:
forecasts are then too high, and families are weighed by how much of that they have. Flat over the evaluations
alone, it favours curves that end just behind the last one: before the bend, forecasts are too low, and
intervals too narrow. Beside it: log sd flat from the evaluation noise that is known (else 0.0005) to
0.15; the correlation phi of neighbours in {0, .2, .4, .6, .8, .9} alike; the families alike.
For a family and (B, C_mid, phi) the sum of squares is a quadratic in (R_0, A), and the integral over sd
depends on the sum of squares alone, so nothing is sampled: `nodes` lays nodes where the posterior has mass,
and they are weighed.

Shapes: cells = (B, C_mid, phi) over all families, a = nodes of A, r = nodes of R_0 for each A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import Family, log_compute, log_compute_to, shares
from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.nodes import family_nodes
from scalerl.curve.noise import PHI, make_noise
from scalerl.curve.sample import Sample


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
        share = shares(self.families, self.family_n, np.exp(self.log_b_n)[:, None], x)
        return self.R_0_n[:, None] + (self.A_n - self.R_0_n)[:, None] * share

    def thinned(self, n: int) -> Draws:
        """About n of them, evenly, for what is asked at many computes."""
        keep = slice(None, None, max(len(self.A_n) // n, 1))
        arrays = self.family_n, self.A_n, self.log_b_n, self.log_mid_n, self.R_0_n
        return Draws(self.families, *(array[keep] for array in arrays))


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
        log_weight = normalised(self.log_weight[keep])
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
        return shares(self.families, self.family_cells, np.exp(self.log_b_cells), x)

    def curve_at(self, compute: float) -> np.ndarray:
        """The mean curve at one compute for every node, shape (cells, a, r)."""
        g = self.share_cells(compute)[:, None, None]
        return self.R_0 * (1 - g) + self.A[:, :, None] * g

    def compute_to(self, target: float) -> np.ndarray:
        """Compute at which every node's curve reaches `target`; 0 below R_0, infinite above A."""
        b, log_mid = np.exp(self.log_b_cells)[:, None, None], self.log_mid_cells[:, None, None]
        A = self.A[:, :, None]
        log_c = log_compute_to(self.families, self.family_cells, A, b, log_mid, self.R_0, target)
        return np.exp(np.where(np.isinf(log_c), log_c, np.clip(log_c, -700, 700)))


def posterior(
    sample: Sample, floor: float, best: Sequence[LeastSquares], phi: tuple[float, ...] = PHI
) -> Posterior:
    """Integrate over the families of `best` and the correlations `phi`, and normalise over all of them.

    `best` holds the least-squares curve of every family: where its nodes are sought from. `floor` is the
    least sd of the noise.
    """
    noise = make_noise(sample, floor, phi)
    families = tuple(found.curve.family for found in best)
    parts = [family_nodes(sample, found.curve.family, noise, math.log(found.curve.C_mid)) for found in best]
    rss = np.concatenate([part.rss.ravel() for part in parts])
    log_weight = normalised(np.concatenate([part.log_weight for part in parts]))
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


def normalised(log_weight: np.ndarray) -> np.ndarray:
    """Logarithms of weights that sum to 1."""
    top = log_weight.max()
    return log_weight - top - np.log(np.exp(log_weight - top).sum())
