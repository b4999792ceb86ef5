"""The backend of verification beside the driver: supervisors, spoken to in lines of JSON.

A supervisor (`scalerl.rl.verify.supervisor`) is started afresh (nothing is forked here, and the script that
is running is not imported again) and has a socket of its own. It starts, checks and ends the workers that
execute the task's code. Nothing that comes from it is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import pickle
import secrets
import select
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from scalerl.errors import InputError, ScalerlError, WorkerError
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Limits
from scalerl.rl.verify import proc
from scalerl.rl.verify.forks import MAX_FAILED_STARTS, spawn
from scalerl.rl.verify.pool import VerifierPool, VerifierWorker
from scalerl.rl.verify.supervisor import main
from scalerl.rl.workers.backend import Backend, Message, Target, WorkerProcess
from scalerl.rl.workers.supervision import WorkerLostError

MAX_SHARE = 64
"""Jobs that a supervisor is given at a time, at most."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a supervisor that has work is lost."""
_END_SECONDS = 10.0  # for a supervisor to end what is below it
_MARK = "SCALERL_VERIFIER"  # in the environment of all that a supervisor has started
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class SupervisedVerifiers(VerifierPool):
    """`limits.workers` supervisors, each with a worker that verifies by `task.verify`.

    Raises:
        InputError: what the task needs for its verifier cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        workers = [VerifierWorker(f"verifier {i}", i) for i in range(limits.workers)]
        super().__init__(workers, Supervisors(task, limits), _line_of, self._size, main)
        self._limits, self._failed_starts = limits, 0
        try:
            self.start()
            self.wait_for(lambda: self.alive > 0)
        except BaseException:
            self.close()
            raise

    def _size(self, n: int) -> int:
        return min(math.ceil(n / self._limits.workers), MAX_SHARE)

    def poll(self, timeout: float) -> None:
        """See `WorkerPool.poll`."""
        try:
            super().poll(timeout)
        except BaseException:
            self.close()
            raise

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

    def _spawn(self, worker: VerifierWorker) -> None:
        try:
            worker.process = self._backend.spawn(worker.name, worker.number, self._target)
        except OSError as error:
            why = f"{error.strerror or error}; free memory, processes or file descriptors"
            raise WorkerError(f"the processes that verify cannot be started: {why}") from error

    def _lose(self, worker: VerifierWorker, error: WorkerLostError) -> None:
        self._failed_starts += not worker.started
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise self._starts_failed(str(error).partition(" is lost: ")[2])
        super()._lose(worker, error)

    def _check_losses(self, worker: VerifierWorker, why: str) -> None:
        """Do nothing: a completion that ends supervisors costs itself, and not the run."""

    def _starts_failed(self, detail: str) -> WorkerError:
        limit = f"task.limits.memory_gib is {self._limits.memory_gib:g}"
        return WorkerError(f"the processes that verify do not start ({detail}; {limit})")


def _line_of(share: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(share) + b"]\n"


class Supervisors(Backend):
    """Starts supervisors for a task."""

    def __init__(self, task: Task, limits: Limits) -> None:
        self._greeting = base64.b64encode(pickle.dumps(task)) + b"\n"
        self._limits = limits

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> SupervisorProcess:
        """See `Backend.spawn`."""
        return SupervisorProcess(name, target, self._greeting, self._limits)

    def wait(self, processes: Sequence[SupervisorProcess], seconds: float) -> None:
        """See `Backend.wait`."""
        wait([process.channel for process in processes], None if seconds == math.inf else seconds)


class SupervisorProcess(WorkerProcess):
    """A supervisor, which gives heartbeats while it starts and while it has work."""

    def __init__(self, name: str, target: Target, greeting: bytes, limits: Limits) -> None:
        secret, memory = secrets.token_hex(16), int(limits.memory_gib * 2**30)
        self.name, self._mark = name, f"{_MARK}={secret}"
        self._process, self.channel = spawn(
            target.__module__, limits.seconds, memory, **_ONE_THREAD, **{_MARK: secret}
        )
        self.pid, self.placed_at = self._process.pid, time.monotonic()
        self._received = bytearray()
        self.send(greeting)

    def send(self, message: bytes) -> None:
        """See `WorkerProcess.send`; a message is short, and is read at once."""
        self._deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        self.channel.settimeout(HEARTBEAT_TIMEOUT)
        with contextlib.suppress(OSError):  # it shows when the answer is read, or does not come
            self.channel.sendall(message)

    def receive(self) -> list[Message]:
        """See `WorkerProcess.receive`."""
        if not select.select([self.channel], [], [], 0)[0]:
            if time.monotonic() >= self._deadline:
                raise self.lost(f"no heartbeat for {HEARTBEAT_TIMEOUT:g} s")
            return []
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise self.lost(f"its process ended with status {self._end()}")
        self._deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        *lines, self._received = (self._received + data).split(b"\n")
        return [self._message(json.loads(line)) for line in lines]

    def excuse(self, seconds: float) -> None:
        """See `WorkerProcess.excuse`."""
        self._deadline += seconds

    def kill(self) -> None:
        """See `WorkerProcess.kill`."""
        self._end()

    def close(self, seconds: float = _END_SECONDS) -> None:
        """See `WorkerProcess.close`: at the end of its channel it ends what it has started, and itself."""
        self.channel.close()

    def join(self) -> None:
        """See `WorkerProcess.join`."""
        self._end()

    def _message(self, value: Any) -> Message:
        if value is None:
            return Message("beat")
        if isinstance(value, dict) and "error" in value:
            return Message("failed", InputError(value["error"]))
        if isinstance(value, dict) and "failed" in value:
            return Message("failed", WorkerError(value["failed"]))
        self._deadline = math.inf  # it is idle
        return Message("done", value) if isinstance(value, list) else Message("started")

    def _end(self) -> int:
        """Stop the process with all below it; return the exit status."""
        self.channel.close()
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status:
            # It may have left processes behind, which only its mark in their environment tells.
            proc.end_marked(self._mark)
        return status
