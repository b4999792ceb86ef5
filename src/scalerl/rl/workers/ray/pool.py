"""A pool of actors of one role, requested again with back-off where they are lost.

    requested --room--> placed --model or task loaded--> started --> takes part --lost--> requested, later

A pool polls its workers, receives what they return, and ends the run where they are lost again and again, or
where none is left. What a worker does once it has started is for the pools of `scalerl.rl.placement.ray`.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import ray

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.config.cluster import ClusterTimeouts
from scalerl.rl.workers.ray.actors import LostError, SupervisedActor, gather, value_of
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import FIRST_PAUSE, PollClock, backoff

_LOG = logging.getLogger("scalerl")
MOST_LOSSES = 5
"""Workers that may be lost for each there is, with no result in between, before the run ends."""


@dataclass(eq=False)
class ActorWorker:
    """A worker of a pool: the actor that has its place, or when the next is requested."""

    name: str
    timeouts: ClusterTimeouts
    start: Callable[[], tuple[Any, Any]]
    """Requests an actor; returns its handle and the call that starts it."""
    actor: SupervisedActor | None = None
    placing: Any = None
    """The call that returns once there is room for it."""
    starting: Any = None
    call: Any = None
    """The call of a started actor that is waited for."""
    taking_part: bool = False
    losses: int = 0
    """Actors lost in a row with no result."""
    request_at: float = 0.0
    placed_at: float = 0.0
    called_at: float = 0.0

    def request(self) -> SupervisedActor:
        """Request an actor, which comes when there is room."""
        # Both calls are queued at once: the actor begins to load as soon as it has a place.
        handle, self.starting = self.start()
        self.placing = handle.where.remote()
        self.actor = SupervisedActor(self.name, handle, self.timeouts.heartbeat)
        return self.actor

    def placed(self, where: tuple[str, int]) -> None:
        """Note its node and process: it begins to load."""
        assert self.actor is not None
        self.actor.placed(where)
        self.placing, self.placed_at = None, time.monotonic()

    def started(self) -> None:
        """Note that it has loaded."""
        self.starting = None

    def calls(self) -> list[Any]:
        """Return the calls that are waited for."""
        return [ref for ref in (self.placing, self.starting, self.call) if ref is not None]

    def excuse(self, seconds: float) -> None:
        """Leave out of all deadlines a time in which the driver did not poll."""
        self.placed_at += seconds
        self.called_at += seconds

    def check(self) -> None:
        """Check heartbeat and deadlines. Waiting for room has no deadline: the cluster may be full for long.

        Raises:
            LostError: one has passed, or the actor has died.
        """
        assert self.actor is not None
        if self.placing is not None:
            return
        if self.starting is None:
            self.check_work(self.actor)
            return
        self.actor.check_life()
        if time.monotonic() - self.placed_at > self.timeouts.start:
            raise self.actor.lost(f"it has not started within {self.timeouts.start:g} s")

    def check_work(self, actor: SupervisedActor) -> None:
        """Check an actor that has started."""
        actor.check_life()

    def release(self) -> None:
        """Kill the actor; the next is requested after a pause."""
        assert self.actor is not None
        # One that hangs must be killed, or its resources stay taken and the next never gets room.
        self.actor.kill()
        self.actor = self.placing = self.starting = self.call = None
        self.taking_part = False
        self.request_at = time.monotonic() + backoff(self.losses)
        self.losses += 1


W = TypeVar("W", bound=ActorWorker)


class ActorPool(ABC, Generic[W]):
    """Actors of one role, polled by the driver."""

    noun: ClassVar[str]
    """Of a worker, in messages."""
    role: ClassVar[str]
    """In timeline.jsonl."""

    def __init__(self, timeouts: ClusterTimeouts, timeline: Timeline) -> None:
        self._timeouts, self._timeline = timeouts, timeline
        self._workers: list[W] = []
        self._clock, self._none_since, self._losses = PollClock(), math.inf, 0
        self.lost: list[str] = []
        """The message of each loss."""

    @abstractmethod
    def _started(self, worker: W) -> None:
        """Give a worker that has started its first work."""

    @abstractmethod
    def _received(self, worker: W, value: Any) -> None:
        """Take what a worker's call has returned."""

    @abstractmethod
    def _release(self, worker: W) -> str:
        """Release a lost worker, and assign its work to others; what becomes of that, for the message."""

    @property
    def alive(self) -> int:
        """Workers that take part."""
        return sum(worker.taking_part for worker in self._workers)

    def close(self) -> None:
        """Kill the actors; their work is lost."""
        for worker in self._workers:
            if worker.actor is not None:
                worker.actor.kill()

    def _start(self) -> None:
        """Request all, and wait until they have started.

        Raises:
            ScalerlError: one does not. None is requested again: an error of the recipe would come again.
        """
        actors = [worker.request() for worker in self._workers]
        placing = dict(zip([worker.placing for worker in self._workers], actors, strict=True))
        starting = dict(zip([worker.starting for worker in self._workers], actors, strict=True))
        try:
            places = gather(placing, self._timeouts.start, "been placed")
            for worker, where in zip(self._workers, places, strict=True):
                worker.placed(where)
            gather(starting, self._timeouts.start, "started")
            for worker in self._workers:
                worker.started()
                self._started(worker)
        except ScalerlError:
            self.close()
            raise

    def _poll(self, timeout: float) -> None:
        """Receive what workers return within `timeout` seconds, and replace those that are lost.

        Raises:
            WorkerError: too many are lost; or none is left, and none came in time.
        """
        check()
        unpolled = self._clock.unpolled()
        # A step of the learner may take minutes, in which this process polls nothing.
        self._none_since += unpolled
        for worker in self._workers:
            worker.excuse(unpolled)
        calls = {ref: worker for worker in self._workers for ref in worker.calls()}
        done = ray.wait(list(calls), num_returns=1, timeout=timeout)[0] if calls else []
        if not calls and timeout:
            time.sleep(min(timeout, FIRST_PAUSE))  # until an actor may be requested again
        if done:
            # `num_returns=1` returns one of those that are ready; this returns all of them.
            done = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]
        for ref in done:
            self._attempt(calls[ref], lambda worker, ref=ref: self._take(worker, ref))
        for worker in self._workers:
            self._attempt(worker, ActorWorker.check)
            if worker.actor is None and time.monotonic() >= worker.request_at:
                worker.request()
        self._check_any_left()

    def _take(self, worker: W, ref: Any) -> None:
        assert worker.actor is not None
        value = value_of(ref, worker.actor)
        if ref is worker.placing:
            worker.placed(value)
        elif ref is worker.starting:
            worker.started()
            self._started(worker)
        else:
            worker.call = None
            self._received(worker, value)

    def _attempt(self, worker: W, do: Callable[[W], None]) -> None:
        if worker.actor is None:  # lost by an earlier call of the same poll
            return
        try:
            do(worker)
        except LostError as error:
            self._lose(worker, error)
        except ScalerlError as error:  # what it cannot load here, another node may have
            self._lose(worker, worker.actor.lost(str(error)))

    def _lose(self, worker: W, error: LostError) -> None:
        self.lost.append(why := str(error))
        self._losses += 1
        self._timeline.event("lost", self.role, error.who, error.node, why, error.at)
        _LOG.warning("%s%s", why, self._release(worker))
        if self._losses > MOST_LOSSES * len(self._workers):
            raise WorkerError(f"{self._losses} {self.noun}s were lost with no result in between: {why}")

    def _check_any_left(self) -> None:
        if self.alive:
            self._none_since = math.inf
            return
        # The first poll without one: it must not move with every poll.
        self._none_since = min(self._none_since, time.monotonic())
        if time.monotonic() - self._none_since > self._timeouts.start:
            why = self.lost[-1] if self.lost else "none has started"
            raise WorkerError(
                f"no {self.noun} is left, and none came within {self._timeouts.start:g} s: {why}"
            )
