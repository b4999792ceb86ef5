"""The backend of a cluster: workers in Ray actors.

A worker runs in a thread of its actor. Other threads take messages for it, and answer the call by which the
driver receives its own: that call returns within some seconds, with nothing where there is nothing, and is
the heartbeat of the process. As it returns, a byte in the backend's pipe wakes the driver.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from scalerl.errors import ScalerlError, brief_error
from scalerl.rl.config.devices import VISIBLE
from scalerl.rl.workers.backend import (
    ActorLostError,
    Backend,
    Message,
    PollClock,
    Target,
    WorkerProcess,
    message,
    run_worker,
)
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import Session, here

_RECEIVE = 2.0  # seconds that an actor waits for a message to return
_CAUSE = 140  # characters of Ray's text about a death
_MANY = 2**16  # bytes, more than a pipe has


class WorkerActor:
    """Runs a worker."""

    def __init__(self, target: Target, arguments: Sequence[Any]) -> None:
        self.began = time.perf_counter()
        if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
            os.environ[VISIBLE] = ""  # Ray leaves an actor that requests none all GPUs of its node
        self._inbox, self._outbox = queue.SimpleQueue[Any](), queue.SimpleQueue[Message]()
        worker = _ActorChannel(self), target, arguments
        threading.Thread(target=run_worker, args=worker, daemon=True).start()

    @ray.method(concurrency_group="receive")
    def where(self) -> tuple[str, int]:
        """Return node and process."""
        return here()

    @ray.method(concurrency_group="put")
    def put(self, message: Any) -> None:
        """Take a message to the worker."""
        self._inbox.put(message)

    @ray.method(concurrency_group="receive")
    def receive(self, seconds: float) -> list[Message]:
        """Return the messages since the last call; none where none comes within `seconds`."""
        try:
            messages = [self._outbox.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._outbox.empty():
            messages.append(self._outbox.get())
        return messages


class _ActorChannel:
    """See `scalerl.rl.workers.backend.Channel`."""

    def __init__(self, actor: WorkerActor) -> None:
        self.began, self._inbox, self._outbox = actor.began, actor._inbox, actor._outbox

    def receive(self) -> Any:
        return self._inbox.get()  # the driver kills an actor, and closes no channel

    def send(self, kind: str, value: Any = None) -> None:
        self._outbox.put(message(kind, value))


class RayActors(Backend):
    """Requests actors, with what the session has for their role."""

    elsewhere = True

    def __init__(self, session: Session, role: str, heartbeat: float) -> None:
        """An actor without a heartbeat for `heartbeat` seconds is lost."""
        make: Any = ray.remote
        cls = type(f"{role.removesuffix('s').title()}Actor", (WorkerActor,), {})  # as Ray names its process
        self._actor = make(concurrency_groups={"receive": 1, "put": 1})(cls)
        self._session, self._role, self._heartbeat = session, role, heartbeat
        # One for all of them, as there may be more than a process may have open files.
        self._woken, self._wakes = Pipe(duplex=False)
        for end in (self._woken, self._wakes):
            os.set_blocking(end.fileno(), False)

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> RayProcess:
        """See `Backend.spawn`. Ray restarts no actor: the pool that lost it requests another."""
        options = self._session.options(self._role, number)
        return self.process(name, self._actor.options(max_restarts=0, **options).remote(target, arguments))

    def process(self, name: str, handle: Any) -> RayProcess:
        """Return an actor, by its handle, as a worker's process."""
        return RayProcess(name, handle, self._heartbeat, self._woken, self._wakes)

    def wait(self, processes: Sequence[RayProcess], seconds: float) -> None:
        """See `Backend.wait`.

        Raises:
            ClusterLostError: the cluster is gone.
        """
        check()
        if self._woken.poll(seconds):
            with suppress(BlockingIOError):  # another thread has taken it
                os.read(self._woken.fileno(), _MANY)  # before they are received, so that none is missed


