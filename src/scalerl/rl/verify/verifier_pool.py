"""Verifications distributed over a pool of workers: processes beside the driver, or Ray actors.

    jobs -> shares -> idle workers -> outcomes of the first jobs of each share; the others wait again

A lost worker is replaced, and its share is verified again. If one of its jobs may be the cause, they are
verified one by one, so that a completion that kills workers costs only itself.
"""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Limits, Prompt
from scalerl.rl.verify import proc
from scalerl.rl.verify.forks import MAX_FAILED_STARTS, Outcome
from scalerl.rl.verify.supervisor import MARK, main
from scalerl.rl.workers.backend import Backend, Message, Target, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, WorkerPool, warn_of_changed
from scalerl.rl.workers.processes import FreshPython
from scalerl.rl.workers.timeline import Timeline

MAX_LOST = 2
"""Workers lost on a job alone until it counts as `died`."""
MAX_SHARE = 64
"""The most jobs that a supervisor is given at a time."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a supervisor that is starting, or has work, is lost."""
_LOST = {"failed": "died", "detail": "the process that supervises its verification died"}


@dataclass(eq=False)
class VerifierWorker(PoolWorker):
    """A worker whose deadline is per share, so that an idle worker has none."""

    notice: float = math.inf
    """No warning before the deadline, as a share may take long."""

    def check(self) -> None:
        """See `PoolWorker.check`."""
        if self.taking_part and not self.in_flight:
            self.note_progress()
        super().check()


class VerifierPool(WorkerPool[VerifierWorker]):
    """Distributes jobs over workers; `share` returns the size of a share for a number of jobs."""

    noun, role = "verifier", "verify"
    capacity = 1

    def __init__(
        self,
        workers: Sequence[VerifierWorker],
        backend: Backend,
        share: Callable[[int], int],
        target: Target,
        arguments: Sequence[Any] = (),
        none_left: float = math.inf,
        events: Timeline | None = None,
    ) -> None:
        super().__init__(workers, backend, target, arguments, none_left, events)
        self._share = share
        self.jobs = Jobs((), self, 0)

    def submit(self, payloads: Sequence[Any]) -> Jobs:
        """Verify; jobs that were submitted before are abandoned."""
        self._waiting.clear()
        self.jobs.given_up = True
        return self.submit_beside(payloads)

    def submit_beside(self, payloads: Sequence[Any]) -> Jobs:
        """Verify jobs after those that were submitted before, or beside them."""
        self.jobs = jobs = Jobs(payloads, self, self.jobs.end)
        size = max(self._share(len(payloads)), 1)
        for first in range(0, len(payloads), size):
            self._wait_again(jobs, list(range(first, min(first + size, len(payloads)))))
        jobs.wait(0.0)  # the workers start now, not when the driver first waits
        return jobs

    def _send(self, worker: VerifierWorker, number: int, work: tuple[Jobs, list[int]]) -> None:
        assert worker.process is not None
        worker.note_progress()
        jobs, share = work
        worker.process.send([jobs.payloads[job] for job in share])

    def _received(self, worker: VerifierWorker, message: Message) -> None:
        if message.kind == "changed":
            warn_of_changed(message.value)
        if message.kind != "done":
            return
        # A worker has one share at a time (`capacity`), so the message needs no number.
        (number,) = worker.in_flight
        jobs, share = self.complete(worker, number)
        # Not strict: a supervisor returns after a second with the outcomes so far.
        jobs.outcomes.update(zip(share, message.value, strict=False))
        if rest := share[len(message.value) :]:
            self._wait_again(jobs, rest)

    def _wait_again(self, jobs: Jobs, share: list[int]) -> None:
        if share and not jobs.given_up:
            self._waiting[jobs.first + share[0]] = jobs, share

    def _reassign(self, worker: VerifierWorker, work: Mapping[int, tuple[Jobs, list[int]]]) -> None:
        for jobs, share in work.values():
            if self._backend.elsewhere:  # the cause may be a lost machine, or one without memory left
                self._wait_again(jobs, share)
                continue
            jobs.losses.update(share)
            # One by one from now on, as any job of the share may have killed the worker.
            for job in share:
                if len(share) == 1 and jobs.losses[job] >= MAX_LOST:
                    jobs.outcomes[job] = dict(_LOST)
                    worker.losses = 0  # the job was at fault, not the worker
                else:
                    self._wait_again(jobs, [job])

    def _fate(self, work: Mapping[int, Any]) -> str:
        if all(jobs.given_up for jobs, _ in work.values()):
            return ""
        who = "others verify" if self.alive else "another is waited for, to verify"
        return f"; {who} what it was given"


