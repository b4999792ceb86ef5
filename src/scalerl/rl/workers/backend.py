"""The interface of a worker pool to its backend, which runs the workers: spawn, send, receive, kill.

    driver   WorkerProcess.send ----> Channel.receive   worker
             WorkerProcess.receive <- Channel.send

Backends are in `scalerl.rl.workers.processes` (this machine) and `scalerl.rl.workers.ray.backend` (actors).
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, ClassVar, NamedTuple, Protocol

from scalerl.errors import ScalerlError, WorkerError, brief_error

CLOSING, STARTING = 10.0, 2.0
"""Seconds that a worker has to exit before it is killed: after its start, and before it."""
_POLLING = 1.5  # a longer interval between two polls, in seconds, means that the driver was busy elsewhere


class WorkerLostError(WorkerError):
    """A worker has exited or passed a deadline, as its text says; another worker can replace it."""

    # With defaults, because unpickling passes only the message and restores the rest from __dict__.
    def __init__(self, message: str, who: str = "", node: str = "") -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, time.time()


class ActorLostError(WorkerLostError):
    """An actor was lost, perhaps with its node; the worker in it may not have failed."""


class PollClock:
    """A clock that stands still while the driver does not poll, and so does not count a worker's silence.

    Messages sent while the driver was busy elsewhere may not arrive at once: a result in the store of another
    node is fetched only on request. And in a suspended job all processes are silent.
    """

    def __init__(self) -> None:
        self._polled_at, self._unpolled = time.monotonic(), 0.0

    def poll(self) -> None:
        """Record that the driver polls."""
        before, self._polled_at = self._polled_at, time.monotonic()
        self._unpolled += max(self._polled_at - before - _POLLING, 0.0)

    def now(self) -> float:
        """Return seconds since an arbitrary time."""
        return time.monotonic() - self._unpolled


class Message(NamedTuple):
    """A message from a worker.

    The pool handles four kinds itself: "started", "beat" (a heartbeat with progress), "failed" (value: an
    error that any other process would raise too) and "lost" (value: why this process cannot continue).
    """

    kind: str
    value: Any = None
    at: float = 0.0
    """Time at which it was sent, in Unix seconds by the worker's clock."""


class Channel(Protocol):
    """A worker's end of the connection to its driver."""

    began: float
    """Time at which its process was started (`time.perf_counter` of its machine)."""

    def receive(self) -> Any:
        """Wait for the next message of the driver, and return it.

        Raises:
            EOFError: the driver has closed the channel.
        """
        ...

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message without waiting; any thread may call this."""
        ...


Target = Callable[..., None]
"""The function that a worker runs, `target(channel, *arguments)`; it must be importable by name."""


class WorkerProcess(ABC):
    """A worker's process as the driver sees it. No method waits for the worker."""

    name: str
    node: str = ""
    """Its node, for messages; empty on this machine."""
    pid: int = 0
    placed_at: float = 0.0
    """Time at which its process was started (`time.monotonic`); 0 while it waits for resources."""
    clock: PollClock
    """The clock of its heartbeats: that of its pool."""

    def watched(self) -> list[int]:
        """Return descriptors for `select` that are ready once there is a message; if empty, it is polled."""
        return []

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a message, which is dropped if the process has exited."""

    @abstractmethod
    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            WorkerLostError: the process has exited, or its heartbeat has timed out.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill the process now."""

    def close(self, seconds: float = CLOSING) -> None:
        """Ask the process to exit within `seconds` from now; `join` waits for that."""
        self.kill()

    def join(self) -> None:  # noqa: B027
        """Wait until a closed process has exited, and kill it after its time."""

    @property
    def where(self) -> str:
        """Its name and node, for messages."""
        return f"{self.name} on {self.node}" if self.node else self.name

    def lost(self, why: str, error: type[WorkerLostError] = WorkerLostError) -> WorkerLostError:
        """Return the error that reports its loss."""
        return error(f"{self.where} is lost: {why}", self.name, self.node)


class Backend(ABC):
    """The interface of backends, which start processes of workers."""

    elsewhere: ClassVar[bool] = False
    """Whether the replacement of a lost worker may run on another machine than the lost one."""
    daemons: bool = False
    """Whether processes are daemons of multiprocessing."""

    @abstractmethod
    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> WorkerProcess:
        """Start worker `number` of a pool, or request it if there are no free resources yet.

        Raises:
            OSError: no process can be started.
        """

    def wait(self, processes: Sequence[Any], seconds: float) -> None:
        """Wait up to `seconds` until one of the processes has a message."""
        wait([fd for process in processes for fd in process.watched()], seconds)


def run_worker(channel: Channel, target: Target, arguments: Sequence[Any]) -> None:
    """Run a worker until it returns or the channel closes, and report errors."""
    try:
        target(channel, *arguments)
    except ScalerlError as error:
        channel.send("failed", error)
    except (EOFError, BrokenPipeError):  # the run has ended
        pass
    except Exception as error:  # such as out of memory, which another process may not run into
        traceback.print_exc()  # the driver gets only one line
        channel.send("lost", brief_error(error))


def message(kind: str, value: Any = None) -> Message:
    """Return a message with the current time."""
    return Message(kind, value, time.time())
