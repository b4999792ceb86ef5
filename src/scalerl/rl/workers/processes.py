"""The backends of this machine: workers in processes, each with one end of a connection.

Processes      by multiprocessing; workers can inherit objects that only a child can get. They are forked from
               a process that has imported torch and has not used it: a worker starts in a tenth of a second
               instead of five, and shares the memory of imported modules
FreshPython    by `python -c ...`, in this environment or another one with other packages. The worker shares
               nothing with this process or the running script. It leads its own process group, which is
               killed as a whole, so that processes that it started end with it
"""

from __future__ import annotations

import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from multiprocessing import Pipe, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from scalerl.rl.workers.backend import CLOSING, Backend, Message, Target, WorkerProcess, message, run_worker
from scalerl.rl.workers.signals import follow_the_parent, leave_signals, masked_signals

_FLUSH = 10.0  # longest wait, in seconds, of a worker that ends until its last messages are read
_VISIBLE, _LINUX = "CUDA_VISIBLE_DEVICES", sys.platform == "linux"
_PRELOAD = "scalerl.rl.workers.preload"
_READ_AT_IMPORT = re.compile(
    "(OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|HF|HUGGINGFACE|TRANSFORMERS|XDG|LD|MALLOC)_|HOME$"
)
"""Environment variables that libraries read at import; the fork server's are those at its start."""


def _read_at_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _READ_AT_IMPORT.match(name)}


_read_by_the_server = cache(_read_at_import)  # first called when the server is started


def start_fork_server(*modules: str) -> bool:
    """Start the process that workers are forked from, unless it runs, without waiting for its imports.

    Returns whether the variables that libraries read at import still have the values of its start. It imports
    torch and `modules`, and ends with this process and the last of its workers.
    """
    # Otherwise Python would start the tracker with our first process, and then unblock SIGINT and SIGTERM.
    resource_tracker.ensure_running()
    loaded_with = _read_by_the_server()
    forkserver.set_forkserver_preload([*modules, _PRELOAD])
    with masked_signals():  # the server keeps the mask; its workers unmask the signals
        forkserver.ensure_running()
    return loaded_with == _read_at_import()


def _device(devices: Sequence[str | None], number: int) -> dict[str, str]:
    return {_VISIBLE: device} if devices and (device := devices[number]) is not None else {}


class Processes(Backend):
    """The backend that starts workers by multiprocessing, in this process's environment at the time."""

    def __init__(
        self,
        *inherited: Any,
        devices: Sequence[str | None] = (),
        preload: str = "",
        parents: bool = False,
        outlive: float = 0.0,
    ) -> None:
        """Fork workers from the fork server, or spawn them if the environment has changed since its start.

        Args:
            inherited: further arguments of every worker, which may be objects that only a child can get.
            devices: the GPUs of each worker, by name in CUDA_VISIBLE_DEVICES; None for all GPUs.
            preload: module that the fork server imports if this starts it; by default that of the first
                target.
            parents: whether workers start processes of their own by multiprocessing.
            outlive: seconds for which workers live on after this process has exited.
        """
        self._inherited, self._devices = inherited, devices
        self._preload, self._outlive = preload, outlive
        # A daemon must not have children; for all other processes the interpreter waits at its exit.
        self.daemons = not parents

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> ChildProcess:
        """See `Backend.spawn`."""
        forks = start_fork_server(self._preload or target.__module__)
        context: Any = get_context("forkserver" if forks else "spawn")
        ours, theirs = context.Pipe()
        environment = {**os.environ, **_device(self._devices, number)}
        # Few arguments: Python waits until a process has read them, even if it has exited.
        begin = theirs, time.perf_counter(), environment, self._outlive, *self._inherited
        kind = name.removeprefix("the ").partition(" ")[0]
        process = context.Process(target=_run, name=kind, args=begin, daemon=self.daemons)
        # A fork inherits the server's mask; masking here would delay a stop until the server's imports end.
        with theirs, nullcontext() if forks else masked_signals():
            try:
                process.start()
            except EOFError as error:
                raise OSError("the process that it is forked from has exited") from error
        return ChildProcess(name, process, ours, (target, arguments))


def start_python(
    code: str, fd: int, python: str = "", environment: Mapping[str, str] | None = None, log: Any = None
) -> subprocess.Popen[bytes]:
    """Start a Python that runs `code` and inherits the descriptor `fd`; to be called with `masked_signals`.

    It has its own session, so that Ctrl-C does not reach it. Without `python` it is this process's Python,
    with the same import path. Its output goes to the file `log`.

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
    """The backend that starts workers as fresh Python processes, with additional environment variables."""

    def __init__(
        self,
        python: str = "",
        environment: Mapping[str, str] | None = None,
        logs: Path | None = None,
        devices: Sequence[str | None] = (),
    ) -> None:
        """Start workers by `python`, by default that of this process. `logs` is the folder of their logs;
        `devices` are as in `Processes`."""
        self._python, self._environment = python, dict(environment or {})
        self._logs, self._devices = logs, devices

    def log(self, number: int) -> Path:
        """Return the log file of a worker."""
        return (self._logs or Path()) / f"vllm-{number}.log"

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> ChildProcess:
        """See `Backend.spawn`."""
        environment, log = self._environment | _device(self._devices, number), nullcontext()
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self.log(number).open("ab")
        ours, theirs = Pipe()
        with theirs, log as file, masked_signals():
            fd = theirs.fileno()
            code = f"from {__name__} import run; run({fd})"
            leader = _GroupLeader(start_python(code, fd, self._python, environment, file))
        return ChildProcess(name, leader, ours, (target, arguments))


class _GroupLeader:
    """A process and its group, with the methods of `multiprocessing.Process` that `ChildProcess` needs."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen, self.pid = popen, popen.pid
        self.sentinel: int | None = None
        with suppress(OSError, AttributeError):  # Linux before 5.3, and macOS
            self.sentinel = os.pidfd_open(self.pid)
            weakref.finalize(self, os.close, self.sentinel)

    @property
    def exitcode(self) -> int | None:
        exited = _LINUX and os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):  # another thread has reaped it meanwhile
            if exited and self._popen.returncode is None and os.waitid(os.P_PID, self.pid, exited):
                self.kill()  # the rest of its group, before it is reaped and its number may be reused
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses if all have exited
                os.killpg(self.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        until = time.monotonic() + (math.inf if timeout is None else timeout)
        if self.sentinel is not None:
            wait([self.sentinel], timeout)
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)


