"""Proper scores of probability forecasts, lower is better, in units of what is forecast (here, pass rate).

Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 102, 2007.
Shapes: M outcomes, K weighted components.
"""

from __future__ import annotations

import math

import numpy as np


def covered(low_M: np.ndarray, high_M: np.ndarray, outcome_M: np.ndarray) -> np.ndarray:
    """Return whether each closed interval contains its outcome, booleans (M,); the mean is the coverage."""
    return (low_M <= outcome_M) & (outcome_M <= high_M)


def interval_score(low_M: np.ndarray, high_M: np.ndarray, outcome_M: np.ndarray, level: float) -> np.ndarray:
    """Return the width, plus 2 / (1 - level) times the distance by which an outcome is missed, (M,).

    S = (u - l) + 2 / alpha (l - y)_+ + 2 / alpha (y - u)_+, alpha = 1 - level, for a central interval
    (Gneiting and Raftery 2007, equation 43).
    """
    missed_M = np.maximum(low_M - outcome_M, 0.0) + np.maximum(outcome_M - high_M, 0.0)
    return high_M - low_M + 2.0 / (1.0 - level) * missed_M


def distance(
    mean_KM: np.ndarray, sd_K: np.ndarray, weight_K: np.ndarray, outcome_M: np.ndarray
) -> np.ndarray:
    """Return E|X - y| of M mixtures of normal distributions X and their outcomes y, shape (M,).

    sum_i w_i a(y - m_i, s_i^2), where a(m, s^2) is the mean of |N(m, s^2)|; weights need not sum to 1, and an
    sd may be 0. Less `half_spread` it is the continuous ranked probability score, the integral of
    (F(z) - 1{z >= y})^2 over z with F the distribution function (Gneiting and Raftery 2007, equations 20 and
    21; Grimit, Gneiting, Berrocal and Johnson, QJRMS 132, 2006, equation 5).
    """
    apart_KM = _mean_abs(outcome_M - mean_KM, np.broadcast_to(np.asarray(sd_K)[:, None], mean_KM.shape))
    return np.asarray(weight_K) / np.sum(weight_K) @ apart_KM


def half_spread(mean_K: np.ndarray, sd_K: np.ndarray, weight_K: np.ndarray) -> float:
    """Return E|X - X'| / 2 of a mixture: sum_ij w_i w_j a(m_i - m_j, s_i^2 + s_j^2) / 2. It costs K^2."""
    weight_K = np.asarray(weight_K) / np.sum(weight_K)
    # Half of the pairs, as each costs an error function in Python.
    i, j = np.triu_indices(len(weight_K))
    pairs = _mean_abs(mean_K[i] - mean_K[j], np.hypot(sd_K[i], sd_K[j]))
    twice = np.where(i == j, 1.0, 2.0)  # every pair of different components stands for two
    return float(np.sum(twice * weight_K[i] * weight_K[j] * pairs)) / 2


_erf = np.vectorize(math.erf, otypes=[float])


def _mean_abs(mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """Return E|N(mean, sd^2)| = m (2 Phi(m / s) - 1) + 2 s phi(m / s)."""
    z = np.divide(mean, sd, out=np.full(np.shape(mean), np.inf), where=sd > 0)
    folded = mean * _erf(z / math.sqrt(2.0)) + sd * math.sqrt(2.0 / math.pi) * np.exp(-0.5 * z * z)
    return np.where(sd > 0, folded, np.abs(mean))
