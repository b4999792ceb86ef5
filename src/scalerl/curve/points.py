"""What is fitted: compute, pass rate and what is known of the noise, for every evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalerl.errors import InputError
from scalerl.record import RunRecord


@dataclass(frozen=True)
class Points:
    """Evaluations of one run on one compute axis, in any order; repeated compute means replicates.

    Raises:
        InputError: lengths differ, a compute is negative or not finite, or a pass rate is outside [0, 1].
    """

    compute_N: np.ndarray
    """Cumulative training compute, in the unit of `axis`; 0 before any training."""
    pass_rate_N: np.ndarray
    """Mean pass rate on the held-out prompts, a share in [0, 1]."""
    noise_sd_N: np.ndarray
    """Sampling noise of the pass rate on fixed prompts, sqrt(mean p(1-p) / (n k)); NaN when not known."""
    step_N: np.ndarray | None = None
    """Trainer step of every evaluation, if known: correlated noise decays with the distance in steps."""
    source: str = "points"
    """The file or folder that errors name."""
    axis: str = "compute"
    line_N: np.ndarray | None = None
    """Line of `source` that every point comes from, for errors."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.compute_N)
        for name, array in (("pass_rate_N", self.pass_rate_N), ("noise_sd_N", self.noise_sd_N)):
            if len(array) != n:
                raise InputError(f"{self.source}: {name} has {len(array)} values for {n} of compute")
        self._check(~np.isfinite(self.compute_N), self.compute_N, f"{self.axis} is not a finite number")
        self._check(self.compute_N < 0, self.compute_N, f"{self.axis} is negative; compute is 0 or more")
        self._check(~np.isfinite(self.pass_rate_N), self.pass_rate_N, "the pass rate is not a finite number")
        self._check(
            self.pass_rate_N > 1,
            self.pass_rate_N,
            "the pass rate is above 1; it is a share in [0, 1], so if these are percent divide by 100",
        )
        self._check(self.pass_rate_N < 0, self.pass_rate_N, "the pass rate is below 0; it is in [0, 1]")

    def _check(self, bad_N: np.ndarray, value_N: np.ndarray, what: str) -> None:
        if bad_N.any():
            i = int(np.argmax(bad_N))
            place = f"point {i + 1}" if self.line_N is None else f"line {int(self.line_N[i])}"
            raise InputError(f"{self.source}, {place}: {what} (found {value_N[i]:g})")

    def __len__(self) -> int:
        return len(self.compute_N)

    def select(self, keep_N: np.ndarray) -> Points:
        """The points that `keep_N` (booleans, or positions in the order wanted) picks."""
        changes: dict[str, Any] = {}
        for name in ("compute_N", "pass_rate_N", "noise_sd_N", "step_N", "line_N"):
            array = getattr(self, name)
            changes[name] = None if array is None else array[keep_N]
        return replace(self, **changes)

    @classmethod
    def from_arrays(
        cls,
        compute: Any,
        pass_rate: Any,
        *,
        noise_sd: Any = None,
        step: Any = None,
        source: str = "points",
        axis: str = "compute",
    ) -> Points:
        """Points from any two sequences of numbers, with noise and steps where they are known."""
        compute_N = np.asarray(compute, dtype=float)
        noise_N = np.nan if noise_sd is None else np.asarray(noise_sd, dtype=float)
        return cls(
            compute_N,
            np.asarray(pass_rate, dtype=float),
            np.array(np.broadcast_to(noise_N, compute_N.shape)),
            None if step is None else np.asarray(step, dtype=float),
            source,
            axis,
        )

    @classmethod
    def from_record(cls, record: RunRecord, axis: str = "gpu_hours", price: float | None = None) -> Points:
        """The evaluations of a run on `axis`; `price` in dollars per GPU-hour for the axis `dollars`.

        Raises:
            InputError: the axis is unknown or its counters were not logged, or a value is out of range.
        """
        step_N = np.array([point.step for point in record.evals], dtype=float)
        compute_N = record.compute(axis, price)
        # Step 0 comes before any training: what the devices idled while starting up is no training compute.
        compute_N = np.where(step_N == 0, 0.0, compute_N)
        return cls(
            compute_N,
            np.array([point.pass_rate for point in record.evals], dtype=float),
            np.array([point.noise_sd for point in record.evals], dtype=float),
            step_N,
            str(record.evals_file),
            axis,
            warnings=record.warnings,
        )
