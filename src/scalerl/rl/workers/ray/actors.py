"""Actors of a run as the driver sees them: calls have a time limit, and who is lost is named with the cause.

An actor whose call fails, or that gives no heartbeat, is lost: it is killed, and its place may be taken by
another. Nothing here waits for longer than it was told to.
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
from scalerl.rl.workers.supervision import Attention, WorkerLostError

FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before what failed is tried again
_LOOK = 1.0  # seconds between two looks at who still lives


class LostError(WorkerLostError):
    """An actor died, does not answer, or cannot go on; the text names actor, node and cause."""

    def __init__(self, message: str, who: str = "", node: str = "") -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, time.time()


@dataclass(eq=False)
class SupervisedActor:
    """An actor, and what it was told to be."""

    name: str
    handle: Any
    heartbeat: float
    """Seconds without a heartbeat after which it is given up."""
    node: str = "no node yet"
    pid: int = 0
    _ping: Any = None
    _pinged: float = field(default_factory=time.monotonic)
    _attention: Attention = field(default_factory=Attention)
    _lock: Any = field(default_factory=threading.Lock)
    """A checkpoint's thread waits for an actor while the driver does too."""

    def lost(self, cause: BaseException | str) -> LostError:
        """The error that says so."""
        text = cause if isinstance(cause, str) else cause_of(cause, self.pid)
        return LostError(f"{self.name} on {self.node} is lost: {text}", self.name, self.node)

    def settled(self, where: tuple[str, int]) -> None:
        """It has said where it runs."""
        self.node, self.pid = where

    def check_life(self) -> None:
        """Ask for a heartbeat, and look for the answer to the last question; waits for nothing.

        Nothing is asked of one that has not said where it runs: it is starting, for which there is another
        limit.

        Raises:
            LostError: there was none for too long, or it has died.
        """
        if not self.pid:
            return
        with self._lock:
            self._look()

    def _look(self) -> None:
        self._pinged += self._attention.away()
        if self._ping is None:
            self._ping, self._pinged = self.handle.ping.remote(), time.monotonic()
            return
        if ray.wait([self._ping], timeout=0)[0]:
            ping, self._ping = self._ping, None
            try:
                ray.get(ping, timeout=self.heartbeat)
            except RayError as error:
                raise self.lost(error) from error
        elif time.monotonic() - self._pinged > self.heartbeat:
            raise self.lost(f"no heartbeat for {self.heartbeat:g} s (pid {self.pid})")

    def kill(self) -> None:
        """End it now, whatever it does. Ray kills the process where that does not end by itself."""
        with suppress(RayError, ValueError):  # it is dead, or Ray is
            ray.kill(self.handle, no_restart=True)


def remote(
    cls: type, groups: Mapping[str, int], share: Resources, put: Callable[[int], Any]
) -> Callable[[int], Any]:
    """What asks for the actor of a number, which is of `cls`, has so many threads for each group of calls and
    `share` of a node, and is put where `put` says.

    Ray restarts none that is lost: whoever asked for it has another one made.
    """
    make: Any = ray.remote
    actor = make(concurrency_groups=dict(groups))(cls)

    def ask(number: int) -> Any:
        where = put(number)
        return actor.options(
            num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0, scheduling_strategy=where
        ).remote()

    return ask


def pause_after(times: int, longest: float = _LONGEST_PAUSE) -> float:
    """Seconds before another attempt, where `times` have failed before the last one: they double."""
    return min(longest, _LONGEST_PAUSE, FIRST_PAUSE * 2**times)


class Calls:
    """Calls under way, each by the actor that is asked; see `scalerl.rl.types.Pending`.

    Raises (by any method):
        LostError: an actor has died, or gave no heartbeat, or has not done `what` within `limit` seconds.
        ClusterLostError: nobody can be asked any more.
        ScalerlError: what an actor raised.
    """

    def __init__(self, calls: Mapping[Any, SupervisedActor], limit: float, what: str) -> None:
        self._calls, self._pending = calls, list(calls)
        self._limit, self._what = limit, what
        self._ends = time.monotonic() + limit
        self._looked = -math.inf
        self._attention = Attention()

    def wait(self, seconds: float) -> bool:
        """Whether all have returned; waits for no longer than `seconds`."""
        until = time.monotonic() + seconds
        while self._pending:
            now = time.monotonic()
            self._take_note(max(0.0, min(_LOOK, until - now, self._ends - now)))
            if now >= until:
                break
        return not self._pending

    def result(self) -> list[Any]:
        """What they return, in order."""
        return [value_of(ref, actor) for ref, actor in self._calls.items()]

    def _take_note(self, timeout: float) -> None:
        check()
        self._ends += self._attention.away()
        done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=timeout)
        for ref in done:
            value_of(ref, self._calls[ref])  # one that has failed is heard of at once, whoever waits for it
        now = time.monotonic()
        if now - self._looked < _LOOK and now < self._ends:
            return
        self._looked = now
        for actor in {id(m): m for m in (self._calls[ref] for ref in self._pending)}.values():
            if now >= self._ends:
                raise actor.lost(f"it has not {self._what} within {self._limit:g} s")
            actor.check_life()


def gather(calls: Mapping[Any, SupervisedActor], limit: float, what: str) -> list[Any]:
    """What calls return, in order, once all have; raises what `Calls` does."""
    under_way = Calls(calls, limit, what)
    under_way.wait(math.inf)
    return under_way.result()


def value_of(ref: Any, actor: SupervisedActor) -> Any:
    """What a call that is over has returned.

    Raises:
        LostError: the actor has died, or raised an error of its own.
        ScalerlError: what the actor raised, where it is meant for the user.
    """
    try:
        return ray.get(ref, timeout=actor.heartbeat)
    except RayTaskError as error:
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
    """What Ray says of a death, in a few words: it says it in many lines, with guesses that are none of ours.

    Ray tells no signal: a process that was killed, and one that crashed, have ended for it in the same way.
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
