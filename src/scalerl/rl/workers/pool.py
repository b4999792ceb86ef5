"""A pool of workers of one role: it starts and watches them, replaces lost ones, and assigns work.

    start --spawned--> placed --loaded--> started --> takes part --lost--> killed --back-off--> start ...

    add          queues a piece of work under its number
    poll         receives messages of workers, detects lost ones, starts others, and assigns waiting work
    lost         exited, silent, or past a deadline. The work waits again under its numbers and is assigned in
                 their order: the lowest number first, to the worker with the least work
    complete     a piece of work is done; this ends a series of losses in a row

A pool never waits for a worker, except in `poll` for a message of any of them. The messages to and from
workers are defined by the pools of `scalerl.rl.placement`, `scalerl.rl.verify` and `scalerl.rl.engine.vllm`.
"""

import atexit
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from scalerl.errors import ScalerlError, WorkerError
from scalerl.own_code import changed_files
from scalerl.rl.workers.backend import (
    CLOSING,
    STARTING,
    Backend,
    Message,
    PollClock,
    Target,
    WorkerLostError,
    WorkerProcess,
)
from scalerl.rl.workers.timeline import Timeline

_LOG = logging.getLogger("scalerl")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before a lost worker is restarted
NOTICE = 30.0
"""Seconds without progress after which a warning is logged, or half the timeout if that is less."""
MOST_LOSSES = 5
"""Most losses of a worker in a row, without a completed piece of work in between, before the run ends. On a
cluster, this times the number of workers is the limit for all of them together."""


def backoff(attempt: int, longest: float = _LONGEST_PAUSE) -> float:
    """Return the seconds to wait before a retry after `attempt` failed ones; they double each time."""
    # Without the bound on the exponent a day of retries ends in an OverflowError.
    return min(longest, _LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt, 20))


@dataclass(eq=False)
class PoolWorker:
    """A worker of a pool: its current process, or the time at which the next is started."""

    name: str
    number: int
    timeout: float = math.inf
    """Seconds without progress after which a started worker is lost."""
    start_timeout: float = math.inf
    """Seconds within which a process that was placed must have loaded what it needs."""
    notice: float = NOTICE
    """Seconds without progress after which a warning is logged."""
    process: WorkerProcess | None = None
    progress_at: float = math.inf
    """Time of its last progress, once it has started."""
    noticed: bool = False
    """Whether its lack of progress was logged."""
    started: bool = False
    """Whether it has loaded what it needs."""
    taking_part: bool = False
    in_flight: dict[int, Any] = field(default_factory=dict)
    """Work assigned to it, by number."""
    losses: int = 0
    """Number of processes lost in a row."""
    start_at: float = 0.0
    start_by: float = math.inf
    """Time by which it must have started."""
    clock: PollClock = field(default_factory=PollClock)
    """The clock of all deadlines: the pool's."""

    @property
    def where(self) -> str:
        """Name and node, for messages."""
        return self.process.where if self.process else self.name

    @property
    def deadline(self) -> tuple[str, float]:
        """A name for messages of what must make progress, and the seconds that it may make none."""
        return self.where, self.timeout

    def note_progress(self) -> None:
        """Record progress; the deadline counts from now on."""
        self.progress_at, self.noticed = self.clock.now(), False

    def check(self) -> None:
        """Check the deadlines, and log a lack of progress once.

        Neither the wait for resources, as a cluster may be full for long, nor work without a timeout has one.

        Raises:
            WorkerLostError: a deadline has passed.
        """
        now = self.clock.now()
        if self.progress_at < math.inf:
            (what, timeout), still = self.deadline, now - self.progress_at
            if still >= timeout:
                raise WorkerLostError(f"{what} has made no progress for {timeout:g} s")
            notice = min(self.notice, timeout / 2)
            if still >= notice and max(self.notice, timeout) < math.inf and not self.noticed:
                self.noticed = True
                text = "%s has made no progress for %g s; its process is replaced after %g s"
                _LOG.warning(text, what, notice, timeout)
        elif self.process and self.process.placed_at:
            self.start_by = min(self.start_by, now + self.start_timeout)
            if now > self.start_by:
                raise self.process.lost(f"it has not started within {self.start_timeout:g} s")

    def release(self) -> dict[int, Any]:
        """Kill the process and return its work; the next process is started after a back-off."""
        if self.process:
            # A process that hangs must be killed, or its resources are never free for the next.
            self.process.kill()
        self.process, self.started, self.taking_part = None, False, False
        self.progress_at = self.start_by = math.inf
        self.start_at = time.monotonic() + backoff(self.losses)
        self.losses += 1
        work, self.in_flight = self.in_flight, {}
        return work


