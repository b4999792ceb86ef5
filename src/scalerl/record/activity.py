"""What a run is doing between two lines of its record: progress.json in the run folder.

The trainer replaces the file every `WRITE_SECONDS`, and removes it at its end. A killed trainer leaves it,
and `time` says how old it is.
"""

import math
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.jsonl import read_object

FILE = "progress.json"
"""Name of the file in the run folder."""
WRITE_SECONDS = 2.0
"""Seconds between two writes."""
_LEAST_RATE_SECONDS = 1.0
"""A rate over less time is not meaningful."""


@dataclass(frozen=True)
class Count:
    """A count of `done` out of `of`; `of` is 0 where the total is not known."""

    done: int = 0
    of: int = 0
    unit: str = ""
    since: float = math.nan
    """Time at which the count was 0, in Unix seconds."""

    def __str__(self) -> str:
        if not self.of:
            return ""
        return f"{self.done:,} of {self.of:,} {self.unit}"

    def ends_in(self, now: float) -> float:
        """Return the seconds until the count is complete, if it rises steadily; NaN where not known."""
        seconds, steady = now - self.since, self.unit in ("completions", "micro-batches")
        if not (steady and self.done and seconds > _LEAST_RATE_SECONDS):
            return math.nan
        return seconds * (self.of - self.done) / self.done


@dataclass(frozen=True)
class Activity:
    """What the trainer is doing at one moment."""

    doing: str = ""
    """The activity: `generating`, `training`, `loading the model`, ..."""
    step: int = 0
    """The trainer step in progress."""
    count: Count = field(default_factory=Count)
    """Its progress: completions evaluated, complete groups, micro-batches."""
    tokens: int = 0
    """Tokens sampled since the activity started; 0 where nothing is sampled."""
    since: float = math.nan
    """Start of the activity, in Unix seconds."""
    time: float = math.nan
    """The moment, in Unix seconds."""
    evaluating: Count = field(default_factory=Count)
    """A concurrent evaluation, in a process of its own."""
    share: float = 0.0
    """Share of the budget spent by the end of the last step."""
    left: float = math.nan
    """Seconds until the budget is spent, at the speed since this start; NaN before the first step."""

    @property
    def seconds(self) -> float:
        """Seconds since the activity started."""
        return self.time - self.since

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second since the activity started; NaN without any, or in its first second."""
        return self.tokens / self.seconds if self.tokens and self.seconds > _LEAST_RATE_SECONDS else math.nan

    def to_json(self) -> dict[str, Any]:
        """Return the content of progress.json."""
        rate = {"tokens_per_second": self.tokens_per_second, "ends_in": self.count.ends_in(self.time)}
        return asdict(self) | rate


def read_activity(run: Path) -> Activity | None:
    """Return what a run was doing when it last reported; None if it has ended or the file is damaged."""
    path = run / FILE
    try:
        found = _made(Activity(), read_object(path) if path.is_file() else {})
    except (InputError, OSError):
        return None
    return found if found.doing else None


def _made(default: Any, value: Any) -> Any:
    """Return a value that was read, or the default where it is missing or has another type.

    The file may be from another version, or edited.
    """
    if is_dataclass(default):
        parts = value if isinstance(value, dict) else {}
        return replace(default, **{k: _made(own, parts.get(k)) for k, own in vars(default).items()})  # pyright: ignore
    kinds = (int, float) if isinstance(default, float) else type(default)
    return value if isinstance(value, kinds) else default
