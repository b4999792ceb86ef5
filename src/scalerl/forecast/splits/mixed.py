"""Linear models whose coefficients shrink together, group by group, by as much as the data say.

    y = F a + sum_g X_g b_g + tau z + e      b_g ~ N(0, scale_g^2)     z ~ N(0, 1)     e ~ N(0, sd_r^2), known

a is flat. tau and the scales are integrated on nodes; given them all is normal, so nothing is sampled. The
likelihood is the restricted one, a integrated out (Harville, JASA 72, 1977).

Shapes: R rows, F fixed columns, P shrunken columns, T nodes of tau, G groups, K = the nodes of all groups'
scales crossed, N = T * K.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scalerl.curve.quantiles import normal_cdf

_REACH, _NODES = 6.0, 11  # nodes of a scale: from its prior's divided by e^(6/2) to it times e^(6/2)
_BISECTIONS = 30
_LITTLE = 1e-6  # nodes that hold less than this together are left out


@dataclass(frozen=True)
class ScalePrior:
    """What is known of a standard deviation: nodes, and weights that sum to 1."""

    node_T: np.ndarray
    weight_T: np.ndarray


def half_t(scale: float, degrees: int = 4) -> ScalePrior:
    """A half-t prior of a standard deviation (Gelman, Bayesian Analysis 1, 2006), on nodes."""
    log_T = np.linspace(-_REACH / 2, _REACH / 2, _NODES)
    weight_T = np.exp(log_T) * (1 + np.exp(2 * log_T) / degrees) ** (-(degrees + 1) / 2)
    return ScalePrior(scale * np.exp(log_T), weight_T / weight_T.sum())


@dataclass(frozen=True)
class LinearPosterior:
    """What is known of the shrunken coefficients: at every node their normal, and the node's weight."""

    weight_N: np.ndarray
    tau_N: np.ndarray
    scale_NG: np.ndarray
    mean_NP: np.ndarray
    sd_NP: np.ndarray

    def above(self, value_P: np.ndarray) -> np.ndarray:
        """Probability that each coefficient is above a value, (P,)."""
        return self.weight_N @ normal_cdf((self.mean_NP - value_P) / self.sd_NP)

    def quantiles(self, at_Q: np.ndarray) -> np.ndarray:
        """Quantiles of every coefficient, (Q, P)."""
        reach = 8 * self.sd_NP
        rows = []
        for at in np.atleast_1d(at_Q):
            low_P, high_P = (self.mean_NP - reach).min(axis=0), (self.mean_NP + reach).max(axis=0)
            for _ in range(_BISECTIONS):
                middle_P = 0.5 * (low_P + high_P)
                is_low_P = 1 - self.above(middle_P) < at
                low_P, high_P = np.where(is_low_P, middle_P, low_P), np.where(is_low_P, high_P, middle_P)
            rows.append(0.5 * (low_P + high_P))
        return np.array(rows)

    def rms(self, value_N: np.ndarray) -> float:
        """Root mean square of tau, or of a scale."""
        return math.sqrt(float(self.weight_N @ value_N**2))


def mixture(parts: Sequence[LinearPosterior], weights: Sequence[float]) -> LinearPosterior:
    """The posteriors of several models in one, by the weights of the models."""
    arrays = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("tau_N", "scale_NG", "mean_NP", "sd_NP")
    ]
    weight_N = np.concatenate([w * part.weight_N for part, w in zip(parts, weights, strict=True)])
    return LinearPosterior(weight_N / weight_N.sum(), *arrays)


def linear_posterior(
    y_R: np.ndarray,
    sd_R: np.ndarray,
    fixed_RF: np.ndarray,
    groups: Sequence[tuple[np.ndarray, ScalePrior]],
    tau: ScalePrior,
) -> LinearPosterior:
    """Integrate over tau and the scale of every group; `groups` are columns (R, p) and their scale's prior.

    The columns of `fixed_RF` are to be linearly independent.
    """
    X_RP = np.hstack([columns for columns, _ in groups])
    sizes = [columns.shape[1] for columns, _ in groups]
    scale_KG = np.array(list(itertools.product(*(prior.node_T for _, prior in groups))))
    prior_K = np.array([math.prod(ws) for ws in itertools.product(*(prior.weight_T for _, prior in groups))])
    variance_KP = np.repeat(scale_KG**2, sizes, axis=1)

    M_TPP, c_TP, rest_T = _given_tau(y_R, sd_R, fixed_RF, X_RP, tau.node_T)
    precision = M_TPP[:, None] + np.eye(X_RP.shape[1]) / variance_KP[:, None, :]
    factor = np.linalg.cholesky(precision)  # (T, K, P, P)
    cov = np.linalg.inv(precision)
    mean_TKP = np.einsum("tkpq,tq->tkp", cov, c_TP)
    log_TK = rest_T[:, None] + 0.5 * np.einsum("tkp,tp->tk", mean_TKP, c_TP)
    log_TK -= np.log(np.diagonal(factor, axis1=2, axis2=3)).sum(axis=2) + 0.5 * np.log(variance_KP).sum(
        axis=1
    )
    weight_TK = tau.weight_T[:, None] * prior_K * np.exp(log_TK - log_TK.max())
    sd_TKP = np.sqrt(np.diagonal(cov, axis1=2, axis2=3))

    weight_N = weight_TK.ravel() / weight_TK.sum()
    order = np.argsort(-weight_N)
    keep_N = order[: int(np.searchsorted(np.cumsum(weight_N[order]), 1 - _LITTLE)) + 1]
    t_N, k_N = np.divmod(keep_N, len(scale_KG))
    return LinearPosterior(
        weight_N[keep_N] / weight_N[keep_N].sum(),
        tau.node_T[t_N],
        scale_KG[k_N],
        mean_TKP[t_N, k_N],
        sd_TKP[t_N, k_N],
    )


def _given_tau(
    y_R: np.ndarray, sd_R: np.ndarray, fixed_RF: np.ndarray, X_RP: np.ndarray, tau_T: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every tau, the fixed columns projected out: X'X and X'y in units of the noise, and the part of the
    log-likelihood that no coefficient changes."""
    M, c, rest = [], [], []
    for tau in tau_T:
        w_R = 1.0 / np.sqrt(sd_R**2 + tau**2)
        q_RF, r_FF = np.linalg.qr(w_R[:, None] * fixed_RF)
        X, y = w_R[:, None] * X_RP, w_R * y_R
        X, y = X - q_RF @ (q_RF.T @ X), y - q_RF @ (q_RF.T @ y)
        M.append(X.T @ X)
        c.append(X.T @ y)
        rest.append(np.log(w_R).sum() - np.log(np.abs(np.diag(r_FF))).sum() - 0.5 * y @ y)
    return np.array(M), np.array(c), np.array(rest)
