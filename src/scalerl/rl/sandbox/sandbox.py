"""Programs and tests in the sandbox, verified from outside.

    run     runs a program on some input, and returns its output as data
    check   runs tests: in two sandboxes, one with the tests and one with the code, and two pipes between them

Wall time and output are limited here, by killing process 1 of the sandbox, with which the kernel kills all
others. CPU time, memory, threads, files and system calls are limited inside (jail.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from scalerl.rl.sandbox.backend import (
    DEVICES,
    Interpreter,
    SandboxBackend,
    SandboxError,
    draw_id,
    is_privileged,
)

THREADS = 64
"""The most threads of a program."""
DISK = 64 << 20
"""Bytes of its /tmp, and of any file in it."""
_SEALED = 1 | 2 | 4 | 8  # no more seals, no shrinking, no growth, no writing
_OWN_PROCESSES = 3  # processes of the sandbox itself, which may count as the program's user
_ERRORS = 1 << 16  # the most bytes of stderr that are kept
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the order of a set must not decide a verdict by chance
    "MALLOC_ARENA_MAX": "1",  # an arena per thread would take 64 MiB of address space each
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Ran:
    """Result of a program."""

    status: int
    """Exit status of the program; 128 plus the number of a signal that killed it."""
    output: bytes
    errors: bytes
    """The beginning of its stderr."""
    stopped: Literal["time", "output"] | None
    """The limit at which it was killed."""


@dataclass(frozen=True)
class Verdict:
    """Result of tests on code: `passed`, `failed`, or `unsupported` if they need more than plain data."""

    verdict: Literal["passed", "failed", "unsupported"]
    why: str = ""


class _OpenFiles:
    """Files that are closed at the end of a block, unless they were closed before."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        """Return a new pipe: its read end and its write end."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def holding(self, data: bytes) -> int:
        """Return a file in memory that holds `data`."""
        fd = os.memfd_create("scalerl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._open.add(fd)
        while data:
            data = data[os.write(fd, data) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALED)  # two sandboxes may share it
        return fd

    def close(self, *fds: int) -> None:
        for fd in fds:
            self._open.remove(fd)
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(*self._open)


@dataclass(frozen=True)
class Sandbox:
    """Runs Python in a backend; `memory` limits the bytes of address space of one program."""

    backend: SandboxBackend
    python: Interpreter
    memory: int = 1 << 30

    def run(self, program: str, given: bytes, seconds: float, most: int = 1 << 20) -> Ran:
        """Run a program on the input `given`, for at most `seconds` and until it has printed `most` bytes.

        Raises:
            SandboxError: the sandbox did not start.
        """
        until = time.monotonic() + seconds
        with _OpenFiles() as files:
            (output, stdout), (errors, stderr) = files.pipe(), files.pipe()
            streams = (files.holding(given), stdout, stderr)
            with self._start("program", {"source": program}, seconds, streams, {}) as process:
                files.close(stdout, stderr)
                texts, stopped = _read({output: most}, {errors: _ERRORS}, until)
                # A program that has closed its output may run on until the time limit.
                if stopped is None and not process.wait(until - time.monotonic()):
                    stopped = "time"
        process.check(texts[errors])
        return Ran(process.status, texts[output], texts[errors], stopped)

    def check(self, code: str, tests: Mapping[str, Any], seconds: float) -> Verdict:
        """Run `code`, and its tests in another sandbox; `tests` are arguments of `harness.judge`.

        Raises:
            SandboxError: a sandbox did not start.
        """
        until = time.monotonic() + seconds
        with _OpenFiles() as files:
            (requests, ask), (replies, answer) = files.pipe(), files.pipe()
            (verdict, judge), (errors, stderr) = files.pipe(), files.pipe()
            (of_code, stderr_of_code), null = files.pipe(), files.holding(b"")
            ends = {"requests": requests, "replies": answer}
            streams = (null, stderr_of_code, stderr_of_code)
            with self._start("candidate", {"source": code}, seconds, streams, ends) as candidate:
                files.close(requests, answer, stderr_of_code)
                ends = {"requests": ask, "replies": replies, "verdict": judge}
                with self._start("harness", tests, seconds, (null, stderr, stderr), ends) as harness:
                    files.close(ask, replies, judge, stderr)
                    kept = {errors: _ERRORS, of_code: _ERRORS}
                    texts, stopped = _read({verdict: _ERRORS}, kept, until)
        harness.check(texts[errors])
        if candidate.ended or stopped:
            candidate.check(texts[of_code])
        if stopped:
            return Verdict("failed", f"the tests took more than {seconds:g} s")
        if not texts[verdict]:
            return Verdict("failed", "the tests ended without a verdict: memory, or CPU time")
        return Verdict(**json.loads(texts[verdict]))

    def _start(
        self,
        run: str,
        arguments: Mapping[str, Any],
        seconds: float,
        streams: tuple[int, int, int],
        fds: Mapping[str, int],
    ) -> _Process:
        """Start a sandbox; `fds` are the arguments that are file descriptors."""
        own = is_privileged()
        limits = {
            "AS": self.memory,
            "CPU": math.ceil(seconds) + 1,
            "FSIZE": DISK,
            "NPROC": THREADS + _OWN_PROCESSES,
            **dict.fromkeys(("CORE", "MEMLOCK", "MSGQUEUE"), 0),
        }
        job = {
            "run": run,
            "arguments": {**arguments, **fds},
            "fds": list(fds.values()),
            "backend": self.backend.name,
            "parent": os.getpid(),
            "read": dict(self.python.read),
            "devices": DEVICES,
            "site": self.python.packages,
            "disk": DISK,
            "limits": limits,
            "uid": draw_id("uid") if own else None,
            "gid": draw_id("gid") if own else None,
        }
        return _Process(self.backend, self.python, job, streams)


class _Process:
    """A process in a sandbox, with the processes around it; leaving its block kills all that are left."""

    def __init__(
        self, backend: SandboxBackend, python: Interpreter, job: dict[str, Any], streams: tuple[int, int, int]
    ) -> None:
        self.status = -1
        """Exit status, once it has ended."""
        self.ended = False
        """Whether it ended by itself."""
        self._backend, self._reports = backend, b""
        with _OpenFiles() as files:
            pipe, info = files.pipe()
            job |= {"info": info, "ready": (ready := os.dup(info))}
            try:
                file = files.holding(json.dumps(job).encode())
                self._process = subprocess.Popen(
                    backend.command(python, job, file),
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    pass_fds=(file, info, ready, *job["fds"]),
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"{backend.name} cannot be started: {error.strerror or error}") from error
            finally:
                os.close(ready)
            self._pipe = os.dup(pipe)
        os.set_blocking(self._pipe, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ended = self._process.poll() is not None
        if not self.ended:
            self._kill()
        code = self._process.wait()
        self.status = code if code >= 0 else 128 - code
        self._receive()
        os.close(self._pipe)

    def wait(self, seconds: float) -> bool:
        fd = os.pidfd_open(self._process.pid)
        try:
            return bool(_ready([fd], max(seconds, 0.0)))
        finally:
            os.close(fd)

    def check(self, errors: bytes) -> None:
        """Raise a SandboxError if the sandbox did not get as far as starting the program."""
        if b"ready" not in self._reports:
            lines = errors.decode(errors="replace").strip().splitlines() or [f"status {self.status}"]
            raise SandboxError(f"{self._backend.name} does not start a sandbox ({lines[-1][:300]})")

    def _kill(self) -> None:
        """Kill process 1 of the sandbox, so that all processes in it end before the outer one."""
        self._receive()
        found = re.search(rb'"child-pid": ?(\d+)', self._reports)
        with contextlib.suppress(OSError):
            if found is not None:
                init = int(found[1])
                fd = os.pidfd_open(init)
                try:
                    about = Path(f"/proc/{init}/stat").read_text().rpartition(")")[2].split()
                    if int(about[1]) == self._process.pid:  # its parent
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                        return
                finally:
                    os.close(fd)
        self._process.kill()  # process 1 does not exist yet, and would end with this process

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, 4096):
                self._reports += data


def _read(
    bounded: Mapping[int, int], kept: Mapping[int, int], until: float
) -> tuple[dict[int, bytes], Literal["time", "output"] | None]:
    """Read pipes to their ends; return their data, and the limit that stopped the reading, if any.

    More bytes than a limit in `bounded` stop it; for pipes in `kept`, only so many first bytes are returned.
    """
    limits = {**bounded, **kept}
    parts: dict[int, list[bytes]] = {fd: [] for fd in limits}
    sizes = dict.fromkeys(limits, 0)
    open_ = set(limits)
    stopped: Literal["time", "output"] | None = None
    while open_ & bounded.keys() and stopped is None:
        ready = _ready(list(open_), until - time.monotonic())
        for fd in ready:
            data = os.read(fd, 1 << 16)
            if not data:
                open_.remove(fd)
            parts[fd].append(data[: max(limits[fd] - sizes[fd], 0)])
            sizes[fd] += len(data)
            if fd in bounded and sizes[fd] > bounded[fd]:
                stopped = "output"
        if not ready and time.monotonic() >= until:
            stopped = "time"
    return {fd: b"".join(part) for fd, part in parts.items()}, stopped


def _ready(fds: list[int], seconds: float) -> list[int]:
    """Return the files that become readable within `seconds`."""
    poll = select.poll()  # select() does not support descriptors from 1024 on
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(seconds, 0.0) * 1000)]
