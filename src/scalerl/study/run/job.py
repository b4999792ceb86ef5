"""One run in a process of its own: started, followed, stopped.

Processes are forked from one that has loaded what trains, and has done nothing with it: a run begins in a
second, and not in ten.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from scalerl.rl.config.recipe import Recipe
from scalerl.study.record import PlannedRun
from scalerl.study.run.worker import work

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # runs share the machine


@dataclass(frozen=True)
class RunTask:
    """A run, its recipe, and the part of the budget that it is to go to."""

    run: PlannedRun
    recipe: Recipe
    until: float

    @property
    def cores(self) -> int:
        """That it keeps busy."""
        return self.recipe.devices


class RunJob:
    """The process of a task, in a folder of its own in that of the study.

    `place` has the numbers of its cores; where the machine has GPUs, of those that it is to see.
    """

    def __init__(
        self, task: RunTask, study: Path, place: tuple[int, ...] = (), on_gpus: bool = False
    ) -> None:
        self.task, self.place = task, place
        self.share, self.pass_rate = 0.0, float("nan")
        self._started = time.monotonic()
        self._end: dict[str, str] = {}
        folder = study / task.run.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        context = get_context("forkserver")
        context.set_forkserver_preload(["scalerl.study.run.preload"])
        self._child, child = context.Pipe(duplex=False)
        log = folder.parent / f"{folder.name}.log"
        recipe = task.recipe.without_prompts()
        gpus = ",".join(map(str, place)) if on_gpus else None
        self._process = context.Process(target=work, args=(child, recipe, folder, task.until, log, gpus))
        with _environment(_ENVIRONMENT):  # of the process that all are forked from
            self._process.start()
        child.close()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def poll(self) -> tuple[str, str] | None:
        """How it ended, and why; None while it runs."""
        status = self._process.exitcode
        self._listen()
        if status is None:
            return None
        if self._end:
            return self._end["outcome"], self._end["cause"]
        if status == -signal.SIGKILL:
            return "failed", "killed (by the system, for want of memory, perhaps)"
        if status < 0:
            return "failed", f"killed by signal {-status}"
        return "failed", f"its process ended with status {status}; see {self.task.run.folder}.log"

    def stop(self) -> None:
        """Ask it to make a checkpoint and end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while self._child.poll():
                said = self._child.recv()
                if "outcome" in said:
                    self._end = said
                else:
                    self.share, self.pass_rate = said["share"], said["pass_rate"]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that processes started within inherit."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
