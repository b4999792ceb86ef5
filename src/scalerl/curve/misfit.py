"""Lack of fit: a decline, a jump, a change of slope or waves that no curve has; single failed evaluations.

A misfit is reported if its Bayes factor against a healthy run (the models are in `scalerl.curve.evidence`),
averaged over all changes (which corrects for looking in many places), exceeds a threshold that was set on
simulated healthy runs (benchmarks/misfit.py).

A single evaluation may have failed, because a server died or a checkpoint was not loaded. The curve is fitted
without the suspect. Its residual must then be much farther from those of its two neighbours than the others
are from theirs, and beyond both; the first evaluation of a step is not. The first evaluation of a run, before
training, is never one. The newest is one only where it falls: alone it may as well be the start of a
decline, so there is no verdict before the next one (`Failures.newest`).

Shapes: N evaluations, J candidate changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scalerl.curve.changes import likeliest_burst
from scalerl.curve.evidence import (
    N_WAVES,
    PARAMETER_SD,
    Changes,
    Evidence,
    Healthy,
    by_sampling_noise,
    candidate_changes,
    estimate_at,
    evidence_of,
    from_neighbours,
    healthy_model,
    model_around,
    without_outliers,
)
from scalerl.curve.families import LOG_LOGISTIC, Curve, Family, Ramp
from scalerl.curve.least_squares import LeastSquares, least_squares, least_squares_many
from scalerl.curve.points import Points, place_on
from scalerl.curve.sample import MIN_TO_JUDGE, Sample, make_sample

MIN_POINTS = 8
"""Evaluations at distinct compute that a misfit needs."""
THRESHOLD, THRESHOLD_SHORT, SHORT = 2.0, 5.0, 25
"""Bayes factor against the healthy run from which a misfit is sure; the second below 25 evaluations."""
SUSPECT, SUSPECT_SHORT = 0.65, 1.0
"""The same for a change of slope alone to be suspected: 5 % of healthy runs reach it ..."""
_FALLING = 0.45
"""... and where the last third of the evaluations falls, which few healthy runs do."""
_STARTS = (35, 45, 55, 65, 75, 85)  # percent of the run, from its start, that a second curve is fitted to
_ROWS = ("log_c_N", "y_N", "weight_N", "gap_N")
_SURE = 2.0  # times its error that a decline must exceed

_FALLEN, _LEAST_FALL = 6.0, 0.1
"""Times the noise, and drop in pass rate, beyond which a run has fallen: .3 % of sound runs have."""

_FAR, _FAR_NEWEST, _LEAST = 12.0, 6.0, 0.05
"""Times the usual distance from neighbours, and distance in pass rate, beyond which an evaluation has failed.
The newest fails sooner, as that costs no more than waiting for the next one."""
_ALONE = 1.5
"""How many times farther it is from its neighbours than they are from theirs."""
_SUSPECTS = 3
_PARAMETERS = 4

Kind = Literal["peaked", "jump", "regime", "residuals"]
IN_WORDS: dict[str, str] = {
    "peaked": "the run has peaked",
    "jump": "the pass rate jumps",
    "regime": "the slope changes for good",
    "residuals": "slow waves around every curve",
}


@dataclass(frozen=True)
class Misfit:
    """Why no family describes the run."""

    kind: Kind
    """A decline after a maximum, a step, a change of slope for good, or waves around the curve."""
    at: float | None
    """Compute of the maximum, the first evaluation after the step, or the kink; None for `residuals`."""
    size: float
    """Pass rate: the decline; the step, or the kink's effect at the end (both signed); the rms of waves."""
    bayes_factor: float
    """How much better a misfit explains the run than none does: kinds, places and sizes averaged."""
    why: str
    """One sentence for messages."""
    keep: tuple[float, float] | None
    """The range of compute (ends included) that can be fitted alone, or None."""
    sure: bool = True
    """Whether it is reported as a misfit; otherwise it is a change of slope that is only suspected."""