W = TypeVar("W", bound=PoolWorker)


class WorkerPool(ABC, Generic[W]):
    """The base class of pools of workers of one role, which the driver polls.

    Raises (by `poll`):
        WorkerError: workers are lost too often, or none is left and no new one has started in time.
        ScalerlError: an error of a worker that any other worker would raise too.
    """

    noun: ClassVar[str]
    """The word for a worker in messages."""
    role: ClassVar[str]
    """The role of workers in timeline.jsonl."""
    capacity: ClassVar[float] = math.inf
    """Most pieces of work that a worker has at a time."""
    no_progress: ClassVar[frozenset[str]] = frozenset()
    """Kinds of messages that do not count as progress."""

    def __init__(
        self,
        workers: Sequence[W],
        backend: Backend,
        target: Target,
        arguments: Sequence[Any] = (),
        none_left: float = math.inf,
        events: Timeline | None = None,
    ) -> None:
        """Make a pool whose workers run `target(channel, *arguments)`. It may be without workers for at most
        `none_left` seconds. `events` records which workers take part and which are lost."""
        self._workers = list(workers)
        self._backend, self._target, self._arguments = backend, target, arguments
        self._waiting: dict[int, Any] = {}
        """Unassigned work, by number."""
        self._none_left, self._events = none_left, events
        self._clock, self._none_since, self._losses = PollClock(), math.inf, 0
        for worker in workers:
            worker.clock = self._clock
        self._any_started = self._ready = self._ended = False
        self._spawning = threading.Lock()
        self.lost: list[str] = []
        """The message of each loss."""

    # -- for subclasses ------------------------------------------------------------------------------------

    def _send(self, worker: W, number: int, work: Any) -> None:
        """Send a piece of work to a worker."""
        assert worker.process is not None
        worker.process.send((number, work))

    @abstractmethod
    def _received(self, worker: W, message: Message) -> None:
        """Handle a message of a worker."""

    def _started(self, worker: W, value: Any) -> None:
        """Handle that a worker has started and sent `value`; by default it takes part."""
        self._take_part(worker)

    def _failed(self, worker: W, error: ScalerlError) -> None:
        """Raise the error of a worker; on a cluster, once any worker has started, only lose the worker."""
        if self._backend.elsewhere and self._any_started and worker.process:
            raise worker.process.lost(str(error))
        raise error

    def _fate(self, work: Mapping[int, Any]) -> str:
        """Return what happens to a lost worker and its work, for the message."""
        return "; it is started again"

    def _reassign(self, worker: W, work: Mapping[int, Any]) -> None:
        """Queue the work of a lost worker again."""
        self._waiting |= work

    # -- the pool --------------------------------------------------------------------------------------------

    @property
    def alive(self) -> int:
        """Number of workers that take part."""
        return sum(worker.taking_part for worker in self._workers)

    def start(self) -> None:
        """Start all processes, without waiting for them."""
        if self._backend.daemons:
            # At its exit Python would end them by SIGTERM, which they ignore.
            atexit.register(self.kill)
        try:
            for worker in self._workers:
                self._spawn(worker)
        except BaseException:
            self.kill()
            raise

    def add(self, number: int, work: Any) -> None:
        """Assign a piece of work to a worker, at once or in its turn."""
        self._waiting[number] = work
        self._assign_waiting()

    def complete(self, worker: W, number: int) -> Any:
        """Record that a worker has done a piece of work, and return the work."""
        self._losses = worker.losses = 0
        return worker.in_flight.pop(number)

    def poll(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for messages; handle them, replace lost workers, and assign work."""
        self._clock.poll()
        processes = [worker.process for worker in self._workers if worker.process]
        if len(processes) < len(self._workers):
            timeout = min(timeout, _FIRST_PAUSE)  # a worker may have to be restarted meanwhile
        if processes:
            self._backend.wait(processes, timeout)
            self._clock.poll()
        elif timeout:
            time.sleep(timeout)
        for worker in self._workers:
            self._attempt(worker, self._receive)
            self._attempt(worker, lambda worker: worker.check())
            if worker.process is None and time.monotonic() >= worker.start_at:
                self._spawn(worker)
        self._assign_waiting()
        self._check_any_left()

    def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Poll until `condition` holds, for at most `seconds`; return whether it does."""
        until = time.monotonic() + seconds
        while not condition():
            left = until - time.monotonic()
            self.poll(min(max(left, 0.0), _FIRST_PAUSE))
            if left <= 0:
                break
        return condition()

    def wait_until_started(self) -> None:
        """Wait until all workers take part.

        Raises:
            WorkerError: they do not take part within `none_left` seconds.
        """
        if not self.wait_for(lambda: self.alive == len(self._workers), self._none_left):
            why = self.lost[-1] if self.lost else "they are not ready in time"
            raise WorkerError(f"the {self.noun}s do not start: {why}")
        self._ready = True

    def close(self) -> None:
        """Stop the processes; work in flight is lost."""
        atexit.unregister(self.kill)
        self._ended = True
        processes = [worker.process for worker in self._workers if worker.process]
        for worker in self._workers:
            if worker.process:  # all exit concurrently; one that is still loading may not notice the close
                worker.process.close(CLOSING if worker.started else STARTING)
        for process in processes:
            process.join()
        for worker in self._workers:
            worker.process, worker.started, worker.taking_part = None, False, False
            worker.in_flight = {}

    def kill(self) -> None:
        """Kill the processes, and start no more; any thread may call this."""
        atexit.unregister(self.kill)
        with self._spawning:
            self._ended = True
        for process in [worker.process for worker in self._workers]:
            if process:
                process.kill()

    # -- parts of it -----------------------------------------------------------------------------------------

    def _spawn(self, worker: W) -> None:
        begin = worker.name, worker.number, self._target
        try:
            with self._spawning:
                if not self._ended:
                    worker.process = self._backend.spawn(*begin, *self._arguments)
                    worker.process.clock = self._clock
        except OSError as error:  # no memory, or too many processes
            why = f"{worker.name} is lost: no process can be started ({error.strerror or error})"
            self._lose(worker, WorkerLostError(why))

    def _receive(self, worker: W) -> None:
        assert worker.process is not None
        for message in worker.process.receive():
            if message.kind == "started":
                worker.started = self._any_started = True
                worker.note_progress()
                self._started(worker, message.value)
            elif message.kind == "failed":
                self._failed(worker, message.value)
            elif message.kind == "lost":
                raise worker.process.lost(message.value)
            else:
                self._received(worker, message)
            if worker.progress_at < math.inf and message.kind not in self.no_progress:
                worker.note_progress()

    def _take_part(self, worker: W, what: str = "takes part") -> None:
        """Let a worker be assigned work from now on."""
        worker.taking_part = True
        if self._events and worker.process:
            node = worker.process.node
            self._events.event("arrived", self.role, worker.name, node, f"{worker.where} {what}")

    def _assign_waiting(self) -> None:
        """Assign waiting work by number, each piece to the participating worker with the least work."""
        # Without a capacity, wait until all workers have started once: the first would get all the work.
        if self.capacity == math.inf and not all(
            worker.taking_part or worker.losses for worker in self._workers
        ):
            return
        for number in sorted(self._waiting):
            free = [w for w in self._workers if w.taking_part and len(w.in_flight) < self.capacity]
            if not free:
                return
            worker = min(free, key=lambda worker: len(worker.in_flight))
            worker.in_flight[number] = work = self._waiting.pop(number)
            self._send(worker, number, work)

    def _attempt(self, worker: W, do: Callable[[W], None]) -> None:
        if worker.process is None:  # lost in an earlier step of this poll
            return
        try:
            do(worker)
        except WorkerLostError as error:
            self._lose(worker, error)

    def _lose(self, worker: W, error: WorkerLostError) -> None:
        if self._ended:
            return
        self.lost.append(why := str(error))
        self._losses += 1
        node = worker.process.node if worker.process else ""
        work = worker.release()
        self._check_losses(worker, error)
        if self._events:
            self._events.event("lost", self.role, worker.name, node, why, error.at)
        _LOG.warning("%s%s", why, self._fate(work))
        warn_of_changed(changed_files())  # only the next process loads the new code
        self._reassign(worker, work)

    def _check_losses(self, worker: W, error: WorkerLostError) -> None:
        if self._backend.elsewhere:
            if self._losses > MOST_LOSSES * len(self._workers):
                raise WorkerError(f"{self._losses} {self.noun}s were lost with no result in between: {error}")
        elif worker.losses > MOST_LOSSES:
            raise WorkerError(f"{error}, {worker.losses} times in a row (out of memory?)")

    def _check_any_left(self) -> None:
        if self.alive or not self._ready:
            self._none_since = math.inf
            return
        # The time of the first poll without workers; later polls must not change it.
        self._none_since = min(self._none_since, self._clock.now())
        if self._clock.now() - self._none_since > self._none_left:
            why = self.lost[-1] if self.lost else "none has started"
            raise WorkerError(f"no {self.noun} is left, and none came within {self._none_left:g} s: {why}")


def warn_of_changed(files: Iterable[str]) -> None:
    """Warn of files of custom code that a process loads, or has loaded, otherwise than those before it."""
    for file in files:
        _LOG.warning("%s has changed since the run began: the next process goes by the new code", file)
