"""The trainer's side of verification: supervisors, and the shares of completions that they are given.

    waiting jobs -> a share for an idle supervisor -> outcomes of its first jobs; the others wait again

A supervisor (`scalerl.rl.verify.supervisor`) is started afresh (nothing is forked here, and the script that
is running is not imported again) and talks over a socket of its own in lines of JSON. It starts, checks and
ends the workers that execute the task's code. One that is lost is replaced, and its jobs are judged one by
one, so that a completion that ends supervisors costs itself alone.
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
from collections.abc import Sequence
from multiprocessing.connection import wait

from scalerl.errors import InputError, WorkerError
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Limits
from scalerl.rl.verify import proc
from scalerl.rl.verify.forks import MAX_FAILED_STARTS, Outcome, spawn
from scalerl.rl.workers.supervision import Attention

MAX_SHARE = 64
"""Jobs that a supervisor is given at a time, at most."""
MAX_LOST = 2
"""Supervisors that may be lost with a job before it counts as `died`."""
SILENCE_SECONDS = 60.0
"""Without a heartbeat, after which a supervisor that has work is lost; only those count in which the trainer
looks, as it may be stopped with all processes of its job."""
_LOOK = 1.0  # seconds between two looks, at most
_END_SECONDS = 10.0  # for a supervisor to end what is below it
_MARK = "SCALERL_VERIFIER"  # in the environment of all that a supervisor has started
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Workers:
    """`limits.workers` supervisors, each with a worker that judges by `task.verify`.

    Raises:
        InputError: what the task needs for judging cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, limits: Limits) -> None:
        self._greeting = base64.b64encode(pickle.dumps(task)) + b"\n"
        self._limits = limits
        self._workers: list[_Supervisor] = []
        self._attention = Attention()
        self._started = False
        self._failed_starts = 0
        try:
            while not self._started:
                self._hear(math.inf)
        except BaseException:
            self.close()
            raise

    def begin(self, jobs: Sequence[bytes]) -> Jobs:
        """Judge some jobs (prompt and text, as JSON), one call at a time."""
        if any(worker.share for worker in self._workers):
            self.close()  # nobody waits for those any more
        for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
            self._workers.remove(worker)
            worker.end()
        return Jobs(self, jobs, self._limits.workers)

    def advance(self, jobs: Jobs, seconds: float) -> None:
        """Give shares of `jobs` to idle supervisors, and wait `seconds` for outcomes, which may be none.

        Raises:
            WorkerError: no process starts any more.
        """
        self._excuse()
        try:
            for worker in self._workers:
                if worker.idle and (share := jobs.take()):
                    worker.give(share, jobs.lines)
            for share, outcomes in self._hear(seconds):
                jobs.note(share, outcomes)
        except BaseException:
            self.close()  # the next call must not get the answers to these jobs
            raise

    def close(self) -> None:
        """End the processes at once."""
        for worker in self._workers:
            worker.channel.close()  # so that they end side by side
        while self._workers:
            self._workers.pop().end()

    def _hear(self, seconds: float) -> list[tuple[list[int], list[Outcome] | None]]:
        """Wait until a supervisor sends something, or no time is left: shares, and what came of them.

        None came of one whose supervisor was lost.
        """
        while len(self._workers) < self._limits.workers:
            try:
                self._workers.append(_Supervisor(self._greeting, self._limits))
            except OSError as error:
                why = f"{error.strerror or error}; free memory, processes or file descriptors"
                raise WorkerError(f"the processes that verify cannot be started: {why}") from error
        speaking = wait([worker.channel for worker in self._workers], min(seconds, _LOOK))
        self._excuse()
        found: list[tuple[list[int], list[Outcome] | None]] = []
        for worker in list(self._workers):
            said = worker.read() if worker.channel in speaking else None
            if said is None and time.monotonic() < worker.deadline:
                continue
            if isinstance(said, list):
                found.append((worker.rest(), said))
            elif said is not None and "ready" in said:
                self._started, self._failed_starts = True, 0
                worker.rest()
            else:
                self._workers.remove(worker)
                status = worker.end()
                found.append((worker.share, None))
                self._note_loss(worker, said or {}, f"its process ended with status {status}")
        return found

    def _excuse(self) -> None:
        """Give back to the supervisors the time in which this process did not look."""
        away = self._attention.away()
        for worker in self._workers:
            worker.deadline += away

    def _note_loss(self, worker: _Supervisor, said: dict[str, str], ended: str) -> None:
        if "error" in said and not self._started:
            raise InputError(said["error"])
        self._failed_starts += worker.starting
        if "failed" in said or self._failed_starts >= MAX_FAILED_STARTS:
            detail = said.get("failed") or said.get("error") or ended
            limit = f"task.limits.memory_gib is {self._limits.memory_gib:g}"
            raise WorkerError(f"the processes that verify do not start ({detail}; {limit})")


