"""What a worker pool requires of the place where its workers run: spawn, send, receive, kill.

    driver   WorkerProcess.send ----> Channel.receive   worker
             WorkerProcess.receive <- Channel.send

The backends are those of `scalerl.rl.workers.processes` (this machine) and `scalerl.rl.workers.ray.backend`
(Ray actors).
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, ClassVar, NamedTuple, Protocol

from scalerl.errors import ScalerlError, WorkerError, brief_error

CLOSING, STARTING = 10.0, 2.0
"""Seconds in which a worker is to exit by itself before it is killed; and one that has not started yet."""
_POLLING = 1.5  # seconds between two polls, beyond which the driver did something else


class WorkerLostError(WorkerError):
    """A worker has exited or passed a deadline; the text names it and the cause. Another can replace it."""

    # Defaults, as unpickling passes the message alone and restores the rest from __dict__.
    def __init__(self, message: str, who: str = "", node: str = "") -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, time.time()


class ActorLostError(WorkerLostError):
    """An actor was lost, perhaps with its node: the worker in it need not have failed."""


class PollClock:
    """Stands still while the driver does not poll: a worker's silence counts only while it does.

    What was sent while the driver did something else may not be here at once, as a result in the store of
    another node is only fetched on request; and all processes of a suspended job are silent.
    """

    def __init__(self) -> None:
        self._polled_at, self._unpolled = time.monotonic(), 0.0

    def poll(self) -> None:
        """Note that the driver polls."""
        before, self._polled_at = self._polled_at, time.monotonic()
        self._unpolled += max(self._polled_at - before - _POLLING, 0.0)

    def now(self) -> float:
        """Return seconds since an arbitrary time."""
        return time.monotonic() - self._unpolled


class Message(NamedTuple):
    """What a worker sends.

    The pool handles four kinds itself: "started", "beat" (a heartbeat with progress), "failed" (value: an
    error that would come again in any other process) and "lost" (value: why this process cannot go on).
    """

    kind: str
    value: Any = None
    at: float = 0.0
    """When it was sent, in Unix seconds by the worker's clock."""


class Channel(Protocol):
    """A worker's end of the connection to its driver."""

    began: float
    """When its process was started (`time.perf_counter` of its machine)."""

    def receive(self) -> Any:
        """Return the next message of the driver; wait for it.

        Raises:
            EOFError: the driver has closed the channel.
        """
        ...

    def send(self, kind: str, value: Any = None) -> None:
        """Send a message; waits for nothing, and may be called by any thread."""
        ...


Target = Callable[..., None]
"""What a worker runs: `target(channel, *arguments)`, importable by its name."""


class WorkerProcess(ABC):
    """A worker's process as the driver sees it. No method waits for the worker."""

    name: str
    node: str = ""
    """Where it runs, for messages; empty on this machine."""
    pid: int = 0
    placed_at: float = 0.0
    """When its process was started (`time.monotonic`); 0 while it waits for room."""
    clock: PollClock
    """That of its heartbeats: the pool's, once it is in one."""

    def watched(self) -> list[int]:
        """Return what `select` takes: ready once there is something to receive. Without any it is polled."""
        return []

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a message; to a process that has exited it is dropped."""

    @abstractmethod
    def receive(self) -> list[Message]:
        """Return the messages that have come.

        Raises:
            WorkerLostError: the process has exited, or gave no heartbeat.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill it now."""

    def close(self, seconds: float = CLOSING) -> None:
        """Have it exit by itself within `seconds` from now; `join` waits for that."""
        self.kill()

    def join(self) -> None:  # noqa: B027
        """Wait for the end of a process that was closed, and kill it after its time."""

    @property
    def where(self) -> str:
        """Its name and its node, for messages."""
        return f"{self.name} on {self.node}" if self.node else self.name

    def lost(self, why: str, error: type[WorkerLostError] = WorkerLostError) -> WorkerLostError:
        """Return the error for its loss."""
        return error(f"{self.where} is lost: {why}", self.name, self.node)


class Backend(ABC):
    """Starts processes of workers."""

    elsewhere: ClassVar[bool] = False
    """Whether the replacement of a lost worker may run on another machine than the lost one."""
    daemons: bool = False
    """Whether processes are daemons of multiprocessing."""

    @abstractmethod
    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> WorkerProcess:
        """Start worker `number` of a pool, or request it where there is no room yet.

        Raises:
            OSError: no process can be started.
        """

    def wait(self, processes: Sequence[Any], seconds: float) -> None:
        """Return when one of the processes has something to receive, and after `seconds` at the latest."""
        wait([fd for process in processes for fd in process.watched()], seconds)


def run_worker(channel: Channel, target: Target, arguments: Sequence[Any]) -> None:
    """Run a worker until it returns or the channel is closed, and report what it raises."""
    try:
        target(channel, *arguments)
    except ScalerlError as error:
        channel.send("failed", error)
    except (EOFError, BrokenPipeError):  # the run has ended
        pass
    except Exception as error:  # out of memory, say: another process may do better
        traceback.print_exc()  # here, as the driver is sent one line of it
        channel.send("lost", brief_error(error))


def message(kind: str, value: Any = None) -> Message:
    """Return a message that is sent now."""
    return Message(kind, value, time.time())
