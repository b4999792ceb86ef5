"""What more compute brings: the expected gain, where to stop, and how much narrower the ceiling becomes."""

import bisect
import functools
import math
from collections.abc import Callable

import numpy as np

from scalerl.curve.answers import MIN_EVALUATIONS, MIN_RATIO, MIN_RATIO_LOW, Identification
from scalerl.curve.posterior import Draws, Posterior
from scalerl.curve.quantiles import tails
from scalerl.curve.sample import Sample

_DRAWS = 256
_MASS = 0.999  # of the posterior: its heaviest cells, for answers at many computes
_TELL_WITHIN = 8.0  # times the compute so far, up to which the compute that identifies A is searched
_STOP_WITHIN = 32.0  # times the compute so far, up to which is searched


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

    The expected gain can rise before it falls: this is where it falls for good, infinite if not within 32
    times the compute so far.
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


def expected_width(
    post: Posterior, sample: Sample, sd: float, phi: float, compute_M: np.ndarray, level: float
) -> np.ndarray:
    """Return the expected width of A's interval if the run goes on to computes (M,), evaluated as so far.

    Each of 256 draws in turn is taken for the truth, and the others are weighted by the likelihood that the
    further evaluations would give them: exp(-sum of squared differences / (2 sd^2 inflated)), the variance
    inflated by (1 + phi) / (1 - phi) for the correlation of neighbours.
    """
    draws = post.draws(_DRAWS)
    now = math.exp(sample.log_c_range[1])
    most = float(np.max(compute_M))
    evaluations = (most - now) / _spacing(sample)
    points = int(np.clip(evaluations, 1, 128))
    further_F = now + (most - now) / points * np.arange(1, points + 1)
    count = evaluations / points  # behind each of the points
    curve_nF = draws.curves_at(further_F) * math.sqrt(count * (1 - phi) / (1 + phi)) / sd
    return np.array([_width(draws, curve_nF[:, further_F <= c], level) for c in compute_M])


def _spacing(sample: Sample) -> float:
    """Return the usual compute from one evaluation to the next."""
    first, now = map(math.exp, sample.log_c_range)
    rows = int(np.isfinite(sample.log_c_N).sum())
    return max((now - first) / max(rows - 1, 1) / sample.each, 1e-6 * now)


def _width(draws: Draws, curve_nF: np.ndarray, level: float) -> float:
    # |a - b|^2 by a matrix product: an array of all differences, (n, n, F), would take 67 MB.
    square_n = (curve_nF**2).sum(axis=1)
    apart_nn = square_n[:, None] + square_n - 2 * curve_nF @ curve_nF.T
    weight_nn = np.exp(-0.5 * np.maximum(apart_nn, 0.0))
    order = np.argsort(draws.A_n)
    held_nn = np.cumsum(weight_nn[:, order], axis=1)
    held_nn /= held_nn[:, -1:]
    A_n = draws.A_n[order]
    ends = [A_n[np.minimum((held_nn < q).sum(axis=1), len(A_n) - 1)] for q in tails(level)]
    return float(np.mean(ends[1] - ends[0]))


def told_at(
    width_at: Callable[[np.ndarray, float], np.ndarray], seen: Identification, sample: Sample
) -> float | None:
    """Return the compute at which A's interval is expected to be narrow enough.

    None where that is beyond 8 times the compute so far, or where it is not the width that is waited for.

    `width_at` gives the expected width at computes (M,) and a level.
    """
    now = math.exp(sample.log_c_range[1])
    missing = max(MIN_EVALUATIONS - len(sample), 0) * _spacing(sample)
    # C_max / C_mid grows with the compute, and is known: no sooner than it is large enough.
    ratios = MIN_RATIO / seen.ratio, MIN_RATIO_LOW / seen.ratio_interval[0]
    factor = max(*ratios, 1.0 + missing / now, 1.1)
    if not seen.waits or factor > _TELL_WITHIN:
        return None
    # An expected width costs a 256 x 256 table of draws, so that the place is found among sixteen.
    compute_M = now * np.geomspace(factor, _TELL_WITHIN, 16)

    @functools.cache
    def narrow(compute: float) -> float:
        # `identify` judges at 95 %, whatever level a fit reports.
        return -float(width_at(np.array([compute]), 0.95)[0])

    # The width falls with compute, so that four of the sixteen are enough to find the first.
    place = bisect.bisect_left(compute_M, -seen.widest, key=narrow)
    if place == len(compute_M):
        return None
    if place == 0:
        return float(compute_M[0])
    # Between two of the sixteen: else the answer would leap by 14 % from one evaluation to the next.
    ends = compute_M[place - 1 : place + 1].tolist()
    return math.exp(np.interp(-seen.widest, [narrow(end) for end in ends], np.log(ends)))
