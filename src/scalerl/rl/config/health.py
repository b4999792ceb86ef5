"""The recipe's table `health`: the figures that are watched, their thresholds, and what an alarm does.

`FIGURES` is the table of all figures: the text of an alarm, the fields it reads, its definition, and its
default thresholds. A source stands where there is one; where there is none, they are our own judgement.
`scalerl.rl.health.watch` does the watching.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import ValidationInfo, field_validator

Rows = Sequence[Mapping[str, Any]]
"""Lines of steps.jsonl, or evaluations, the latest last."""
Level = Literal["warning", "alarm"]

LONGEST_WINDOW = 100
"""Steps; twice as many are remembered, as drifts compare two windows."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of one figure, over `window` steps (those that have the figure).

    A figure that no run reaches is off: `alarm = 2.0` for a share.
    """

    warning: float
    alarm: float
    window: int


@dataclass(frozen=True)
class Figure:
    """A figure of the run's health, with its thresholds."""

    label: str
    """In the text of an alarm, with the unit."""
    reads: tuple[str, ...]
    """Fields of a row."""
    value: Callable[[Rows, int], float]
    """The figure over a window of rows; NaN where they do not hold enough of it."""
    thresholds: Thresholds
    sign: Literal[1, -1] = 1
    """-1 where low is bad."""
    follows_precision: bool = False
    """A threshold of 0 stands for that of the precision of the weights."""

    def __post_init__(self) -> None:
        warning, alarm = self.thresholds.warning, self.thresholds.alarm
        if self.follows_precision:
            if warning < 0 or alarm < 0:
                raise ValueError("thresholds must not be negative")
            warning, alarm = warning or alarm or 1.0, alarm or warning or 1.0
        ordered = self.sign * warning <= self.sign * alarm
        if not (0 < warning < math.inf and 0 < alarm < math.inf and ordered):
            side = "at or above" if self.sign > 0 else "at or below"
            raise ValueError(f"thresholds must be positive and finite, alarm {side} warning")
        if not 1 <= self.thresholds.window <= LONGEST_WINDOW:
            raise ValueError(f"window must be 1 to {LONGEST_WINDOW} steps")

    def __call__(self, rows: Rows) -> float:
        """The figure over the window of its thresholds."""
        return self.value(rows, self.thresholds.window)

    def of(self, precision: str) -> Figure:
        """The same with the thresholds that follow the precision; one that is given moves the other."""
        if not self.follows_precision:
            return self
        given = self.thresholds
        warning, alarm = (2e-5, 2e-4) if precision == "float32" else (0.03, 0.1)
        warning = given.warning or min(warning, given.alarm or alarm)
        return replace(
            self, thresholds=replace(given, warning=warning, alarm=given.alarm or max(alarm, warning))
        )

    def level(self, value: float) -> Level | None:
        """What a value calls for."""
        if self.sign * value >= self.sign * self.thresholds.alarm:
            return "alarm"
        return "warning" if self.sign * value >= self.sign * self.thresholds.warning else None

    def is_over(self, value: float, level: Level) -> bool:
        """Whether what was reported has ended: an alarm below the *warning*, a warning a fifth below that, so
        that a value at a threshold does not come and go."""
        bound = self.thresholds.warning * (1 if level == "alarm" else 1 - 0.2 * self.sign)
        return self.sign * value < self.sign * bound


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


def _mean_of(key: str) -> Callable[[Rows, int], float]:
    return lambda rows, window: _mean(_known(rows, key, window), window)


def _probes(rows: Rows, window: int, key: str = "probe_tokens") -> Rows:
    return [row for row in rows if row.get(key)][-window:]


def _logp_gap(rows: Rows, window: int) -> float:
    """|log pi_train - log pi_gen| of one version of the weights, mean over the probe's tokens."""
    probes = _probes(rows, window)
    tokens = sum(row["probe_tokens"] for row in probes)
    return sum(row["logp_gap"] * row["probe_tokens"] for row in probes) / tokens if tokens else math.nan


def _head(rows: Rows, window: int) -> float:
    """Whether the generator's LM head has the precision of the trainer's; only in a low precision.

    Per token |trainer - recorded| less the same with the trainer's head in the other precision; the sum over
    the root of the sum of squares. It is negative as long as the heads agree, and grows with the root of the
    number of tokens where they do not.
    """
    probes = _probes(rows, window, "head_gap_rms")
    squares = sum(row["probe_tokens"] * row["head_gap_rms"] ** 2 for row in probes)
    excess = sum(row["probe_tokens"] * row["head_gap"] for row in probes)
    return max(excess, 0.0) / math.sqrt(squares) if probes else math.nan


