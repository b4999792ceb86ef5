"""Progress of a run: reports after every step and evaluation, and the activities within them.

An activity is shown a few times a second and written to progress.json every two seconds. Reports in between
are dropped, so that they cost a decode step no more than a reading of the clock.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from scalerl.record.activity import WRITE_SECONDS, Activity, Count
from scalerl.record.evaluation import EvalPoint
from scalerl.rl.health.watch import Finding

EVALUATING, TRAINING = "evaluating", "training"
_REPORT_SECONDS = 0.25
"""Seconds between two reports of the same activity; a new activity is reported at once."""


class Activities:
    """The latest activity of a run; any thread may call the methods."""

    def __init__(
        self,
        report: Callable[[Activity], None] = lambda activity: None,
        write: Callable[[Activity], None] = lambda activity: None,
    ) -> None:
        """Call `report` with every activity that is due, and `write` with those for progress.json."""
        self._report, self._write = report, write
        self._now = Activity()
        self._due = self._write_due = 0.0
        self._tokens = 0
        """Tokens that the generator had sampled at the start of the activity."""
        self._trained_since, self._share_at_start = math.nan, 0.0
        self._lock = threading.Lock()

    def due(self, doing: str) -> bool:
        """Return whether a report of this activity is due: it is new, or its last report is old enough."""
        return doing != self._now.doing or time.monotonic() >= self._due

    def doing(self, doing: str, count: Count | None = None, tokens: int = 0) -> None:
        """Report an activity if it is due, with its count and the tokens sampled in the run so far."""
        with self._lock:
            if not self.due(doing):
                return
            now = time.time()
            if doing != self._now.doing:
                self._tokens = tokens
                self._now = replace(self._now, since=now)
            since, sampled = self._now.since, max(tokens - self._tokens, 0)
            if count is None or math.isnan(count.since):  # a count of another process has its own start
                count = replace(count, since=since) if count else Count()
            self._now = replace(
                self._now, doing=doing, count=count, tokens=sampled, time=now, left=self._left()
            )
            # By the monotonic clock: the wall clock of `time` may be set back.
            self._due = time.monotonic() + _REPORT_SECONDS
            self._report(self._now)
            if time.monotonic() >= self._write_due:
                self._write_due = time.monotonic() + WRITE_SECONDS
                self._write(self._now)

    def waits_for_evaluation(self) -> None:
        """Report that the run waits for an evaluation in another process."""
        self.doing(EVALUATING, self._now.evaluating)

    def evaluating(self, done: int, of: int) -> None:
        """Keep the progress of an evaluation in another process for the next report."""
        with self._lock:
            before, count = self._now.evaluating, Count()
            if done < of:
                goes_on = before.of and before.done <= done
                count = Count(done, of, "completions", before.since if goes_on else time.time())
            self._now = replace(self._now, evaluating=count)

    def starts(self, step: int, share: float) -> None:
        """Record the step that starts, and the share of the budget spent before it."""
        with self._lock:
            # Time from the first step on: start-up says nothing about the speed of steps.
            if math.isnan(self._trained_since):
                self._trained_since, self._share_at_start = time.monotonic(), share
            self._now = replace(self._now, step=step, share=min(share, 1.0), left=self._left())

    def _left(self) -> float:
        """Return the seconds until the budget is spent, at the speed since this start; NaN if unknown."""
        spent, seconds = self._now.share - self._share_at_start, time.monotonic() - self._trained_since
        return seconds * (1 - self._now.share) / spent if spent > 0 and self._now.share < 1 else math.nan


@dataclass(frozen=True)
class Progress:
    """The state of a run after a step, after an evaluation, or at a health finding."""

    step: int = 0
    share: float = 0.0
    """Share of the budget spent."""
    tokens_per_second: float = math.nan
    """Sampled tokens per device-second of generation and training."""
    pass_rate: float = math.nan
    """Pass rate of the last evaluation."""
    forecast: Mapping[str, Any] | None = None
    """The last row of forecasts.jsonl."""
    evaluated: bool = False
    """Whether this reports an evaluation, made after `step`, rather than a step."""
    finding: str = ""
    """The text of the health finding, if this reports one."""


class View:
    """The latest progress of a run; steps, evaluations and findings are passed to `report`."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self._report, self._last = report, Progress()

    def step(self, step: int, share: float, tokens_per_second: float) -> None:
        """Report a trainer step."""
        now = {"step": step, "share": min(share, 1.0), "tokens_per_second": tokens_per_second}
        self._last = replace(self._last, **now)
        self._report(self._last)

    def point(self, point: EvalPoint) -> None:
        """Report a recorded evaluation."""
        self._last = replace(self._last, pass_rate=point.pass_rate)
        self._report(replace(self._last, step=point.step, evaluated=True))

    def frozen(self, forecast: Mapping[str, Any]) -> None:
        """Keep a forecast for the next report."""
        self._last = replace(self._last, forecast=forecast)

    def finding(self, finding: Finding) -> None:
        """Report a health finding."""
        self._report(replace(self._last, step=finding.step, finding=str(finding)))
