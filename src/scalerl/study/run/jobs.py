"""Processes that each do one job of a study, as many at a time as there are cores or GPUs for.

    JobPool     a worker pool whose workers are jobs: a process is started when its job has cores, and again
                where it is lost or fails, as often as `again` says

Processes are forked from one that has loaded torch and has done nothing with it, so that a job starts in a
second instead of ten.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from scalerl.rl.workers.backend import Channel, Message, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.processes import Processes

STOP = "stop"
"""The message on which a job ends by itself."""


@dataclass(eq=False, kw_only=True)
class Job(PoolWorker):
    """A job: a process of it runs `target(channel, *arguments(numbers of its cores))`.

    The target sends "progress" as it likes, and "ended" with an outcome and its cause at last.
    """

    target: Callable[..., None]
    arguments: Callable[[Sequence[int]], Sequence[Any]]
    needs: int = 1
    """Cores, or GPUs."""
    cores: tuple[int, ...] = ()
    progress: tuple[float, float] = (0.0, math.nan)
    """Share of the work that is done, and the last pass rate."""
    outcome: tuple[str, str] | None = None
    """Of its last process, and the cause."""
    done: bool = False

    @property
    def seconds(self) -> float:
        """Seconds since its process was started."""
        return time.monotonic() - self.process.placed_at if self.process else 0.0


class JobPool(WorkerPool[Job]):
    """Jobs in order; `again` takes the outcome of each, and returns whether to run it again."""

    noun, role = "job", "job"

    def __init__(self, jobs: Sequence[Job], cores: int, again: Callable[[Job, str, str], bool]) -> None:
        # Not fork: this process has threads and may have used CUDA, neither of which survives one.
        context = get_context("forkserver")
        context.set_forkserver_preload(["scalerl.study.run.preload"])
        super().__init__(jobs, Processes(context=context, parents=True), lambda channel: None)
        self._cores, self._again, self._stopping = cores, again, False

    @property
    def running(self) -> list[Job]:
        """Jobs that have a process."""
        return [job for job in self._workers if job.process]

    @property
    def done(self) -> int:
        """Jobs that are done for good."""
        return sum(job.done for job in self._workers)

    def stop(self, seconds: float) -> list[Job]:
        """Have jobs end by themselves within so many seconds; kill the others, and return these."""
        self._stopping = True
        for job in self.running:
            if job.process:
                job.process.send(STOP)
        with suppress(KeyboardInterrupt):  # the second: kill at once
            self.wait_for(lambda: not self.running, seconds)
        left = self.running
        self.kill()
        return left

    def _spawn(self, worker: Job) -> None:
        now = time.monotonic()
        waiting = [job for job in self._workers if not (job.process or job.done or job.start_at > now)]
        # Only the first: one of several devices would else be overtaken for ever.
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
    """Do something, in a thread, once the study stops its jobs."""

    def wait() -> None:
        with suppress(EOFError):
            channel.receive()
            do()

    threading.Thread(target=wait, daemon=True).start()
