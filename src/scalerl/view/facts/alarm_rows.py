"""What was wrong with the run's health, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from scalerl.errors import counted
from scalerl.record.alarms import Alarm
from scalerl.record.reader import RunRecord
from scalerl.view.facts.ceiling import Notice
from scalerl.view.numbers import plain

_LONGEST_LIST = 3
"""Alarms that are named; the others are counted."""
NOT_CHECKED = "not checked"
WHO_CHECKS = "only the trainer of scalerl looks for alarms"


def health_text(run: RunRecord | None) -> str:
    """All alarms in one line, `none`, or that nobody looked."""
    return (alarm_text(run.alarms) or "none") if run is not None and run.health_is_watched else NOT_CHECKED


def alarm_rows(alarms: Sequence[Alarm]) -> list[dict[str, str]]:
    """A row of the table for everything that was told, alarms first."""
    return [
        {
            "level": alarm.level,
            "metric": alarm.metric.replace("_", " "),
            "steps": alarm.steps,
            "worst": plain(alarm.worst),
            "threshold": plain(alarm.threshold),
        }
        for alarm in sorted(alarms, key=lambda alarm: alarm.level != "alarm")
    ]


def alarm_notices(alarms: Sequence[Alarm]) -> list[Notice]:
    """What stands at the head of the page where there were alarms; warnings are no notice."""
    if not (found := [alarm for alarm in alarms if alarm.level == "alarm"]):
        return []
    title = "A health alarm." if len(found) == 1 else f"{len(found)} health alarms."
    return [(title, f"{_list(found)}. The curve may not be the same before and after.")]


def alarm_text(alarms: Sequence[Alarm]) -> str:
    """All alarms in one line of the closing table; empty where nothing was told."""
    found = [alarm for alarm in alarms if alarm.level == "alarm"]
    counts = ((len(found), "alarm"), (len(alarms) - len(found), "warning"))
    in_words = ", ".join(counted(n, name) for n, name in counts if n)
    return f"{in_words}: {_list(found or alarms)}" if alarms else ""


def _list(alarms: Sequence[Alarm]) -> str:
    named = "; ".join(map(str, alarms[:_LONGEST_LIST]))
    return named + (f"; and {len(alarms) - _LONGEST_LIST} more" if len(alarms) > _LONGEST_LIST else "")
