"""Proper scores of probability forecasts: lower is better, in the unit of what is forecast (pass rate).

Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 102, 2007.
Shapes: M outcomes, Q quantiles.
"""

import numpy as np


def covered(low_M: np.ndarray, high_M: np.ndarray, outcome_M: np.ndarray) -> np.ndarray:
    """Return whether each closed interval contains its outcome, booleans (M,); the mean is the coverage."""
    return (low_M <= outcome_M) & (outcome_M <= high_M)


def interval_score(low_M: np.ndarray, high_M: np.ndarray, outcome_M: np.ndarray, level: float) -> np.ndarray:
    """Return the width plus 2 / (1 - level) times the distance by which an outcome is missed, (M,).

    S = (u - l) + 2 / alpha (l - y)_+ + 2 / alpha (y - u)_+, alpha = 1 - level, for a central interval
    (Gneiting and Raftery 2007, equation 43).
    """
    missed_M = np.maximum(low_M - outcome_M, 0.0) + np.maximum(outcome_M - high_M, 0.0)
    return high_M - low_M + 2.0 / (1.0 - level) * missed_M


def crps(value_QM: np.ndarray, outcome_M: np.ndarray) -> np.ndarray:
    """Return the continuous ranked probability score of M forecasts given by Q quantiles, shape (M,).

    `value_QM` are the quantiles at (i + 1/2) / Q, ascending. The score is the integral of
    (F(z) - 1{z >= y})^2 over z with F the distribution function (Gneiting and Raftery 2007, equation 20). For
    F a step of 1 / Q at every quantile it is 2 / Q sum_i (q_i - y) (1{y < q_i} - (i + 1/2) / Q) (Laio and
    Tamea, HESS 11, 2007).
    """
    at_Q1 = levels(len(value_QM))[:, None]
    return 2.0 * np.mean((value_QM - outcome_M) * ((outcome_M < value_QM) - at_Q1), axis=0)


def levels(n: int) -> np.ndarray:
    """Return the probabilities (i + 1/2) / n of the quantiles that `crps` takes, (n,)."""
    return (np.arange(n) + 0.5) / n