class Jobs:
    """Verifications in progress; see `scalerl.rl.types.Pending`."""

    def __init__(self, payloads: Sequence[Any], pool: VerifierPool, first: int) -> None:
        self.payloads, self._pool = payloads, pool
        self.first, self.end = first, first + len(payloads)
        """The range of their numbers in the pool."""
        self.given_up = False
        """Whether later jobs have replaced them, so that their work is not repeated."""
        self.outcomes: dict[int, Outcome] = {}
        self.losses = Counter[int]()
        """Workers that were lost with each job."""

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for all jobs; return whether they are done."""
        return self._pool.wait_for(lambda: self.done, seconds)

    @property
    def done(self) -> bool:
        """Whether all are done."""
        return len(self.outcomes) == len(self.payloads)

    def result(self) -> list[Outcome]:
        """Return the outcome of each job, in order."""
        return [self.outcomes[job] for job in range(len(self.payloads))]


def job_of(prompt: Prompt, turns: Any) -> bytes:
    """Return a `scalerl.rl.verify.forks.Job` for a supervisor, as JSON, so that nothing is unpickled."""
    return json.dumps([asdict(prompt), turns]).encode()


class SupervisedVerifiers(VerifierPool):
    """`limits.workers` supervisors on this machine, each with a worker that verifies; they take `job_of`.

    A supervisor (`scalerl.rl.verify.supervisor`) starts in a new Python: nothing is forked here, and the
    running script is not imported again. It starts, checks and ends the workers that execute the task's code.
    From their answers it passes on only two numbers or a text, and unpickles nothing.

    Raises:
        InputError: something that the verifier needs cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        workers = [VerifierWorker(f"verifier {i}", i, HEARTBEAT_TIMEOUT) for i in range(limits.workers)]
        greeting, memory = base64.b64encode(pickle.dumps(task)) + b"\n", int(limits.memory_gib * 2**30)
        arguments = greeting, limits.seconds, memory, os.getpid()

        def share(n_jobs: int) -> int:
            return min(math.ceil(n_jobs / limits.workers), MAX_SHARE)

        super().__init__(workers, FreshPython(), share, main, arguments)
        # Random, as processes with this mark are killed, and those of other runs must not have it.
        self._limits, self._failed_starts, self._secret = limits, 0, secrets.token_hex(16)
        try:
            self.start()
            self.wait_for(lambda: self.alive > 0)
        except BaseException:
            self.close()
            raise

    def poll(self, timeout: float) -> None:
        """See `WorkerPool.poll`."""
        try:
            super().poll(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `WorkerPool.close`; a supervisor ends its own processes when its channel is closed."""
        super().close()
        self._end_marked(*self._workers)

    def _spawn(self, worker: VerifierWorker) -> None:
        mark, begin = self._mark(worker), (worker.name, worker.number, self._target)
        try:
            worker.process = self._backend.spawn(*begin, *self._arguments, mark)
        except OSError as error:
            why = f"{error.strerror or error}; free memory, processes or file descriptors"
            raise WorkerError(f"the processes that verify cannot be started: {why}") from error
        worker.note_progress()  # heartbeats are expected during start-up too

    def _started(self, worker: VerifierWorker, value: Any) -> None:
        self._failed_starts = 0
        super()._started(worker, value)

    def _failed(self, worker: VerifierWorker, error: ScalerlError) -> None:
        assert worker.process is not None
        if isinstance(error, WorkerError):
            raise self._starts_failed(str(error))
        if self._any_started:
            raise worker.process.lost(str(error))
        raise error

    def _lose(self, worker: VerifierWorker, error: WorkerLostError) -> None:
        self._failed_starts += not worker.started
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise self._starts_failed(str(error).rpartition(" is lost: ")[2])
        super()._lose(worker, error)
        self._end_marked(worker)

    def _check_losses(self, worker: VerifierWorker, error: WorkerLostError) -> None:
        """Do nothing: a completion that kills supervisors must not end the run."""

    def _starts_failed(self, detail: str) -> WorkerError:
        limit = f"task.limits.memory_gib is {self._limits.memory_gib:g}"
        return WorkerError(f"the processes that verify do not start ({detail}; {limit})")

    def _mark(self, worker: VerifierWorker) -> str:
        return f"{self._secret}-{worker.number}"

    def _end_marked(self, *workers: VerifierWorker) -> None:
        """Kill processes left by supervisors that were killed; only the mark identifies them."""
        proc.end_marked([f"{MARK}={self._mark(worker)}" for worker in workers])
