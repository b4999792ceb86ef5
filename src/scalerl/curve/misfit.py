"""Does any saturating curve describe the run? A decline, a jump, a change of slope, or waves that none has.

    y = R(C) + wander + noise                   a healthy run, the null
    y = R(C) + wander + noise + g d_j(C)        a change at C_j: d_j is a hinge (0, then a line) or a step
    y = R(C) + waves + noise                    the wander of a healthy run several times over

R(C) is the curve of the family that fits best, with small changes of its parameters and steps towards the
other families' curves: a run that lies between two families is healthy. The wander is a smooth process of
small known sd: what wandering explains is no misfit either. The noise is AR(1); its sd and correlation are
integrated over a grid, so that neither is fixed by residuals that hold the misfit. All else is Gaussian and
integrated in closed form. The answer is a Bayes factor, averaged over all changes (so that looking in many
places is paid for), and a misfit from a threshold that simulated healthy runs set (benchmarks/misfit.py).
Known sampling noise plays no part: training adds noise of its own, so scatter above the sampling noise is no
evidence. Structure is.

Shapes: N evaluations, K columns of the null, J candidate changes; P correlations, S noise sds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalerl.curve.families import Curve
from scalerl.curve.least_squares import LeastSquares, least_squares, least_squares_many
from scalerl.curve.points import Points
from scalerl.curve.sample import Sample, make_sample

MIN_POINTS = 8
"""Evaluations at distinct compute below which nothing is said."""
THRESHOLD, THRESHOLD_SHORT, SHORT = 3.0, 5.0, 25
"""Bayes factor against the healthy run from which a misfit is reported, and in fewer than 25 evaluations."""
WANDER_SD, WAVES_SD = 0.003, 0.02
"""Of the smooth deviation of a healthy run, and of one that no family explains, in units of pass rate."""
CHANGE_SD = np.array([0.02, 0.06, 0.2])
"""Prior sd of the size of a change (the step; the hinge at the last evaluation): small to large, alike."""
_WANDER_LENGTH = 0.15  # correlation length of the wander, as a share of the run
_N_WAVES = 8
_PARAMETER_SD = (0.1, 0.1, 0.3, 0.3)  # of A, R_0, log B and log C_mid about the fitted curve
_PHI = np.array([0.0, 0.2, 0.4, 0.6, 0.8])  # alike
_SD_NODES = 10
_STARTS = (35, 45, 55, 65, 75, 85)  # percent of the run that a second curve is fitted to
_ROWS = ("log_c_N", "y_N", "weight_N", "gap_N")
_SIDE = 3  # evaluations on each side of a change, the least
_MOST_HINGES, _MOST_STEPS = 40, 120
_SURE = 2.0  # a decline is this many times its error
_FITTABLE = 5  # evaluations that a fit needs

Kind = Literal["peaked", "jump", "regime", "residuals"]
_Node = tuple[float, float]  # phi and sd of the noise


@dataclass(frozen=True)
class Misfit:
    """Why no family describes the run."""

    kind: Kind
    """A decline after a maximum, a step, a change of slope for good, or waves around the curve."""
    at: float | None
    """Compute of the maximum, of the first evaluation after the step, of the kink; None for `residuals`."""
    size: float
    """In pass rate: the decline, the step or the kink's effect at the end (both signed), the rms of waves."""
    bayes_factor: float
    """How much better a misfit explains the run than none does: kinds, places and sizes averaged."""
    why: str
    """For people: one sentence."""
    keep: tuple[float, float] | None
    """The range of compute (ends included) of the part that can be fitted alone, or None."""


def find_misfit(points: Points, best: Sequence[LeastSquares]) -> Misfit | None:
    """What no saturating curve describes in a run, or None. Deterministic.

    `best` holds the least-squares curves of the families for these points, in any order. Fewer than 8
    evaluations at distinct compute say nothing.
    """
    sample = make_sample(points, None)
    if len(sample.y_N) < MIN_POINTS:
        return None
    null = _healthy(sample, best)
    changes = _changes(sample, null.residual_N)
    first = _weigh(sample, null, changes, _noise_nodes(null.residual_N))
    beside = _beside_a_step(sample, first, changes)
    found = max(first, beside, key=lambda look: look.log_change)
    # The curve beside a step may describe the run without any step, too: then the run is healthy.
    log_bayes = found.log_change - max(first.log_null, beside.log_null)
    if log_bayes < math.log(THRESHOLD_SHORT if len(sample) < SHORT else THRESHOLD):
        return None
    if found.log_kinds[1] < max(found.log_kinds):  # a step is placed by now; for all else a better curve
        found = max(found, _look_again(sample, null, changes), key=lambda look: look.log_change)
    return _describe(points, sample, changes, found, math.exp(min(log_bayes, 700.0)))


