"""Medians and intervals of the parameters, and whether the data fix the ceiling at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import FAMILIES, LOG_LOGISTIC
from scalerl.curve.misfit import MIN_POINTS
from scalerl.curve.posterior import Posterior
from scalerl.curve.prior import LOG_B, log_mid_range
from scalerl.curve.quantiles import Interval, node_quantiles, tails, weighted_quantiles
from scalerl.curve.sample import Sample

MAX_WIDTH_A, MAX_WIDTH_OF_GAIN = 0.25, 1.0
"""A ceiling is identified when its 95 % interval is no wider than this, nor than this share of A - R_0 ..."""
MIN_RATIO, MIN_RATIO_LOW = 1.5, 1.0
"""... and when the data reach this many times C_mid by its median, and this many by its 97.5 % quantile."""
MIN_EVALUATIONS = MIN_POINTS
"""... of this many evaluations at least: with fewer neither the noise is known, nor a misfit told."""
MAX_AT_BOUND = 0.05
"""More of the posterior than this against the bound of a parameter means that the data do not fix it."""


@dataclass(frozen=True)
class Intervals:
    """Central intervals at `level`. `A` averages the families; the others are given the paper's family."""

    level: float
    A: Interval
    A_given_family: Interval
    B: Interval
    C_mid: Interval


@dataclass(frozen=True)
class Medians:
    """Posterior medians, each with the meaning and the conditioning of its namesake in `Intervals`.

    They are the points that stand beside the intervals. The least-squares curve has other parameters, which
    may lie outside of the intervals where the log-logistic family misfits or the noise is correlated.
    """

    A: float
    A_given_family: float
    B: float
    C_mid: float


@dataclass(frozen=True)
class Identification:
    """Whether the data fix the ceiling, in one sentence why, and what that rests on."""

    identified: bool
    why: str
    ratio: float
    """C_max / C_mid: posterior median over all families."""
    ratio_interval: Interval
    at_bounds: dict[str, float]
    """Share of the posterior against a bound: A at 1, B and C_mid at either edge of their prior."""
    widest: float
    """The width of A's 95 % interval up to which the ceiling is called identified."""


def parameters_of(post: Posterior, level: float) -> tuple[Medians, Intervals]:
    """Medians of the parameters, and their central intervals at `level`."""
    low, high = tails(level)
    ends = np.array(_quantiles(post, np.array([low, 0.5, high]))).tolist()
    intervals = Intervals(level, *((low, high) for low, _, high in ends))
    return Medians(*(median for _, median, _ in ends)), intervals


def _quantiles(post: Posterior, at_Q: np.ndarray) -> list[np.ndarray]:
    """Quantiles of A over all families, and of A, B and C_mid given the paper's; each of shape (Q,)."""
    own = post.only(FAMILIES.index(LOG_LOGISTIC))

    def of_log(value_cells: np.ndarray) -> np.ndarray:
        return np.exp(node_quantiles(value_cells, own.weight_cells, at_Q))

    return [ceiling(post, at_Q), ceiling(own, at_Q), of_log(own.log_b_cells), of_log(own.log_mid_cells)]


def ceiling(post: Posterior, at_Q: np.ndarray) -> np.ndarray:
    """Quantiles of A, (Q,)."""
    return weighted_quantiles(post.A, post.weight.sum(axis=2), at_Q)


def identify(post: Posterior, sample: Sample) -> Identification:
    """Look at the posterior of A, of C_max / C_mid, and at the bounds; always at 95 %."""
    log_mid = node_quantiles(post.log_mid_cells, post.weight_cells, np.array([0.025, 0.5, 0.975]))
    least, ratio, most = np.exp(sample.log_c_range[1] - log_mid[::-1]).tolist()
    at_bounds = _at_bounds(post, sample)
    low, high = ceiling(post, tails(0.95)).tolist()
    reach = "{} C_mid [{}, {}]".format(*(f"{x:.2g}" if x < 10 else f"{x:.0f}" for x in (ratio, least, most)))
    span = f"the data reach {reach}, A is in [{low:.3f}, {high:.3f}]"
    gain = float(np.sum((post.A[:, :, None] - post.R_0) * post.weight))
    widest = min(MAX_WIDTH_A, MAX_WIDTH_OF_GAIN * gain)
    name = max(("B", "C_mid"), key=lambda n: at_bounds[n])
    if ratio < MIN_RATIO or least < MIN_RATIO_LOW:
        identified, why = False, f"{span}: the bend has hardly been seen"
    elif len(sample) < MIN_EVALUATIONS:
        identified, why = (
            False,
            f"{span}, but {len(sample)} evaluations are too few to tell: {MIN_EVALUATIONS} are needed",
        )
    elif high - low > widest:
        identified, why = False, f"{span}: wider than {widest:.2g}"
    elif at_bounds[name] > MAX_AT_BOUND:
        edge = f"{at_bounds[name]:.0%} of the probability of {name} lies on the edge of its prior"
        identified, why = False, f"{span}, but {edge}"
    else:
        identified, why = True, f"{span}: the bend has been seen"
    return Identification(identified, why, ratio, (least, most), at_bounds, widest)


def _at_bounds(post: Posterior, sample: Sample) -> dict[str, float]:
    edges = {"B": (post.log_b_cells, *LOG_B), "C_mid": (post.log_mid_cells, *log_mid_range(sample))}
    share = {"A": float(post.weight.sum(axis=2)[post.A > 0.99].sum())}
    for name, (value, start, stop) in edges.items():
        share[name] = float(post.weight_cells[(value < start + 0.05) | (value > stop - 0.05)].sum())
    return share