class RayProcess(WorkerProcess):
    """An actor, where it runs, and when it last gave a heartbeat."""

    def __init__(
        self, name: str, handle: Any, heartbeat: float, woken: Connection, wakes: Connection
    ) -> None:
        """`woken` is ready once a call has returned, of which `wakes` is sent a byte."""
        self.name, self._handle, self._heartbeat = name, handle, heartbeat
        self._woken, self._wakes = woken, wakes
        self.node = "no node yet"
        self._placing, self._receiving = self._awaited(handle.where.remote()), Future[Any]()
        self._heard_at, self.clock = 0.0, PollClock()
        self._lock = threading.RLock()
        """A checkpoint's thread waits for an actor while the driver does too."""

    def watched(self) -> list[int]:
        """See `WorkerProcess.watched`."""
        return [self._woken.fileno()]

    def send(self, message: Any) -> None:
        """See `WorkerProcess.send`."""
        self._handle.put.remote(message)

    def receive(self) -> list[Message]:
        """See `WorkerProcess.receive`. One that has no place yet is not expected to give a heartbeat."""
        with self._lock:
            if self._placing is not None:
                if not self._placing.done():
                    return []
                placing, self._placing = self._placing, None
                self.node, self.pid = self._value_of(placing)
                self.placed_at = time.monotonic()
                self._request()
            if not self._receiving.done():
                if self.clock.now() - self._heard_at > self._heartbeat:
                    silent = f"no heartbeat for {self._heartbeat:g} s (pid {self.pid})"
                    raise self.lost(silent, ActorLostError)
                return []
            messages = self._value_of(self._receiving)
            self._request()
            return messages

    def kill(self) -> None:
        """See `WorkerProcess.kill`. Ray kills the process where that does not end by itself."""
        with suppress(RayError, ValueError):  # it is dead, or Ray is
            ray.kill(self._handle, no_restart=True)

    def _request(self) -> None:
        """Request its next messages."""
        self._receiving = self._awaited(self._handle.receive.remote(min(_RECEIVE, self._heartbeat / 4)))
        self._heard_at = self.clock.now()

    def _awaited(self, ref: Any) -> Future[Any]:
        """Return the result of a call, which is on this node once it is done."""
        future = ref.future()
        future.add_done_callback(self._wake)
        return future

    def _wake(self, _: Any) -> None:
        with suppress(BlockingIOError):  # the pipe is full, and so ready
            os.write(self._wakes.fileno(), b".")

    def _value_of(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except RayTaskError as error:
            # An error for the user must reach them as it is, without Ray's trace.
            if isinstance(error.cause, ScalerlError):
                raise error.cause from None
            raise self.lost(brief_error(error.cause)) from error
        except RayError as error:
            raise self.lost(cause_of(error, self.pid, self.node), ActorLostError) from error


def cause_of(error: BaseException, pid: int, node: str) -> str:
    """Return the cause of an actor's death in a few words.

    Ray tells it in a text of many lines, whose wording differs between versions: it is shortened, and not
    interpreted. Ray reports no signal: it cannot tell a process that was killed from one that crashed.
    """
    if isinstance(error, ActorUnavailableError):
        return f"it cannot be reached ({_shortened(error)})"
    if not isinstance(error, RayActorError):
        return brief_error(error)
    if error.actor_init_failed:
        return f"it could not begin ({str(error).strip().splitlines()[-1].strip()})"
    if pid and _has_died(node):
        return f"its node is gone ({_shortened(error)})"
    return f"its process ended (pid {pid}, {_shortened(error)})" if pid else f"it died ({_shortened(error)})"


def _shortened(error: BaseException) -> str:
    """Return the last paragraph of Ray's text, after the lines that name the actor, as one short line."""
    lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith("\t")]
    text = " ".join(lines[1:] or lines)
    return text if len(text) <= _CAUSE else text[: _CAUSE - 3].rstrip() + "..."


def _has_died(node: str) -> bool:
    """Return whether Ray has noticed that a node, named as by `here`, is gone."""
    return any(not known["Alive"] and known["NodeID"][:8] in node for known in ray.nodes())