@dataclass(frozen=True)
class _Healthy:
    """y = curve + Z beta + noise, beta_k ~ N(0, sd_k^2): the parameters, other families, the wander."""

    curve: Curve
    curve_N: np.ndarray
    residual_N: np.ndarray
    columns_NK: np.ndarray
    sd_K: np.ndarray

    def with_waves(self) -> _Healthy:
        """The same with the larger and faster waves that no family explains: alike in all frequencies."""
        sd_K = self.sd_K.copy()
        sd_K[-_N_WAVES:] = WAVES_SD / math.sqrt(_N_WAVES)
        return replace(self, sd_K=sd_K)


@dataclass(frozen=True)
class _Changes:
    """Candidate columns, the hinges first; `first_J` is the first evaluation that a change moves.

    `log_tried` is the log of the share of all steps that are candidates: the others count, as unlikely.
    """

    columns_NJ: np.ndarray
    first_J: np.ndarray
    n_hinges: int
    log_tried: float


@dataclass(frozen=True)
class _Evidence:
    """Log evidence of the healthy run and of each alternative, with its most probable node of the noise."""

    null: _Healthy
    log_null: float
    log_hinge_J: np.ndarray
    log_step_J: np.ndarray
    log_waves: float
    node_J: list[_Node]
    node_waves: _Node

    @property
    def log_kinds(self) -> tuple[float, float, float]:
        """Of hinges, steps and waves, places averaged."""
        return _log_mean(self.log_hinge_J), _log_mean(self.log_step_J), self.log_waves

    @property
    def log_change(self) -> float:
        """Of a misfit of any kind, the three alike beforehand."""
        return _log_mean(self.log_kinds)


def _healthy(sample: Sample, best: Sequence[LeastSquares]) -> _Healthy:
    """The linear model of a run without misfit, around the curve of the family that fits best."""
    ranked = sorted(best, key=lambda found: found.rss)
    compute_N = np.exp(sample.log_c_N)
    curve_N = ranked[0].curve(compute_N)
    others = [found.curve(compute_N) - curve_N for found in ranked[1:]]
    return _around(sample, ranked[0].curve, np.array(others).reshape(len(others), -1).T)


def _around(sample: Sample, curve: Curve, others_NK: np.ndarray) -> _Healthy:
    """The model around one curve; `others_NK` are the steps towards the other families' curves."""
    curve_N = curve(np.exp(sample.log_c_N))
    share_N, by_log_b_N, by_log_c_N = curve.family.slopes(
        np.asarray(curve.B), sample.log_c_N - math.log(curve.C_mid)
    )
    gain = curve.A - curve.R_0
    parameters = [share_N, 1 - share_N, gain * by_log_b_N, -gain * by_log_c_N]
    waves_NK, waves_sd_K = _waves(sample)
    return _Healthy(
        curve,
        curve_N,
        _without_outliers(sample.y_N - curve_N),
        np.column_stack([*parameters, others_NK, waves_NK]),
        np.concatenate([_PARAMETER_SD, np.ones(others_NK.shape[1]), WANDER_SD * waves_sd_K]),
    )


