"""The best evaluation of a run, by a smooth curve through all of them rather than by the luckiest one.

    y_i = f_i + e_i                              e_i ~ N(0, s^2), evaluation i at compute C_i
    f_i = R_0 (1 - g_i) + A g_i + walk_i         g_i = 1 / (1 + (C_mid / C_i)^B), 0 at compute 0
    walk ~ N(0, w^2 T)                           T of a random walk over compute, or of a slope that is one

The curve encodes that runs rise and level off; the walk lets them fall, fast or slowly. T is 1 at the last
evaluation, so w is in units of the pass rate. With T = U diag(l) U^T everything is independent in the basis
U: (R_0, A) and the walk are normal given (B, C_mid, s, w), over whose nodes the posterior is summed. The
noise is that between evaluations of one run: they share their random numbers, so it is below the sampling
noise.

It is used after every evaluation of a run that keeps its best weights, from the first one on: `fit` has
better curves, but needs four evaluations.

Shapes: N evaluations, J nodes of (B, C_mid), n draws of f.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from scalerl.errors import CannotAnswerError
from scalerl.record.reader import RunRecord

FEWEST = 3
"""Evaluations that are needed before the best one is reported."""
_DRAWS = 2000
_B = np.geomspace(0.5, 4.0, 7)
_MID_PLACES = 11
"""Nodes of C_mid, from a part of the first compute to three times the last."""
_WALKS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Nodes of w."""
_NO_WALK = 0.4
"""Prior probability of no walk; a random walk and a trend have half of the rest each."""
_NOISE_OF_SAMPLING = np.geomspace(0.2, 2.0, 7)
"""Nodes of s, in units of the sampling noise."""
_NOISE = np.geomspace(0.002, 0.1, 9)
"""Nodes of s where the sampling noise is not known."""
_MEAN, _SD = np.array([0.4, 0.5]), 0.5
"""Prior of R_0 and A."""


@dataclass(frozen=True)
class SmoothedRun:
    """The noise-free pass rates of a run's evaluations, as draws from their posterior."""

    step_N: np.ndarray
    rate_nN: np.ndarray
    level: float = 0.95

    @property
    def rate_N(self) -> np.ndarray:
        """The posterior mean of every evaluation, shape (N,)."""
        return self.rate_nN.mean(axis=0)

    def interval(self, place: int) -> tuple[float, float]:
        """Return the credible interval of the evaluation at one place."""
        tail = (1 - self.level) / 2
        low, high = np.quantile(self.rate_nN[:, place], [tail, 1 - tail])
        return float(low), float(high)

    def best(self, steps: Collection[int] | None = None) -> int:
        """Return the place of the evaluation with the highest mean; `steps` limits the choice to those steps.

        Of equal ones it is the last.

        Raises:
            CannotAnswerError: no evaluation is of these steps.
        """
        may = np.ones(len(self.step_N), bool) if steps is None else np.isin(self.step_N, list(steps))
        if not may.any():
            raise CannotAnswerError("no evaluation is of any of these steps")
        rate_N = np.where(may, self.rate_N, -np.inf)
        return int(len(rate_N) - 1 - np.argmax(rate_N[::-1]))

    def probability_better(self, place: int, than: int) -> float:
        """Return the probability that one evaluation's weights beat another's, on these prompts."""
        return float(np.mean(self.rate_nN[:, place] > self.rate_nN[:, than]))


def smoothed(record: RunRecord, axis: str | None = None, level: float = 0.95) -> SmoothedRun:
    """Return the pass rates of a run without noise, over one compute axis (by default the run's own).

    Raises:
        InputError: the axis is unknown, or its counters were not logged.
        CannotAnswerError: the run has no evaluation.
    """
    if not record.evals:
        raise CannotAnswerError(f"{record.evals_file}: no evaluation yet")
    compute_N = record.training_compute(axis or record.default_axis)
    order_N = np.argsort(compute_N, kind="stable")
    rate_N = np.array([point.pass_rate for point in record.evals])[order_N]
    sd_N = np.array([point.noise_sd for point in record.evals])
    known_N = sd_N[np.isfinite(sd_N) & (sd_N > 0)]
    noise_S = _NOISE_OF_SAMPLING * np.median(known_N) if len(known_N) else _NOISE
    step_N = np.array([point.step for point in record.evals])[order_N]
    return SmoothedRun(step_N, smoothed_draws(compute_N[order_N], rate_N, noise_S), level)


def rates_by_step(record: RunRecord) -> dict[int, float]:
    """Return the smoothed pass rate of every evaluation of a run by its step: the criterion of
    `evaluation.keep = "best"`."""
    found = smoothed(record)
    return dict(zip(found.step_N.tolist(), found.rate_N.tolist(), strict=True))


