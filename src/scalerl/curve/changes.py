"""Changes of level: a burst at the start of a run, as of a format, or a step, as of a collapse.

    y = R(C) + d / (1 + (C_d / C)^S) + noise        d ~ N(0, .2^2), relative to the run's apparent noise

A change is a model of the noise (`scalerl.curve.noise`) whose covariance has rank one. Its prior probability
is spread over all places, and the few that the data support enter the posterior: the steps that stand out
among the differences of neighbours, and the best burst of a grid, refined once. A burst upwards is no misfit:
`likeliest_burst` returns the one beside which `scalerl.curve.misfit` looks again.

Shapes: N rows of the sample, P models of the noise.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from scalerl.curve.families import LOG_LOGISTIC
from scalerl.curve.least_squares import least_squares_many
from scalerl.curve.nodes import level_of_cells
from scalerl.curve.noise import make_noise
from scalerl.curve.prior import STEEP, NoiseModel, Prior
from scalerl.curve.sample import Sample

_SIZE_SD = 0.2  # of a change, in pass rate
_STANDS_OUT, _LEAST_STEP, _MOST_STEPS = 4.0, 0.05, 2  # times the usual difference of neighbours, pass rate
_BURST_BY = 5.0  # the largest compute is at least this many times C_d of a burst: half of it is over by then
_SPACING = 0.35  # of log C_d of bursts on the grid
_BURST_S = (4.0, 10.0)
_FINER = tuple((k * _SPACING / 4, f) for k in range(-2, 3) for f in (1 / 1.8, 1.0, 1.8))
_PHI = 0.4  # correlation of the noise beside a change: covers .95 of jumps, independent noise .78
_LEAST_S, _MOST_S = 2.0, 25.0
_CUT = 4.0  # log-density below the best beyond which a change is dropped
# For the burst that a healthy run may begin with: stricter, as a first rise before a second is no burst.
_EARLY, _SHARE = 8.0, 0.2  # the same for this burst; its prior probability
_SIZES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.32, 0.4)
_FINER_SIZES, _FINER_AT, _FINER_S = (0.85, 1.0, 1.15), (-0.2, -0.1, 0.0, 0.1, 0.2), (1.0, 1.4, 2.0)
_S_SD, _ROUGH_STEPS = 0.25, 8
# A rough log-logistic beside the change shows which changes are likely.
_LOG_MID, _LOG_B = 10, np.linspace(math.log(0.6), math.log(5.0), 5)


def likely_changes(sample: Sample, floor: float, prior: Prior) -> list[NoiseModel]:
    """Return the changes of level that the data support, with their share of the prior; often none."""
    if not any(prior.changes):
        return []
    size_N = np.abs(np.diff(sample.y_N))
    usual = float(np.median(size_N))
    # In units of an evaluation's variance: the median difference of neighbours is .954 times its sd.
    variance = (_SIZE_SD / min(max(usual / 0.954, 0.002), 0.05)) ** 2
    steps, bursts = _steps(sample, size_N, usual, prior, variance), _bursts(sample, prior, variance)
    level_P = _levels(sample, floor, prior, [*steps, *bursts])
    known = len(prior.noise)
    found = [
        step for step, level in zip(steps, level_P[known:], strict=False) if level > level_P.max() - _CUT
    ]
    if not bursts:
        return found
    best = bursts[int(np.argmax(level_P[known + len(steps) :]))]
    finer = [_moved(best, *by) for by in _FINER]
    finer_P = _levels(sample, floor, replace(prior, noise=prior.noise[:1]), finer)[1:]
    i = int(np.argmax(finer_P))
    return [*found, finer[i]] if finer_P[i] > level_P[:known].max() - _CUT else found


def _steps(
    sample: Sample, size_N: np.ndarray, usual: float, prior: Prior, variance: float
) -> list[NoiseModel]:
    """Return steps between neighbours that differ unusually much, none of them right after compute 0."""
    log_c_N, weight = sample.log_c_N, prior.changes[1] / len(size_N)
    return [
        NoiseModel(_PHI, 0.0, weight, 0.0, variance, 0.5 * float(log_c_N[j] + log_c_N[j + 1]), STEEP)
        for j in np.argsort(-size_N)[:_MOST_STEPS]
        if size_N[j] > max(_STANDS_OUT * usual, _LEAST_STEP) and np.isfinite(log_c_N[j])
    ]


def _bursts(sample: Sample, prior: Prior, variance: float) -> list[NoiseModel]:
    low, high = sample.log_c_range
    places = np.arange(high - math.log(_BURST_BY), low, -_SPACING).tolist()
    weight = prior.changes[0] / max(len(places) * len(_BURST_S), 1)
    return [NoiseModel(_PHI, 0.0, weight, 0.0, variance, at, s) for at in places for s in _BURST_S]


def _moved(burst: NoiseModel, later: float, steeper: float) -> NoiseModel:
    """Return a nearby burst with its share of the prior: about eight of them stand for one of the grid."""
    s = min(max(burst.steep * steeper, _LEAST_S), _MOST_S)
    return replace(burst, weight=burst.weight / 8, log_at=burst.log_at + later, steep=s)


def _levels(sample: Sample, floor: float, prior: Prior, changes: list[NoiseModel]) -> np.ndarray:
    """Return the best log-density of the prior's noise models, then of `changes`, by a log-logistic, (P,)."""
    noise = make_noise(sample, floor, prior, changes)
    low, high = sample.log_c_range
    log_mid_FM = np.linspace(low, high + 1.0, _LOG_MID)[None]
    log_b_FMK = np.broadcast_to(_LOG_B, (1, _LOG_MID, len(_LOG_B)))
    return level_of_cells(sample, (LOG_LOGISTIC,), noise, prior, log_b_FMK, log_mid_FM).max(axis=(1, 2, 3))


