"""Actors of a run as the driver sees them: calls have a time limit, and a lost actor is named with the cause.

An actor whose call fails, or that gives no heartbeat, is lost: it is killed, and another may take its place.
No function here waits for longer than its limit.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from scalerl.errors import ScalerlError, brief_error, first_line
from scalerl.rl.config.cluster import Resources
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import here
from scalerl.rl.workers.supervision import PollClock, WorkerLostError

_INTERVAL = 1.0  # seconds between two checks of a heartbeat


class LostError(WorkerLostError):
    """An actor died, does not answer, or cannot go on; the text names actor, node and cause."""

    def __init__(self, message: str, who: str = "", node: str = "") -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, time.time()


class WorkerActor:
    """Base of the actors of a run: where it is, and a heartbeat, in a thread that waits for no other call."""

    @ray.method(concurrency_group="life")
    def where(self) -> tuple[str, int]:
        """Return node and process."""
        return here()

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """Answer, as a heartbeat."""


@dataclass(eq=False)
class SupervisedActor:
    """An actor, where it runs, and when it last gave a heartbeat."""

    name: str
    handle: Any
    heartbeat: float
    """Seconds without a heartbeat after which it is lost."""
    node: str = "no node yet"
    pid: int = 0
    _ping: Any = None
    _pinged: float = field(default_factory=time.monotonic)
    _check_at: float = 0.0
    _clock: PollClock = field(default_factory=PollClock)
    _lock: Any = field(default_factory=threading.Lock)
    """A checkpoint's thread waits for an actor while the driver does too."""

    def lost(self, cause: BaseException | str) -> LostError:
        """Return the error for its loss."""
        text = cause if isinstance(cause, str) else cause_of(cause, self.pid)
        return LostError(f"{self.name} on {self.node} is lost: {text}", self.name, self.node)

    def placed(self, where: tuple[str, int]) -> None:
        """Note node and process."""
        self.node, self.pid = where

    def check_life(self) -> None:
        """Check the answer to the last ping, and send the next; waits for nothing.

        An actor that has no place yet is not pinged: its start has a limit of its own.

        Raises:
            LostError: there was no heartbeat for too long, or the actor has died.
        """
        if not self.pid:
            return
        with self._lock:
            self._pinged += self._clock.unpolled()
            now = time.monotonic()
            # The driver polls in tight loops, and each ping is a call through Ray.
            if now < self._check_at:
                return
            self._check_at = now + _INTERVAL
            if self._ping is None:
                self._ping, self._pinged = self.handle.ping.remote(), now
            elif ray.wait([self._ping], timeout=0)[0]:
                ping, self._ping = self._ping, None
                value_of(ping, self)
            elif now - self._pinged > self.heartbeat:
                raise self.lost(f"no heartbeat for {self.heartbeat:g} s (pid {self.pid})")

    def kill(self) -> None:
        """Kill it now. Ray kills the process where that does not end by itself."""
        with suppress(RayError, ValueError):  # it is dead, or Ray is
            ray.kill(self.handle, no_restart=True)


def actors_of(
    cls: type, threads: Mapping[str, int], resources: Resources, placement: Callable[[int], Any]
) -> Callable[[int], Any]:
    """Return a function that requests the actor of a number.

    It is of class `cls`, has so many threads for each group of calls, and is put where `placement` says. Ray
    restarts none: the pool that lost it requests another.
    """
    make: Any = ray.remote
    actor = make(concurrency_groups=dict(threads))(cls)

    def request(number: int) -> Any:
        where = placement(number)
        return actor.options(
            num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=0, scheduling_strategy=where
        ).remote()

    return request


