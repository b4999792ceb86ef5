"""The protocol of a tracker: it is opened, logs rows, and is closed, all in one thread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Status = Literal["finished", "stopped", "failed"]
"""How a run ended: by reaching its end (or --until), by a signal or an alarm, or by an error."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker logs."""

    folder: Path
    name: str
    project: str = "scalerl"
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The content of config.json."""
    first_step: int = 1
    """The step at which training continues; later steps that were logged before will be logged again."""
    kept: Mapping[str, str] = field(default_factory=dict)
    """What `open` returned at the previous start of this run; empty at the first."""


class Tracker(Protocol):
    """Logs the metrics of one run; a `SampleTracker` also takes completions.

    Its methods may raise anything and may block without delaying the run. An object given to
    `scalerl.rl.train.train` is sent to another process before it is opened, so it must be picklable.
    """

    @property
    def name(self) -> str:
        """The name in messages, and the key in tracking.json."""
        ...

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        """Start logging the run, or resume it by `run.kept`.

        Returns:
            What tracking.json keeps for a resume; the value of a key `where` is shown to the user.
        """
        ...

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Log finite numbers of a `step`, at `time` in Unix seconds.

        Evaluations end after later steps, so `step` may be less than in the row before.
        """
        ...

    def close(self, status: Status) -> None:
        """Write the rest; this is the last call."""
        ...


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that also shows completions as text."""

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log completions kept from an evaluation or a step: lines of samples.jsonl, at least one, all with
        the same `source`.
        """
        ...
