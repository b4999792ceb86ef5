"""Does a monotone curve describe the run at all? A decline, a jump, a kink, or waves that no family has.

    y = R(C) + wander + noise                   a healthy run, the null
    y = R(C) + wander + noise + g d_j(C)        a change at C_j: d_j is a hinge (0, then a line) or a step
    y = R(C) + waves + noise                    the wander of a healthy run several times over

R(C) is the curve of the best family, with small changes of A, R_0, log B and log C_mid, and of steps towards
the other families' curves. The wander is a smooth process of small known sd: no run follows its curve to the
last digit, and what wandering explains is no misfit. The noise is AR(1); its sd and correlation are
integrated over a grid, so that neither is fixed by residuals that hold the misfit. All else is Gaussian and
integrated in closed form. The answer is a Bayes factor, averaged over all changes (so that looking in many
places is paid for), and a misfit from a threshold that simulated healthy runs set (benchmarks/misfit.py).

Shapes: N points, K columns of the null, J candidate changes, G = nodes of the noise (phi, sd).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalerl.curve.least_squares import LeastSquares
from scalerl.curve.points import Points
from scalerl.curve.sample import Sample, make_sample

MIN_POINTS = 8
"""Evaluations at distinct compute below which nothing is said."""
THRESHOLD = 20.0
"""Bayes factor against the null from which a misfit is reported."""
WANDER_SD, WAVES_SD = 0.004, 0.02
"""Of the smooth deviation of a healthy run, and of one that no family explains, in units of pass rate."""
CHANGE_SD = 0.05
"""Prior sd of the size of a change: of the step, and of the hinge at the last evaluation."""
_WANDER_LENGTH = 0.15  # correlation length of the wander, as a share of the run
_WAVES = 8
_PHI = np.array([0.0, 0.2, 0.4, 0.6, 0.8])
_SD_NODES = 12
_SURE = 2.0  # a decline is this many times its error
_FITTABLE = 5  # evaluations that a fit needs
_SIDE = 3  # evaluations on each side of a change, the least
_MOST_CHANGES = 60
_PARAMETER_SD = np.array([0.3, 0.3, 1.0, 1.0])  # A, R_0, log B, log C_mid

Kind = Literal["peaked", "jump", "regime", "residuals"]


@dataclass(frozen=True)
class Misfit:
    """Why no family describes the run."""

    kind: Kind
    """A decline after a maximum, a step, a change of slope for good, or waves around the curve."""
    at: float | None
    """Compute of the maximum, or of the first evaluation after the change; None for `residuals`."""
    size: float
    """In pass rate: the decline, the step (signed), the kink's effect at the end (signed), the waves' rms."""
    bayes_factor: float
    """How much better the change explains the run than none does, places and sizes averaged."""
    why: str
    """For people: one sentence."""
    keep: tuple[float, float] | None
    """The range of compute (ends included) of the part that can be fitted, or None."""


def find_misfit(points: Points, best: Sequence[LeastSquares]) -> Misfit | None:
    """What no monotone curve describes in a run, or None. Deterministic.

    `best` holds the least-squares curve of every family for these points. Fewer than 8 evaluations at
    distinct compute say nothing.
    """
    sample = make_sample(points, None)
    if len(sample.y_N) < MIN_POINTS:
        return None
    null = _healthy(sample, best)
    changes = _changes(sample)
    evidence = _weigh(sample, null, changes)
    if evidence.log_total < math.log(THRESHOLD):
        return None
    return _describe(points, sample, null, changes, evidence)


@dataclass(frozen=True)
class _Healthy:
    """y = curve + Z beta + noise, beta_k ~ N(0, sd_k^2): the parameters, other families, then the wander."""

    curve_N: np.ndarray
    residual_N: np.ndarray
    columns_NK: np.ndarray
    sd_K: np.ndarray

    def with_waves(self) -> _Healthy:
        """The same with a wander as large as waves that no family explains."""
        sd_K = self.sd_K.copy()
        sd_K[-_WAVES:] *= WAVES_SD / WANDER_SD
        return replace(self, sd_K=sd_K)


@dataclass(frozen=True)
class _Changes:
    """Candidate columns, the hinges first; `first_J` is the first evaluation that a change moves."""

    columns_NJ: np.ndarray
    first_J: np.ndarray
    n_hinges: int


@dataclass(frozen=True)
class _Evidence:
    """Log Bayes factors against the healthy run, and each alternative's most probable node (phi, sd)."""

    log_bayes_J: np.ndarray
    node_J: list[tuple[float, float]]
    log_hinge: float
    log_step: float
    log_waves: float
    node_waves: tuple[float, float]

    @property
    def log_total(self) -> float:
        """Of a misfit of any kind, the three alike beforehand."""
        return _log_mean(np.array([self.log_hinge, self.log_step, self.log_waves]))


