"""The rows that are fitted: points sorted, replicates pooled, and gaps between evaluations measured."""

import math
from dataclasses import dataclass

import numpy as np

from scalerl.curve.families import log_compute
from scalerl.curve.points import Points

MIN_TO_FIT = 4
"""Evaluations at distinct compute that a fit needs: the prior supplies the rest, with wide intervals."""
MIN_TO_JUDGE = 6
"""Evaluations that a verdict, a comparison, a misfit, and any fit under a flat prior need."""
MAX_ROWS = 400
"""Above this many rows, runs of consecutive evaluations are averaged, so that time stays linear."""


@dataclass(frozen=True, eq=False)
class Sample:
    """N rows in the order of compute; repeated evaluations at one compute are one row.

    `weight_N` counts the evaluations behind each row's mean, `within` is their sum of squares about the
    means, `gap_N[i]` is the distance from row i-1 to i in usual gaps between evaluations, at least 1 and
    infinite from compute 0. `r0` is a fixed R_0, or None where R_0 is a parameter.
    """

    log_c_N: np.ndarray
    y_N: np.ndarray
    weight_N: np.ndarray
    gap_N: np.ndarray
    within: float
    n_points: int
    r0: float | None
    each: float = 1.0
    """Evaluations averaged in a usual row of a long run."""
    scatter: float = 0.0
    """Standard deviation of the evaluations of a long run about the means of their rows."""

    def __len__(self) -> int:
        return len(self.y_N)

    def row_sd(self, sd: float) -> float:
        """Return the noise of a usual row, given `sd` of one evaluation: less where rows are means."""
        return math.sqrt(max(sd**2 - self.scatter**2, 0.0))

    @property
    def clock_N(self) -> np.ndarray:
        """The clock of a wander, log(1 + C / C_1) scaled: 0 at compute 0 and 1 at the last row, (N,)."""
        return clock(np.exp(self.log_c_N), *self.log_c_range)

    @property
    def even_N(self) -> np.ndarray:
        """The clock of a trend: compute over that of the last row, from 0 to 1, (N,)."""
        return np.exp(self.log_c_N - self.log_c_N[-1])

    @property
    def n_linear(self) -> int:
        """How many of (R_0, A) are free."""
        return 2 if self.r0 is None else 1

    @property
    def log_c_range(self) -> tuple[float, float]:
        """Logarithms of the smallest positive and the largest compute."""
        return float(self.log_c_N[0 if self.log_c_N[0] > -np.inf else 1]), float(self.log_c_N[-1])


def clock(compute_M: np.ndarray, log_first: float, log_last: float) -> np.ndarray:
    """Return log(1 + C / C_1) over its value at the last evaluation, at computes (M,)."""
    since_M = np.logaddexp(0.0, log_compute(compute_M) - log_first)
    return since_M / np.logaddexp(0.0, log_last - log_first)


