"""The noise of evaluations: unknown in size, correlated between neighbours, and integrated out.

    e ~ N(0, sd^2 K_phi)        K_phi[i, j] = phi^(distance from i to j in usual steps between evaluations)

A Markov correlation, so that its inverse is tridiagonal.
Shapes: P values of phi, J of sd, N points, T entries of a table over the sum of squares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.quadratic import Precision
from scalerl.curve.sample import Sample

PHI = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Correlations of neighbours, alike before the data."""
SD_RANGE = (5e-4, 0.15)
"""Where log sd has its flat prior; evaluation noise that is known raises the lower end."""


@dataclass(frozen=True)
class Noise:
    """The noise integrated out: log of the integral over sd as a function of the sum of squares.

    `log_rss_T`, `log_weight_T` tabulate it; `sd_given_TJ` is the posterior of the nodes `sd_J`.
    `log_prior_P` is the prior of phi, with the determinant of its correlation.
    """

    phi_P: np.ndarray
    precision: Precision
    log_prior_P: np.ndarray
    sd_J: np.ndarray
    log_rss_T: np.ndarray
    log_weight_T: np.ndarray
    sd_given_TJ: np.ndarray

    def only(self, p: int) -> Noise:
        """The same given one correlation, P = 1."""
        phi_P, log_prior_P = self.phi_P[p : p + 1], self.log_prior_P[p : p + 1]
        return replace(self, phi_P=phi_P, precision=self.precision.only(p), log_prior_P=log_prior_P)

    def log_weight(self, rss: np.ndarray) -> np.ndarray:
        """Log marginal likelihood (up to a constant) of a sum of squares; first axis of `rss` is P."""
        return self.of_rss(rss) + self.log_prior_P.reshape(-1, *(1,) * (rss.ndim - 1))

    def of_rss(self, rss: np.ndarray) -> np.ndarray:
        """The same given phi."""
        return np.interp(np.log(np.maximum(rss, 1e-300)), self.log_rss_T, self.log_weight_T)

    def sd_weights(self, rss: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Posterior of the sd on `sd_J`, from the sums of squares of weighed nodes."""
        step = self.log_rss_T[1] - self.log_rss_T[0]
        index = np.round((np.log(np.maximum(rss, 1e-300)) - self.log_rss_T[0]) / step).astype(int)
        index = np.clip(index, 0, len(self.log_rss_T) - 1)
        return np.bincount(index, weight, len(self.log_rss_T)) @ self.sd_given_TJ


def make_noise(sample: Sample, floor: float, phi: tuple[float, ...] = PHI) -> Noise:
    """Tabulate the noise model of a sample whose sd is at least `floor`, with the correlations `phi`."""
    phi_P = np.array(phi)
    precision, log_det_P = _ar1(sample, phi_P)
    sd_J = np.geomspace(floor, max(SD_RANGE[1], 2 * floor), 80)
    log_rss_T = np.linspace(math.log(1e-3 * floor**2), math.log(4.0 * sample.n_points), 600)
    log_TJ = -sample.n_points * np.log(sd_J) - 0.5 * np.exp(log_rss_T)[:, None] / sd_J**2
    top_T = log_TJ.max(axis=1, keepdims=True)
    weight_TJ = np.exp(log_TJ - top_T)
    total_T = weight_TJ.sum(axis=1, keepdims=True)
    log_weight_T = (top_T + np.log(total_T))[:, 0]
    return Noise(phi_P, precision, -0.5 * log_det_P, sd_J, log_rss_T, log_weight_T, weight_TJ / total_T)


def _ar1(sample: Sample, phi_P: np.ndarray) -> tuple[Precision, np.ndarray]:
    """Inverses and log-determinants of the correlations phi^gap, replicates weighed; one per phi."""
    rho_PN = phi_P[:, None] ** sample.gap_N
    rho_PN[:, 0] = 0.0
    inverse_PN = 1.0 / (1.0 - rho_PN**2)
    diagonal_PN = inverse_PN.copy()
    diagonal_PN[:, :-1] += (rho_PN**2 * inverse_PN)[:, 1:]
    root_N = np.sqrt(sample.weight_N)
    below_PN = -rho_PN * inverse_PN * root_N * np.concatenate([[0.0], root_N[:-1]])
    return Precision(diagonal_PN * sample.weight_N, below_PN), -np.log(inverse_PN).sum(axis=1)


def ar1(white: np.ndarray, rho: np.ndarray | float) -> np.ndarray:
    """Independent noise (..., N) made AR(1): `rho`, or rho[i], is the correlation of i with i - 1."""
    noise, rho_N = np.array(white), np.broadcast_to(rho, white.shape[-1:])
    for i in range(1, len(rho_N)):
        noise[..., i] = rho_N[i] * noise[..., i - 1] + math.sqrt(1 - rho_N[i] ** 2) * noise[..., i]
    return noise
