"""The watch on a run's health: it reports findings from the lines of steps.jsonl and the evaluations.

A finding is reported once when it starts, once more if a warning becomes an alarm, and once when it is over
(`Figure.is_over` keeps it from toggling near a threshold). Unknown values change nothing.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalerl.record.evaluation import EvalPoint
from scalerl.rl.config.health import LONGEST_WINDOW, Health
from scalerl.rl.health.figures import FIGURES, READ, Figure, Level, Rows, figures_of

# Twice the window, because the drift of lengths compares a window with the one before it.
_STEPS_KEPT = 2 * LONGEST_WINDOW


@dataclass(frozen=True)
class Finding:
    """A warning or alarm that started at step `since`, or is `over` at `step`: a line of alarms.jsonl."""

    step: int
    metric: str
    level: Level
    value: float
    threshold: float
    since: int
    worst: float
    over: bool = False

    def json(self) -> dict[str, Any]:
        """Return the line of alarms.jsonl, with the time."""
        return {**asdict(self), "time": time.time(), "text": str(self)}

    def __str__(self) -> str:
        label = FIGURES[self.metric].label
        if self.over:
            return f"step {self.step}: {self.level} of step {self.since} is over: {label} {self.value:.3g}"
        return f"step {self.step}: {self.level}: {label} {self.value:.3g}, threshold {self.threshold:g}"


class Watch:
    """The watch on a run: it applies the thresholds of `health` for a `precision`, and reports findings."""

    def __init__(self, health: Health, precision: str, report: Callable[[Finding], None]) -> None:
        self._of_steps = figures_of(health, precision)
        self._of_points = {"pass_rate_drop": self._of_steps.pop("pass_rate_drop")}
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_STEPS_KEPT)
        self._points: list[Mapping[str, float]] = []
        self._open: dict[str, Finding] = {}
        self._report = report
        self._pauses = health.on_alarm == "pause"
        self.pause_for: Finding | None = None
        """The alarm for which the run must pause; one reported before a resume does not pause it again."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Check a line of steps.jsonl."""
        # Only the fields that figures read, because the rows are part of every checkpoint.
        self._rows.append({key: row[key] for key in READ if key in row})
        self._check(row["step"], list(self._rows), self._of_steps)

    def evaluation(self, point: EvalPoint) -> None:
        """Check an evaluation."""
        p, n = point.pass_rate, point.n_prompts * point.n_samples
        # Without the spread within prompts, use p (1 - p) of the mean, which bounds the mean of p (1 - p).
        noise = point.noise_sd if math.isfinite(point.noise_sd) else math.sqrt(p * (1 - p) / max(n, 1))
        self._points.append({"pass_rate": p, "noise_sd": noise})
        self._check(point.step, self._points, self._of_points)

    def diverged(self, step: int) -> None:
        """Report that the gradient of `step`, or an evaluation after it, is not finite: the run ends."""
        self._report(Finding(step, "non_finite", "alarm", 1.0, 1.0, step, 1.0))

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON values (and NaN)."""
        open_findings = {name: asdict(finding) for name, finding in self._open.items()}
        return {"rows": list(self._rows), "points": list(self._points), "open": open_findings}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; findings that were reported are not reported again."""
        self._rows = deque(state["rows"], maxlen=_STEPS_KEPT)
        self._points = list(state["points"])
        self._open = {name: Finding(**finding) for name, finding in state["open"].items()}

    def _check(self, step: int, rows: Rows, figures: Mapping[str, Figure]) -> None:
        for name, figure in figures.items():
            value = figure(rows)
            if not math.isnan(value):
                self._check_one(step, name, figure, value)

    def _check_one(self, step: int, name: str, figure: Figure, value: float) -> None:
        known = self._open.get(name)
        if known is not None:
            # Also while it stays open, because the report of its end has the worst value.
            worst = max(known.worst, value) if figure.sign > 0 else min(known.worst, value)
            known = self._open[name] = replace(known, worst=worst)
            if figure.is_over(value, known.level):
                self._report(replace(self._open.pop(name), step=step, value=value, over=True))
                return
        level = figure.level(value)
        if level is None or (known is not None and (known.level, level) != ("warning", "alarm")):
            return
        threshold = figure.thresholds.alarm if level == "alarm" else figure.thresholds.warning
        found = Finding(step, name, level, value, threshold, step, value)
        self._open[name] = found
        if level == "alarm" and self._pauses:
            self.pause_for = found
        self._report(found)
