"""The watch: from the lines of steps.jsonl and the evaluations, what is to be said of the run's health.

Something is said once when it begins, once more if a warning becomes an alarm, and once when it is over
(`_Limits.is_over` keeps a value at a threshold from coming and going). Nothing is said of what is not known.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from scalerl.record.reader import EvalPoint
from scalerl.rl.config.health import LONGEST_WINDOW, Health, Level, NonFinite, PassRateDrop

_STEPS_KEPT = 2 * LONGEST_WINDOW
_LABELS = {
    "truncated": "share of truncated completions",
    "logp_gap": "gap between the log-probabilities of trainer and generator (nats)",
    "head": "sign that the LM head of the generator has another precision (standard errors)",
    "sampling": "distance of the sampled tokens from the trainer's distribution (standard errors)",
    "ess": "effective sample size",
    "ratio_clipped": "share of importance ratios clipped",
    "length_drift": "factor by which the mean length changed",
    "zero_variance": "share of groups without signal",
    "grad_norm": "gradient norm over its usual size",
    "reward_drop": "drop of the share correct in training",
    "pass_rate_drop": "drop of the held-out pass rate",
    "failed": "share of completions whose verification failed",
    "non_finite": "number of figures that are not finite",
}


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
        label = _LABELS[self.metric]
        if self.over:
            return f"step {self.step}: {self.level} of step {self.since} is over: {label} {self.value:.3g}"
        return f"step {self.step}: {self.level}: {label} {self.value:.3g}, threshold {self.threshold:g}"


class Watch:
    """Judges a run by the thresholds of `health`, for weights of `precision`, and says what it finds."""

    def __init__(self, health: Health, precision: str, say: Callable[[Finding], None]) -> None:
        limits = health.limits(precision)
        self._of_points = {n: m for n, m in limits.items() if isinstance(m, PassRateDrop)}
        self._of_rows = {n: m for n, m in limits.items() if n not in self._of_points}
        self._of_rows["non_finite"] = NonFinite()
        self._kept = {key for limits in self._of_rows.values() for key in limits.reads}
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
        rows = list(self._rows)
        values = {name: limits(rows) for name, limits in self._of_rows.items()}
        self._judge(row["step"], values)

    def evaluation(self, point: EvalPoint) -> None:
        """Judge an evaluation."""
        p, n = point.pass_rate, point.n_prompts * point.n_samples
        noise = point.noise_sd if math.isfinite(point.noise_sd) else math.sqrt(p * (1 - p) / max(n, 1))
        self._points.append({"pass_rate": p, "noise_sd": noise})
        values = {name: limits(self._points) for name, limits in self._of_points.items()}
        self._judge(point.step, values)

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

    def _judge(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not math.isnan(value):
                self._judge_one(step, name, value)

    def _judge_one(self, step: int, name: str, value: float) -> None:
        limits, told = (self._of_rows | self._of_points)[name], self._open.get(name)
        if told is not None:
            worst = max(told.worst, value) if limits.sign > 0 else min(told.worst, value)
            told = self._open[name] = replace(told, worst=worst)
            if limits.is_over(value, told.level):
                self._say(replace(self._open.pop(name), step=step, value=value, over=True))
                return
        level = limits.level(value)
        if level is None or (told is not None and (told.level, level) != ("warning", "alarm")):
            return
        threshold = limits.alarm if level == "alarm" else limits.warning
        found = Finding(step, name, level, value, threshold, step, value)
        self._open[name] = found
        if level == "alarm" and self._pauses:
            self.pause_for = found
        self._say(found)
