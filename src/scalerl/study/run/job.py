"""One run in a process of its own: started, followed, stopped.

Processes are forked from one that has loaded torch and has done nothing with it, so that a run starts in a
second instead of ten.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from scalerl.rl.config.recipe import Recipe
from scalerl.study.record import PlannedRun
from scalerl.study.run.worker import work


@dataclass(frozen=True)
class RunTask:
    """A run, its recipe, and the part of the budget that it is to go to."""

    run: PlannedRun
    recipe: Recipe
    until: float


class RunJob:
    """The process of a task, on cores of these numbers; where the machine has GPUs, on those GPUs."""

    def __init__(self, task: RunTask, study: Path, cores: tuple[int, ...], on_gpus: bool) -> None:
        self.task, self.cores = task, cores
        self.share, self.pass_rate = 0.0, float("nan")
        self._started = time.monotonic()
        self._end: dict[str, str] = {}
        folder = study / task.run.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Not fork: this process has threads and may have used CUDA, neither of which survives one.
        context = get_context("forkserver")
        context.set_forkserver_preload(["scalerl.study.run.preload"])
        self._inbox, outbox = context.Pipe(duplex=False)
        log = folder.parent / f"{folder.name}.log"
        gpus = ",".join(map(str, cores)) if on_gpus else None
        args = (outbox, task.recipe.without_prompts(), folder, task.until, log, gpus)
        self._process = context.Process(target=work, args=args)
        self._process.start()
        # Closed here, so that the end of the process is the end of the channel.
        outbox.close()

    @property
    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started

    def poll(self) -> tuple[str, str] | None:
        """Receive the messages of the process; return its outcome and the cause, or None while it runs."""
        status = self._process.exitcode  # before the messages: its last one is there once it has exited
        with suppress(EOFError, OSError):
            while self._inbox.poll():
                message = self._inbox.recv()
                if "outcome" in message:
                    self._end = message
                else:
                    self.share, self.pass_rate = message["share"], message["pass_rate"]
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
        """Have the process make a checkpoint and exit."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()
        self._process.join()