@dataclass(frozen=True)
class EarlyBurst:
    """A burst upwards: until it is over, the run is `size * to_come_N` below the curve that follows."""

    size: float
    to_come_N: np.ndarray
    columns_N3: np.ndarray
    """The effect of one prior sd more of its size, of its log C_d and of its log S."""
    log_prior: float
    """The log of the prior probability of a burst near this C_d."""


def likeliest_burst(sample: Sample) -> EarlyBurst | None:
    """Return the burst beside which a log-logistic has the least squares; None if the range is too short."""
    low, high = sample.log_c_range
    places = np.arange(high - math.log(_EARLY), low - _SPACING, -_SPACING).tolist()
    if not places:
        return None
    size, at, s = _least_squares(sample, itertools.product(_SIZES, places, _BURST_S))
    finer = itertools.product(_FINER_SIZES, _FINER_AT, _FINER_S)
    size, at, s = _least_squares(sample, ((size * more, at + later, s * by) for more, later, by in finer))
    share_N, by_s_N, by_at_N = LOG_LOGISTIC.slopes(np.asarray(s), sample.log_c_N - at)
    columns = [_SIZE_SD * (1.0 - share_N), _SPACING * size * by_at_N, _S_SD * size * by_s_N]
    return EarlyBurst(size, 1.0 - share_N, np.stack(columns, axis=1), math.log(_SHARE / len(places)))


def _least_squares(
    sample: Sample, bursts: Iterable[tuple[float, float, float]]
) -> tuple[float, float, float]:
    """Return the (size, log C_d, S) of `bursts` beside which a log-logistic has the least squares."""
    tried, even = list(bursts), []
    for size, at, s in tried:
        to_come_N = 1.0 - LOG_LOGISTIC.share(np.asarray(s), sample.log_c_N - at)
        even.append(replace(sample, y_N=sample.y_N + size * to_come_N))
    found = least_squares_many(even, LOG_LOGISTIC, steps=_ROUGH_STEPS)
    return tried[int(np.argmin([one.rss for one in found]))]