def _sampling(rows: Rows, window: int) -> float:
    """How far the sampled tokens are from a sample of the trainer's distribution.

    The rank of a token is the probability of all likelier ones and half of its own. Where the token was
    sampled from that distribution its mean is 1/2 and its variance (1 - sum p^3) / 12, whatever the
    distribution: the mid-p form of the probability integral transform. The mean is below 1/2 where sampling
    is sharper than the trainer believes (temperature, top-p, top-k), and above where it is flatter; recorded
    log-probabilities do not show that.
    """
    probes = _probes(rows, window)
    variance = sum(row["probe_tokens"] * row["rank_variance"] for row in probes)
    if variance < 2.5:  # ten tokens that could have been others: too few for a normal distribution
        return math.nan
    return abs(sum(row["probe_tokens"] * (row["rank"] - 0.5) for row in probes)) / math.sqrt(variance)


def _length_drift(rows: Rows, window: int) -> float:
    """Mean length of a window over that of the window before, or its inverse; under a token is one."""
    lengths = _known(rows, "mean_length", 2 * window)
    before, now = _mean(lengths[:-window], window), _mean(lengths, window)
    ratio = max(now, 1.0) / max(before, 1.0)
    return max(ratio, 1 / ratio) if math.isfinite(before) else math.nan


def _grad_norm(rows: Rows, window: int) -> float:
    """Gradient norm before clipping: median of the latest 5 steps over that of the `window` before them.

    One spike is clipped, and does no harm; a norm that stays high does.
    """
    norms = _known(rows, "grad_norm", 5 + window)
    before = norms[-5 - window : -5]
    if len(before) < min(window, 10):
        return math.nan
    usual = statistics.median(before)
    return statistics.median(norms[-5:]) / usual if usual > 0 else math.nan


def _reward_drop(rows: Rows, window: int) -> float:
    """How far the share correct in training is below the best window that is remembered."""
    total = np.cumsum([0.0, *_known(rows, "correct")])
    means = (total[window:] - total[:-window]) / window
    return float(means.max() - means[-1]) if len(means) else math.nan


def _pass_rate_drop(rows: Rows, window: int) -> float:
    """How far the held-out pass rate is below its best so far, beyond three standard errors of the
    difference; mean of the latest `window` evaluations, which the rows are."""
    if len(rows) <= window:
        return math.nan
    now = statistics.fmean(row["pass_rate"] for row in rows[-window:])
    best = max(rows, key=lambda row: row["pass_rate"])
    noise = math.hypot(best["noise_sd"], rows[-1]["noise_sd"] / math.sqrt(window))
    return max(best["pass_rate"] - now - 3 * noise, 0.0)


def _failed(rows: Rows, window: int) -> float:
    """Share of the completions whose verification failed, mean over steps."""
    shares = [sum(row["failed"].values()) / row["completions"] for row in rows if row.get("completions")]
    return _mean(shares, window)


_FINITE = ("loss", "entropy", "ratio_mean", "ess", "grad_norm")


def _non_finite(rows: Rows, window: int) -> float:
    """How many figures of the latest step are not finite, where its gradient was."""
    row = rows[-1]
    values = [] if row["skipped"] else [row[key] for key in _FINITE if key in row]
    return float(sum(value is None or not math.isfinite(value) for value in values))


