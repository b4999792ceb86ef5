"""The pool of supervisors, which verify beside the driver in processes of this machine.

A supervisor (`scalerl.rl.verify.supervisor`) is started afresh: nothing is forked here, and the script that
is running is not imported again. It starts, checks and ends the workers that execute the task's code. Of what
these answer it passes on two numbers, or a text, and unpickles nothing.
"""

import base64
import math
import os
import pickle
import secrets
from typing import Any

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Limits
from scalerl.rl.verify import proc
from scalerl.rl.verify.forks import MAX_FAILED_STARTS
from scalerl.rl.verify.pool import VerifierPool, VerifierWorker
from scalerl.rl.verify.supervisor import MARK, main
from scalerl.rl.workers.backend import WorkerLostError
from scalerl.rl.workers.processes import FreshPython

MAX_SHARE = 64
"""Jobs that a supervisor is given at a time, at most."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a supervisor that starts, or has work, is lost."""


class SupervisedVerifiers(VerifierPool):
    """`limits.workers` supervisors, each with a worker that verifies by `task.verify`.

    Raises:
        InputError: what the task needs for its verifier cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        workers = [VerifierWorker(f"verifier {i}", i, HEARTBEAT_TIMEOUT) for i in range(limits.workers)]
        greeting, memory = base64.b64encode(pickle.dumps(task)) + b"\n", int(limits.memory_gib * 2**30)
        arguments = greeting, limits.seconds, memory, os.getpid()

        def share(n_jobs: int) -> int:
            return min(math.ceil(n_jobs / limits.workers), MAX_SHARE)

        super().__init__(workers, FreshPython(), list, share, main, arguments)
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
        """See `WorkerPool.close`: at the end of its channel a supervisor ends what it has started, too."""
        super().close()
        self._end_marked(*self._workers)

    def _spawn(self, worker: VerifierWorker) -> None:
        mark, begin = self._mark(worker), (worker.name, worker.number, self._target)
        try:
            worker.process = self._backend.spawn(*begin, *self._arguments, mark)
        except OSError as error:
            why = f"{error.strerror or error}; free memory, processes or file descriptors"
            raise WorkerError(f"the processes that verify cannot be started: {why}") from error
        worker.watchdog = worker.watch()  # it gives heartbeats while it starts, too

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

    def _check_losses(self, worker: VerifierWorker, why: str) -> None:
        """Do nothing: a completion that ends supervisors costs itself, and not the run."""

    def _starts_failed(self, detail: str) -> WorkerError:
        limit = f"task.limits.memory_gib is {self._limits.memory_gib:g}"
        return WorkerError(f"the processes that verify do not start ({detail}; {limit})")

    def _mark(self, worker: VerifierWorker) -> str:
        return f"{self._secret}-{worker.number}"

    def _end_marked(self, *workers: VerifierWorker) -> None:
        """Kill what supervisors that did not end by themselves have left, which only its mark tells."""
        proc.end_marked([f"{MARK}={self._mark(worker)}" for worker in workers])
