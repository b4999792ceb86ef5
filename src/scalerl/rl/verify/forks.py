"""A supervisor's workers: processes that it forks, gives completions one by one, and kills.

Every answer must carry the random number that came with its completion. After its answer a worker must have
left no process behind, which could read the next completion, or answer it.
"""

import contextlib
import json
import marshal
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scalerl.errors import InputError, WorkerError
from scalerl.rl.verify import proc
from scalerl.rl.workers.processes import start_python
from scalerl.rl.workers.signals import masked_signals

Outcome = dict[str, Any]
"""`value` and `correct`; for an environment `answers`, each with whether it comes from a user; or `failed`,
the reason, and `detail`."""
Job = tuple[dict[str, Any], Any]
"""A prompt, as JSON, and the texts of a completion's turns: a list to verify, or in a dict to be answered."""
Wait = Callable[[socket.socket, float], bool]
"""Returns whether a channel has something to read within some seconds."""

START_SECONDS = 120.0
"""Seconds for a template to start Python and to prepare the task."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row after which the run ends, as nothing can be verified any more."""
_LOOK = 0.1  # seconds between two checks of the memory of processes that a completion has started
_MAX_ANSWER = 1 << 16  # bytes
_ANSWER = re.compile(
    rb"([0-9a-f]{32}) (ok|exit|changed) "
    rb"(?:verdict ([01]) (\S{1,40})|(raised|nonsense|answers) ((?:[0-9a-f]{2})*))\n"
)


@dataclass(frozen=True)
class WorkerAnswer:
    """A worker's answer to a completion."""

    outcome: Outcome
    odd: str | None
    """What was odd about it, if anything; the worker was then killed."""
    seconds: float


@dataclass
class _Template:
    process: subprocess.Popen[bytes]
    control: socket.socket
    forks: bool
    own: set[int]


@dataclass
class ForkedWorker:
    """A process that verifies."""

    pid: int
    channel: socket.socket
    template: _Template
    """The template that it was forked from, or that became the worker."""
    threads: int
    own: set[int]
    """Processes below it that its task had started before the first completion."""
    children: proc.Children
    verified: int = 0
    status: int | None = None
    """Exit status; None if not known."""


