"""Real trackers that tests give to runs: one that keeps all it is told, and those that fail in every way.

They go to another process, which imports them from here.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.record.reader import RunRecord
from scalerl.rl.tracking.tracker import Status, TrackedRun
from scalerl.rl.tracking.trackers import TensorboardTracker


@dataclass
class Keeps:
    """Writes all to a file, line by line."""

    file: Path
    name: str = "keeps"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        self._write({"open": run.name, "group": run.group, "kept": dict(run.kept), "first": run.first_step})
        return {"opened": str(int(run.kept.get("opened", 0)) + 1)}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._write({"step": step, "time": time, "metrics": metrics})

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        self._write({"samples": list(samples), "of": step})

    def close(self, status: Status) -> None:
        self._write({"close": status})

    def _write(self, row: Mapping[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


@dataclass
class Returns(Keeps):
    """Has to keep a value that is given."""

    value: Any = None

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        super().open(run)
        return {"opened": self.value}


def never(record: RunRecord, axis: str, end: float) -> Mapping[str, Any]:
    """A forecast that is not made."""
    time.sleep(10_000)
    return {}


@dataclass
class Fails:
    """Raises, or never comes back, at one of its three calls."""

    at: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.how} at {self.at}"

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        self._at("open")
        return {}

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._at("log")

    def close(self, status: Status) -> None:
        self._at("close")

    def _at(self, where: str) -> None:
        if where != self.at:
            return
        if self.how == "hangs":
            time.sleep(10_000)
        if self.how == "exits":
            raise SystemExit(3)
        if self.how == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ConnectionError("no route to host\nand a second line")


class NotEverySecond(Fails):
    """Fails at every other row: each time there is one that works between."""

    rows = 0

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self.rows += 1
        if self.rows % 2:
            super().log(step, time, metrics)


class OnAFullDisk(TensorboardTracker):
    """TensorBoard's, where the kernel takes little more of the file once an evaluation is in it."""

    def open(self, run: TrackedRun) -> Mapping[str, str]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ])
        self._folder = run.folder / "tensorboard"
        return super().open(run)

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        super().log(step, time, metrics)
        if "eval/pass_rate" in metrics:
            (file,) = self._folder.iterdir()
            most = file.stat().st_size + 10
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def log_samples(self, step: int, time: float, samples: Sequence[Mapping[str, Any]]) -> None:
        pass  # tables could fill it before the first evaluation
