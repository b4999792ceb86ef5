"""One evaluation of a run with its cumulative counters, and the compute axes that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from scalerl.errors import InputError, brief, nearest, number_of
from scalerl.jsonl import number, whole

AXES = ("gpu_hours", "flops", "tokens", "tokens_processed", "samples", "steps", "dollars")
"""The compute axes: device-hours of generating, training and idling; floating-point operations; generated
tokens; generated plus trained tokens; completions; trainer steps; and GPU-hours times a price."""
_MEANT = {
    "time": "gpu_hours",
    "seconds": "gpu_hours",
    "compute": "flops",
    "cost": "dollars",
    "rollouts": "samples",
}
"""Other names that people use for an axis, where the spelling alone does not lead to it."""
_LEAST = {"step": 0, "version": -1, "n_prompts": 0, "n_samples": 0}
"""The fields of an evaluation that are whole numbers, each with its least value."""


@dataclass(frozen=True)
class DeviceSeconds:
    """Cumulative device-seconds by role. `evaluate` and `startup` are recorded, but do not count as training
    compute."""

    generate: float = math.nan
    train: float = math.nan
    evaluate: float = math.nan
    idle: float = math.nan
    startup: float = math.nan


@dataclass(frozen=True)
class Flops:
    """Cumulative floating-point operations by role."""

    generate: float = math.nan
    train: float = math.nan


@dataclass(frozen=True)
class Tokens:
    """Cumulative tokens by role: sampled by the generators, and trained on."""

    generated: float = math.nan
    trained: float = math.nan


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation on the held-out prompts, with the cumulative counters at that point.

    A counter or a health figure that the trainer did not log is NaN. Shares are in [0, 1], lengths in
    tokens, entropy in nats per token.
    """

    step: int
    pass_rate: float
    """Mean over the held-out prompts of the share of their completions that are correct (mean@k)."""
    time: float = math.nan
    """Unix seconds."""
    device_seconds: DeviceSeconds = field(default_factory=DeviceSeconds)
    flops: Flops = field(default_factory=Flops)
    tokens: Tokens = field(default_factory=Tokens)
    samples: float = math.nan
    """Completions consumed by the trainer."""
    prompts: float = math.nan
    """Groups consumed by the trainer."""
    version: int = -1
    """Version of the weights that sampled every completion of this evaluation; -1 when not known."""
    n_prompts: int = 0
    n_samples: int = 0
    """Completions per held-out prompt."""
    mean_p_1mp: float = math.nan
    """Unbiased estimate of the mean over prompts of p (1 - p); NaN at one sample per prompt."""
    failed: float = math.nan
    """Share of completions whose verification failed; they count as not correct."""
    truncated: float = math.nan
    interrupted: float = math.nan
    mean_length: float = math.nan
    entropy: float = math.nan

    @property
    def total_samples(self) -> float:
        """Completions behind `pass_rate`, all prompts together; NaN when not known."""
        # 0 means not known, and must not become a divisor.
        return float(self.n_prompts * self.n_samples) or math.nan

    @property
    def noise_sd(self) -> float:
        """Sampling noise of `pass_rate` on fixed prompts, sqrt(mean p(1-p) / (n k)); NaN when not known."""
        # The unbiased estimate is NaN at one sample, and so is this; a foreign one may be below 0.
        return math.sqrt(max(self.mean_p_1mp, 0.0) / self.total_samples)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> EvalPoint:
        """Build a point from one parsed line of evals.jsonl; null means not known, other keys are ignored.

        Raises:
            InputError: a field has another type, is not finite, or `step` or `pass_rate` is missing.
        """
        for name in ("step", "pass_rate"):
            if row.get(name) is None:
                raise InputError(f"an evaluation needs a whole 'step' and a numeric 'pass_rate': no '{name}'")
        values: dict[str, Any] = {}
        for name in (f.name for f in fields(cls)):
            # The writer makes null of NaN: not known, like a missing key.
            if (value := row.get(name)) is None:
                continue
            if name in COUNTERS:
                values[name] = _counters(COUNTERS[name], value, name)
            elif name in _LEAST:
                values[name] = whole(value, name, _LEAST[name])
            else:
                values[name] = number(value, name)
        return cls(**values)


COUNTERS = {"device_seconds": DeviceSeconds, "flops": Flops, "tokens": Tokens}
"""The fields of an evaluation that are counters by role."""


def _counters(kind: type, value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise InputError(f"'{name}' must be an object of counters, found {brief(value)}")
    known = [f.name for f in fields(kind) if value.get(f.name) is not None]
    return kind(**{key: number(value[key], f"{name}.{key}") for key in known})


def mean_p_1mp(correct_P: np.ndarray, n_samples: int) -> float:
    """Estimate the mean over prompts of p (1 - p) without bias, from `correct_P` successes of `n_samples`.

    For x successes of k, x (k - x) / (k (k - 1)) has expectation p (1 - p). NaN at k = 1, where one sample
    says nothing about the spread.
    """
    if n_samples < 2:
        return math.nan
    return float(np.mean(correct_P * (n_samples - correct_P)) / (n_samples * (n_samples - 1)))


def check_axis(axis: str) -> None:
    """Raise an InputError unless `axis` is one of `AXES`."""
    if axis not in AXES:
        near = nearest(_MEANT.get(axis.lower(), axis.lower()), AXES)
        hint = f"did you mean {near!r}? " if near else ""
        raise InputError(f"unknown compute axis {axis!r}: {hint}choose one of {', '.join(AXES)}")


def unit_of(axis: str) -> str:
    """Return the unit of an axis, as written after an amount; that of a column is its name."""
    units = {"gpu_hours": "GPU-hours", "flops": "FLOP", "samples": "completions"}
    return (units | {"tokens_processed": "processed tokens"}).get(axis, axis)


def compute_of(point: EvalPoint, axis: str) -> float:
    """Return the training compute up to one evaluation, in units of one of `AXES`; NaN where not known."""
    if axis in ("gpu_hours", "dollars"):
        seconds = point.device_seconds
        # Idle time is paid for. NaN in any part makes the sum NaN, which means not logged.
        return (seconds.generate + seconds.train + seconds.idle) / 3600
    if axis == "flops":
        return point.flops.generate + point.flops.train
    if axis == "tokens":
        return point.tokens.generated
    if axis == "tokens_processed":
        return point.tokens.generated + point.tokens.trained
    return float(point.samples if axis == "samples" else point.step)


def in_dollars(gpu_hours_N: np.ndarray, price: float | None) -> np.ndarray:
    """Convert GPU-hours to dollars at `price` each.

    Raises:
        InputError: `price` is missing, or not a number above 0.
    """
    if price is None:
        raise InputError("the axis 'dollars' needs a price per GPU-hour")
    if not (math.isfinite(number_of(price, "the price of a GPU-hour")) and price > 0):
        raise InputError(f"the price of a GPU-hour must be a number of dollars above 0, found {price:g}")
    with np.errstate(over="ignore"):  # infinite compute is rejected where it is used, with its line
        return gpu_hours_N * price
