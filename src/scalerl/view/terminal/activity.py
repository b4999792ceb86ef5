"""Show the current activity of a run in a line."""

import math
from collections.abc import Sequence

from scalerl.numbers import duration
from scalerl.record.activity import Activity

_YOUNG = 30.0
"""Seconds after which an activity counts as old, as a decode step or a micro-batch may take a while."""


def activity_parts(activity: Activity, now: float) -> list[str]:
    """Return the parts of the line, the most important first; `now` is in Unix seconds."""
    count, step = str(activity.count), f"step {activity.step}: " * bool(activity.step)
    # A count shows progress; without one, show the seconds.
    how_far = count or f"for {duration(now - activity.since)}"
    parts = [f"{step}{activity.doing} {how_far}"]
    if not math.isnan(ends_in := activity.count.ends_in(activity.time)):
        parts.append(f"done in {duration(ends_in)}")
    if not math.isnan(activity.tokens_per_second):
        parts.append(token_speed(activity.tokens_per_second))
    if activity.tokens:
        parts.append(f"{activity.tokens:,} tokens")
    if str(activity.evaluating) and activity.evaluating != activity.count:
        parts.append(f"evaluating {activity.evaluating}")
    return parts


def activity_line(activity: Activity, now: float) -> str:
    """Return the line for an activity in progress.json, with its age if it is old."""
    age = now - activity.time
    parts = activity_parts(activity, activity.time if age > _YOUNG else now)
    if not math.isnan(activity.left):
        parts.append(f"{duration(activity.left)} left")
    return "  ".join([*parts, f"(as of {duration(age)} ago)"] if age > _YOUNG else parts)


def token_speed(tokens_per_second: float) -> str:
    """Return the speed in words."""
    if tokens_per_second < 1000:
        return f"{tokens_per_second:.0f} tokens/s"
    return f"{tokens_per_second / 1000:.1f}k tokens/s"


def fitted(parts: Sequence[str], width: int) -> str:
    """Join parts by two spaces, leaving out those that do not fit; the first is cut if it does not."""
    text = parts[0] if len(parts[0]) <= width else f"{parts[0][: max(width - 1, 0)]}…"
    for part in parts[1:]:
        if len(text) + 2 + len(part) <= width:
            text += f"  {part}"
    return text
