"""Medians and intervals of the parameters, and whether the data fix the ceiling at all."""

from __future__ import annotations

import math

import numpy as np

from scalerl.curve.families import FAMILIES, LOG_LOGISTIC
from scalerl.curve.nodes import B_RANGE, C_MID_FACTOR
from scalerl.curve.posterior import Posterior
from scalerl.curve.quantiles import tails, weighted_quantiles
from scalerl.curve.result import Intervals, Medians
from scalerl.curve.sample import Sample

MAX_WIDTH_A, MAX_WIDTH_OF_GAIN = 0.20, 0.5
"""A ceiling is identified when its 95 % interval is no wider than this, nor than this share of A - R_0 ..."""
MIN_RATIO = 1.5
"""... and when the data reach this many times C_mid."""


def intervals_of(post: Posterior, level: float) -> Intervals:
    """Central intervals of the parameters at `level`."""
    return Intervals(level, *((float(low), float(high)) for low, high in _quantiles(post, tails(level))))


def medians_of(post: Posterior) -> Medians:
    """Medians of the parameters, the points that belong to the intervals."""
    return Medians(*(float(median) for (median,) in _quantiles(post, np.array([0.5]))))


def _quantiles(post: Posterior, at_Q: np.ndarray) -> list[np.ndarray]:
    """Quantiles of A over all families, and of A, B and C_mid given the paper's; each of shape (Q,)."""
    own = post.only(FAMILIES.index(LOG_LOGISTIC))

    def ceiling(post: Posterior) -> np.ndarray:
        return weighted_quantiles(np.broadcast_to(post.A[:, :, None], post.weight.shape), post.weight, at_Q)

    def of_log(value_cells: np.ndarray) -> np.ndarray:
        return np.exp(weighted_quantiles(value_cells, own.weight_cells, at_Q))

    return [ceiling(post), ceiling(own), of_log(own.log_b_cells), of_log(own.log_mid_cells)]


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
