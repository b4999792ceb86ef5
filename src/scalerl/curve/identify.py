"""Intervals of the parameters, and whether the data fix the ceiling at all."""

from __future__ import annotations

import math

import numpy as np

from scalerl.curve.families import FAMILIES, LOG_LOGISTIC
from scalerl.curve.least_squares import Sample
from scalerl.curve.posterior import B_RANGE, C_MID_FACTOR, Posterior
from scalerl.curve.quantiles import tails, weighted_quantiles
from scalerl.curve.result import Interval, Intervals

MAX_WIDTH_A, MAX_WIDTH_OF_GAIN = 0.20, 0.5
"""A ceiling is identified when its 95 % interval is no wider than this, nor than this share of A - R_0 ..."""
MIN_RATIO = 1.5
"""... and when the data reach this many times C_mid."""


def intervals_of(post: Posterior, level: float) -> Intervals:
    """Intervals of the parameters; the paper's family is the first."""
    at_Q = tails(level)

    def interval(post: Posterior, value: np.ndarray) -> Interval:
        low, high = weighted_quantiles(value, post.weight if value.ndim == 3 else post.weight_cells, at_Q)
        return float(low), float(high)

    def ceiling(post: Posterior) -> Interval:
        return interval(post, np.broadcast_to(post.A[:, :, None], post.weight.shape))

    own = post.only(FAMILIES.index(LOG_LOGISTIC))
    log_b, log_mid = interval(own, own.log_b_cells), interval(own, own.log_mid_cells)
    return Intervals(
        level,
        ceiling(post),
        ceiling(own),
        (math.exp(log_b[0]), math.exp(log_b[1])),
        (math.exp(log_mid[0]), math.exp(log_mid[1])),
    )


def identified_ceiling(post: Posterior, ratio: float, sample: Sample) -> tuple[bool, str]:
    """Whether the data fix the ceiling, and one sentence that says why."""
    low, high = intervals_of(post, 0.95).A
    span = f"the data reach {ratio:.2g} C_mid and the 95 % interval of A is [{low:.3f}, {high:.3f}]"
    if ratio < MIN_RATIO:
        return False, f"{span}: below {MIN_RATIO:g} C_mid the bend has hardly been seen"
    gain = float(np.sum((post.A[:, :, None] - post.R_0) * post.weight))
    widest = min(MAX_WIDTH_A, MAX_WIDTH_OF_GAIN * gain)
    if high - low > widest:
        return False, f"{span}: wider than {widest:.2g}"
    weight = post.weight_cells
    log_lo, log_hi = sample.log_c_range
    edges = (
        ("B", post.log_b_cells, math.log(B_RANGE[0]), math.log(B_RANGE[1])),
        ("C_mid", post.log_mid_cells, log_lo - math.log(C_MID_FACTOR), log_hi + math.log(C_MID_FACTOR)),
    )
    for name, value, start, stop in edges:
        near = float(weight[(value < start + 0.05) | (value > stop - 0.05)].sum())
        if near > 0.05:
            return False, f"{span}, but {near:.0%} of the probability of {name} lies on the edge of its prior"
    return True, f"{span}: the bend has been seen"
