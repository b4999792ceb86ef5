"""The watch: from the lines of steps.jsonl and the evaluations, what is to be said of the run's health.

Something is said once when it begins, once more if a warning becomes an alarm, and once when it is over
(`Figure.is_over` keeps a value at a threshold from coming and going). Nothing is said of what is not known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalerl.record.reader import EvalPoint
from scalerl.rl.config.health import FIGURES, LONGEST_WINDOW, Figure, Health, Level, Rows

_STEPS_KEPT = 2 * LONGEST_WINDOW


@dataclass(frozen=True)
class Finding:
    """Something that began at step `since`, or that is `over` at `step`: a line of alarms.jsonl."""

    step: int
    metric: str
    level: Level
    value: float
    threshold: float
    since: int
    worst: float
    over: bool = False

    def json(self) -> dict[str, Any]:
        """The line, with the time."""
        return {**asdict(self), "time": time.time(), "text": str(self)}

    def __str__(self) -> str:
        label = FIGURES[self.metric].label
        if self.over:
            return f"step {self.step}: {self.level} of step {self.since} is over: {label} {self.value:.3g}"
        return f"step {self.step}: {self.level}: {label} {self.value:.3g}, threshold {self.threshold:g}"


class Watch:
    """Judges a run by the thresholds of `health`, for weights of `precision`, and says what it finds."""

    def __init__(self, health: Health, precision: str, say: Callable[[Finding], None]) -> None:
        self._of_steps = health.figures(precision)
        self._of_points = {"pass_rate_drop": self._of_steps.pop("pass_rate_drop")}
        self._kept = {key for figure in self._of_steps.values() for key in figure.reads}
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_STEPS_KEPT)
        self._points: list[Mapping[str, float]] = []
        self._open: dict[str, Finding] = {}
        self._say = say
        self._pauses = health.on_alarm == "pause"
        self.pause_for: Finding | None = None
        """The alarm for which the run is to pause. An alarm that was told before a resume is none: whoever
        resumed has seen it."""

    def step(self, row: Mapping[str, Any]) -> None:
        """Judge a line of steps.jsonl."""
        self._rows.append({key: row[key] for key in self._kept if key in row})
        self._judge(row["step"], list(self._rows), self._of_steps)

    def evaluation(self, point: EvalPoint) -> None:
        """Judge an evaluation."""
        p, n = point.pass_rate, point.n_prompts * point.n_samples
        noise = point.noise_sd if math.isfinite(point.noise_sd) else math.sqrt(p * (1 - p) / max(n, 1))
        self._points.append({"pass_rate": p, "noise_sd": noise})
        self._judge(point.step, self._points, self._of_points)

    def diverged(self, step: int) -> None:
        """Say that the gradient of `step`, or an evaluation after it, is not finite, which ends the run."""
        self._say(Finding(step, "non_finite", "alarm", 1.0, 1.0, step, 1.0))

    def state(self) -> dict[str, Any]:
        """What a resume needs, as JSON has it (NaN apart)."""
        told = {name: asdict(finding) for name, finding in self._open.items()}
        return {"rows": list(self._rows), "points": list(self._points), "open": told}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: what was told is not told again."""
        self._rows = deque(state["rows"], maxlen=_STEPS_KEPT)
        self._points = list(state["points"])
        self._open = {name: Finding(**finding) for name, finding in state["open"].items()}

    def _judge(self, step: int, rows: Rows, figures: Mapping[str, Figure]) -> None:
        for name, figure in figures.items():
            value = figure(rows)
            if not math.isnan(value):
                self._judge_one(step, name, figure, value)

    def _judge_one(self, step: int, name: str, figure: Figure, value: float) -> None:
        told = self._open.get(name)
        if told is not None:
            worst = max(told.worst, value) if figure.sign > 0 else min(told.worst, value)
            told = self._open[name] = replace(told, worst=worst)
            if figure.is_over(value, told.level):
                self._say(replace(self._open.pop(name), step=step, value=value, over=True))
                return
        level = figure.level(value)
        if level is None or (told is not None and (told.level, level) != ("warning", "alarm")):
            return
        threshold = figure.thresholds.alarm if level == "alarm" else figure.thresholds.warning
        found = Finding(step, name, level, value, threshold, step, value)
        self._open[name] = found
        if level == "alarm" and self._pauses:
            self.pause_for = found
        self._say(found)