def make_sample(points: Points, r0: float | None) -> Sample:
    """Sort and pool the points, measure the gaps between evaluations, and thin a very long run.

    Evaluations at one compute are pooled, weighted by their samples where these are known. With known steps
    they make one observation (the same weights, evaluated again); without, each is one. Above `MAX_ROWS` rows
    consecutive ones are averaged. The noise of such means is estimated from their scatter about the curve, so
    that correlation within them is not lost.
    """
    order_N = np.argsort(points.compute_N, kind="stable")
    compute_N, y_N = points.compute_N[order_N], points.pass_rate_N[order_N]
    step_N = None if points.step_N is None else points.step_N[order_N]
    weight_N, within, n_points = np.ones(len(y_N)), 0.0, len(points)
    first_N = np.flatnonzero(np.diff(compute_N, prepend=-1.0))
    if len(first_N) < len(compute_N):
        count_N = np.diff(first_N, append=len(y_N))
        samples_N = points.samples_N[order_N]
        known_M = np.isfinite(np.add.reduceat(samples_N, first_N))
        sized_N = np.where(np.repeat(known_M, count_N), samples_N, 1.0)
        mean_N = np.add.reduceat(y_N * sized_N, first_N) / np.add.reduceat(sized_N, first_N)
        if step_N is None:
            weight_N = count_N.astype(float)
            within = float(np.sum((y_N - np.repeat(mean_N, count_N)) ** 2))
        else:
            step_N, n_points = step_N[first_N], len(first_N)
            weight_N = np.ones(len(first_N))
        compute_N, y_N = compute_N[first_N], mean_N
    if compute_N[0] == 0:
        # Before training there is only sampling noise, so this row may be worth several.
        weight_N[0] *= _start_weight(points)
    each, scatter = 1.0, 0.0
    if len(y_N) > MAX_ROWS:
        each = len(y_N) / MAX_ROWS
        before = float(weight_N @ y_N**2), float(weight_N.sum())
        compute_N, y_N, weight_N, step_N = _thin(compute_N, y_N, weight_N, step_N)
        after = float(weight_N @ y_N**2) / float(weight_N.sum())
        scatter = math.sqrt(max((before[0] + within) / before[1] - after, 0.0))
        within, n_points = 0.0, len(y_N)
    log_c_N, gap_N = log_compute(compute_N), _gaps(compute_N, step_N)
    return Sample(log_c_N, y_N, weight_N, gap_N, within, n_points, r0, each, scatter)


def _start_weight(points: Points) -> float:
    """Return the weight of the evaluation before training, by its sampling noise; 1 if that is not known.

    Training adds noise to all other evaluations, so the true weight is at least this.
    """
    zero_N, known_N = points.compute_N == 0, np.isfinite(points.noise_sd_N) & (points.noise_sd_N > 0)
    if not (known_N & zero_N).any() or not (known_N & ~zero_N).any():
        return 1.0
    # Medians, as one evaluation on few prompts must not set what is usual.
    usual = float(np.median(points.noise_sd_N[known_N & ~zero_N]))
    own = float(np.mean(points.noise_sd_N[known_N & zero_N]))
    return float(np.clip((usual / own) ** 2, 1 / 16, 16))


def _gaps(compute_N: np.ndarray, step_N: np.ndarray | None) -> np.ndarray:
    gap_N = np.ones(len(compute_N))
    if step_N is not None and len(step_N) > 2:
        gap_N[1:] = np.abs(np.diff(step_N))
        usual = float(np.median(gap_N[1:]))
        # Evaluations closer than usual still have independent sampling noise: no more correlation than at 1.
        gap_N = np.maximum(gap_N / usual, 1.0) if usual > 0 else np.ones_like(gap_N)
    if compute_N[0] == 0 and len(gap_N) > 1:
        gap_N[1] = np.inf  # before any training there is only sampling noise, which is shared with nothing
    return gap_N


def _thin(
    compute_N: np.ndarray, y_N: np.ndarray, weight_N: np.ndarray, step_N: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Average runs of consecutive rows, at the mean of their log compute; compute 0 stays a row of its own.

    Weights are relative to the median, so that a row counts as one observation.
    """
    zero = int(compute_N[0] == 0)
    edge_M = np.unique(np.linspace(zero, len(y_N), MAX_ROWS + 1 - zero).astype(int))[:-1]
    if zero:
        edge_M = np.concatenate([[0], edge_M])
    total_M = np.add.reduceat(weight_N, edge_M)

    def mean(value_N: np.ndarray) -> np.ndarray:
        return np.add.reduceat(value_N * weight_N, edge_M) / total_M

    log_c_M = mean(log_compute(np.where(compute_N > 0, compute_N, 1.0)))
    compute_M = np.where(np.arange(len(edge_M)) < zero, 0.0, np.exp(log_c_M))
    relative_M = total_M / np.median(total_M)
    if zero:
        # The row at compute 0 is a single evaluation: it counts at most as much as a mean of several.
        relative_M[0] = min(relative_M[0], 1.0)
    return compute_M, mean(y_N), relative_M, None if step_N is None else mean(step_N)
