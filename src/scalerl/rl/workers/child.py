"""The backend of this machine: workers in processes of their own, by multiprocessing."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from scalerl.rl.workers.backend import Backend, Message, Target, WorkerProcess, message, run_worker
from scalerl.rl.workers.process import follow_the_parent, masked_signals
from scalerl.rl.workers.supervision import CLOSING

_FLUSH = 10.0  # seconds in which a worker that ends waits for its last messages to be read


class Processes(Backend):
    """Starts workers in processes of this machine."""

    def __init__(
        self,
        *inherited: Any,
        devices: Sequence[str | None] = (),
        context: Any = None,
        parents: bool = False,
        outlive: float = 0.0,
    ) -> None:
        """Start workers afresh, or by another `context` of multiprocessing.

        Args:
            inherited: further arguments of every worker, such as only a child can be given.
            devices: the GPUs of each, by their names in CUDA_VISIBLE_DEVICES.
            context: of multiprocessing; "spawn" where it is None.
            parents: workers start processes of their own, by multiprocessing.
            outlive: seconds that they have once this process has exited.
        """
        self._inherited, self._devices = inherited, devices
        self._context, self._parents, self._outlive = context or get_context("spawn"), parents, outlive

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> ChildProcess:
        """See `Backend.spawn`."""
        kind = name.removeprefix("the ").partition(" ")[0]
        device = self._devices[number] if self._devices else None
        how = {"device": device, "context": self._context, "parent": self._parents}
        begin = time.perf_counter(), self._outlive, target, *self._inherited
        process = ChildProcess(kind, spawned(kind, _run, *begin, **how), self._context)
        process.name = name
        process.send(arguments)
        return process

    def wait(self, processes: Sequence[ChildProcess], seconds: float) -> None:
        """See `Backend.wait`."""
        # The sentinel too: what a process has started may hold its end of the channel open.
        ready = [one for process in processes for one in (process.channel, process.sentinel)]
        wait([one for one in ready if one is not None], seconds)


class ChildProcess(WorkerProcess):
    """A process of this machine, and one end of a connection to it.

    A pipe takes 64 KiB, and a process that is stopped or hangs takes nothing more. Messages are therefore
    sent by a thread: the driver never waits for a reader.
    """

    def __init__(self, name: str, start: Callable[[Connection], Any], context: Any = None) -> None:
        """`start` starts a process with the other end, and returns it (a `multiprocessing.Process`, say).

        Raises:
            OSError: no process can be started.
        """
        self.name = name
        self.channel, theirs = (context or get_context("spawn")).Pipe()
        with masked_signals():
            self._process = start(theirs)
        theirs.close()
        self.pid, self.placed_at = self._process.pid or 0, time.monotonic()
        self._outbox, self._ends = Outbox(self.channel), 0.0

    @property
    def sentinel(self) -> int | None:
        """What `multiprocessing.connection.wait` takes, ready once the process has exited, or None."""
        return self._process.sentinel

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
        if ended and not found:  # else at the next call
            raise self.lost(self.exit_cause())
        return found

    def kill(self) -> None:
        """See `WorkerProcess.kill`."""
        self._process.kill()
        self._process.join()
        self._outbox.close()

    def close(self, seconds: float = CLOSING) -> None:
        """See `WorkerProcess.close`; the channel is closed once all is sent."""
        self._outbox.close()
        self._ends = time.monotonic() + seconds

    def join(self) -> None:
        """See `WorkerProcess.join`."""
        self._process.join(timeout=max(self._ends - time.monotonic(), 0.0))
        self.kill()

    def exit_cause(self) -> str:
        """Return how the process ended."""
        self._process.join(timeout=10)  # its channel is closed shortly before it has ended
        status = self._process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            return f"its process was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
        return f"its process exited with status {status}"


def spawned(
    name: str,
    target: Callable[..., None],
    *arguments: Any,
    device: str | None = None,
    context: Any = None,
    parent: bool = False,
) -> Callable[[Connection], Any]:
    """Return the start of a process by multiprocessing that runs `target(connection, *arguments)`.

    `arguments` must be few: Python waits until a process has read them, even one that has exited. The process
    sees no GPU but `device`, which may name several; all that this one sees where it is None. See `Processes`
    for the others.
    """
    run = target if device is None else partial(_run_on, device, target)

    def start(theirs: Connection) -> Any:
        # A daemon must have no children; the interpreter waits at its end for all others.
        args, make = (theirs, *arguments), (context or get_context("spawn")).Process
        process = make(target=run, name=name, args=args, daemon=not parent)
        # Python starts this process with the first one of ours, and unblocks SIGINT and SIGTERM afterwards.
        resource_tracker.ensure_running()
        with masked_signals():
            process.start()
        return process

    return start


class Outbox:
    """A thread that sends what is put here through one end of a pipe, and closes that end last."""

    def __init__(self, channel: Connection) -> None:
        self._channel, self._queue = channel, queue.SimpleQueue[Any]()
        self._thread = threading.Thread(target=self._send_queued, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Queue a message; where the other side has closed the pipe it is dropped."""
        self._queue.put(ForkingPickler.dumps(message))  # pickled here, where an error has a caller

    def close(self) -> None:
        """Close the channel once all is sent."""
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
        # This process may be reading from the channel: it is closed only when this process says so.
        while self._queue.get() is not None:
            pass
        self._channel.close()


# -- in the process of a worker -----------------------------------------------------------------------------


class ChildChannel:
    """See `scalerl.rl.workers.backend.Channel`."""

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
        """Return what `select` takes: it is ready once a message has come, or the driver has closed it."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the channel once all is sent."""
        self._outbox.close()
        self._outbox.join(_FLUSH)


def _run(connection: Connection, began: float, outlive: float, target: Target, *inherited: Any) -> None:
    follow_the_parent(outlive)
    channel = ChildChannel(connection, began)
    try:
        arguments = channel.receive()
    except EOFError:  # the run has ended
        return
    run_worker(channel, target, (*arguments, *inherited))
    channel.close()


def _run_on(device: str, target: Callable[..., None], *arguments: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = device  # read when CUDA is first used, which it was not yet
    target(*arguments)
