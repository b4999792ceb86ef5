"""The figures of a run's health: their definitions, and their names in the text of alarms.

Thresholds, with their sources, are in `scalerl.rl.config.health`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from scalerl.rl.config.health import Health, Thresholds

Rows = Sequence[Mapping[str, Any]]
"""Lines of steps.jsonl, or evaluations, the latest last."""
Level = Literal["warning", "alarm"]


@dataclass(frozen=True)
class Figure:
    """A figure of the run's health, with its thresholds."""

    label: str
    """Name in the text of an alarm, with the unit."""
    value: Callable[[Rows, int], float]
    """The figure over a window of rows; NaN if there are too few rows with it."""
    thresholds: Thresholds
    sign: Literal[1, -1] = 1
    """-1 if low values are bad."""

    def of(self, precision: str) -> Figure:
        """Return the figure with the thresholds for a precision: the weights' precision, or tf32."""
        return replace(self, thresholds=self.thresholds.of(precision))

    def __call__(self, rows: Rows) -> float:
        """Return the figure over the window of its thresholds."""
        return self.value(rows, self.thresholds.window)

    def level(self, value: float) -> Level | None:
        """Return the level that a value reaches, or None."""
        if self.sign * value >= self.sign * self.thresholds.alarm:
            return "alarm"
        return "warning" if self.sign * value >= self.sign * self.thresholds.warning else None

    def is_over(self, value: float, level: Level) -> bool:
        """Return whether a report is over: an alarm on the good side of the *warning* threshold, a warning a
        fifth of that further. The gap keeps it from toggling while the value is near a threshold."""
        bound = self.thresholds.warning * (1 if level == "alarm" else 1 - 0.2 * self.sign)
        return self.sign * value < self.sign * bound


def _known(rows: Rows, key: str, most: int | None = None) -> list[float]:
    """Return the known, finite values of a field, at most the latest `most` of them."""
    values = (row.get(key) for row in reversed(rows))
    return list(islice((v for v in values if v is not None and math.isfinite(v)), most))[::-1]


def _mean(values: Sequence[float], window: int) -> float:
    """Return the mean of the latest `window` values; NaN if there are fewer."""
    return statistics.fmean(values[-window:]) if len(values) >= window else math.nan


def _mean_of(key: str) -> Callable[[Rows, int], float]:
    return lambda rows, window: _mean(_known(rows, key, window), window)


def _probes(rows: Rows, window: int, key: str = "probe_tokens") -> Rows:
    return [row for row in rows if row.get(key)][-window:]


def _logp_gap(rows: Rows, window: int) -> float:
    """Return the mean of |log pi_train - log pi_gen| over the probe's tokens, both by the same weights."""
    probes = _probes(rows, window)
    tokens = sum(row["probe_tokens"] for row in probes)
    return sum(row["logp_gap"] * row["probe_tokens"] for row in probes) / tokens if tokens else math.nan


def _head(rows: Rows, window: int) -> float:
    """Return the evidence that the LM heads of generator and trainer differ in precision; low precision only.

    For each token, take |trainer - recorded| less the same with the trainer's head in the other precision.
    The figure is the sum over the root of the sum of squares. The sum is negative if the heads agree, which
    counts as 0; if they differ, the figure grows with the root of the number of tokens.
    """
    probes = _probes(rows, window, "head_gap_rms")
    squares = sum(row["probe_tokens"] * row["head_gap_rms"] ** 2 for row in probes)
    excess = sum(row["probe_tokens"] * row["head_gap"] for row in probes)
    return max(excess, 0.0) / math.sqrt(squares) if probes else math.nan


def _sampling(rows: Rows, window: int) -> float:
    """Return how far the sampled tokens are from a sample of the trainer's distribution, in standard errors.

    The rank of a token is the probability of all likelier tokens plus half its own. If the token was sampled
    from that distribution, the mean is 1/2 and the variance (1 - sum p^3) / 12 for any distribution: this is
    the mid-p form of the probability integral transform. The mean is below 1/2 if sampling is sharper than
    the trainer's distribution (temperature, top-p, top-k), and above if it is flatter; recorded
    log-probabilities do not show that.
    """
    probes = _probes(rows, window)
    variance = sum(row["probe_tokens"] * row["rank_variance"] for row in probes)
    if variance < 2.5:  # fewer than about thirty tokens (1/12 each): no normal approximation
        return math.nan
    return abs(sum(row["probe_tokens"] * (row["rank"] - 0.5) for row in probes)) / math.sqrt(variance)


def _length_drift(rows: Rows, window: int) -> float:
    """Return the ratio of mean lengths of two successive windows, at least 1; under a token counts as one."""
    lengths = _known(rows, "mean_length", 2 * window)
    before, now = _mean(lengths[:-window], window), _mean(lengths, window)
    ratio = max(now, 1.0) / max(before, 1.0)
    return max(ratio, 1 / ratio) if math.isfinite(before) else math.nan


