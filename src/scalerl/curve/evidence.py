"""The evidence for a misfit: a model of a healthy run, candidate changes, and the Bayes factor of each.

    y = R(C) + wander + noise                   a healthy run, the null
    y = R(C) + wander + noise + g d_j(C)        a change at C_j: d_j is a hinge (0, then a line) or a step
    y = R(C) + waves + noise                    a larger and faster wander than that of a healthy run

R(C) is the curve of the family that fits best, with small changes of its parameters and steps towards the
other families' curves: a run between two families is healthy. The wander is a smooth process of small known
sd. The noise is AR(1), and smaller where the curve is near 1, as that of a share is. Its sd and correlation
are integrated over a grid, so that residuals that contain the misfit fix neither. All else is Gaussian and
integrated in closed form. Known sampling noise plays no part: training adds noise of its own, so scatter
above the sampling noise is no evidence. Structure is.

Shapes: N evaluations, K columns of the null, J candidate changes; P correlations, S noise sds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.families import Curve
from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.sample import Sample

WANDER_SD, WAVES_SD = 0.003, 0.02
"""Sd, in pass rate, of the smooth deviation of a healthy run, and of one that no family explains."""
CHANGE_SD = np.array([0.02, 0.06, 0.2])
"""Prior sds of the size of a change (step; hinge at the last evaluation): small to large, equally likely."""
PARAMETER_SD = (0.1, 0.1, 0.3, 0.3)
"""Prior sd of A, R_0, log B and log C_mid about the fitted curve: the first columns of the null."""
FAMILY_SD = 0.3
"""Prior sd of a step towards the curve of another family, where 1 is all the way."""
N_WAVES = 8
"""Cosines that make up the wander and the waves: the last columns of the null."""
PHI = np.array([0.0, 0.2, 0.4, 0.6, 0.8])
"""Correlations of the noise of neighbours, equally probable a priori."""
_WANDER_LENGTH = 0.15  # correlation length of the wander, as a share of the run
_OTHER_NOISE = 0.01  # variance of the noise besides p (1 - p), in that of one sample
_SD_NODES = 10
_SIDE = 3  # least number of evaluations on each side of a change
_MOST_HINGES, _MOST_STEPS = 40, 120

Node = tuple[float, float]
"""phi and sd of the noise."""


@dataclass(frozen=True)
class Healthy:
    """y = curve + Z beta + noise, beta_k ~ N(0, sd_k^2); Z: the parameters, other families, the wander."""

    curve: Curve
    curve_N: np.ndarray
    residual_N: np.ndarray
    columns_NK: np.ndarray
    sd_K: np.ndarray

    def with_waves(self) -> Healthy:
        """Return the model with larger and faster waves that no family explains, equal at all frequencies."""
        sd_K = self.sd_K.copy()
        sd_K[-N_WAVES:] = WAVES_SD / math.sqrt(N_WAVES)
        return replace(self, sd_K=sd_K)


@dataclass(frozen=True)
class Changes:
    """Candidate columns, hinges first; `first_J` is the first evaluation that each change moves.

    `log_tried` is the log of the share of all steps that are candidates: the others count as unlikely.
    """

    columns_NJ: np.ndarray
    first_J: np.ndarray
    n_hinges: int
    log_tried: float


@dataclass(frozen=True)
class Evidence:
    """Log evidence of the healthy run and of each alternative, with its most probable noise node."""

    null: Healthy
    log_null: float
    log_hinge_J: np.ndarray
    log_step_J: np.ndarray
    log_waves: float
    node_J: list[Node]
    node_waves: Node

    @property
    def log_kinds(self) -> tuple[float, float, float]:
        """Log evidence of hinges, steps and waves, averaged over places."""
        return _log_mean(self.log_hinge_J), _log_mean(self.log_step_J), self.log_waves

    @property
    def log_change(self) -> float:
        """Log evidence of a misfit of any kind, the three equally probable a priori."""
        return _log_mean(self.log_kinds)


def healthy_model(sample: Sample, best: Sequence[LeastSquares]) -> Healthy:
    """Make the linear model of a run without misfit, around the curve of the family that fits best."""
    ranked = sorted(best, key=lambda found: found.rss)
    compute_N = np.exp(sample.log_c_N)
    curve_N = ranked[0].curve(compute_N)
    others = [found.curve(compute_N) - curve_N for found in ranked[1:]]
    return model_around(sample, ranked[0].curve, np.array(others).reshape(len(others), -1).T)


def model_around(sample: Sample, curve: Curve, others_NK: np.ndarray) -> Healthy:
    """Make the model around one curve; `others_NK` are the steps towards the other families' curves."""
    curve_N = curve(np.exp(sample.log_c_N))
    parameters_N4 = curve.jacobian(sample.log_c_N)[:, [0, 3, 1, 2]]
    # The wander: a squared-exponential process over the evaluations, as cosines of decreasing sd.
    gap_N = np.where(np.isfinite(sample.gap_N), sample.gap_N, 1.0)
    clock_N = np.cumsum(gap_N) - gap_N[0]
    k_K = np.arange(1, N_WAVES + 1)
    waves_NK = math.sqrt(2.0) * np.cos(np.pi * k_K * (clock_N / clock_N[-1])[:, None])
    sd_K = np.exp(-0.25 * (np.pi * k_K * _WANDER_LENGTH) ** 2)
    waves_sd_K = sd_K / math.sqrt(float(sd_K @ sd_K))
    return Healthy(
        curve,
        curve_N,
        without_outliers(sample.y_N - curve_N),
        np.column_stack([parameters_N4, others_NK, waves_NK]),
        np.concatenate([PARAMETER_SD, np.full(others_NK.shape[1], FAMILY_SD), WANDER_SD * waves_sd_K]),
    )


