"""The backend of this machine for workers with the Python of another environment, whose packages are others.

    OtherPython    starts `python -c ... FD`, with one end of a connection as its only inheritance
    run            what runs there: the target, which must be importable there by its name

A process is a group of its own, which is killed whole: what it has started ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from scalerl.rl.workers.backend import Backend, Target, run_worker
from scalerl.rl.workers.child import ChildChannel, ChildProcess, Processes
from scalerl.rl.workers.process import leave_signals

_RUN = "from scalerl.rl.workers.other_python import run; run()"


class OtherPython(Backend):
    """Starts workers of a Python, with more in their environment, and a log each."""

    def __init__(
        self, python: str, environment: Mapping[str, str], logs: Path, devices: Sequence[str | None] = ()
    ) -> None:
        """`devices` are the GPUs of each worker, by their names in CUDA_VISIBLE_DEVICES."""
        self._python, self._environment, self._logs, self._devices = python, environment, logs, devices

    def log(self, number: int) -> Path:
        """Return where the output of a worker goes."""
        return self._logs / f"vllm-{number}.log"

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> ChildProcess:
        """See `Backend.spawn`."""
        environment = {**os.environ, **self._environment}
        if self._devices and (device := self._devices[number]) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        self._logs.mkdir(parents=True, exist_ok=True)

        def start(theirs: Connection) -> _GroupLeader:
            with self.log(number).open("ab") as log:
                return _GroupLeader([self._python, "-c", _RUN], theirs, environment, log)

        process = ChildProcess(name, start)
        process.send((target, arguments))
        return process

    def wait(self, processes: Sequence[ChildProcess], seconds: float) -> None:
        """See `Backend.wait`."""
        Processes().wait(processes, seconds)


class _GroupLeader:
    """What `ChildProcess` requires of a process of multiprocessing."""

    def __init__(
        self, command: list[str], theirs: Connection, environment: Mapping[str, str], log: Any
    ) -> None:
        fd = theirs.fileno()
        self._popen = subprocess.Popen(
            [*command, str(fd)],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self.sentinel)

    @property
    def exitcode(self) -> int | None:
        exited = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self._popen.returncode is None and os.waitid(os.P_PID, self.pid, exited):
            self.kill()  # what it has left; once it is waited for, another group may have its number
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        wait([self.sentinel], timeout)
        self.is_alive()


def run() -> None:
    """Run a worker in this process, with the connection of the number that is the first argument."""
    leave_signals()
    channel = ChildChannel(Connection(int(sys.argv[1])), time.perf_counter())
    try:
        target, arguments = channel.receive()
    except EOFError:  # the run has ended
        return
    run_worker(channel, target, arguments)
    channel.close()
