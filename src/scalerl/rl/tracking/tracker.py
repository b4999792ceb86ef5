"""What a tracker is: it is opened, takes rows, and is closed, all in a thread of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["finished", "stopped", "failed"]
"""How a run ended: at its end (or where it was to be cut), by a signal or an alarm, or by an error."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    folder: Path
    name: str
    project: str = "scalerl"
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What config.json holds."""
    first_step: int = 1
    """The step with which training goes on: from there, what was logged before a resume comes again."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """What `open` returned when this run was begun; empty at its beginning."""


class Tracker(Protocol):
    """Takes the metrics of one run somewhere.

    It may raise whatever it likes, and take as long as it likes: the run is not held up. An object given to
    `scalerl.rl.train.train` goes to another process before it is opened, so that it must be picklable.
    """

    @property
    def name(self) -> str:
        """For messages, and the key in tracking.json."""
        ...

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Begin, or go on with what `run.kept` says.

        Returns:
            What is to be kept in tracking.json for a resume; a key `where` is told to the user.
        """
        ...

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Take a row: finite numbers at a step, at `time` in Unix seconds.

        Evaluations end after steps that are later, so that `step` may be less than in the row before.
        """
        ...

    def close(self, status: Status) -> None:
        """Write what is left; nothing comes after."""
        ...
