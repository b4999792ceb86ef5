"""What who looks on at a run is told, after every step and every evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scalerl.record.reader import EvalPoint
from scalerl.rl.health.watch import Finding
from scalerl.rl.loop.counters import RunCounters


@dataclass(frozen=True)
class Progress:
    """What a watcher sees after every step and every evaluation."""

    step: int
    share: float
    """Of the budget."""
    tokens_per_second: float
    """Sampled tokens per second of generating and training."""
    pass_rate: float
    """Of the last evaluation."""
    forecast: Mapping[str, Any] | None
    """The last row of forecasts.jsonl."""
    evaluated: bool = False
    """Whether this is an evaluation (its step is then `step`) and not a step."""
    finding: str = ""
    """What there is to say of the run's health, if this is about that alone."""


class View:
    """Keeps what a watcher is to see, and tells it."""

    def __init__(self, watch: Callable[[Progress], None]) -> None:
        self.forecast: Mapping[str, Any] | None = None
        self._watch = watch
        self._share = 0.0
        self._tokens_per_second = math.nan
        self._pass_rate = math.nan

    def step(self, step: int, share: float, counters: RunCounters) -> None:
        """A trainer step is done."""
        self._share = min(share, 1.0)
        self._tokens_per_second = counters.generated / (counters.generate_seconds + counters.train_seconds)
        self._tell(step, evaluated=False)

    def point(self, point: EvalPoint) -> None:
        """An evaluation is on record."""
        self._pass_rate = point.pass_rate
        self._tell(point.step, evaluated=True)

    def finding(self, finding: Finding) -> None:
        """There is something to say of the run's health."""
        self._tell(finding.step, evaluated=False, finding=str(finding))

    def _tell(self, step: int, evaluated: bool, finding: str = "") -> None:
        speed, rate = self._tokens_per_second, self._pass_rate
        self._watch(Progress(step, self._share, speed, rate, self.forecast, evaluated, finding))