FIGURES = {
    # Runs in which 10-15 % were truncated broke, and ScaleRL stayed below 5 % for 90 % of the time
    # (arXiv 2510.13786).
    "truncated": Figure(
        "share of truncated completions", ("truncated",), _mean_of("truncated"), Thresholds(0.05, 0.10, 10)
    ),
    # The two differ by kernels and precision alone: see `scalerl.rl.learner.probe`. In float32 kernels agree
    # to 1e-6, so 2e-5 and 2e-4 are our own judgement. In bfloat16 .03 is the upper end of what was seen in
    # dense models (a k3 divergence of 1e-3, so a difference of .045 root mean square: SGLang RL team, 2025),
    # and .1 is our own judgement.
    "logp_gap": Figure(
        "gap between the log-probabilities of trainer and generator (nats)",
        ("logp_gap", "probe_tokens"),
        _logp_gap,
        Thresholds(0.0, 0.0, 3),
        follows_precision=True,
    ),
    # Our own judgement.
    "head": Figure(
        "sign that the LM head of the generator has another precision (standard errors)",
        ("head_gap", "head_gap_rms", "probe_tokens"),
        _head,
        Thresholds(4.0, 6.0, 50),
    ),
    # Our own judgement: with the normal distribution once in 16,000 and 500 million windows.
    "sampling": Figure(
        "distance of the sampled tokens from the trainer's distribution (standard errors)",
        ("rank", "rank_variance", "probe_tokens"),
        _sampling,
        Thresholds(4.0, 6.0, 50),
    ),
    # (sum rho)^2 / (n sum rho^2) over the trained tokens, in (0, 1]: the share of the batch that is left once
    # the importance ratios have weighed it (Kong, 1992). The lower end of good, and the warning, of verl's
    # guide to rollout correction (2025).
    "ess": Figure("effective sample size", ("ess",), _mean_of("ess"), Thresholds(0.5, 0.3, 5), sign=-1),
    # Of the trained tokens those on which a bound of the loss acts. GSPO clips 15 % of its tokens when it is
    # well (arXiv 2507.18071); .3 and .6 are our own judgement.
    "ratio_clipped": Figure(
        "share of importance ratios clipped",
        ("ratio_clipped",),
        _mean_of("ratio_clipped"),
        Thresholds(0.3, 0.6, 10),
    ),
    # Lengths grow as reasoning does, slowly; our own judgement.
    "length_drift": Figure(
        "factor by which the mean length changed", ("mean_length",), _length_drift, Thresholds(2.0, 3.0, 20)
    ),
    # What is left is the effective batch. It rises as prompts are solved; our own judgement.
    "zero_variance": Figure(
        "share of groups without signal",
        ("zero_variance",),
        _mean_of("zero_variance"),
        Thresholds(0.8, 0.95, 10),
    ),
    # Our own judgement.
    "grad_norm": Figure(
        "gradient norm over its usual size", ("grad_norm",), _grad_norm, Thresholds(5.0, 20.0, 50)
    ),
    # The curriculum takes solved prompts away, which lowers it by .1 and more in a run that is well; our own
    # judgement.
    "reward_drop": Figure(
        "drop of the share correct in training", ("correct",), _reward_drop, Thresholds(0.25, 0.4, 20)
    ),
    # The curve assumes that the pass rate does not fall (arXiv 2510.13786, equation 1); our own judgement.
    "pass_rate_drop": Figure(
        "drop of the held-out pass rate",
        ("pass_rate", "noise_sd"),
        _pass_rate_drop,
        Thresholds(0.02, 0.05, 1),
    ),
    # A verifier that is down teaches nothing; our own judgement.
    "failed": Figure(
        "share of completions whose verification failed",
        ("failed", "completions"),
        _failed,
        Thresholds(0.02, 0.1, 5),
    ),
    # One is an alarm. It cannot be set.
    "non_finite": Figure(
        "number of figures that are not finite", ("skipped", *_FINITE), _non_finite, Thresholds(1.0, 1.0, 1)
    ),
}
_SETTINGS = [name for name in FIGURES if name != "non_finite"]


@dataclass(frozen=True)
class Health:
    """What is watched (docs/health.md), and what an alarm does.

    `warn` puts alarms on record and on standard error. `pause` also ends the run after the step that is on
    record, with exit status 4; it can be resumed. A gradient that is not finite always ends it.
    """

    on_alarm: Literal["warn", "pause"] = "warn"
    probe: int = 4
    """Completions that are scored by the trainer in a step with the weights that sampled them; 0 is none."""
    truncated: Thresholds = FIGURES["truncated"].thresholds
    logp_gap: Thresholds = FIGURES["logp_gap"].thresholds
    head: Thresholds = FIGURES["head"].thresholds
    sampling: Thresholds = FIGURES["sampling"].thresholds
    ess: Thresholds = FIGURES["ess"].thresholds
    ratio_clipped: Thresholds = FIGURES["ratio_clipped"].thresholds
    length_drift: Thresholds = FIGURES["length_drift"].thresholds
    zero_variance: Thresholds = FIGURES["zero_variance"].thresholds
    grad_norm: Thresholds = FIGURES["grad_norm"].thresholds
    reward_drop: Thresholds = FIGURES["reward_drop"].thresholds
    pass_rate_drop: Thresholds = FIGURES["pass_rate_drop"].thresholds
    failed: Thresholds = FIGURES["failed"].thresholds

    @field_validator(*_SETTINGS, mode="before")
    @classmethod
    def _completed(cls, value: Any, info: ValidationInfo) -> Any:
        """The keys of a table that a recipe does not name have their defaults."""
        default = FIGURES[str(info.field_name)].thresholds
        return {**asdict(default), **value} if isinstance(value, Mapping) else value

    @field_validator(*_SETTINGS)
    @classmethod
    def _checked(cls, value: Thresholds, info: ValidationInfo) -> Thresholds:
        """Checked here as well, so that the error of a recipe names the table."""
        replace(FIGURES[str(info.field_name)], thresholds=value)
        return value

    def __post_init__(self) -> None:
        if self.probe < 0:
            raise ValueError("probe must not be negative")
        self.figures("float32")  # raises where a threshold is out of range

    def figures(self, precision: str) -> dict[str, Figure]:
        """The figures by name, with the thresholds for weights of this precision.

        Raises:
            ValueError: a threshold or a window is out of range.
        """
        return {
            name: replace(figure, thresholds=getattr(self, name, figure.thresholds)).of(precision)
            for name, figure in FIGURES.items()
        }