def _waves(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """A smooth process of sd 1 in cosines (N, K), and their sds: squared-exponential, in evaluations."""
    gap_N = np.where(np.isfinite(sample.gap_N), sample.gap_N, 1.0)
    clock_N = np.cumsum(gap_N) - gap_N[0]
    k_K = np.arange(1, _N_WAVES + 1)
    sd_K = np.exp(-0.25 * (np.pi * k_K * _WANDER_LENGTH) ** 2)
    cosine_NK = math.sqrt(2.0) * np.cos(np.pi * k_K * (clock_N / clock_N[-1])[:, None])
    return cosine_NK, sd_K / math.sqrt(float(sd_K @ sd_K))


def _without_outliers(residual_N: np.ndarray) -> np.ndarray:
    """Single evaluations far from both neighbours, moved to them: an outlier is neither jump nor peak.

    A step shows on both of its sides alike; an outlier is twice as far from its neighbours' mean as they are
    from theirs. What only the first or the last evaluation shows is not believed either.
    """
    apart_N = np.empty_like(residual_N)
    apart_N[1:-1] = residual_N[1:-1] - 0.5 * (residual_N[:-2] + residual_N[2:])
    apart_N[0], apart_N[-1] = residual_N[0] - residual_N[1], residual_N[-1] - residual_N[-2]
    size_N = np.abs(apart_N)
    scale = float(np.median(size_N)) / 0.6745
    padded = np.pad(size_N, 1)
    single_N = (size_N > 5 * scale) & (size_N > 1.5 * np.maximum(padded[:-2], padded[2:]))
    return residual_N - np.where(single_N, apart_N, 0.0)


def _changes(sample: Sample, residual_N: np.ndarray) -> _Changes:
    """Hinges in compute, 1 at the last evaluation, and steps, with enough evaluations on both sides.

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
    return _Changes(columns_NJ, first_J, len(bent), math.log(len(stepped) / len(every)))


def _beside_a_step(sample: Sample, first: _Evidence, changes: _Changes) -> _Evidence:
    """The same around a curve fitted to the run with its likeliest step taken out.

    A step bends the curve that is fitted to all of a short run, which then hides most of it.
    """
    null, j = first.null, changes.n_hinges + int(np.argmax(first.log_step_J))
    column_NJ = changes.columns_NJ[:, j : j + 1]
    size = _estimate(sample, null, first.node_J[j], column_NJ).mean_K[-1]
    even = replace(sample, y_N=sample.y_N - size * column_NJ[:, 0])
    curve = least_squares(even, null.curve.family).curve
    left_N = _without_outliers(even.y_N - curve(np.exp(sample.log_c_N)))
    again = _around(sample, curve, null.columns_NK[:, len(_PARAMETER_SD) : -_N_WAVES])
    return _weigh(sample, again, changes, _noise_nodes(left_N))


def _look_again(sample: Sample, null: _Healthy, changes: _Changes) -> _Evidence:
    """The same around a curve that was fitted to the start of the run, to name and to place a misfit.

    A large change of slope bends the curve that is fitted to all of the run so far that small changes of its
    parameters do not lead back. Of several starts, the one whose curve with a hinge at its end fits best.
    """
    n, compute_N = len(sample.y_N), np.exp(sample.log_c_N)
    ends = [n * share // 100 for share in _STARTS if n * share // 100 >= _FITTABLE]
    parts = [replace(sample, **{k: getattr(sample, k)[:end] for k in _ROWS}) for end in ends]
    tries = []
    for end, found in zip(ends, least_squares_many(parts, null.curve.family), strict=True):
        residual_N = _without_outliers(sample.y_N - found.curve(compute_N))
        hinge_N = np.maximum(compute_N - compute_N[end - 1], 0.0) / compute_N[-1]
        left_N = residual_N - hinge_N * (hinge_N @ residual_N) / (hinge_N @ hinge_N)
        tries.append((float(left_N @ left_N), found.curve, left_N))
    _, curve, left_N = min(tries, key=lambda t: t[0])
    again = _around(sample, curve, null.columns_NK[:, len(_PARAMETER_SD) : -_N_WAVES])
    return _weigh(sample, again, changes, _noise_nodes(left_N))


def _weigh(sample: Sample, null: _Healthy, changes: _Changes, sd_S: np.ndarray) -> _Evidence:
    """Evidence of all changes and of the waves, integrated over beta, the size of the change and the noise.

    s = d' Q d and t = d' Q r of every column d, with Q the precision of the data once beta is integrated out.
    """
    log_null_PS, s, t = _integrated(sample, null, sd_S, changes.columns_NJ)
    bayes = sum(np.exp(np.minimum(_log_bayes(s, t, v), 600.0)) for v in CHANGE_SD) / len(CHANGE_SD)
    log_change = log_null_PS[..., None] + np.log(bayes)
    log_waves_PS, _, _ = _integrated(sample, null.with_waves(), sd_S, changes.columns_NJ[:, :0])
    log_J, h = _log_sum(log_change), changes.n_hinges
    nodes = [(float(phi), float(sd)) for phi in _PHI for sd in sd_S]
    return _Evidence(
        null,
        float(_log_sum(log_null_PS)),
        log_J[:h],
        log_J[h:] + changes.log_tried,
        float(_log_sum(log_waves_PS)),
        [nodes[i] for i in log_change.reshape(len(nodes), -1).argmax(axis=0)],
        nodes[int(log_waves_PS.argmax())],
    )


def _log_bayes(s: np.ndarray, t: np.ndarray, v: float) -> np.ndarray:
    """Log of what a change of prior sd v multiplies the evidence by: Gaussian in its size."""
    return 0.5 * t**2 / (s + v**-2.0) - 0.5 * np.log1p(v * v * s)


def _noise_nodes(residual_N: np.ndarray) -> np.ndarray:
    """Nodes of the noise sd, even in its logarithm: from how neighbours differ to how far residuals reach."""
    rms = math.sqrt(float(np.mean(residual_N**2))) + 1e-5
    apart_N = residual_N[1:-1] - 0.5 * (residual_N[:-2] + residual_N[2:])
    local = math.sqrt(float(np.mean(apart_N**2)) / 1.5) + 1e-5
    return np.geomspace(0.6 * min(local, rms), 2.5 * rms, _SD_NODES)


def _integrated(
    sample: Sample, null: _Healthy, sd_S: np.ndarray, columns_NJ: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log evidence (P, S), and s, t (P, S, J) of the columns, beta integrated out.

    With beta scaled to unit sd and Z' K^-1 Z = U diag(l) U', the integral over beta leaves
    Q = K^-1 / sd^2 - K^-1 Z U diag(1 / (l + sd^2)) U' Z' K^-1 / sd^2: diagonal whatever sd is.
    """
    n, k = null.columns_NK.shape
    everything = np.column_stack([null.columns_NK * null.sd_K, null.residual_N, columns_NJ])
    white, log_det_P = _whiten(sample, everything, _PHI)
    Z, x, r = white[..., :k], white[..., k:], white[..., k : k + 1]
    l_PK, U = np.linalg.eigh(np.swapaxes(Z, 1, 2) @ Z)
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
    """K_phi^(-1/2) times the columns, (P, N, K), and log |K_phi| (P,); replicates weigh as many."""
    rho_PN = phi_P[:, None] ** sample.gap_N
    rho_PN[:, 0] = 0.0
    root_PN = np.sqrt(1.0 - rho_PN**2)
    column_NK = columns_NK * np.sqrt(sample.weight_N)[:, None]
    before_NK = np.concatenate([column_NK[:1], column_NK[:-1]])
    white = (column_NK - rho_PN[:, :, None] * before_NK) / root_PN[:, :, None]
    return white, 2.0 * np.log(root_PN).sum(axis=1)


def _log_sum(log_PS: np.ndarray) -> np.ndarray:
    """Log of the sum of exponentials over the nodes of the noise, the first two axes."""
    top = log_PS.max(axis=(0, 1))
    return top + np.log(np.exp(log_PS - top).sum(axis=(0, 1)))


def _log_mean(log_J: Sequence[float] | np.ndarray) -> float:
    log_J = np.asarray(log_J)
    top = float(log_J.max())
    return top + math.log(float(np.mean(np.exp(log_J - top))))


def _describe(
    points: Points, sample: Sample, changes: _Changes, found: _Evidence, bayes_factor: float
) -> Misfit:
    """Name the misfit and the part that holds: the likeliest kind, at its likeliest place."""
    null, compute_N, h, axis = found.null, _as_logged(points, sample), changes.n_hinges, points.axis
    log_hinge, log_step, log_waves = found.log_kinds
    stepped = log_step > max(log_hinge, log_waves)
    j = h + int(np.argmax(found.log_step_J)) if stepped else int(np.argmax(found.log_hinge_J))
    first = int(changes.first_J[j])
    estimate = _estimate(sample, null, found.node_J[j], changes.columns_NJ[:, j : j + 1])
    size = float(estimate.mean_K[-1])
    if stepped:
        at = float(compute_N[first])
        keep, said = _part_that_holds(compute_N, first)
        why = f"the pass rate jumps by {size:+.3f} at {axis} {at:.4g}, as if evaluated otherwise; {said}"
        return Misfit("jump", at, size, bayes_factor, why, keep)
    peak, decline, error = _decline(null, estimate)
    if decline > _SURE * error:
        at = float(compute_N[peak])
        keep = (float(compute_N[0]), at) if peak + 1 >= _FITTABLE else None
        said = "what came before can be fitted" if keep else "too little came before to be fitted"
        why = f"the run has peaked: from {axis} {at:.4g} on it falls by {decline:.3f} +- {error:.3f}; {said}"
        return Misfit("peaked", at, decline, bayes_factor, why, keep)
    if log_hinge >= log_waves:
        at = float(compute_N[first - 1])
        keep, said = _part_that_holds(compute_N, first - 1)
        why = (
            f"the slope changes for good at {axis} {at:.4g}, by {size:+.3f} up to the last evaluation; {said}"
        )
        return Misfit("regime", at, size, bayes_factor, why, keep)
    estimate = _estimate(sample, null.with_waves(), found.node_waves, changes.columns_NJ[:, :0])
    waves_N = estimate.columns_NK[:, -_N_WAVES:] @ estimate.mean_K[-_N_WAVES:]
    size = math.sqrt(float(np.mean(waves_N**2)))
    why = f"slow waves of {size:.3f} (root mean square) around the best family: none describes the run"
    return Misfit("residuals", None, size, bayes_factor, why, None)


def _as_logged(points: Points, sample: Sample) -> np.ndarray:
    """Compute of the rows as the data have it, (N,); of rows that average evaluations, of the nearest one."""
    logged_M = np.unique(points.compute_N)
    if len(logged_M) == len(sample):
        return logged_M
    row_N = np.exp(sample.log_c_N)
    above_N = np.clip(np.searchsorted(logged_M, row_N), 1, len(logged_M) - 1)
    below_N = above_N - (row_N - logged_M[above_N - 1] < logged_M[above_N] - row_N)
    nearest_N = logged_M[below_N]
    nearest_N[[0, -1]] = logged_M[[0, -1]]  # the ends are those of the run
    return nearest_N


@dataclass(frozen=True)
class _Estimate:
    """Posterior of the coefficients of a model at one node."""

    columns_NK: np.ndarray
    mean_K: np.ndarray
    covariance_KK: np.ndarray


def _estimate(sample: Sample, null: _Healthy, node: _Node, column_NJ: np.ndarray) -> _Estimate:
    """The coefficients of the null and of one added change, or none."""
    phi, sd = node
    columns_NK = np.concatenate([null.columns_NK, column_NJ], axis=1)
    prior_K = np.concatenate([null.sd_K, np.full(column_NJ.shape[1], CHANGE_SD[-1])])
    both = np.column_stack([columns_NK, null.residual_N])
    white = _whiten(sample, both, np.array([phi]))[0][0]
    Z, r = white[:, :-1], white[:, -1]
    covariance_KK = np.linalg.inv(Z.T @ Z / sd**2 + np.diag(prior_K**-2.0))
    return _Estimate(columns_NK, covariance_KK @ (Z.T @ r) / sd**2, covariance_KK)


def _decline(null: _Healthy, estimate: _Estimate) -> tuple[int, float, float]:
    """(index of the maximum, fall from there to the end, its error), the wander left out."""
    k = null.columns_NK.shape[1]
    trend_NK = estimate.columns_NK.copy()
    trend_NK[:, k - _N_WAVES : k] = 0.0
    trend_N = null.curve_N + trend_NK @ estimate.mean_K
    peak = int(np.argmax(trend_N))
    contrast_K = trend_NK[peak] - trend_NK[-1]
    error = math.sqrt(float(contrast_K @ estimate.covariance_KK @ contrast_K))
    return peak, float(trend_N[peak] - trend_N[-1]), error


def _part_that_holds(compute_N: np.ndarray, first: int) -> tuple[tuple[float, float] | None, str]:
    """What can be fitted around a change, and the words for it: the run as it is now, if that is enough."""
    if len(compute_N) - first >= MIN_POINTS:
        return (
            float(compute_N[first]),
            float(compute_N[-1]),
        ), "what follows is the run as it is now: fit that"
    if first >= _FITTABLE:
        return (float(compute_N[0]), float(compute_N[first - 1])), "too little follows: fit what came before"
    return None, "neither part is long enough to be fitted"
