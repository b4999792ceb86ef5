"""The recipe's table `health`: the thresholds of the watched figures, and what an alarm does.

A comment names the source of a threshold; thresholds without a source are our own judgement.
`scalerl.rl.health.figures` defines the figures, `scalerl.rl.health.watch` watches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

LONGEST_WINDOW = 100
"""In steps; twice as many are kept, as drifts compare two windows."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of one figure over `window` steps (counting only steps that have the figure).

    A threshold that no run reaches turns the figure off: `alarm = 2.0` for a share.
    """

    warning: float
    alarm: float
    window: int

    def check(self, default: Thresholds) -> None:
        """Raise a ValueError unless these are valid in place of `default`, which sets their order."""
        warning, alarm, low_is_bad = self.warning, self.alarm, default.alarm < default.warning
        if not default.alarm:  # a threshold of 0 follows the precision
            if warning < 0 or alarm < 0:
                raise ValueError("thresholds must not be negative")
            warning, alarm = warning or alarm or 1.0, alarm or warning or 1.0
        ordered = alarm <= warning if low_is_bad else warning <= alarm
        if not (0 < warning < math.inf and 0 < alarm < math.inf and ordered):
            side = "at or below" if low_is_bad else "at or above"
            raise ValueError(f"thresholds must be positive and finite, alarm {side} warning")
        if not 1 <= self.window <= LONGEST_WINDOW:
            raise ValueError(f"window must be 1 to {LONGEST_WINDOW} steps")

    def of(self, precision: str) -> Thresholds:
        """Replace thresholds of 0 by those of a precision; if one is given, the other is adapted to it."""
        if self.warning and self.alarm:
            return self
        warning, alarm = {"float32": (2e-5, 2e-4), "tf32": (2e-3, 2e-2)}.get(precision, (0.03, 0.1))
        warning = self.warning or min(warning, self.alarm or alarm)
        return replace(self, warning=warning, alarm=self.alarm or max(alarm, warning))


_SETTINGS = (
    *("truncated", "logp_gap", "head", "sampling", "ess", "ratio_clipped", "length_drift", "zero_variance"),
    *("grad_norm", "reward_drop", "pass_rate_drop", "failed"),
)


@dataclass(frozen=True)
class Health:
    """The watched figures (docs/reference/health.md), and what an alarm does.

    `warn` writes alarms to the record and to standard error. `pause` also ends the run after the recorded
    step, with exit status 4; it can be resumed. A gradient that is not finite always ends the run.
    """

    on_alarm: Literal["warn", "pause"] = "warn"
    probe: int = 4
    """Completions per step that the trainer scores with the weights that sampled them; 0 for none."""
    # Runs in which 10-15 % were truncated broke, and ScaleRL stayed below 5 % for 90 % of the time
    # (arXiv 2510.13786).
    truncated: Thresholds = Thresholds(0.05, 0.10, 10)
    # In float32 kernels agree to 1e-6, so 2e-5 and 2e-4 are our own judgement, as are 2e-3 and 2e-2 of vLLM,
    # whose attention multiplies float32 as TF32 on a GPU: 5e-4 was seen on an H200. In bfloat16 .03 is the
    # upper end of what was seen in dense models (a k3 divergence of 1e-3, so a difference of .045 root mean
    # square: SGLang RL team, 2025), and .1 is our own judgement.
    logp_gap: Thresholds = Thresholds(0.0, 0.0, 3)
    head: Thresholds = Thresholds(4.0, 6.0, 50)
    # Under a normal distribution, once in 16,000 and once in 500 million windows.
    sampling: Thresholds = Thresholds(4.0, 6.0, 50)
    # The lower end of the good range, and the warning level, in verl's guide to rollout correction (2025).
    ess: Thresholds = Thresholds(0.5, 0.3, 5)
    # GSPO clips 15 % of its tokens in a healthy run (arXiv 2507.18071).
    ratio_clipped: Thresholds = Thresholds(0.3, 0.6, 10)
    # Lengths grow slowly as reasoning improves.
    length_drift: Thresholds = Thresholds(2.0, 3.0, 20)
    # The remaining groups are the effective batch. The share rises as prompts are solved.
    zero_variance: Thresholds = Thresholds(0.8, 0.95, 10)
    grad_norm: Thresholds = Thresholds(5.0, 20.0, 50)
    # The curriculum retires solved prompts, which lowers the share by .1 and more in a healthy run.
    reward_drop: Thresholds = Thresholds(0.25, 0.4, 20)
    # The curve assumes that the pass rate does not fall (arXiv 2510.13786, equation 1).
    pass_rate_drop: Thresholds = Thresholds(0.02, 0.05, 1)
    # Nothing is learnt while a verifier is down.
    failed: Thresholds = Thresholds(0.02, 0.1, 5)

    @field_validator(*_SETTINGS, mode="wrap")
    @classmethod
    def _completed(cls, value: Any, build: Callable[[Any], Thresholds], info: ValidationInfo) -> Thresholds:
        """Fill in the defaults of keys that a recipe leaves out of a table.

        The table is checked here as well, so that the error names it.
        """
        default = getattr(cls, str(info.field_name))
        found = build({**asdict(default), **value} if isinstance(value, Mapping) else value)
        found.check(default)
        return found

    def __post_init__(self) -> None:
        if self.probe < 0:
            raise ValueError("probe must not be negative")
        for name in _SETTINGS:
            getattr(self, name).check(getattr(Health, name))
