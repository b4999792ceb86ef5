"""One run in a process of its own: started, followed, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.rl.recipe import Recipe
from scalerl.study.record import PlannedRun

_KILLED = {signal.SIGKILL: "killed (by the system, for want of memory, perhaps)"}


@dataclass(frozen=True)
class Task:
    """A run, its recipe, and the part of the budget that it is to go to."""

    run: PlannedRun
    recipe: Recipe
    until: float

    @property
    def cores(self) -> int:
        """That it keeps busy."""
        return self.recipe.placement.devices


class Job:
    """The process of a task, in a folder of its own in that of the study."""

    def __init__(self, task: Task, study: Path) -> None:
        self.task = task
        self.share, self.pass_rate = 0.0, float("nan")
        self._started = time.monotonic()
        self._end: dict[str, str] = {}
        folder = study / task.run.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Runs that share a machine get a core each.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "scalerl.study.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the study, which stops its runs
            )
        order = {"recipe": task.recipe.to_json(), "folder": str(folder), "until": task.until}
        assert self._process.stdin
        with suppress(BrokenPipeError):  # it has died; `poll` says so
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def poll(self) -> tuple[str, str] | None:
        """How it ended, and why; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                _close(pipe.close)
        if self._end:
            return self._end["outcome"], self._end["cause"]
        if status < 0:
            return "failed", _KILLED.get(signal.Signals(-status), f"killed by signal {-status}")
        return "failed", f"its process ended with status {status}; see {self.task.run.folder}.log"

    def stop(self) -> None:
        """Ask it to make a checkpoint and end."""
        _close(self._process.terminate)

    def kill(self) -> None:
        """End it at once."""
        _close(self._process.kill)
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            try:
                said: dict[str, Any] = json.loads(line)
            except ValueError:
                continue  # what a library prints
            if "outcome" in said:
                self._end = said
            elif "share" in said:
                self.share = said["share"]
                self.pass_rate = float("nan") if said["pass_rate"] is None else said["pass_rate"]


def _close(end: Callable[[], object]) -> None:
    """Do what may find that the other side has gone."""
    with suppress(BrokenPipeError, ProcessLookupError):
        end()