class ChildProcess(WorkerProcess):
    """A process on this machine, and one end of a connection to it.

    A pipe holds 64 KiB, and a process that is stopped or hangs reads no more. A thread therefore sends the
    messages, so that the driver never waits for a reader.
    """

    def __init__(self, name: str, process: Any, channel: Connection, first: Any) -> None:
        """Send the message `first` to a started `multiprocessing.Process`, or an object with its methods.

        The process is killed if `first` cannot be pickled."""
        self.name, self._process, self.channel = name, process, channel
        self.pid, self.placed_at = process.pid or 0, time.monotonic()
        self._outbox, self._ends = Outbox(channel), 0.0
        try:
            self.send(first)
        except BaseException:
            self.kill()
            raise

    def watched(self) -> list[int]:
        """See `WorkerProcess.watched`."""
        # The sentinel too: children of the process may keep its end of the channel open.
        sentinel = self._process.sentinel
        return [self.channel.fileno()] if sentinel is None else [self.channel.fileno(), sentinel]

    def send(self, message: Any) -> None:
        """See `WorkerProcess.send`."""
        self._outbox.put(message)

    def receive(self) -> list[Message]:
        """See `WorkerProcess.receive`."""
        found: list[Message] = []
        try:
            while self.channel.poll():
                found.append(self.channel.recv())
        except (EOFError, OSError):
            ended = True
        else:
            ended = not self._process.is_alive() and not self.channel.poll()
        if ended and not found:  # otherwise raised by the next call
            raise self.lost(self._exit_cause())
        return found

    def kill(self) -> None:
        """See `WorkerProcess.kill`."""
        self._process.kill()
        self._process.join()
        self._outbox.close()

    def close(self, seconds: float = CLOSING) -> None:
        """See `WorkerProcess.close`; the channel is closed once all messages are sent."""
        self._outbox.close()
        self._ends = time.monotonic() + seconds

    def join(self) -> None:
        """See `WorkerProcess.join`."""
        self._process.join(timeout=max(self._ends - time.monotonic(), 0.0))
        self.kill()

    def _exit_cause(self) -> str:
        self._process.join(timeout=10)  # its channel closes shortly before it has exited
        status = self._process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            return f"its process was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
        return f"its process exited with status {status}"


class Outbox:
    """A thread that sends queued messages through one end of a pipe, and finally closes that end."""

    def __init__(self, channel: Connection) -> None:
        self._channel, self._queue = channel, queue.SimpleQueue[Any]()
        self._thread = threading.Thread(target=self._send_queued, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Queue a message, which is dropped if the other side has closed the pipe."""
        self._queue.put(ForkingPickler.dumps(message))  # pickled here, so that the caller gets the error

    def close(self) -> None:
        """Close the channel once all messages are sent."""
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Wait until the channel is closed."""
        self._thread.join(seconds)

    def _send_queued(self) -> None:
        with suppress(OSError):
            while (message := self._queue.get()) is not None:
                self._channel.send_bytes(message)
            self._channel.close()
            return
        # This process may still be reading from the channel, so it is closed only by `close`.
        while self._queue.get() is not None:
            pass
        self._channel.close()


# -- in the process of a worker -----------------------------------------------------------------------------


class ChildChannel:
    """The channel of a `ChildProcess`; see `scalerl.rl.workers.backend.Channel`."""

    def __init__(self, connection: Connection, began: float) -> None:
        self._connection, self._outbox, self.began = connection, Outbox(connection), began

    def receive(self) -> Any:
        """See `Channel.receive`."""
        try:
            return self._connection.recv()
        except OSError as error:
            raise EOFError from error

    def send(self, kind: str, value: Any = None) -> None:
        """See `Channel.send`."""
        self._outbox.put(message(kind, value))

    def fileno(self) -> int:
        """Return the descriptor for `select`: ready once there is a message or the driver has closed it."""
        return self._connection.fileno()

    def run(self, *inherited: Any) -> None:
        """Run the worker that the first message names, and flush its messages at the end."""
        try:
            target, arguments = self.receive()
        except EOFError:  # the run has ended
            return
        run_worker(self, target, (*arguments, *inherited))
        self._outbox.close()
        self._outbox.join(_FLUSH)


def _run(
    connection: Connection, began: float, environment: Mapping[str, str], outlive: float, *inherited: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)  # still in time for CUDA, which reads it at its first use
    follow_the_parent(outlive)
    ChildChannel(connection, began).run(*inherited)


def run(fd: int) -> None:
    """Run a worker of `FreshPython` in this process, over the connection with the descriptor `fd`."""
    os.set_inheritable(fd, False)  # processes that the worker starts must not inherit it
    leave_signals()
    ChildChannel(Connection(fd), time.perf_counter()).run()