def _healthy(sample: Sample, best: Sequence[LeastSquares]) -> _Healthy:
    """The linear model of a run without misfit, around the curve of the family that fits best."""
    ranked = sorted(best, key=lambda found: found.rss)
    curve = ranked[0].curve
    compute_N = np.exp(sample.log_c_N)
    curve_N = curve(compute_N)
    share_N, by_log_b_N, by_log_c_N = curve.family.slopes(
        np.asarray(curve.B), sample.log_c_N - math.log(curve.C_mid)
    )
    gain = curve.A - curve.R_0
    parameters = [share_N, 1 - share_N, gain * by_log_b_N, gain * by_log_c_N]
    others = [found.curve(compute_N) - curve_N for found in ranked[1:]]
    waves_NK, waves_sd_K = _waves(sample)
    return _Healthy(
        curve_N,
        _without_outliers(sample.y_N - curve_N),
        np.stack([*parameters, *others, *waves_NK.T], axis=1),
        np.concatenate([_PARAMETER_SD, np.ones(len(others)), WANDER_SD * waves_sd_K]),
    )


def _waves(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """A smooth process of sd 1 in cosines (N, K), and their sds: squared-exponential, in evaluations."""
    clock_N = np.cumsum(sample.gap_N) - sample.gap_N[0]
    k_K = np.arange(1, _WAVES + 1)
    sd_K = np.exp(-0.25 * (np.pi * k_K * _WANDER_LENGTH) ** 2)
    cosine_NK = math.sqrt(2.0) * np.cos(np.pi * k_K * (clock_N / clock_N[-1])[:, None])
    return cosine_NK, sd_K / math.sqrt(float(sd_K @ sd_K))


def _without_outliers(residual_N: np.ndarray) -> np.ndarray:
    """Single evaluations far from both neighbours, moved to their mean: an outlier is neither jump nor peak.

    A step shows on both of its sides alike; an outlier is twice as far from its neighbours' mean as they are.
    """
    apart_N = np.zeros_like(residual_N)
    apart_N[1:-1] = residual_N[1:-1] - 0.5 * (residual_N[:-2] + residual_N[2:])
    size_N = np.abs(apart_N)
    scale = float(np.median(size_N[1:-1])) / 0.6745
    beside_N = np.maximum(np.roll(size_N, 1), np.roll(size_N, -1))
    single_N = (size_N > 5 * scale) & (size_N > 1.5 * beside_N)
    return residual_N - np.where(single_N, apart_N, 0.0)


def _changes(sample: Sample) -> _Changes:
    """Hinges in compute, 1 at the last evaluation, and steps, with enough evaluations on both sides."""
    n, compute_N = len(sample.y_N), np.exp(sample.log_c_N)
    first_J = np.arange(_SIDE, n - _SIDE + 1)
    if len(first_J) > _MOST_CHANGES:
        first_J = np.unique(np.linspace(_SIDE, n - _SIDE, _MOST_CHANGES).astype(int))
    knot_J = compute_N[first_J - 1]
    hinge_NJ = np.maximum(compute_N[:, None] - knot_J, 0.0) / (compute_N[-1] - knot_J)
    step_NJ = (np.arange(n)[:, None] >= first_J).astype(float)
    return _Changes(np.concatenate([hinge_NJ, step_NJ], axis=1), np.tile(first_J, 2), len(first_J))


def _whiten(sample: Sample, columns_NK: np.ndarray, phi_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K_phi^(-1/2) times the columns, (P, N, K), and log |K_phi| (P,); replicates weigh as many."""
    rho_PN = phi_P[:, None] ** sample.gap_N
    rho_PN[:, 0] = 0.0
    root_PN = np.sqrt(1.0 - rho_PN**2)
    column_NK = columns_NK * np.sqrt(sample.weight_N)[:, None]
    before_NK = np.concatenate([column_NK[:1], column_NK[:-1]])
    white = (column_NK - rho_PN[:, :, None] * before_NK) / root_PN[:, :, None]
    return white, 2.0 * np.log(root_PN).sum(axis=1)


def _weigh(sample: Sample, null: _Healthy, changes: _Changes) -> _Evidence:
    """Bayes factors of all changes and of the waves, each averaged over the noise given the healthy run.

    With Q the precision of the data once beta is integrated out, s = d' Q d and t = d' Q r, a change of prior
    sd v has the Bayes factor (1 + v^2 s)^(-1/2) exp(t^2 / (s + v^-2) / 2) at a node of the noise.
    """
    sd_S = _noise_nodes(null.residual_N)
    log_null_PS, s, t = _integrated(sample, null, sd_S, changes.columns_NJ)
    v2 = CHANGE_SD**2
    log_change = log_null_PS[..., None] + 0.5 * t**2 / (s + 1 / v2) - 0.5 * np.log1p(v2 * s)
    log_waves_PS, _, _ = _integrated(sample, null.with_waves(), sd_S, changes.columns_NJ[:, :0])
    total = float(_log_sum(log_null_PS))
    log_bayes_J = _log_sum(log_change) - total
    nodes = [(float(phi), float(sd)) for phi in _PHI for sd in sd_S]
    best_J = log_change.reshape(len(nodes), -1).argmax(axis=0)
    return _Evidence(
        log_bayes_J,
        [nodes[i] for i in best_J],
        _log_mean(log_bayes_J[: changes.n_hinges]),
        _log_mean(log_bayes_J[changes.n_hinges :]),
        float(_log_sum(log_waves_PS)) - total,
        nodes[int(log_waves_PS.argmax())],
    )


def _noise_nodes(residual_N: np.ndarray) -> np.ndarray:
    """Nodes of the noise sd, even in its logarithm: from how neighbours differ to how far residuals reach."""
    rms = math.sqrt(float(np.mean(residual_N**2))) + 1e-5
    apart_N = residual_N[1:-1] - 0.5 * (residual_N[:-2] + residual_N[2:])
    local = math.sqrt(float(np.mean(apart_N**2)) / 1.5) + 1e-5
    return np.geomspace(0.6 * min(local, rms), 2.5 * rms, _SD_NODES)


def _integrated(
    sample: Sample, null: _Healthy, sd_S: np.ndarray, columns_NJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log evidence (P, S) with the prior of phi, and s, t (P, S, J) of the columns, beta integrated out.

    With beta scaled to unit sd and Z' K^-1 Z = U diag(l) U', the integral over beta leaves
    Q = K^-1 / sd^2 - K^-1 Z U diag(1 / (l + sd^2)) U' Z' K^-1 / sd^2, diagonal in k at every node.
    """
    n, k = null.columns_NK.shape
    everything = np.concatenate([null.columns_NK * null.sd_K, null.residual_N[:, None], columns_NJ], axis=1)
    white, log_det_P = _whiten(sample, everything, _PHI)
    Z, x, r = white[..., :k], white[..., k:], white[..., k : k + 1]
    l_PK, U = np.linalg.eigh(np.swapaxes(Z, 1, 2) @ Z)
    l_PK = np.maximum(l_PK, 0.0)
    z = np.swapaxes(Z @ U, 1, 2) @ x
    shrink_PSK = 1.0 / (l_PK[:, None] + sd_S[:, None] ** 2)
    precision_S1 = sd_S[:, None] ** -2.0
    square = (np.sum(x**2, axis=1)[:, None] - shrink_PSK @ z**2) * precision_S1
    cross = (np.sum(x * r, axis=1)[:, None] - shrink_PSK @ (z * z[..., :1])) * precision_S1
    log_M_PS = np.log1p(l_PK[:, None] * precision_S1).sum(axis=2)
    log_PS = -n * np.log(sd_S) - 0.5 * (log_det_P[:, None] + log_M_PS + square[..., 0])
    return log_PS + np.log1p(-_PHI)[:, None], square[..., 1:], cross[..., 1:]


def _log_sum(log_PS: np.ndarray) -> np.ndarray:
    """Log of the sum of exponentials over the nodes of the noise, the first two axes."""
    top = log_PS.max(axis=(0, 1))
    return top + np.log(np.exp(log_PS - top).sum(axis=(0, 1)))


def _log_mean(log_J: np.ndarray) -> float:
    top = float(log_J.max())
    return top + math.log(float(np.mean(np.exp(log_J - top))))


@dataclass(frozen=True)
class _Estimate:
    """Posterior of the coefficients of a model at one node of the noise."""

    columns_NK: np.ndarray
    mean_K: np.ndarray
    covariance_KK: np.ndarray


def _estimate(sample: Sample, null: _Healthy, node: tuple[float, float], column_NJ: np.ndarray) -> _Estimate:
    phi, sd = node
    columns_NK = np.concatenate([null.columns_NK, column_NJ], axis=1)
    prior_K = np.concatenate([null.sd_K, np.full(column_NJ.shape[1], CHANGE_SD)])
    white, _ = _whiten(
        sample, np.concatenate([columns_NK, null.residual_N[:, None]], axis=1), np.array([phi])
    )
    Z, r = white[0, :, :-1], white[0, :, -1]
    covariance_KK = np.linalg.inv(Z.T @ Z / sd**2 + np.diag(prior_K**-2.0))
    return _Estimate(columns_NK, covariance_KK @ (Z.T @ r) / sd**2, covariance_KK)


def _describe(points: Points, sample: Sample, null: _Healthy, changes: _Changes, found: _Evidence) -> Misfit:
    """Name the misfit, and the part that holds."""
    bayes_factor = math.exp(min(found.log_total, 700.0))
    compute_N, h = np.exp(sample.log_c_N), changes.n_hinges
    if found.log_step > max(found.log_hinge, found.log_waves):
        j = h + int(np.argmax(found.log_bayes_J[h:]))
        estimate = _estimate(sample, null, found.node_J[j], changes.columns_NJ[:, j : j + 1])
        size, first = float(estimate.mean_K[-1]), int(changes.first_J[j])
        at = float(compute_N[first])
        keep, said = _longest_now(compute_N, first)
        why = (
            f"the pass rate jumps by {size:+.3f} at {points.axis} {at:g}, as after a change of the "
            f"evaluation set, the reward or the checkpoint{said}"
        )
        return Misfit("jump", at, size, bayes_factor, why, keep)
    j = int(np.argmax(found.log_bayes_J[:h]))
    estimate = _estimate(sample, null, found.node_J[j], changes.columns_NJ[:, j : j + 1])
    peak, decline, error = _decline(null, estimate)
    if decline > _SURE * error:
        at = float(compute_N[peak])
        keep = (float(compute_N[0]), at) if peak + 1 >= _FITTABLE else None
        why = (
            f"the run has peaked: from {points.axis} {at:g} to the last evaluation the pass rate falls by "
            f"{decline:.3f} +- {error:.3f}, and no saturating curve falls"
        )
        return Misfit("peaked", at, decline, bayes_factor, why, keep)
    if found.log_hinge >= found.log_waves:
        size, first = float(estimate.mean_K[-1]), int(changes.first_J[j])
        at = float(compute_N[first - 1])
        keep, said = _longest_now(compute_N, first - 1)
        why = (
            f"the slope changes for good at {points.axis} {at:g}, by {size:+.3f} up to the last evaluation, "
            f"as after a change of the recipe{said}"
        )
        return Misfit("regime", at, size, bayes_factor, why, keep)
    estimate = _estimate(sample, null.with_waves(), found.node_waves, changes.columns_NJ[:, :0])
    waves_N = estimate.columns_NK[:, -_WAVES:] @ estimate.mean_K[-_WAVES:]
    size = math.sqrt(float(np.mean(waves_N**2)))
    why = f"slow waves of {size:.3f} (root mean square) around every family: none of them describes the run"
    return Misfit("residuals", None, size, bayes_factor, why, None)


def _decline(null: _Healthy, estimate: _Estimate) -> tuple[int, float, float]:
    """(index of the maximum, fall from there to the end, its error), the wander left out."""
    k = null.columns_NK.shape[1]
    trend_NK = estimate.columns_NK.copy()
    trend_NK[:, k - _WAVES : k] = 0.0
    trend_N = null.curve_N + trend_NK @ estimate.mean_K
    peak = int(np.argmax(trend_N))
    contrast_K = trend_NK[peak] - trend_NK[-1]
    error = math.sqrt(float(contrast_K @ estimate.covariance_KK @ contrast_K))
    return peak, float(trend_N[peak] - trend_N[-1]), error


def _longest_now(compute_N: np.ndarray, first: int) -> tuple[tuple[float, float] | None, str]:
    """What can be fitted around a change, and the words for it: the run as it is now, if that is enough."""
    if len(compute_N) - first >= MIN_POINTS:
        keep = (float(compute_N[first]), float(compute_N[-1]))
        return keep, "; the evaluations from there on, which are the run as it is now, can be fitted"
    if first >= _FITTABLE:
        keep = (float(compute_N[0]), float(compute_N[first - 1]))
        return keep, "; too few evaluations follow, and those before it can be fitted"
    return None, "; neither part has enough evaluations to be fitted"