def find_misfit(points: Points, best: Sequence[LeastSquares]) -> Misfit | None:
    """Return what no curve describes in a run, or None; always None below `MIN_POINTS` evaluations.

    A change of slope that is about as likely as none is returned too, as not `sure`. `best` holds the
    least-squares curves of the families for these points, in any order.
    """
    sample = make_sample(points, None)
    if len(sample.y_N) < MIN_POINTS:
        return None
    # A ramp has a kink, which is what is looked for: it cannot stand for a healthy run.
    best = [one for one in best if not isinstance(one.curve.family, Ramp)]
    null = healthy_model(sample, best)
    sample = by_sampling_noise(sample, null.curve_N)
    # Candidates come from the residuals of the healthy curve; later models are given the same ones.
    changes = candidate_changes(sample, null.residual_N)
    first = evidence_of(sample, null, changes, null.residual_N)
    # The curve beside a step may also describe the run without any step: then the run is healthy.
    looks, short = [first, _beside_a_step(sample, first, changes)], len(sample) < SHORT
    least, suspect = (THRESHOLD_SHORT, SUSPECT_SHORT) if short else (THRESHOLD, SUSPECT)
    suspect = _FALLING if _falls(sample) else suspect
    judged = _judged(looks, least, suspect)
    # Checked last, as few runs come here: a run that learns the easy part in a burst is healthy too.
    if judged and (burst := _beside_a_burst(sample, [one.curve.family for one in best], changes)):
        judged = _judged([*looks, burst], least, suspect)
    if judged is None:
        return None
    found, log_bayes, sure = judged
    if not sure or found.log_kinds[1] < max(found.log_kinds):  # a step is placed already
        found = max(found, _look_again(sample, null, changes), key=lambda look: look.log_change)
    return _describe(points, sample, changes, found, math.exp(min(log_bayes, 700.0)), sure)


