"""Alarms of a run, read from alarms.jsonl: what was wrong, from which step on, and until when.

One line per finding: {"step", "metric", "level" ("warning" or "alarm"), "value", "threshold", "since",
"over", "worst", "time", "text"}. A line with `over` ends the finding of the same metric that began at
`since`. A run without findings has no such file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief
from scalerl.jsonl import number, read_jsonl, whole


@dataclass(frozen=True)
class Alarm:
    """Something that was wrong from step `first` to `last`; `last` is None if it had not ended."""

    metric: str
    level: str
    first: int
    last: int | None
    worst: float
    """The recorded value that was furthest from what is good."""
    threshold: float

    @property
    def is_alarm(self) -> bool:
        """Whether it was an alarm rather than a warning."""
        return self.level == "alarm"

    @property
    def steps(self) -> str:
        """The steps from first to last, in words."""
        return f"from step {self.first} on" if self.last is None else f"steps {self.first} to {self.last}"

    def __str__(self) -> str:
        return f"{self.metric} {self.worst:.3g} (threshold {self.threshold:g}), {self.steps}"


def read_alarms(path: Path, warnings: list[str]) -> tuple[Alarm, ...]:
    """Read the alarms and warnings of a run, in the order in which they began; none without a file."""
    found: dict[tuple[str, str, int], Alarm] = {}
    for line, row in read_jsonl(path, warnings) if path.is_file() else []:
        try:
            alarm = _alarm(row)
        except InputError as error:
            raise InputError(f"{path}, line {line}: {error}") from error
        began = found.get((alarm.metric, alarm.level, alarm.first), alarm)
        found[alarm.metric, alarm.level, alarm.first] = replace(began, last=alarm.last, worst=alarm.worst)
    alarms = list(found.values())
    for place, alarm in enumerate(alarms):  # a warning that became an alarm ends where the alarm starts
        later = [other.first for other in alarms[place + 1 :] if other.metric == alarm.metric]
        if alarm.last is None and later:
            alarms[place] = replace(alarm, last=later[0])
    return tuple(alarms)


def _alarm(row: Mapping[str, Any]) -> Alarm:
    metric, level = row.get("metric"), row.get("level")
    if not isinstance(metric, str) or level not in ("warning", "alarm"):
        what = "an alarm has a 'metric' and a 'level' (warning or alarm)"
        raise InputError(f"{what}, found {brief(metric)} and {brief(level)}")
    worst = row.get("worst")
    return Alarm(
        metric,
        level,
        whole(row.get("since"), "since"),
        whole(row.get("step"), "step") if row.get("over") else None,
        float("inf") if worst is None else number(worst, "worst"),  # JSON has no infinity
        number(row.get("threshold"), "threshold"),
    )


def warnings_of(alarms: Iterable[Alarm], last_step: int) -> tuple[str, ...]:
    """Return the warnings for a fit to the evaluations up to `last_step`: one per metric with an alarm."""
    by_metric: dict[str, list[Alarm]] = {}
    for alarm in alarms:
        if alarm.is_alarm and alarm.first <= last_step:
            by_metric.setdefault(alarm.metric, []).append(alarm)
    return tuple(
        f"health alarm: {found[0]}{f' (the first of {len(found)})' if len(found) > 1 else ''}; "
        "the curve may not be the same before and after"
        for found in by_metric.values()
    )
