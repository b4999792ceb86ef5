"""Worker processes that judge completions; `scalerl.rl.worker` is what runs inside.

    waiting jobs -> idle workers -> answers, or the time limit -> outcomes, in order

They are started afresh (nothing is forked, and the script that is running is not imported again) and talk
over a socket of their own in lines of JSON, so that nothing a verifier prints is taken for a verdict. A
worker has one job at a time. One that exceeds the time limit is killed with all it started, and another takes
its place.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from scalerl.errors import InputError, WorkerError
from scalerl.rl.types import Limits, Task

Outcome = dict[str, Any]
"""`value` and `correct`; or `failed`, the reason, and `detail`."""

START_SECONDS = 120.0
"""For a worker to start Python and to load what the task needs."""
MAX_FAILED_STARTS = 3
"""In a row; then nothing can be verified any more."""
_MAX_ANSWER = 1 << 16  # bytes
_CODE = "import sys; sys.path[:] = {!r}; from scalerl.rl.worker import main; main({}, {}, {})"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Workers:
    """`limits.workers` processes that judge by `task.verify`.

    Raises:
        InputError: what the task needs for judging cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        # A fresh copy has no prompts in its cache, and those are not needed for judging.
        own: Any = replace(task) if is_dataclass(task) and not isinstance(task, type) else task
        self._greeting = base64.b64encode(pickle.dumps(own))
        self._limits = limits
        self._workers: list[_Worker] = []
        self._started = False
        self._failed_starts = 0
        try:
            while not self._started:
                self._advance()
        except BaseException:
            self.close()
            raise

    def begin(self, jobs: Sequence[bytes]) -> Jobs:
        """Judge some jobs (lines of JSON for `scalerl.rl.worker`), one call at a time."""
        if any(worker.job is not None for worker in self._workers):
            self.close()  # nobody waits for those any more
        self._bury()
        return Jobs(self, jobs)

    def advance(self, waiting: deque[int], jobs: Sequence[bytes], seconds: float) -> dict[int, Outcome]:
        """Give jobs to whoever is idle, and wait `seconds` for outcomes, which may be none.

        Raises:
            WorkerError: no process starts any more.
        """
        try:
            for worker in self._workers:
                if worker.idle and waiting:
                    job = waiting.popleft()
                    worker.give(job, jobs[job], self._limits.seconds)
            return self._advance(seconds)
        except BaseException:
            self.close()  # the next call must not get the answers to these jobs
            raise

    def close(self) -> None:
        """End the processes at once."""
        while self._workers:
            self._workers.pop().kill()

    def _advance(self, seconds: float = math.inf) -> dict[int, Outcome]:
        """Wait until a worker has something to say, or no time left; the outcomes of their jobs."""
        while len(self._workers) < self._limits.workers:
            self._workers.append(_Worker(self._greeting, self._limits))
        soonest = min(time.monotonic() + seconds, *(worker.deadline for worker in self._workers))
        timeout = None if soonest == math.inf else max(soonest - time.monotonic(), 0.0)
        speaking = wait([worker.channel for worker in self._workers], timeout)
        outcomes: dict[int, Outcome] = {}
        for worker in list(self._workers):
            said = worker.read() if worker.channel in speaking else None
            if said is None:  # nothing, or half a line
                if time.monotonic() < worker.deadline:
                    continue
                said = {"failed": "timeout", "detail": "it was not done within the time limit"}
            if said.get("failed") in ("timeout", "died") or "error" in said:
                self._workers.remove(worker)
                status = worker.kill()
                said.setdefault("detail", f"its process ended with status {status}")
            if worker.starting:
                self._note_start(said)
            if worker.job is not None:
                outcomes[worker.job] = said
            worker.rest()
        return outcomes

    def _bury(self) -> None:
        """Whoever died without a job costs no completion its verdict."""
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._workers.remove(worker)
            worker.kill()

    def _note_start(self, said: Outcome) -> None:
        if "ready" in said:
            self._started, self._failed_starts = True, 0
            return
        if "error" in said and not self._started:
            raise InputError(said["error"])
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            limit = f"task.limits.memory_gib is {self._limits.memory_gib:g}"
            raise WorkerError(f"the processes that verify do not start ({said['detail']}; {limit})")


class Jobs:
    """Jobs under way; see `scalerl.rl.pending.Pending`. The workers get on while somebody waits."""

    def __init__(self, workers: Workers, jobs: Sequence[bytes]) -> None:
        self._workers, self._jobs = workers, jobs
        self._waiting = deque(range(len(jobs)))
        self._outcomes: dict[int, Outcome] = {}

    def wait(self, seconds: float) -> bool:
        """Whether all are done."""
        until = time.monotonic() + seconds
        while len(self._outcomes) < len(self._jobs):
            left = until - time.monotonic()
            self._outcomes |= self._workers.advance(self._waiting, self._jobs, max(left, 0.0))
            if left <= 0:
                break
        return len(self._outcomes) == len(self._jobs)

    def result(self) -> list[Outcome]:
        """The outcome of each job, in order."""
        return [self._outcomes[job] for job in range(len(self._jobs))]


class _Worker:
    """One process, and what is known of it here."""

    def __init__(self, greeting: bytes, limits: Limits) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            memory = int(limits.memory_gib * 2**30)
            code = _CODE.format(sys.path, theirs.fileno(), os.getpid(), memory)
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # out of reach of Ctrl-C, and a group that can be killed as one
                env={**os.environ, **_ONE_THREAD},
            )
        self.starting = True
        self.job: int | None = None
        self.deadline = math.inf
        self._heard = bytearray()
        self._send(greeting, START_SECONDS)

    @property
    def idle(self) -> bool:
        return self.job is None and not self.starting

    def give(self, job: int, line: bytes, seconds: float) -> None:
        """Start a job."""
        self.job = job
        self._send(line, seconds)

    def rest(self) -> None:
        """The job, or the start, is over."""
        self.job, self.starting, self.deadline = None, False, math.inf

    def read(self) -> Outcome | None:
        """What the worker said; None where the line is not whole yet."""
        try:
            data = self.channel.recv(_MAX_ANSWER)
        except OSError:
            data = b""
        self._heard += data
        if not data or len(self._heard) > _MAX_ANSWER:
            return {"failed": "died"}
        if not self._heard.endswith(b"\n"):
            return None
        line, self._heard = bytes(self._heard), bytearray()
        return _outcome(line, self.starting)

    def kill(self) -> int:
        """End the process and all of its group; the exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where all have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        return self.process.wait()

    def _send(self, line: bytes, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.channel.settimeout(seconds)
        with contextlib.suppress(OSError):  # it shows when the answer is read, or does not come
            self.channel.sendall(line + b"\n")


def _outcome(line: bytes, starting: bool) -> Outcome:
    """A line of a worker, if it is one that `scalerl.rl.worker` writes at this point."""
    with contextlib.suppress(ValueError, RecursionError):
        said = json.loads(line)
        if isinstance(said, dict) and (_is_greeting(said) if starting else _is_verdict(said)):
            return said
    return {"failed": "died", "detail": "what its process said was no verdict"}


def _is_greeting(said: Outcome) -> bool:
    return said.keys() == {"ready"} or (said.keys() == {"error"} and isinstance(said["error"], str))


def _is_verdict(said: Outcome) -> bool:
    if said.keys() == {"failed", "detail"}:
        return said["failed"] in ("raised", "nonsense") and isinstance(said["detail"], str)
    return (
        said.keys() == {"value", "correct"}
        and isinstance(said["value"], float)
        and math.isfinite(said["value"])
        and isinstance(said["correct"], bool)
    )
