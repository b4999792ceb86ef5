"""Progress of a run, reported after every step and every evaluation."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalerl.record.evaluation import EvalPoint
from scalerl.rl.health.watch import Finding
from scalerl.rl.loop.counters import RunCounters


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step, after an evaluation, or at a finding on its health."""

    step: int = 0
    share: float = 0.0
    """Of the budget."""
    tokens_per_second: float = math.nan
    """Sampled tokens per second of generating and training."""
    pass_rate: float = math.nan
    """Of the last evaluation."""
    forecast: Mapping[str, Any] | None = None
    """The last row of forecasts.jsonl."""
    evaluated: bool = False
    """Whether this is an evaluation (its step is then `step`) and not a step."""
    finding: str = ""
    """The finding on the run's health, if this is one."""


class View:
    """Keeps the latest progress, and reports every change of it to `report`."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self._report, self._last = report, Progress()

    def step(self, step: int, share: float, counters: RunCounters) -> None:
        """Report a trainer step."""
        # Per second of work: idle devices and evaluations would make the same code look slower.
        speed = counters.generated / (counters.generate_seconds + counters.train_seconds)
        self._last = replace(self._last, step=step, share=min(share, 1.0), tokens_per_second=speed)
        self._report(self._last)

    def point(self, point: EvalPoint) -> None:
        """Report an evaluation that is on record."""
        self._last = replace(self._last, pass_rate=point.pass_rate)
        self._report(replace(self._last, step=point.step, evaluated=True))

    def frozen(self, forecast: Mapping[str, Any]) -> None:
        """Keep a forecast, for the next report."""
        self._last = replace(self._last, forecast=forecast)

    def finding(self, finding: Finding) -> None:
        """Report a finding on the run's health."""
        self._report(replace(self._last, step=finding.step, finding=str(finding)))