def smoothed_draws(compute_N: np.ndarray, rate_N: np.ndarray, noise_S: np.ndarray) -> np.ndarray:
    """Return draws of the pass rates without noise, shape (n, N).

    Args:
        compute_N: compute of every evaluation, in ascending order.
        rate_N: their pass rates.
        noise_S: values that the standard deviation of the noise may have, with equal weight.
    """
    n_points = len(rate_N)
    if n_points == 1:
        return np.full((_DRAWS, 1), rate_N[0])
    shape_JN = _shapes(compute_N)
    nodes: list[tuple[np.ndarray, np.ndarray, float, float]] = []
    log_weights: list[np.ndarray] = []
    for prior, walk, basis_NN, scale_N in _walks(compute_N):
        y_N, g_JN = rate_N @ basis_NN, shape_JN @ basis_NN
        h_JN = np.ones(n_points) @ basis_NN - g_JN
        for noise in noise_S:
            log_weights.append(np.log(prior) + _evidence(y_N, h_JN, g_JN, noise**2 + walk**2 * scale_N))
            nodes.append((basis_NN, walk**2 * scale_N, float(noise), walk))
    log_weight = np.array(log_weights)  # nodes of (s, w), nodes of (B, C_mid)
    held = np.cumsum(np.exp(log_weight - log_weight.max()).ravel())
    # A systematic sample: every node as often as its weight says, without chance.
    chosen_n = np.searchsorted(held, (np.arange(_DRAWS) + 0.5) / _DRAWS * held[-1])
    draw, parts = np.random.default_rng(0), []
    for at, count in zip(*np.unique(chosen_n, return_counts=True), strict=True):
        node, j = divmod(int(at), log_weight.shape[1])
        parts.append(_paths(rate_N, shape_JN[j], *nodes[node][:3], int(count), draw))
    return np.clip(np.concatenate(parts), 0.0, 1.0)


def _shapes(compute_N: np.ndarray) -> np.ndarray:
    """Return the share g of the gain reached at every evaluation, for every node of (B, C_mid), (J, N)."""
    last = float(compute_N[-1])
    if not last > 0:
        return np.linspace(0.0, 1.0, len(compute_N))[None]  # several evaluations of one model
    first = float(compute_N[compute_N > 0][0])
    mid_M = np.geomspace(min(first, last / 4) / 2, 3 * last, _MID_PLACES)
    ratio_MN = np.divide(
        mid_M[:, None], compute_N, out=np.full((_MID_PLACES, len(compute_N)), np.inf), where=compute_N > 0
    )
    return np.concatenate([1.0 / (1.0 + ratio_MN**b) for b in _B])


def _walks(compute_N: np.ndarray) -> list[tuple[float, float, np.ndarray, np.ndarray]]:
    """Return the prior, w, the basis U and the scales l for every node of the walk."""
    n_points, last = len(compute_N), float(compute_N[-1])
    u_N = compute_N / last if last > 0 else np.linspace(0.0, 1.0, n_points)
    less_NN, more_NN = np.minimum.outer(u_N, u_N), np.maximum.outer(u_N, u_N)
    found = [(_NO_WALK, 0.0, np.eye(n_points), np.zeros(n_points))]
    for covariance_NN in (less_NN, less_NN**2 * (3 * more_NN - less_NN) / 2):
        scale_N, basis_NN = np.linalg.eigh(covariance_NN)
        share = (1 - _NO_WALK) / 2 / len(_WALKS)
        found += [(share, walk, basis_NN, np.maximum(scale_N, 0.0)) for walk in _WALKS]
    return found


def _normal(
    y_N: np.ndarray, h_JN: np.ndarray, g_JN: np.ndarray, variance_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, for (R_0, A), the precision (J, 2, 2) and precision times shift of the mean (J, 2); the sum of
    squares at the prior mean (J,); and the design (J, 2, N)."""
    x_J2N = np.stack([h_JN, g_JN], axis=1)
    over_J2N = x_J2N / variance_N
    rest_JN = y_N - _MEAN @ x_J2N
    precision_J22 = over_J2N @ x_J2N.transpose(0, 2, 1) + np.eye(2) / _SD**2
    return (
        precision_J22,
        np.einsum("jkn,jn->jk", over_J2N, rest_JN),
        (rest_JN**2 / variance_N).sum(axis=1),
        x_J2N,
    )


def _evidence(y_N: np.ndarray, h_JN: np.ndarray, g_JN: np.ndarray, variance_N: np.ndarray) -> np.ndarray:
    """Return the log marginal likelihood of every node of (B, C_mid), up to a constant, (J,)."""
    precision_J22, product_J2, rss_J, _ = _normal(y_N, h_JN, g_JN, variance_N)
    gain_J = np.einsum("jk,jk->j", product_J2, np.linalg.solve(precision_J22, product_J2[..., None])[..., 0])
    return -0.5 * (np.log(variance_N).sum() + np.log(np.linalg.det(precision_J22)) + rss_J - gain_J)


def _paths(
    rate_N: np.ndarray,
    g_N: np.ndarray,
    basis_NN: np.ndarray,
    walked_N: np.ndarray,
    noise: float,
    count: int,
    draw: np.random.Generator,
) -> np.ndarray:
    """Draw `count` paths f of one node, (count, N); `walked_N` are the walk's variances in the basis."""
    y_N, g_N = rate_N @ basis_NN, g_N @ basis_NN
    variance_N = noise**2 + walked_N
    ones_N = np.ones(len(y_N)) @ basis_NN
    precision_J22, product_J2, _, x_J2N = _normal(y_N, (ones_N - g_N)[None], g_N[None], variance_N)
    covariance = np.linalg.inv(precision_J22[0])
    ends_n2 = draw.multivariate_normal(_MEAN + covariance @ product_J2[0], covariance, count)
    curve_nN = ends_n2 @ x_J2N[0]
    share_N = walked_N / variance_N
    walk_nN = share_N * (y_N - curve_nN) + noise * np.sqrt(share_N) * draw.normal(size=curve_nN.shape)
    return (curve_nN + walk_nN) @ basis_NN.T