class Jobs:
    """Jobs under way; see `scalerl.rl.types.Pending`. The workers get on while somebody waits."""

    def __init__(self, workers: Workers, lines: Sequence[bytes], n_workers: int) -> None:
        self._workers, self.lines = workers, lines
        self._waiting = deque(range(len(lines)))
        self._outcomes: dict[int, Outcome] = {}
        self._lost = Counter[int]()
        self._size = min(max(math.ceil(len(lines) / n_workers), 1), MAX_SHARE)

    def wait(self, seconds: float) -> bool:
        """Whether all are done."""
        until = time.monotonic() + seconds
        while len(self._outcomes) < len(self.lines):
            left = until - time.monotonic()
            self._workers.advance(self, max(left, 0.0))
            if left <= 0:
                break
        return len(self._outcomes) == len(self.lines)

    def result(self) -> list[Outcome]:
        """The outcome of each job, in order."""
        return [self._outcomes[job] for job in range(len(self.lines))]

    def take(self) -> list[int]:
        """The next share; a job that was with a lost supervisor is one by itself."""
        share: list[int] = []
        while self._waiting and len(share) < self._size and not (share and self._waiting[0] in self._lost):
            share.append(self._waiting.popleft())
            if share[0] in self._lost:
                break
        return share

    def note(self, share: list[int], outcomes: list[Outcome] | None) -> None:
        """Take the outcomes of the first jobs of a share; None where its supervisor was lost."""
        if outcomes is None:
            self._lost.update(share)
            over = [job for job in share if self._lost[job] >= MAX_LOST and len(share) == 1]
            self._outcomes |= {job: dict(_LOST) for job in over}
            self._waiting.extendleft(job for job in reversed(share) if job not in over)
            return
        self._outcomes.update(zip(share, outcomes, strict=False))
        self._waiting.extendleft(reversed(share[len(outcomes) :]))


_LOST = {"failed": "died", "detail": "the process that supervises its verification died"}


class _Supervisor:
    """One supervisor process, and what is known of it here."""

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

    def give(self, share: list[int], lines: Sequence[bytes]) -> None:
        """Have it judge some jobs."""
        self.share = share
        self._send(b"[" + b",".join(lines[job] for job in share) + b"]\n")

    def rest(self) -> list[int]:
        """The share, or the start, is over; the share."""
        share, self.share, self.starting, self.deadline = self.share, [], False, math.inf
        return share

    def read(self) -> list[Outcome] | dict[str, str] | None:
        """What it sent; None where that is a heartbeat or half a line; an empty object where it has ended."""
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return {}
        self.deadline = time.monotonic() + SILENCE_SECONDS
        *lines, self._received = (self._received + data).split(b"\n")
        return next((said for line in lines if (said := json.loads(line)) is not None), None)

    def end(self) -> int:
        """End the process with all below it; the exit status."""
        self.channel.close()  # its sign to end them
        try:
            status = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status:
            proc.end_marked(self._mark)
        return status

    def _send(self, line: bytes) -> None:
        self.deadline = time.monotonic() + SILENCE_SECONDS
        self.channel.settimeout(SILENCE_SECONDS)
        with contextlib.suppress(OSError):  # it shows when the answer is read, or does not come
            self.channel.sendall(line)
