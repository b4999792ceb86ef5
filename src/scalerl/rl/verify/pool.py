"""The trainer's side of verification: supervisors, and the shares of completions that they are given.

    waiting jobs -> a share for an idle supervisor -> outcomes of its first jobs; the others wait again

A supervisor (`scalerl.rl.verify.supervisor`) is started afresh (nothing is forked here, and the script that
is running is not imported again) and talks over a socket of its own in lines of JSON. It starts, checks and
ends the workers that execute the task's code. One that is lost is replaced, and its jobs are verified one
by one, so that a completion that ends supervisors costs itself alone.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import pickle
import secrets
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from scalerl.errors import InputError, WorkerError
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Limits
from scalerl.rl.verify import proc
from scalerl.rl.verify.forks import MAX_FAILED_STARTS, Outcome, spawn
from scalerl.rl.workers.supervision import PollClock

MAX_SHARE = 64
"""Jobs that a supervisor is given at a time, at most."""
MAX_LOST = 2
"""Supervisors that may be lost with a job before it counts as `died`."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which a supervisor that has work is lost."""
_LOOK = 1.0  # seconds between two polls, at most
_END_SECONDS = 10.0  # for a supervisor to end what is below it
_MARK = "SCALERL_VERIFIER"  # in the environment of all that a supervisor has started
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class VerifierPool:
    """`limits.workers` supervisors, each with a worker that verifies by `task.verify`.

    Raises:
        InputError: what the task needs for its verifier cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        self._greeting = base64.b64encode(pickle.dumps(task)) + b"\n"
        self._limits = limits
        self._workers: list[_Supervisor] = []
        self._clock = PollClock()
        self._started = False
        self._failed_starts = 0
        self._lines: Sequence[bytes] = ()
        self._jobs = Jobs(0, 1, self._advance)
        try:
            while not self._started:
                self._poll(math.inf)
        except BaseException:
            self.close()
            raise

    def submit(self, lines: Sequence[bytes]) -> Jobs:
        """Verify completions (prompt and text, as JSON); those that were submitted before are given up."""
        if any(worker.share for worker in self._workers):
            self.close()  # or the next call would get the answers to the jobs before
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._workers.remove(worker)
            worker.end()
        size = min(max(math.ceil(len(lines) / self._limits.workers), 1), MAX_SHARE)
        self._lines, self._jobs = lines, Jobs(len(lines), size, self._advance)
        return self._jobs

    def close(self) -> None:
        """Stop the processes at once."""
        for worker in self._workers:
            worker.channel.close()  # so that they end side by side
        while self._workers:
            self._workers.pop().end()

    def _advance(self, seconds: float) -> None:
        """Give shares to idle supervisors, and wait `seconds` for outcomes, which may be none.

        Raises:
            WorkerError: no process starts any more.
        """
        self._excuse()
        try:
            for worker in self._workers:
                if worker.idle and (share := self._jobs.take()):
                    worker.submit(share, self._lines)
            self._poll(seconds)
        except BaseException:
            self.close()  # the next call must not get the answers to these jobs
            raise

    def _poll(self, seconds: float) -> None:
        """Wait until a supervisor sends something, or no time is left, and take it."""
        while len(self._workers) < self._limits.workers:
            try:
                self._workers.append(_Supervisor(self._greeting, self._limits))
            except OSError as error:
                why = f"{error.strerror or error}; free memory, processes or file descriptors"
                raise WorkerError(f"the processes that verify cannot be started: {why}") from error
        ready = wait([worker.channel for worker in self._workers], min(seconds, _LOOK))
        self._excuse()
        for worker in list(self._workers):
            message = worker.receive() if worker.channel in ready else None
            if message is None and time.monotonic() < worker.deadline:
                continue
            if isinstance(message, list):
                self._jobs.complete(worker.rest(), message)
            elif message is not None and "ready" in message:
                self._started, self._failed_starts = True, 0
                worker.rest()
            else:
                self._workers.remove(worker)
                status = worker.end()
                self._jobs.note_loss(worker.share)
                self._note_loss(worker, message or {}, f"its process ended with status {status}")

    def _excuse(self) -> None:
        """Leave out of the deadlines the time in which this process did not poll."""
        unpolled = self._clock.unpolled()
        for worker in self._workers:
            worker.deadline += unpolled

    def _note_loss(self, worker: _Supervisor, message: dict[str, str], ended: str) -> None:
        if "error" in message and not self._started:
            raise InputError(message["error"])
        self._failed_starts += worker.starting
        if "failed" in message or self._failed_starts >= MAX_FAILED_STARTS:
            detail = message.get("failed") or message.get("error") or ended
            limit = f"task.limits.memory_gib is {self._limits.memory_gib:g}"
            raise WorkerError(f"the processes that verify do not start ({detail}; {limit})")


class Jobs:
    """Verifications under way, given out in shares of `size`; see `scalerl.rl.types.Pending`.

    The pool's workers get on while `wait` calls its `advance` with the seconds that it may take.
    """

    def __init__(self, n: int, size: int, advance: Callable[[float], None]) -> None:
        self._n, self._size, self._advance = n, size, advance
        self._waiting = deque(range(n))
        self._outcomes: dict[int, Outcome] = {}
        self._losses = Counter[int]()

    def wait(self, seconds: float) -> bool:
        """Return whether all are done; wait for that, and for no longer than `seconds`."""
        until = time.monotonic() + seconds
        while len(self._outcomes) < self._n:
            left = until - time.monotonic()
            self._advance(max(left, 0.0))
            if left <= 0:
                break
        return len(self._outcomes) == self._n

    def result(self) -> list[Outcome]:
        """Return the outcome of each job, in order."""
        return [self._outcomes[job] for job in range(self._n)]

    def take(self) -> list[int]:
        """Return the next share; a job that was with a lost supervisor is one by itself."""
        share: list[int] = []
        while self._waiting and len(share) < self._size and not (share and self._waiting[0] in self._losses):
            share.append(self._waiting.popleft())
            if share[0] in self._losses:
                break
        return share

    def complete(self, share: list[int], outcomes: list[Outcome]) -> None:
        """Take the outcomes of the first jobs of a share; the others wait again."""
        self._outcomes.update(zip(share, outcomes, strict=False))
        self.put_back(share[len(outcomes) :])

    def put_back(self, share: list[int]) -> None:
        """Have a share wait again, before all others."""
        self._waiting.extendleft(reversed(share))

    def note_loss(self, share: list[int]) -> None:
        """Have the share of a lost supervisor wait again; a job that has lost `MAX_LOST` by itself fails."""
        self._losses.update(share)
        if len(share) == 1 and self._losses[share[0]] >= MAX_LOST:
            self._outcomes[share[0]] = dict(_LOST)
        else:
            self.put_back(share)


_LOST = {"failed": "died", "detail": "the process that supervises its verification died"}


class _Supervisor:
    """A supervisor process, and its share."""

    def __init__(self, greeting: bytes, limits: Limits) -> None:
        secret, memory = secrets.token_hex(16), int(limits.memory_gib * 2**30)
        self._mark = f"{_MARK}={secret}"
        self.process, self.channel = spawn(
            "scalerl.rl.verify.supervisor", limits.seconds, memory, **_ONE_THREAD, **{_MARK: secret}
        )
        self.starting = True
        self.share: list[int] = []
        self._received = bytearray()
        self._send(greeting)

    @property
    def idle(self) -> bool:
        return not self.share and not self.starting

    def submit(self, share: list[int], lines: Sequence[bytes]) -> None:
        """Send it some jobs."""
        self.share = share
        self._send(b"[" + b",".join(lines[job] for job in share) + b"]\n")

    def rest(self) -> list[int]:
        """Note that its start or its share is over; return the share."""
        share, self.share, self.starting, self.deadline = self.share, [], False, math.inf
        return share

    def receive(self) -> list[Outcome] | dict[str, str] | None:
        """Return its message; None for a heartbeat or half a line; an empty object where it has ended."""
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return {}
        self.deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        *lines, self._received = (self._received + data).split(b"\n")
        return next((message for line in lines if (message := json.loads(line)) is not None), None)

    def end(self) -> int:
        """Stop the process with all below it; return the exit status."""
        self.channel.close()  # at which it ends what it has started, and itself
        try:
            status = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status:
            # It may have left processes behind, which only its mark in their environment tells.
            proc.end_marked(self._mark)
        return status

    def _send(self, line: bytes) -> None:
        self.deadline = time.monotonic() + HEARTBEAT_TIMEOUT
        self.channel.settimeout(HEARTBEAT_TIMEOUT)
        with contextlib.suppress(OSError):  # it shows when the answer is read, or does not come
            self.channel.sendall(line)