def by_sampling_noise(sample: Sample, curve_N: np.ndarray) -> Sample:
    """Weight rows above 1/2 by the sampling noise of a share, p (1 - p) with p the curve, and a little more.

    A run that comes near 1 has less noise there: with equal noise its first half would look like waves. Near
    0 the noise is small as well, but the curve of a run that learns the format first is known less well.
    """
    p_N = np.clip(curve_N, 0.5, 1.0)
    weight_N = sample.weight_N / (p_N * (1.0 - p_N) + _OTHER_NOISE)
    return replace(sample, weight_N=weight_N * (sample.weight_N.sum() / weight_N.sum()))


def without_outliers(residual_N: np.ndarray) -> np.ndarray:
    """Move single evaluations far from both neighbours onto them: an outlier is neither a jump nor a peak.

    A step stands out alike on both of its sides; a single outlier is twice as far from its neighbours' mean
    as they are from theirs. The first or the last evaluation alone is no evidence either.
    """
    apart_N = np.pad(from_neighbours(residual_N), 1)
    apart_N[0], apart_N[-1] = residual_N[0] - residual_N[1], residual_N[-1] - residual_N[-2]
    size_N = np.abs(apart_N)
    scale = float(np.median(size_N)) / 0.6745  # the sd of a normal of this median deviation
    padded = np.pad(size_N, 1)
    single_N = (size_N > 5.0 * scale) & (size_N > 1.5 * np.maximum(padded[:-2], padded[2:]))
    return residual_N - np.where(single_N, apart_N, 0.0)


def from_neighbours(value_N: np.ndarray) -> np.ndarray:
    """Return how far each value but the first and the last is from the mean of its neighbours, (N - 2,)."""
    return value_N[1:-1] - 0.5 * (value_N[:-2] + value_N[2:])


def candidate_changes(sample: Sample, residual_N: np.ndarray) -> Changes:
    """Return candidate hinges (in compute, 1 at the last evaluation) and steps, away from the run's ends.

    A hinge next to the true one does as well. A step does not, so of many steps the largest are tried.
    """
    n, compute_N = len(sample.y_N), np.exp(sample.log_c_N)
    every = np.arange(_SIDE, n - _SIDE + 1)
    bent = every[np.linspace(0, len(every) - 1, min(len(every), _MOST_HINGES)).astype(int)]
    by_size = np.argsort(-np.abs(residual_N[every] - residual_N[every - 1]), kind="stable")
    stepped = np.sort(every[by_size[:_MOST_STEPS]])
    knot_J = compute_N[bent - 1]
    hinge_NJ = np.maximum(compute_N[:, None] - knot_J, 0.0) / (compute_N[-1] - knot_J)
    step_NJ = (np.arange(n)[:, None] >= stepped).astype(float)
    columns_NJ, first_J = np.concatenate([hinge_NJ, step_NJ], axis=1), np.concatenate([bent, stepped])
    return Changes(columns_NJ, first_J, len(bent), math.log(len(stepped) / len(every)))


def evidence_of(sample: Sample, null: Healthy, changes: Changes, residual_N: np.ndarray) -> Evidence:
    """Integrate all changes and the waves over beta, the size of the change and the noise.

    `residual_N` sets the range of the noise sd. s = d' Q d and t = d' Q r of every column d, with Q the
    precision of the data once beta is integrated out.
    """
    sd_S = noise_nodes(residual_N)
    log_null_PS, s, t = integrated(sample, null, sd_S, changes.columns_NJ)
    # A Bayes factor of e^600 is certain enough; beyond it the exponential would overflow.
    bayes = sum(np.exp(np.minimum(log_bayes(s, t, v), 600.0)) for v in CHANGE_SD) / len(CHANGE_SD)
    log_change = log_null_PS[..., None] + np.log(bayes)
    log_waves_PS, _, _ = integrated(sample, null.with_waves(), sd_S, changes.columns_NJ[:, :0])
    log_J, h = _log_sum(log_change), changes.n_hinges
    nodes = [(float(phi), float(sd)) for phi in PHI for sd in sd_S]
    return Evidence(
        null,
        float(_log_sum(log_null_PS)),
        log_J[:h],
        log_J[h:] + changes.log_tried,
        float(_log_sum(log_waves_PS)),
        [nodes[i] for i in log_change.reshape(len(nodes), -1).argmax(axis=0)],
        nodes[int(log_waves_PS.argmax())],
    )