class Forks:
    """Starts a template, and workers from it; `seconds` and `memory` (bytes) are limits of one completion.

    Raises:
        InputError: the task cannot be loaded.
        WorkerError: (also raised by `fresh`) no process can be started, or it exits during start-up.
    """

    def __init__(self, greeting: bytes, wait: Wait, seconds: float, memory: int) -> None:
        self._greeting, self._wait, self._seconds, self._memory = greeting, wait, seconds, memory
        self._template: _Template | None = None
        self._workers: dict[int, ForkedWorker] = {}
        self._children = proc.Children(os.getpid())
        self._loaded = False
        self.fork_seconds = 0.0
        """Running mean of the seconds that a new worker takes to start."""
        self._started_in = 0.0
        self._code: dict[str, str] = {}
        self.changed: list[str] = []
        """Files of custom code that a later template has loaded otherwise than the one before."""
        self._ensure_template()

    def fresh(self) -> ForkedWorker:
        """Start a worker."""
        for _ in range(MAX_FAILED_STARTS):
            template = self._ensure_template()
            began = time.monotonic()
            ours, theirs = socket.socketpair()
            with theirs:
                pid = self._request(template, b"w", theirs.fileno())
            if pid is not None and pid > 0:
                took = time.monotonic() - began + (0 if template.forks else self._started_in)
                self.fork_seconds += (0.2 if self.fork_seconds else 1.0) * (took - self.fork_seconds)
                return self._worker_of(template, pid, ours)
            ours.close()  # the template is gone: a completion has killed it
            self._end_template()
        raise WorkerError("its process ends before it forks")

    def verify(self, worker: ForkedWorker, job: Job, thorough: bool = False) -> WorkerAnswer:
        """Have a worker verify a completion; if `thorough`, check all modules for replaced functions too."""
        began = time.monotonic()
        outcome, odd = self._exchange(worker, job, thorough, began + self._seconds)
        worker.verified += 1
        if odd is None and self._left_behind(worker):
            odd = "left"
        if odd is not None:
            self.end(worker)
        if outcome.get("failed") == "died":
            status = "" if worker.status is None else f" with status {worker.status}"
            outcome.setdefault("detail", f"its process ended{status}")
        return WorkerAnswer(outcome, odd, time.monotonic() - began)

    def end(self, worker: ForkedWorker) -> None:
        """Kill a worker with every process that it started, in any session or group."""
        if self._workers.pop(worker.pid, None) is None:
            return
        self._kill(worker)
        if (template := worker.template) is self._template:  # only its parent can tell its status
            worker.status = self._request(template, b"%d" % worker.pid)

    def close(self) -> None:
        """Kill everything, without waiting for the template to respond."""
        while self._workers:
            self._kill(self._workers.popitem()[1])
        self._end_template()

    def _kill(self, worker: ForkedWorker) -> None:
        worker.channel.close()
        worker.children.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses if all have ended
            os.killpg(worker.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # for a fork that has no group of its own yet
            os.kill(worker.pid, signal.SIGKILL)
        if not worker.template.forks:
            worker.status = worker.template.process.wait()  # before the next line reaps it
        proc.end(os.getpid(), self._kept())

    # -- the template -------------------------------------------------------------------------------------

    def _ensure_template(self) -> _Template:
        failed = 0
        while self._template is None:
            began = time.monotonic()
            control, theirs = socket.socketpair()
            arguments = theirs.fileno(), os.getpid(), self._memory
            try:
                with theirs, masked_signals():
                    code = f"from scalerl.rl.verify.worker import main; main{arguments}"
                    process = start_python(code, theirs.fileno())
            except OSError as error:
                raise WorkerError(f"it cannot be started: {error.strerror or error}") from error
            control.settimeout(START_SECONDS)
            with contextlib.suppress(OSError):  # reading the answer will show the failure
                control.sendall(self._greeting)
            message = json.loads(self._line(control, START_SECONDS) or "{}")
            if message.get("ready"):
                code, own = message["code"], proc.descendants(process.pid)
                self.changed += [file for file in code if self._code.get(file, code[file]) != code[file]]
                self._code |= code
                self._template = _Template(process, control, message["forks"], own)
                self._started_in, self._loaded = time.monotonic() - began, True
                break
            status = _killed(process, control)
            if "error" in message and not self._loaded:
                raise InputError(message["error"])
            failed += 1
            if failed >= MAX_FAILED_STARTS:
                raise WorkerError(message.get("error", f"its process ended with status {status}"))
        return self._template

    def _request(self, template: _Template, request: bytes, *fds: int) -> int | None:
        """Return the number that the template answers: the pid of a new worker, or a worker's status.

        A template that does not answer is killed: a late answer would be taken for that to the next request.
        """
        try:
            socket.send_fds(template.control, [request], fds)
            return int(self._line(template.control, START_SECONDS))
        except (OSError, ValueError):
            self._end_template()
            return None

    def _worker_of(self, template: _Template, pid: int, channel: socket.socket) -> ForkedWorker:
        own = set[int]() if template.forks else template.own
        if not template.forks:
            template.control.close()
            self._template = None
        worker = ForkedWorker(pid, channel, template, proc.threads(pid), own, proc.Children(pid))
        self._workers[pid] = worker
        return worker

    def _end_template(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            _killed(template.process, template.control)
        proc.end(os.getpid(), self._kept())

    def _kept(self) -> set[int]:
        """Return the processes that are supposed to exist."""
        kept = {pid for worker in self._workers.values() for pid in (worker.pid, *worker.own)}
        return kept | ({self._template.process.pid, *self._template.own} if self._template else set())

    def _line(self, channel: socket.socket, seconds: float) -> bytes:
        """Return the next line of a template; empty if none comes."""
        until, received = time.monotonic() + seconds, b""
        while not received.endswith(b"\n"):
            if (left := until - time.monotonic()) <= 0:
                return b""
            if self._wait(channel, min(left, 1.0)):
                try:
                    data = channel.recv(_MAX_ANSWER)
                except OSError:
                    data = b""
                if not data:
                    return b""
                received += data
        return received

    # -- one completion -----------------------------------------------------------------------------------

    def _exchange(
        self, worker: ForkedWorker, job: Job, thorough: bool, until: float
    ) -> tuple[Outcome, str | None]:
        """Return the outcome of a completion, and what is odd about the answer, if anything."""
        channel = worker.channel
        if select.select([channel], [], [], 0)[0]:  # the worker sent something or exited before the request
            return _misfit()
        nonce = os.urandom(16).hex().encode()
        message = marshal.dumps((nonce, *job, thorough))
        channel.settimeout(self._seconds)
        received = b""
        try:
            channel.sendall(struct.pack("<I", len(message)) + message)
            while not received.endswith(b"\n"):
                if (left := until - time.monotonic()) <= 0:
                    raise TimeoutError
                if not self._wait(channel, min(left, _LOOK)):
                    if self._holds_too_much(worker):
                        detail = "its processes together took more than task.limits.memory_gib"
                        return {"failed": "died", "detail": detail}, "died"
                    continue
                received += (data := channel.recv(_MAX_ANSWER))
                if not data:
                    return {"failed": "died"}, "died"
                if len(received) > _MAX_ANSWER:
                    return _misfit()
        except TimeoutError:
            return {"failed": "timeout", "detail": "it was not done within the time limit"}, "timeout"
        except OSError:
            return {"failed": "died"}, "died"
        return _outcome(received, nonce)

    def _left_behind(self, worker: ForkedWorker) -> bool:
        """Return whether a worker has left a process or a thread behind; these get 22 ms to end."""
        for pause in (0.0, 0.002, 0.02):
            if pause:  # even a sleep of 0 s would yield the processor
                time.sleep(pause)
            if proc.threads(worker.pid) <= worker.threads and not self._strangers(worker):
                return False
        return True

    def _strangers(self, worker: ForkedWorker) -> bool:
        below = worker.children.now() if worker.threads == 1 else proc.children(worker.pid)
        kept = self._kept()
        found = [pid for pid in (*self._children.now(), *below) if pid not in kept]
        if found:
            proc.reap(kept)
        return any(map(proc.running, found))

    def _holds_too_much(self, worker: ForkedWorker) -> bool:
        """Return whether a worker and all processes that it started exceed the memory of one completion."""
        others = self._kept() - {worker.pid, *worker.own}
        return proc.memory(proc.descendants(os.getpid()) - others, self._memory) > self._memory


def _killed(process: subprocess.Popen[bytes], control: socket.socket) -> int:
    process.kill()
    control.close()
    return process.wait()


def _misfit() -> tuple[Outcome, str]:
    return {"failed": "died", "detail": "what its process sent is no verdict"}, "answer"


def _outcome(line: bytes, nonce: bytes) -> tuple[Outcome, str | None]:
    """Return the outcome in a worker's answer, if it carries the `nonce` of the completion."""
    match = _ANSWER.fullmatch(line)
    if match is None or match[1] != nonce:
        return _misfit()
    odd = None if match[2] == b"ok" else match[2].decode()
    if match[5]:
        detail = bytes.fromhex(match[6].decode()).decode(errors="replace")
        if match[5] == b"answers":
            return {"answers": json.loads(detail)}, odd
        return {"failed": match[5].decode(), "detail": detail}, odd
    try:
        value = float(match[4])
    except ValueError:
        return _misfit()
    return ({"value": value, "correct": match[3] == b"1"}, odd) if math.isfinite(value) else _misfit()
