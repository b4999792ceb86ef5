"""Processes that each do one job of a study, as many at a time as the cores or GPUs allow.

    JobPool     a worker pool whose workers are jobs: a process starts when cores are free for its job, and
                is restarted after a loss or a failure as often as `again` says

`work` is the job of one run: it sends "progress" (share of the budget, pass rate) after every evaluation and
once a second, and at its end "ended" (outcome, cause), where the outcome is that of
`scalerl.study.record.Attempt`, or "disk".

Processes are forked from one that has loaded torch but not used it, so that a job starts in a second instead
of ten.
"""

import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.errors import DivergedError, PausedError, ScalerlError, WriteError, brief_error
from scalerl.forecast.best import rates_by_step
from scalerl.forecast.freeze import freeze
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.loop.progress import Progress
from scalerl.rl.train import train
from scalerl.rl.workers.backend import Channel, Message, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.processes import Processes
from scalerl.rl.workers.signals import stopped_by_signals

STOP = "stop"
"""The message that asks a job to end."""


@dataclass(eq=False, kw_only=True)
class Job(PoolWorker):
    """A job, whose process runs `target(channel, *arguments(numbers of its cores))`.

    The target sends "progress" at any time, and finally "ended" with an outcome and its cause.
    """

    target: Callable[..., None]
    arguments: Callable[[Sequence[int]], Sequence[Any]]
    needs: int = 1
    """Number of cores or GPUs."""
    cores: tuple[int, ...] = ()
    progress: tuple[float, float] = (0.0, math.nan)
    """Share of the work that is done, and the last pass rate."""
    outcome: tuple[str, str] | None = None
    """Outcome of the last process, and its cause."""
    done: bool = False

    @property
    def seconds(self) -> float:
        """Seconds since its process was started."""
        return time.monotonic() - self.process.placed_at if self.process else 0.0


class JobPool(WorkerPool[Job]):
    """Runs jobs in order; `again` receives the outcome of each, and returns whether to run it again."""

    noun, role = "job", "job"

    def __init__(self, jobs: Sequence[Job], cores: int, again: Callable[[Job, str, str], bool]) -> None:
        processes = Processes(preload="scalerl.study.run.preload", parents=True)
        super().__init__(jobs, processes, lambda channel: None)
        self._cores, self._again, self._stopping = cores, again, False

    @property
    def running(self) -> list[Job]:
        """Jobs that have a process."""
        return [job for job in self._workers if job.process]

    @property
    def done(self) -> int:
        """Number of jobs that are done for good."""
        return sum(job.done for job in self._workers)

    def stop(self, seconds: float) -> list[Job]:
        """Ask jobs to end within `seconds`; kill and return those that do not."""
        self._stopping = True
        for job in self.running:
            if job.process:
                job.process.send(STOP)
        with suppress(KeyboardInterrupt):  # a second Ctrl-C kills them at once
            self.wait_for(lambda: not self.running, seconds)
        left = self.running
        self.kill()
        return left

    def _spawn(self, worker: Job) -> None:
        now = time.monotonic()
        waiting = [job for job in self._workers if not (job.process or job.done or job.start_at > now)]
        # Only the first waiting job may start, or later ones would overtake one of several devices for ever.
        if self._stopping or waiting[:1] != [worker]:
            return
        taken = {number for job in self.running for number in job.cores}
        free = [number for number in range(self._cores) if number not in taken]
        if len(free) >= worker.needs or not taken:
            worker.cores, worker.outcome = tuple(free[: worker.needs]), None
            self._target, self._arguments = worker.target, worker.arguments(worker.cores)
            super()._spawn(worker)

    def _received(self, worker: Job, message: Message) -> None:
        if message.kind == "progress":
            worker.progress = message.value
        elif message.kind == "ended":
            worker.outcome = message.value

    def _lose(self, worker: Job, error: WorkerLostError) -> None:
        cause = str(error).partition(" is lost: ")[2]
        worker.done = not self._again(worker, *(worker.outcome or ("failed", cause)))
        worker.release()


def when_stopped(channel: Channel, do: Callable[[], Any]) -> None:
    """Call `do`, in a thread, once the study stops its jobs."""

    def wait() -> None:
        with suppress(EOFError):
            channel.receive()
            do()

    threading.Thread(target=wait, daemon=True).start()


def work(
    channel: Channel, recipe: Recipe, folder: Path, until: float, log: Path, gpus: str | None = None
) -> None:
    """Train `recipe` in `folder` until `until` of its budget is spent; output goes to `log`.

    `gpus` names the visible GPUs; None for all.
    """
    from scalerl.study.run.preload import ENVIRONMENT

    os.environ |= ENVIRONMENT  # for processes started from here, as a fork has the study's environment
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # takes effect, as CUDA has not been used yet
    os.setsid()  # Ctrl-C is for the study, which stops its runs
    try:
        with log.open("ab") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
    except OSError as error:
        channel.send("ended", ("disk", f"{log}: {error.strerror}"))
        return
    sent = -1.0

    def show(progress: Progress) -> None:
        nonlocal sent
        if progress.finding:
            logging.getLogger(__name__).warning(progress.finding)
        if progress.evaluated or time.monotonic() - sent >= 1:
            sent = time.monotonic()
            channel.send("progress", (progress.share, progress.pass_rate))

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    outcome, cause = "done", ""
    try:
        with stopped_by_signals() as stop:
            when_stopped(channel, stop.set)
            train(
                recipe,
                folder,
                resume=True,
                forecaster=freeze,
                smooth=rates_by_step,
                progress=show,
                # A run in one process has one core; the record is the same either way.
                evaluate_aside=recipe.placement.kind != "inline",
                stop=stop,
                until=until,
            )
    except KeyboardInterrupt:
        outcome, cause = "cut", "stopped"
    except ScalerlError as error:
        kinds = ((WriteError, "disk"), (DivergedError, "diverged"), (PausedError, "paused"))
        outcome = next((name for kind, name in kinds if isinstance(error, kind)), "failed")
        cause = str(error).partition(";")[0] if outcome == "paused" else str(error)
    except Exception as error:
        traceback.print_exc()
        outcome, cause = "failed", brief_error(error)
    channel.send("ended", (outcome, cause))