def log_bayes(s: np.ndarray, t: np.ndarray, v: float) -> np.ndarray:
    """Return the log Bayes factor of a change whose size has a normal prior of sd v."""
    return 0.5 * t**2 / (s + v**-2.0) - 0.5 * np.log1p(v * v * s)


def noise_nodes(residual_N: np.ndarray) -> np.ndarray:
    """Return nodes of the noise sd, log-spaced from the scatter of neighbours to the rms of residuals."""
    # 1e-5 for exact data, which have no residuals: a grid needs a range above 0.
    rms = math.sqrt(float(np.mean(residual_N**2))) + 1e-5
    local = math.sqrt(float(np.mean(from_neighbours(residual_N) ** 2)) / 1.5) + 1e-5
    return np.geomspace(0.6 * min(local, rms), 2.5 * rms, _SD_NODES)


def integrated(
    sample: Sample, null: Healthy, sd_S: np.ndarray, columns_NJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log evidence (P, S), and s and t (P, S, J) of the columns, with beta integrated out.

    With beta scaled to unit sd and Z' K^-1 Z = U diag(l) U', the integral over beta leaves
    Q = K^-1 / sd^2 - K^-1 Z U diag(1 / (l + sd^2)) U' Z' K^-1 / sd^2: diagonal whatever sd is.
    """
    n, k = null.columns_NK.shape
    everything = np.column_stack([null.columns_NK * null.sd_K, null.residual_N, columns_NJ])
    white, log_det_P = _whiten(sample, everything, PHI)
    Z, x, r = white[..., :k], white[..., k:], white[..., k : k + 1]
    l_PK, U = np.linalg.eigh(np.swapaxes(Z, 1, 2) @ Z)
    # Collinear columns have zero eigenvalues, which may come out as -1e-17.
    l_P1K = np.maximum(l_PK, 0.0)[:, None]
    z = np.swapaxes(Z @ U, 1, 2) @ x
    variance_S1 = sd_S[:, None] ** 2
    shrink_PSK = 1.0 / (l_P1K + variance_S1)
    square = (np.sum(x**2, axis=1)[:, None] - shrink_PSK @ z**2) / variance_S1
    cross = (np.sum(x * r, axis=1)[:, None] - shrink_PSK @ (z * z[..., :1])) / variance_S1
    log_M_PS = np.log1p(l_P1K / variance_S1).sum(axis=2)
    spacing = math.log(math.log(sd_S[1] / sd_S[0]))  # of log sd, whose prior is flat
    log_evidence_PS = spacing - n * np.log(sd_S) - 0.5 * (log_det_P[:, None] + log_M_PS + square[..., 0])
    return log_evidence_PS, square[..., 1:], cross[..., 1:]


def _whiten(sample: Sample, columns_NK: np.ndarray, phi_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return K_phi^(-1/2) times the columns, (P, N, K), and log |K_phi| (P,), replicates weighted."""
    rho_PN = phi_P[:, None] ** sample.gap_N
    rho_PN[:, 0] = 0.0
    root_PN = np.sqrt(1.0 - rho_PN**2)
    column_NK = columns_NK * np.sqrt(sample.weight_N)[:, None]
    before_NK = np.concatenate([column_NK[:1], column_NK[:-1]])
    white = (column_NK - rho_PN[:, :, None] * before_NK) / root_PN[:, :, None]
    return white, 2.0 * np.log(root_PN).sum(axis=1)


def _log_sum(log_PS: np.ndarray) -> np.ndarray:
    """Return the log of the sum of exponentials over the nodes of the noise, the first two axes."""
    top = log_PS.max(axis=(0, 1))
    return top + np.log(np.exp(log_PS - top).sum(axis=(0, 1)))


def _log_mean(log_J: Sequence[float] | np.ndarray) -> float:
    log_J = np.asarray(log_J)
    top = float(log_J.max())
    return top + math.log(float(np.mean(np.exp(log_J - top))))


def estimate_at(
    sample: Sample, null: Healthy, node: Node, column_NJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return columns (N, K), coefficients (K,) and their covariance, for the null and at most one change."""
    phi, sd = node
    columns_NK = np.concatenate([null.columns_NK, column_NJ], axis=1)
    prior_K = np.concatenate([null.sd_K, np.full(column_NJ.shape[1], CHANGE_SD[-1])])
    both = np.column_stack([columns_NK, null.residual_N])
    white = _whiten(sample, both, np.array([phi]))[0][0]
    Z, r = white[:, :-1], white[:, -1]
    covariance_KK = np.linalg.inv(Z.T @ Z / sd**2 + np.diag(prior_K**-2.0))
    return columns_NK, covariance_KK @ (Z.T @ r) / sd**2, covariance_KK
