"""What is watched of a run, from where on it is told, and what an alarm does.

One small object per figure: its thresholds, and in `__call__` its definition, from the latest lines of
steps.jsonl. A source stands where there is one; where there is none, the threshold is our own judgement, and
the docstring says so. `scalerl.rl.health.watch` does the watching.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

Rows = Sequence[Mapping[str, Any]]
"""Lines of steps.jsonl, the latest last."""
Level = Literal["warning", "alarm"]

LONGEST_WINDOW = 100
"""Steps; twice as many are remembered, as drifts compare two windows."""


@dataclass(frozen=True)
class _Limits:
    """Thresholds of one figure, over `window` steps (those that have the figure).

    A figure that no run reaches is off: `alarm = 2.0` for a share.
    """

    warning: float
    alarm: float
    window: int

    sign = 1  # -1 where low is bad
    reads = ()  # fields of a row

    def __post_init__(self) -> None:
        self._check(self.warning, self.alarm)

    def _check(self, warning: float, alarm: float) -> None:
        ordered = self.sign * warning <= self.sign * alarm
        if not (0 < warning < math.inf and 0 < alarm < math.inf and ordered):
            side = "at or above" if self.sign > 0 else "at or below"
            raise ValueError(f"thresholds must be positive and finite, alarm {side} warning")
        if not 1 <= self.window <= LONGEST_WINDOW:
            raise ValueError(f"window must be 1 to {LONGEST_WINDOW} steps")

    def __call__(self, rows: Rows) -> float:
        """The figure; NaN where the rows do not hold enough of it."""
        raise NotImplementedError

    def level(self, value: float) -> Level | None:
        """What a value calls for."""
        if self.sign * value >= self.sign * self.alarm:
            return "alarm"
        return "warning" if self.sign * value >= self.sign * self.warning else None

    def is_over(self, value: float, level: Level) -> bool:
        """Whether what was told has ended: an alarm below the *warning*, a warning a fifth below that, so
        that a value at a threshold does not come and go."""
        bound = self.warning * (1 if level == "alarm" else 1 - 0.2 * self.sign)
        return self.sign * value < self.sign * bound


@dataclass(frozen=True)
class Truncated(_Limits):
    """Share of the completions consumed that ran out of their budget, mean.

    Runs in which 10-15 % were truncated broke, and ScaleRL stayed below 5 % for 90 % of the time
    (arXiv 2510.13786).
    """

    warning: float = 0.05
    alarm: float = 0.10
    window: int = 10
    reads = ("truncated",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        return _mean(_known(rows, "truncated", self.window), self.window)


@dataclass(frozen=True)
class LogpGap(_Limits):
    """|log pi_train - log pi_gen| of one version of the weights, mean over the probe's tokens, in nats.

    The two differ by kernels and precision alone: see `scalerl.rl.learner.probe`. A threshold of 0 follows
    the precision of the weights. In float32 kernels agree to 1e-6, so 2e-5 and 2e-4 are our own judgement. In
    bfloat16 .03 is the upper end of what was seen in dense models (a k3 divergence of 1e-3, so a difference
    of .045 root mean square: SGLang RL team, 2025), and .1 is our own judgement.
    """

    warning: float = 0.0
    alarm: float = 0.0
    window: int = 3
    reads = ("logp_gap", "probe_tokens")

    def __post_init__(self) -> None:
        if self.warning < 0 or self.alarm < 0:
            raise ValueError("thresholds must not be negative")
        self._check(self.warning or self.alarm or 1.0, self.alarm or self.warning or 1.0)

    def of(self, precision: str) -> LogpGap:
        """The same with the thresholds that follow the precision; the one that is given moves the other."""
        warning, alarm = (2e-5, 2e-4) if precision == "float32" else (0.03, 0.1)
        warning = self.warning or min(warning, self.alarm or alarm)
        return replace(self, warning=warning, alarm=self.alarm or max(alarm, warning))

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        probes = [row for row in rows if row.get("probe_tokens")][-self.window :]
        tokens = sum(row["probe_tokens"] for row in probes)
        return sum(row["logp_gap"] * row["probe_tokens"] for row in probes) / tokens if tokens else math.nan


@dataclass(frozen=True)
class SamplingDrift(_Limits):
    """How far the sampled tokens are from a sample of the trainer's distribution, in standard errors.

    The rank of a token is the probability of all likelier ones and half of its own. Where the token was
    sampled from that distribution its mean is 1/2 and its variance (1 - sum p^3) / 12, whatever the
    distribution: the mid-p form of the probability integral transform. The mean is below 1/2 where sampling
    is sharper than the trainer believes (temperature, top-p, top-k), and above where it is flatter; recorded
    log-probabilities do not show that. 4 and 6 standard errors are our own judgement: with the normal
    distribution once in 16,000 and 500 million windows.
    """

    warning: float = 4.0
    alarm: float = 6.0
    window: int = 50
    reads = ("rank", "rank_variance", "probe_tokens")

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        probes = [row for row in rows if row.get("probe_tokens")][-self.window :]
        variance = sum(row["probe_tokens"] * row["rank_variance"] for row in probes)
        if variance < 2.5:  # ten tokens that could have been others: too few for a normal distribution
            return math.nan
        return abs(sum(row["probe_tokens"] * (row["rank"] - 0.5) for row in probes)) / math.sqrt(variance)


@dataclass(frozen=True)
class Head(_Limits):
    """Whether the generator's LM head has the precision of the trainer's, in standard errors; only in a low
    precision.

    Per token |trainer - recorded| less the same with the trainer's head in the other precision; the sum over
    the root of the sum of squares. It is negative as long as the heads agree, and grows with the root of the
    number of tokens where they do not. 4 and 6 are our own judgement.
    """

    warning: float = 4.0
    alarm: float = 6.0
    window: int = 50
    reads = ("head_gap", "head_gap_rms", "probe_tokens")

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        probes = [row for row in rows if row.get("head_gap_rms")][-self.window :]
        squares = sum(row["probe_tokens"] * row["head_gap_rms"] ** 2 for row in probes)
        excess = sum(row["probe_tokens"] * row["head_gap"] for row in probes)
        return max(excess, 0.0) / math.sqrt(squares) if probes else math.nan


@dataclass(frozen=True)
class EffectiveSample(_Limits):
    """(sum rho)^2 / (n sum rho^2) over the trained tokens, in (0, 1]: the share of the batch that is left
    once the importance ratios have weighed it (Kong, 1992); mean. Low is bad.

    .5 and .3: the lower end of good, and the warning, of verl's guide to rollout correction (2025).
    """

    warning: float = 0.5
    alarm: float = 0.3
    window: int = 5
    sign = -1
    reads = ("ess",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        return _mean(_known(rows, "ess", self.window), self.window)


@dataclass(frozen=True)
class RatioClipped(_Limits):
    """Share of the trained tokens on which a bound of the loss acts, mean.

    GSPO clips 15 % of its tokens when it is well (arXiv 2507.18071); .3 and .6 are our own judgement.
    """

    warning: float = 0.3
    alarm: float = 0.6
    window: int = 10
    reads = ("ratio_clipped",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        return _mean(_known(rows, "ratio_clipped", self.window), self.window)


@dataclass(frozen=True)
class LengthDrift(_Limits):
    """Factor by which the mean length changed, up or down, from one window to the next; under a token is one.

    Lengths grow as reasoning does, slowly; 2 and 3 are our own judgement.
    """

    warning: float = 2.0
    alarm: float = 3.0
    window: int = 20
    reads = ("mean_length",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        lengths = _known(rows, "mean_length", 2 * self.window)
        before, now = _mean(lengths[: -self.window], self.window), _mean(lengths, self.window)
        ratio = max(now, 1.0) / max(before, 1.0)
        return max(ratio, 1 / ratio) if math.isfinite(before) else math.nan


@dataclass(frozen=True)
class ZeroVariance(_Limits):
    """Share of the groups without signal, mean: what is left is the effective batch.

    It rises as prompts are solved; .8 and .95 are our own judgement.
    """

    warning: float = 0.8
    alarm: float = 0.95
    window: int = 10
    reads = ("zero_variance",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        return _mean(_known(rows, "zero_variance", self.window), self.window)


@dataclass(frozen=True)
class GradNorm(_Limits):
    """Gradient norm before clipping: median of the latest 5 steps over that of the `window` before them.

    One spike is clipped, and does no harm; a norm that stays high does. 5 and 20 are our own judgement.
    """

    warning: float = 5.0
    alarm: float = 20.0
    window: int = 50
    reads = ("grad_norm",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        norms = _known(rows, "grad_norm", 5 + self.window)
        before = norms[-5 - self.window : -5]
        if len(before) < min(self.window, 10):
            return math.nan
        usual = statistics.median(before)
        return statistics.median(norms[-5:]) / usual if usual > 0 else math.nan


@dataclass(frozen=True)
class RewardDrop(_Limits):
    """How far the share correct in training is below the best window that is remembered.

    The curriculum takes solved prompts away, which lowers it by .1 and more in a run that is well; .25 and .4
    are our own judgement.
    """

    warning: float = 0.25
    alarm: float = 0.4
    window: int = 20
    reads = ("correct",)

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        total = np.cumsum([0.0, *_known(rows, "correct")])
        means = (total[self.window :] - total[: -self.window]) / self.window
        return float(means.max() - means[-1]) if len(means) else math.nan


@dataclass(frozen=True)
class PassRateDrop(_Limits):
    """How far the held-out pass rate is below its best so far, beyond three standard errors of the
    difference; mean of the latest `window` evaluations.

    The curve assumes that the pass rate does not fall (arXiv 2510.13786, equation 1); .02 and .05 are our own
    judgement.
    """

    warning: float = 0.02
    alarm: float = 0.05
    window: int = 1
    reads = ("pass_rate", "noise_sd")

    def __call__(self, rows: Rows) -> float:
        """See the class; the rows are evaluations."""
        if len(rows) <= self.window:
            return math.nan
        now = statistics.fmean(row["pass_rate"] for row in rows[-self.window :])
        best = max(rows, key=lambda row: row["pass_rate"])
        noise = math.hypot(best["noise_sd"], rows[-1]["noise_sd"] / math.sqrt(self.window))
        return max(best["pass_rate"] - now - 3 * noise, 0.0)


@dataclass(frozen=True)
class Failed(_Limits):
    """Share of the completions whose verification failed, mean: a verifier that is down teaches nothing.

    .02 and .1 are our own judgement.
    """

    warning: float = 0.02
    alarm: float = 0.1
    window: int = 5
    reads = ("failed", "completions")

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        shares = [sum(row["failed"].values()) / row["completions"] for row in rows if row.get("completions")]
        return _mean(shares, self.window)


@dataclass(frozen=True)
class NonFinite(_Limits):
    """How many figures of the latest step are not finite, where its gradient was. One is an alarm."""

    warning: float = 1.0
    alarm: float = 1.0
    window: int = 1
    reads = ("skipped", "loss", "entropy", "ratio_mean", "ess", "grad_norm")

    def __call__(self, rows: Rows) -> float:
        """See the class."""
        row = rows[-1]
        values = [] if row["skipped"] else [row[key] for key in self.reads[1:] if key in row]
        return float(sum(value is None or not math.isfinite(value) for value in values))


@dataclass(frozen=True)
class Health:
    """What is watched (docs/health.md), and what an alarm does.

    `warn` puts alarms on record and on standard error. `pause` also ends the run after the step that is on
    record, with exit status 4; it can be resumed. A gradient that is not finite always ends it.
    """

    on_alarm: Literal["warn", "pause"] = "warn"
    probe: int = 4
    """Completions that are scored by the trainer in a step with the weights that sampled them; 0 is none."""
    truncated: Truncated = field(default_factory=Truncated)
    logp_gap: LogpGap = field(default_factory=LogpGap)
    head: Head = field(default_factory=Head)
    sampling: SamplingDrift = field(default_factory=SamplingDrift)
    ess: EffectiveSample = field(default_factory=EffectiveSample)
    ratio_clipped: RatioClipped = field(default_factory=RatioClipped)
    length_drift: LengthDrift = field(default_factory=LengthDrift)
    zero_variance: ZeroVariance = field(default_factory=ZeroVariance)
    grad_norm: GradNorm = field(default_factory=GradNorm)
    reward_drop: RewardDrop = field(default_factory=RewardDrop)
    pass_rate_drop: PassRateDrop = field(default_factory=PassRateDrop)
    failed: Failed = field(default_factory=Failed)

    def __post_init__(self) -> None:
        if self.probe < 0:
            raise ValueError("probe must not be negative")

    def limits(self, precision: str) -> dict[str, _Limits]:
        """The figures by name, with the thresholds for weights of this precision."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["logp_gap"] = self.logp_gap.of(precision)
        return {name: limits for name, limits in found.items() if isinstance(limits, _Limits)}


def _known(rows: Rows, key: str, most: int | None = None) -> list[float]:
    """The values of a field, where it is known; the latest `most` of them."""
    found: list[float] = []
    for row in reversed(rows):
        if len(found) == most:
            break
        value = row.get(key)
        if value is not None and math.isfinite(value):
            found.append(value)
    return found[::-1]


def _mean(values: Sequence[float], window: int) -> float:
    """The mean of the latest `window` values; NaN where there are fewer."""
    return statistics.fmean(values[-window:]) if len(values) >= window else math.nan