class Calls:
    """Calls under way, each with its actor; see `scalerl.rl.types.Pending`.

    Raises (by any method):
        LostError: an actor has died, or gave no heartbeat, or has not done `what` within `limit` seconds.
        ClusterLostError: the cluster is gone.
        ScalerlError: what an actor raised.
    """

    def __init__(self, calls: Mapping[Any, SupervisedActor], limit: float, what: str) -> None:
        self._calls, self._pending = calls, list(calls)
        self._limit, self._what = limit, what
        self._ends = time.monotonic() + limit
        self._clock = PollClock()

    def wait(self, seconds: float) -> bool:
        """Return whether all have returned; wait for that, and for no longer than `seconds`."""
        until = time.monotonic() + seconds
        while self._pending:
            now = time.monotonic()
            self._poll(max(0.0, min(_INTERVAL, until - now, self._ends - now)))
            if now >= until:
                break
        return not self._pending

    def result(self) -> list[Any]:
        """Return what they returned, in order."""
        return [value_of(ref, actor) for ref, actor in self._calls.items()]

    def _poll(self, timeout: float) -> None:
        check()
        self._ends += self._clock.unpolled()
        # All that are ready, and not the first: one that failed may be behind many that run on.
        done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=timeout)
        for ref in done:
            value_of(ref, self._calls[ref])  # raises at once where one has failed, while others still run
        for ref in self._pending:
            actor = self._calls[ref]
            if time.monotonic() >= self._ends:
                raise actor.lost(f"it has not {self._what} within {self._limit:g} s")
            actor.check_life()


def gather(calls: Mapping[Any, SupervisedActor], limit: float, what: str) -> list[Any]:
    """Return what calls return, in order, once all have; raise what `Calls` does."""
    under_way = Calls(calls, limit, what)
    under_way.wait(math.inf)
    return under_way.result()


def value_of(ref: Any, actor: SupervisedActor) -> Any:
    """Return what a finished call has returned.

    Raises:
        LostError: the actor has died, or raised an error of its own.
        ScalerlError: what the actor raised, where it is meant for the user.
    """
    try:
        # A finished call may still wait here: a large result is fetched from the store of another node.
        return ray.get(ref, timeout=actor.heartbeat)
    except RayTaskError as error:
        # An error for the user (a model that cannot be loaded) must reach them as it is, without Ray's trace.
        if isinstance(error.cause, ScalerlError):
            raise error.cause from None
        raise actor.lost(brief_error(error.cause)) from error
    except RayError as error:
        raise actor.lost(error) from error


_EXIT = re.compile(r"Worker exit type: (\w+)(?: Worker exit detail: (.+?)(?:\. |\.?$))?", re.MULTILINE)
_RPC = re.compile(r"RPC error: (.+?)(?:\.| rpc_code|$)")
_CREATION = re.compile(r"error raised in its creation task.*?ip=([^,)\s]+)", re.DOTALL)
_NODE = re.compile(r"the actor's node was (?:terminated|preempted)[^:\n]*: *(.*)")


def cause_of(error: BaseException, pid: int) -> str:
    """Return the cause of an actor's death in a few words; Ray's text has many lines, and general guesses.

    Ray reports no signal: it cannot tell a process that was killed from one that crashed.
    """
    text = str(error)
    process = f"its process ended (pid {pid}" if pid else "its process ended (before it had a place"
    if isinstance(error, ActorUnavailableError):
        found = _RPC.search(text)
        return f"it cannot be reached ({found[1] if found else first_line(error)})"
    if found := _EXIT.search(text):
        kind, detail = found[1], (found[2] or "").removeprefix("Worker unexpectedly exits with a ")
        if kind == "NODE_OUT_OF_MEMORY":
            return f"{process}): Ray ended it, as its node was out of memory"
        return f"{process}, {kind}{': ' * bool(detail)}{detail})"
    if "its node has died" in text:
        reason = _NODE.search(text)
        return f"its node is gone{f' ({reason[1].strip()})' if reason and reason[1].strip() else ''}"
    if found := _CREATION.search(text):
        return f"it could not begin at {found[1]} ({text.strip().splitlines()[-1].strip()})"
    if isinstance(error, RayActorError):
        reason = text.rpartition("The actor is dead because ")[2] if "dead because" in text else ""
        return f"it died ({first_line(ValueError(reason or text))})"
    return brief_error(error)