def _falls(sample: Sample) -> bool:
    """Return whether the last third falls: its slope is below -1 standard error, given its correlation."""
    last = slice(-max(len(sample) // 3, 4), None)
    c_K, y_K = np.exp(sample.log_c_N[last] - sample.log_c_range[1]), sample.y_N[last]
    c_K = c_K - c_K.mean()
    spread = max(float(c_K @ c_K), 1e-30)
    slope = float(c_K @ y_K) / spread
    left_K = y_K - y_K.mean() - slope * c_K
    square = max(float(left_K @ left_K), 1e-30)
    r = min(max(float(left_K[1:] @ left_K[:-1]) / square, 0.0), 0.9)
    return slope < -math.sqrt(square / (len(c_K) - 2) / spread * (1 + r) / (1 - r))


def _judged(looks: Sequence[Evidence], least: float, suspect: float) -> tuple[Evidence, float, bool] | None:
    """Return the evidence that shows a change best, its log Bayes factor and whether it is sure; None if the
    run is healthy. `least` and `suspect` are the Bayes factors from which a change is sure, and suspected."""
    found, log_null = max(looks, key=lambda look: look.log_change), max(look.log_null for look in looks)
    log_bayes, log_hinge = found.log_change - log_null, found.log_kinds[0] - log_null
    sure = log_bayes >= math.log(least)
    return (found, log_bayes, sure) if sure or log_hinge >= math.log(suspect) else None


def find_fall(points: Points) -> str:
    """Describe a fall from the maximum that lasts to the end and is far beyond the noise; else return "".

    It needs no curve, so it also works in runs of fewer than `MIN_POINTS` evaluations. `points` are in the
    order of compute.
    """
    rate_N = points.pass_rate_N
    if len(rate_N) < MIN_TO_JUDGE:
        return ""
    peak = int(np.argmax(rate_N))
    fall = float(rate_N[peak] - rate_N[-max(2, len(rate_N) // 8) :].max())
    # Medians, which a single fall does not move; the smaller one, as a fall in a short run does.
    bends_N = np.abs(from_neighbours(rate_N))
    sd = min(float(np.median(bends_N)) / 0.826, float(np.median(np.abs(np.diff(rate_N)))) / 0.954)
    known_N = points.noise_sd_N[np.isfinite(points.noise_sd_N)]
    if fall <= max(_FALLEN * max(sd, float(known_N.max(initial=0.0))), _LEAST_FALL):
        return ""
    since = place_on(points.axis, float(points.compute_N[peak]))
    return f"the pass rate has fallen from {rate_N[peak]:.3f} to {rate_N[-1]:.3f} since {since}"


def _beside_a_step(sample: Sample, first: Evidence, changes: Changes) -> Evidence:
    """Return the evidence around a curve fitted to the run without its likeliest step.

    In a short run a step bends the curve that is fitted to all of it, which then hides most of the step.
    """
    null, j = first.null, changes.n_hinges + int(np.argmax(first.log_step_J))
    column_NJ = changes.columns_NJ[:, j : j + 1]
    _, mean_K, _ = estimate_at(sample, null, first.node_J[j], column_NJ)
    even = replace(sample, y_N=sample.y_N - mean_K[-1] * column_NJ[:, 0])
    curve = least_squares(even, null.curve.family).curve
    left_N = without_outliers(even.y_N - curve(np.exp(sample.log_c_N)))
    again = model_around(sample, curve, null.columns_NK[:, len(PARAMETER_SD) : -N_WAVES])
    return evidence_of(sample, again, changes, left_N)


def _beside_a_burst(sample: Sample, families: Sequence[Family], changes: Changes) -> Evidence | None:
    """Return the evidence around curves fitted beside the likeliest burst; None if the range is short."""
    burst = likeliest_burst(sample)
    if burst is None:
        return None
    even = replace(sample, y_N=sample.y_N + burst.size * burst.to_come_N)
    null = healthy_model(even, least_squares_many([even] * len(families), families))
    # The waves must stay the last columns.
    null = replace(
        null,
        columns_NK=np.insert(null.columns_NK, [len(PARAMETER_SD)] * 3, burst.columns_N3, axis=1),
        sd_K=np.insert(null.sd_K, [len(PARAMETER_SD)] * 3, 1.0),
    )
    look = evidence_of(even, null, changes, null.residual_N)
    return replace(
        look,
        log_null=look.log_null + burst.log_prior,
        log_hinge_J=look.log_hinge_J + burst.log_prior,
        log_step_J=look.log_step_J + burst.log_prior,
        log_waves=look.log_waves + burst.log_prior,
    )


def _look_again(sample: Sample, null: Healthy, changes: Changes) -> Evidence:
    """Return the evidence around a curve that was fitted to the start of the run, to place a misfit.

    A large change of slope bends the curve that is fitted to the whole run so far that small changes of its
    parameters do not lead back. Of several starts, the curve that fits best with a hinge at its end is used.
    """
    n, compute_N = len(sample.y_N), np.exp(sample.log_c_N)
    ends = [n * share // 100 for share in _STARTS if n * share // 100 >= MIN_TO_JUDGE]
    parts = [replace(sample, **{k: getattr(sample, k)[:end] for k in _ROWS}) for end in ends]
    tries = []
    for end, found in zip(ends, least_squares_many(parts, null.curve.family), strict=True):
        residual_N = without_outliers(sample.y_N - found.curve(compute_N))
        hinge_N = np.maximum(compute_N - compute_N[end - 1], 0.0) / compute_N[-1]
        left_N = residual_N - hinge_N * (hinge_N @ residual_N) / (hinge_N @ hinge_N)
        tries.append((float(left_N @ left_N), found.curve, left_N))
    _, curve, left_N = min(tries, key=lambda t: t[0])
    again = model_around(sample, curve, null.columns_NK[:, len(PARAMETER_SD) : -N_WAVES])
    return evidence_of(sample, again, changes, left_N)


def _describe(
    points: Points, sample: Sample, changes: Changes, found: Evidence, bayes_factor: float, sure: bool
) -> Misfit:
    """Describe the misfit, of the likeliest kind at its likeliest place, and the part that can be fitted.

    A misfit that is not sure is described by its change of slope.
    """
    null, compute_N, h, axis = found.null, _as_logged(points, sample), changes.n_hinges, points.axis
    log_hinge, log_step, log_waves = found.log_kinds
    stepped = sure and log_step > max(log_hinge, log_waves)
    j = h + int(np.argmax(found.log_step_J)) if stepped else int(np.argmax(found.log_hinge_J))
    first = int(changes.first_J[j])
    estimate = estimate_at(sample, null, found.node_J[j], changes.columns_NJ[:, j : j + 1])
    size = float(estimate[1][-1])
    if stepped:
        at = float(compute_N[first])
        keep, said = _part_that_holds(compute_N, first)
        why = f"the pass rate jumps by {size:+.3f} at {place_on(axis, at)}, as if evaluated otherwise; {said}"
        return Misfit("jump", at, size, bayes_factor, why, keep)
    peak, decline, error = _decline(null, *estimate)
    if decline > _SURE * error:
        at = float(compute_N[peak])
        keep = (float(compute_N[0]), at) if peak + 1 >= MIN_TO_JUDGE else None
        said = "what came before can be fitted" if keep else "too little came before to be fitted"
        since = place_on(axis, at)
        why = f"the run has peaked: from {since} on it falls by {decline:.3f} +- {error:.3f}; {said}"
        return Misfit("peaked", at, decline, bayes_factor, why, keep, sure)
    if not sure or log_hinge >= log_waves:
        at = float(compute_N[first - 1])
        keep, said = _part_that_holds(compute_N, first - 1)
        why = (
            f"the slope changes for good at {place_on(axis, at)}, by {size:+.3f} up to the last evaluation; "
            f"{said}"
        )
        return Misfit("regime", at, size, bayes_factor, why, keep, sure)
    waves = null.with_waves()
    columns_NK, mean_K, _ = estimate_at(sample, waves, found.node_waves, changes.columns_NJ[:, :0])
    waves_N = columns_NK[:, -N_WAVES:] @ mean_K[-N_WAVES:]
    size = math.sqrt(float(np.mean(waves_N**2)))
    why = f"slow waves of {size:.3f} (root mean square) around the best family of curves"
    return Misfit("residuals", None, size, bayes_factor, why, None)


def _as_logged(points: Points, sample: Sample) -> np.ndarray:
    """Return the compute of the rows as logged, (N,); where rows are averages, of the nearest evaluation."""
    logged_M = np.unique(points.compute_N)
    if len(logged_M) == len(sample):
        return logged_M
    row_N = np.exp(sample.log_c_N)
    above_N = np.clip(np.searchsorted(logged_M, row_N), 1, len(logged_M) - 1)
    below_N = above_N - (row_N - logged_M[above_N - 1] < logged_M[above_N] - row_N)
    nearest_N = logged_M[below_N]
    nearest_N[[0, -1]] = logged_M[[0, -1]]  # the ends are those of the run
    return nearest_N


def _decline(
    null: Healthy, columns_NK: np.ndarray, mean_K: np.ndarray, covariance_KK: np.ndarray
) -> tuple[int, float, float]:
    """Return (index of the maximum, fall from there to the end, its error), without the wander."""
    k = null.columns_NK.shape[1]
    trend_NK = columns_NK.copy()
    trend_NK[:, k - N_WAVES : k] = 0.0
    trend_N = null.curve_N + trend_NK @ mean_K
    peak = int(np.argmax(trend_N))
    contrast_K = trend_NK[peak] - trend_NK[-1]
    error = math.sqrt(float(contrast_K @ covariance_KK @ contrast_K))
    return peak, float(trend_N[peak] - trend_N[-1]), error


def _part_that_holds(compute_N: np.ndarray, first: int) -> tuple[tuple[float, float] | None, str]:
    """Return what can be fitted around a change, and a clause for it: the later part, if long enough."""
    if len(compute_N) - first >= MIN_POINTS:
        later = float(compute_N[first]), float(compute_N[-1])
        return later, "what follows is the run as it is now: fit that"
    if first >= MIN_TO_JUDGE:
        return (float(compute_N[0]), float(compute_N[first - 1])), "too little follows: fit what came before"
    return None, "neither part is long enough to be fitted"


@dataclass(frozen=True)
class Failures:
    """Which evaluations have failed, and a sentence about each."""

    failed_N: np.ndarray
    said: tuple[str, ...] = ()
    newest: str = ""
    """Why there is no verdict yet, where the newest evaluation is one of them; else empty."""


def find_failed(points: Points, r0: float | None, curve: Curve) -> Failures:
    """Find single evaluations that are off: at most a tenth of all plus one; if there are more, none.

    `curve` is the least-squares log-logistic curve of all `points`, `r0` its R_0 where that is given.
    """
    at = np.arange(len(points))
    apart: dict[int, float] = {}
    while found := _worst(points.select(at), r0, curve):
        place, distance, curve = found
        apart[int(at[place])] = distance
        at = np.delete(at, place)
    if len(apart) > len(points) // 10 + 1:
        apart = {}
    failed_N = np.isin(np.arange(len(points)), list(apart))
    said = tuple(_sentence(points, i, apart[i]) for i in sorted(apart))
    newest = said[-1] if len(points) - 1 in apart else ""
    return Failures(failed_N, said, newest)


def _worst(points: Points, r0: float | None, curve: Curve) -> tuple[int, float, Curve] | None:
    """Return one failed evaluation: its place, its distance from its neighbours, the curve without it."""
    n = len(points)
    apart_N = np.abs(_distances(points.pass_rate_N - curve(points.compute_N)))
    suspects = 1 + np.argsort(-apart_N[1:], kind="stable")[:_SUSPECTS]
    # Half, as the curve that is fitted to all goes some way towards it.
    for i in (int(i) for i in suspects if apart_N[i] > 0.5 * _LEAST):
        others = points.select(np.arange(n) != i)
        if len(np.unique(others.compute_N)) < MIN_TO_JUDGE:
            continue
        without = least_squares(make_sample(others, r0), LOG_LOGISTIC).curve
        left_N = points.pass_rate_N - without(points.compute_N)
        beside = [i - 1, i + 1] if i < n - 1 else [i - 1]
        distance = float(left_N[i] - left_N[beside].mean())
        rate, rates = points.pass_rate_N[i], points.pass_rate_N[beside]
        # A rise is not a failure of the second (a run may learn at once and collapse) or of the newest.
        if not (rate < rates.min() or (1 < i < n - 1 and rate > rates.max())):
            continue
        others_N = np.abs(_distances(np.delete(left_N, i)))
        # The curve has taken parameters from them, hence the factor; .6745 makes a median deviation an sd.
        usual = float(np.median(others_N)) / 0.6745 * math.sqrt((n - 1) / max(n - 1 - _PARAMETERS, 1))
        far = _FAR if i < n - 1 else _FAR_NEWEST
        if abs(distance) > max(far * usual, _LEAST, _ALONE * others_N[i - 1 : i + 1].max()):
            return i, distance, without
    return None


def _distances(left_N: np.ndarray) -> np.ndarray:
    """Return how far each residual is from its neighbours' mean; at an end from the nearer of two."""
    apart_N = np.pad(from_neighbours(left_N), 1)
    for end, two in ((0, left_N[1:3]), (-1, left_N[-3:-1])):
        apart_N[end] = min(left_N[end] - two, key=abs)
    return apart_N


def _sentence(points: Points, i: int, apart: float) -> str:
    steps = points.step_N
    where = f"{points.axis} {points.compute_N[i]:.10g}" if steps is None else f"step {steps[i]:.10g}"
    way = "below" if apart < 0 else "above"
    what = f"at {where} ({points.pass_rate_N[i]:.3f}) is {abs(apart):.3f} {way}"
    if i < len(points) - 1:
        return f"left out: the evaluation {what} its neighbours, as if it had failed"
    return (
        f"the newest evaluation, {what} the one before, and left out: it has failed, or the run falls, so no "
        "ceiling is identified and verdicts are 'too early' until the next one"
    )
