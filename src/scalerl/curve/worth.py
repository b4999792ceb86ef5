"""What more compute brings: the expected gain, where to stop, how much narrower the ceiling's interval is."""

import bisect
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from scalerl.curve.answers import MIN_EVALUATIONS, MIN_RATIO, MIN_RATIO_LOW, Identification
from scalerl.curve.posterior import Draws, Posterior
from scalerl.curve.sample import Sample
from scalerl.quantiles import tails

_DRAWS = 512  # with 256 the compute to identify A scatters by 3 %, in a quarter of the time
_MASS = 0.999  # share of the posterior kept, in its heaviest cells, for answers at many computes
_IDENTIFIED_WITHIN = 8.0  # times the compute so far, within which A is to be identified
_STOP_WITHIN = 32.0  # times the compute so far, within which the compute to stop at is searched


def gain_per_unit(post: Posterior, compute_M: np.ndarray) -> np.ndarray:
    """Return the expected dR/dC of the mean curve at computes (M,) above 0, per unit of compute."""
    post, step = post.heaviest(_MASS), 1e-3
    up_M, down_M = (
        np.array([np.sum(post.curve_at(float(c)) * post.weight) for c in compute_M * math.exp(s)])
        for s in (step, -step)
    )
    return (up_M - down_M) / (2 * step * compute_M)


def stop_at(post: Posterior, now: float, worth: float) -> float:
    """Return the compute from which a further unit is expected to gain less than `worth`; at least `now`.

    The expected gain can rise before it falls. This is where it falls for good, or infinity if that is not
    within 32 times the compute so far. An unlikely decline can outweigh the end of a rise, at any `worth`.
    """
    compute_M = now * np.geomspace(1.0, _STOP_WITHIN, 161)
    pays_M = gain_per_unit(post, compute_M) >= worth
    if pays_M[-1]:
        return math.inf
    if not pays_M.any():
        return now
    last = int(np.flatnonzero(pays_M)[-1])
    low, high = compute_M[last : last + 2].tolist()
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain_per_unit(post, np.array([middle]))[0] >= worth else (low, middle)
    return high


class Outlook(NamedTuple):
    """What a fit is expected to report at a later compute; C_mid is over all families."""

    width: float
    """The width of A's 95 % interval."""
    log_mid: float
    """The median of log C_mid ..."""
    log_mid_high: float
    """... and the upper end of its 95 % interval."""


def expected_width(
    post: Posterior, sample: Sample, sd: float, phi: float, compute_M: np.ndarray, level: float
) -> np.ndarray:
    """Return the expected width of A's interval if the run goes on to computes (M,), evaluated as so far.

    Each of 512 draws in turn is taken as the truth, and the others are weighted by the likelihood that the
    further evaluations would give them: exp(-sum of squared differences / (2 v)), where v is sd^2 inflated by
    (1 + phi) / (1 - phi) for the correlation of neighbours.
    """
    draws = post.draws(_DRAWS)
    ahead = _weights_ahead(draws, sample, sd, phi, compute_M)
    return np.array([np.ptp(_expected(draws.A_n, weight_nn, tails(level))) for weight_nn in ahead])


def outlook(post: Posterior, sample: Sample, sd: float, phi: float, compute: float) -> Outlook:
    """Return the outlook if the run goes on to a compute, with the assumptions of `expected_width`."""
    draws, (low, high) = post.draws(_DRAWS), tails(0.95)
    (weight_nn,) = _weights_ahead(draws, sample, sd, phi, np.array([compute]))
    A_low, A_high = _expected(draws.A_n, weight_nn, np.array([low, high]))
    log_mid, log_mid_high = _expected(draws.log_mid_n, weight_nn, np.array([0.5, high]))
    return Outlook(float(A_high - A_low), float(log_mid), float(log_mid_high))


def _weights_ahead(
    draws: Draws, sample: Sample, sd: float, phi: float, compute_M: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield the weights (n, n) of all draws at every compute, each row taking another draw as the truth."""
    now = math.exp(sample.log_c_range[1])
    most = float(np.max(compute_M))
    evaluations = (most - now) / _spacing(sample)
    points = int(np.clip(evaluations, 1, 128))
    further_F = now + (most - now) / points * np.arange(1, points + 1)
    count = evaluations / points  # evaluations behind each of the points
    curve_nF = draws.curves_at(further_F) * math.sqrt(count * (1 - phi) / (1 + phi)) / sd
    for compute in compute_M:
        # |a - b|^2 by a matrix product: an array of all differences, (n, n, F), would take 268 MB.
        seen_nF = curve_nF[:, further_F <= compute]
        square_n = (seen_nF**2).sum(axis=1)
        apart_nn = square_n[:, None] + square_n - 2 * seen_nF @ seen_nF.T
        yield np.exp(-0.5 * np.maximum(apart_nn, 0.0))


def _expected(value_n: np.ndarray, weight_nn: np.ndarray, at_Q: np.ndarray) -> np.ndarray:
    """Return the quantiles of the draws' values, each averaged over the rows of weights, (Q,)."""
    order = np.argsort(value_n, kind="stable")
    held_nn = np.cumsum(weight_nn[:, order], axis=1)
    held_nn /= held_nn[:, -1:]
    value_n = value_n[order]
    return np.array([value_n[np.minimum((held_nn < q).sum(axis=1), len(value_n) - 1)].mean() for q in at_Q])


def _spacing(sample: Sample) -> float:
    """Return the usual compute from one evaluation to the next."""
    first, now = map(math.exp, sample.log_c_range)
    rows = int(np.isfinite(sample.log_c_N).sum())
    return max((now - first) / max(rows - 1, 1) / sample.each, 1e-6 * now)


def identified_at(
    outlook_at: Callable[[float], Outlook], seen: Identification, sample: Sample
) -> float | None:
    """Return the compute at which the ceiling is expected to be identified, by the outlooks at computes.

    None if that is beyond 8 times the compute so far, or if more compute is not what is missing.
    """
    now = math.exp(sample.log_c_range[1])
    missing = max(MIN_EVALUATIONS - len(sample), 0) * _spacing(sample)
    factor = max(1.0 + missing / now, 1.1)
    if not seen.waits or factor > _IDENTIFIED_WITHIN:
        return None
    # An outlook costs a 512 x 512 table of draws, so the place is searched among sixteen.
    compute_M = now * np.geomspace(factor, _IDENTIFIED_WITHIN, 16)

    @functools.cache
    def spare(compute: float) -> float:
        # The least margin of the conditions of `identify`, in logarithms: at 0 the last one is met. C_mid is
        # as it will be known by then: its present interval would delay the answer, and make it jump.
        found, log_c = outlook_at(compute), math.log(compute)
        return min(
            math.log(max(seen.widest, 1e-9) / max(found.width, 1e-9)),
            log_c - found.log_mid - math.log(MIN_RATIO),
            log_c - found.log_mid_high - math.log(MIN_RATIO_LOW),
        )

    # All margins grow with compute, so four of the sixteen are enough to find the first.
    place = bisect.bisect_left(compute_M, 0.0, key=spare)
    if place == len(compute_M):
        return None
    if place == 0:
        return float(compute_M[0])
    # Interpolated between two of the sixteen: else the answer would jump by 14 % between evaluations.
    ends = compute_M[place - 1 : place + 1].tolist()
    return math.exp(np.interp(0.0, [spare(end) for end in ends], np.log(ends)))