def _grad_norm(rows: Rows, window: int) -> float:
    """Return the median gradient norm, before clipping, of the latest 5 steps over that of `window` before.

    A single spike is clipped and does no harm, unlike a norm that stays high.
    """
    norms = _known(rows, "grad_norm", 5 + window)
    before = norms[-5 - window : -5]
    if len(before) < min(window, 10):
        return math.nan
    usual = statistics.median(before)
    return statistics.median(norms[-5:]) / usual if usual > 0 else math.nan


def _reward_drop(rows: Rows, window: int) -> float:
    """Return how far the share correct in training is below that of the best window of the known rows."""
    total = np.cumsum([0.0, *_known(rows, "correct")])
    means = (total[window:] - total[:-window]) / window
    return float(means.max() - means[-1]) if len(means) else math.nan


def _pass_rate_drop(rows: Rows, window: int) -> float:
    """Return how far the held-out pass rate is below its best so far, beyond three standard errors of the
    difference, from the mean of the latest `window` evaluations; rows are evaluations."""
    if len(rows) <= window:
        return math.nan
    now = statistics.fmean(row["pass_rate"] for row in rows[-window:])
    best = max(rows, key=lambda row: row["pass_rate"])
    noise = math.hypot(best["noise_sd"], rows[-1]["noise_sd"] / math.sqrt(window))
    return max(best["pass_rate"] - now - 3 * noise, 0.0)


def _failed(rows: Rows, window: int) -> float:
    """Return the share of completions whose verification failed, as a mean over steps."""
    shares = [sum(row["failed"].values()) / row["completions"] for row in rows if row.get("completions")]
    return _mean(shares, window)


_FINITE = ("loss", "entropy", "ratio_mean", "ess", "grad_norm")


def _non_finite(rows: Rows, window: int) -> float:
    """Return how many figures of the latest step are not finite; a non-finite gradient ends a run before."""
    row = rows[-1]
    values = [] if row["skipped"] else [row[key] for key in _FINITE if key in row]
    return float(sum(value is None or not math.isfinite(value) for value in values))


FIGURES = {
    "truncated": Figure("share of truncated completions", _mean_of("truncated"), Health.truncated),
    # The log-probabilities differ only by kernels and precision: see `scalerl.rl.learner.probe`.
    "logp_gap": Figure(
        "gap between the log-probabilities of trainer and generator (nats)", _logp_gap, Health.logp_gap
    ),
    "head": Figure(
        "sign that the LM head of the generator has another precision (standard errors)", _head, Health.head
    ),
    "sampling": Figure(
        "distance of the sampled tokens from the trainer's distribution (standard errors)",
        _sampling,
        Health.sampling,
    ),
    # (sum rho)^2 / (n sum rho^2) over the trained tokens, in (0, 1]: the effective share of the batch under
    # its importance ratios (Kong, 1992).
    "ess": Figure("effective sample size", _mean_of("ess"), Health.ess, sign=-1),
    # The share of trained tokens on which a bound of the loss acts.
    "ratio_clipped": Figure(
        "share of importance ratios clipped", _mean_of("ratio_clipped"), Health.ratio_clipped
    ),
    "length_drift": Figure("factor by which the mean length changed", _length_drift, Health.length_drift),
    "zero_variance": Figure(
        "share of groups without signal", _mean_of("zero_variance"), Health.zero_variance
    ),
    "grad_norm": Figure("gradient norm over its usual size", _grad_norm, Health.grad_norm),
    "reward_drop": Figure("drop of the share correct in training", _reward_drop, Health.reward_drop),
    "pass_rate_drop": Figure("drop of the held-out pass rate", _pass_rate_drop, Health.pass_rate_drop),
    "failed": Figure("share of completions whose verification failed", _failed, Health.failed),
    # One is an alarm; this threshold cannot be set.
    "non_finite": Figure("number of figures that are not finite", _non_finite, Thresholds(1.0, 1.0, 1)),
}
READ = (
    *(*_FINITE, "skipped", "truncated", "ratio_clipped", "mean_length", "zero_variance", "correct", "failed"),
    *("completions", "probe_tokens", "logp_gap", "head_gap", "head_gap_rms", "rank", "rank_variance"),
)
"""The fields of steps.jsonl that figures read."""


def figures_of(health: Health, precision: str) -> dict[str, Figure]:
    """Return the figures by name, with the thresholds of a recipe for this precision (see `Figure.of`)."""
    return {
        name: replace(figure, thresholds=getattr(health, name, figure.thresholds)).of(precision)
        for name, figure in FIGURES.items()
    }
