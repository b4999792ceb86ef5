"""The backend of this machine for workers in a Python that is started afresh: neither this process nor the
script that is running has a part in it.

    FreshPython    starts `python -c ...`, of this environment or of another, whose packages are others; one
                   end of a connection is its only inheritance
    run            what runs there: the target, which must be importable there by its name

A process is a group of its own, which is killed whole: what it has started ends with it.
"""

import math
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

_LINUX = sys.platform == "linux"


def start_python(
    code: str, fd: int, python: str = "", environment: Mapping[str, str] | None = None, log: Any = None
) -> subprocess.Popen[bytes]:
    """Start a Python that runs `code` and inherits the descriptor `fd`, in a session of its own, out of reach
    of Ctrl-C; to be called with `masked_signals`.

    Without `python` it is this one, which imports from the same places. What it prints goes to the file
    `log`.

    Raises:
        OSError: no process can be started.
    """
    if not python:
        python, code = sys.executable, f"import sys; sys.path[:] = {sys.path}; {code}"
    return subprocess.Popen(
        [python, "-c", code],
        pass_fds=(fd,),
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


class FreshPython(Backend):
    """Starts workers of a Python, with more in their environment."""

    def __init__(
        self,
        python: str = "",
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
        devices: Sequence[str | None] = (),
    ) -> None:
        """Start them by `python`, or that of this process. `logs` is the folder for a log each, and `devices`
        are the GPUs of each, by their names in CUDA_VISIBLE_DEVICES."""
        self._python, self._environment = python, dict(environment or {})
        self._logs, self._devices = logs, devices

    def log(self, number: int) -> Path:
        """Return where the output of a worker goes."""
        return (self._logs or Path()) / f"vllm-{number}.log"

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> ChildProcess:
        """See `Backend.spawn`."""
        environment = dict(self._environment)
        if self._devices and (device := self._devices[number]) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device

        def start(theirs: Connection) -> _GroupLeader:
            fd = theirs.fileno()
            how = f"from {__name__} import run; run({fd})", fd, self._python, environment
            if self._logs is None:
                return _GroupLeader(start_python(*how))
            self._logs.mkdir(parents=True, exist_ok=True)
            with self.log(number).open("ab") as log:
                return _GroupLeader(start_python(*how, log))

        process = ChildProcess(name, start)
        process.send((target, arguments))
        return process

    def wait(self, processes: Sequence[ChildProcess], seconds: float) -> None:
        """See `Backend.wait`."""
        Processes().wait(processes, seconds)


class _GroupLeader:
    """What `ChildProcess` requires of a process of multiprocessing."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen, self.pid = popen, popen.pid
        self.sentinel: int | None = None
        with suppress(OSError, AttributeError):  # Linux before 5.3, and macOS
            self.sentinel = os.pidfd_open(self.pid)
            weakref.finalize(self, os.close, self.sentinel)

    @property
    def exitcode(self) -> int | None:
        exited = _LINUX and os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # another thread has waited for it meanwhile
            if exited and self._popen.returncode is None and os.waitid(os.P_PID, self.pid, exited):
                self.kill()  # what it has left; once it is waited for, another group may have its number
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses where all have ended
                os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        until = time.monotonic() + (math.inf if timeout is None else timeout)
        if self.sentinel is not None:
            wait([self.sentinel], timeout)
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)


def run(fd: int) -> None:
    """Run a worker in this process, with the connection that is the descriptor `fd`."""
    os.set_inheritable(fd, False)  # what the worker starts must not have it
    leave_signals()
    channel = ChildChannel(Connection(fd), time.perf_counter())
    try:
        target, arguments = channel.receive()
    except EOFError:  # the run has ended
        return
    run_worker(channel, target, arguments)
    channel.close()
