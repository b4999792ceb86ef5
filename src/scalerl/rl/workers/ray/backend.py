"""The backend of a cluster: workers in Ray actors.

A worker runs in a thread of its actor. Other threads receive its messages and answer the call by which the
driver receives those of the worker. That call returns within some seconds even without messages, and so is
the heartbeat of the process. Its return wakes the driver by a byte in the backend's pipe.
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

_RECEIVE = 2.0  # longest wait, in seconds, of an actor for a message to return
_CAUSE = 140  # most characters of Ray's text about a death
_MANY = 2**16  # bytes, enough to empty a pipe


class WorkerActor:
    """An actor that runs a worker."""

    def __init__(self, target: Target, arguments: Sequence[Any]) -> None:
        self.began = time.perf_counter()
        if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
            os.environ[VISIBLE] = ""  # an actor that requests no GPU would see all GPUs of its node
        self._inbox, self._outbox = queue.SimpleQueue[Any](), queue.SimpleQueue[Message]()
        worker = _ActorChannel(self), target, arguments
        threading.Thread(target=run_worker, args=worker, daemon=True).start()

    @ray.method(concurrency_group="receive")
    def where(self) -> tuple[str, int]:
        """Return the node and process id of this actor."""
        return here()

    @ray.method(concurrency_group="put")
    def put(self, message: Any) -> None:
        """Pass a message to the worker."""
        self._inbox.put(message)

    @ray.method(concurrency_group="receive")
    def receive(self, seconds: float) -> list[Message]:
        """Return the messages since the last call; wait up to `seconds` for the first."""
        try:
            messages = [self._outbox.get(timeout=seconds)]
        except queue.Empty:
            return []
        while not self._outbox.empty():
            messages.append(self._outbox.get())
        return messages


class _ActorChannel:
    """The channel of an actor's worker; see `scalerl.rl.workers.backend.Channel`."""

    def __init__(self, actor: WorkerActor) -> None:
        self.began, self._inbox, self._outbox = actor.began, actor._inbox, actor._outbox

    def receive(self) -> Any:
        return self._inbox.get()  # no EOFError: the driver kills an actor rather than close a channel

    def send(self, kind: str, value: Any = None) -> None:
        self._outbox.put(message(kind, value))


class RayActors(Backend):
    """The backend that requests actors, with the resources that the session reserves for their role."""

    elsewhere = True

    def __init__(self, session: Session, role: str, heartbeat: float) -> None:
        """Define the actors of a `role`; one without a heartbeat for `heartbeat` seconds is lost."""
        make: Any = ray.remote
        cls = type(f"{role.removesuffix('s').title()}Actor", (WorkerActor,), {})  # Ray names processes by it
        self._actor = make(concurrency_groups={"receive": 1, "put": 1})(cls)
        self._session, self._role, self._heartbeat = session, role, heartbeat
        # One pipe for all actors, which may be more than the files that a process may open.
        self._woken, self._wakes = Pipe(duplex=False)
        for end in (self._woken, self._wakes):
            os.set_blocking(end.fileno(), False)

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> RayProcess:
        """See `Backend.spawn`. Ray does not restart an actor: the pool that lost it requests another."""
        options = self._session.options(self._role, number)
        return self.process(name, self._actor.options(max_restarts=0, **options).remote(target, arguments))

    def process(self, name: str, handle: Any) -> RayProcess:
        """Return the worker's process for the handle of an actor."""
        return RayProcess(name, handle, self._heartbeat, self._woken, self._wakes)

    def wait(self, processes: Sequence[RayProcess], seconds: float) -> None:
        """See `Backend.wait`.

        Raises:
            ClusterLostError: the cluster is gone.
        """
        check()
        if self._woken.poll(seconds):
            with suppress(BlockingIOError):  # another thread has emptied the pipe
                os.read(self._woken.fileno(), _MANY)  # before messages are received, so that none is missed


class RayProcess(WorkerProcess):
    """An actor as the driver sees it: its node, and its last heartbeat."""

    def __init__(
        self, name: str, handle: Any, heartbeat: float, woken: Connection, wakes: Connection
    ) -> None:
        """Wrap the actor of `handle`; a call that returns writes to `wakes`, which makes `woken` ready."""
        self.name, self._handle, self._heartbeat = name, handle, heartbeat
        self._woken, self._wakes = woken, wakes
        self.node = "no node yet"
        self._placing, self._receiving = self._awaited(handle.where.remote()), Future[Any]()
        self._heard_at, self.clock = 0.0, PollClock()
        self._lock = threading.RLock()
        """Needed because a checkpoint's thread waits for an actor while the driver does too."""

    def watched(self) -> list[int]:
        """See `WorkerProcess.watched`."""
        return [self._woken.fileno()]

    def send(self, message: Any) -> None:
        """See `WorkerProcess.send`."""
        self._handle.put.remote(message)

    def receive(self) -> list[Message]:
        """See `WorkerProcess.receive`. An actor that is not placed yet has no heartbeat timeout."""
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
        """See `WorkerProcess.kill`. Ray kills the process if it does not exit by itself."""
        with suppress(RayError, ValueError):  # the actor or Ray has already ended
            ray.kill(self._handle, no_restart=True)

    def _request(self) -> None:
        """Request the actor's next messages."""
        self._receiving = self._awaited(self._handle.receive.remote(min(_RECEIVE, self._heartbeat / 4)))
        self._heard_at = self.clock.now()

    def _awaited(self, ref: Any) -> Future[Any]:
        """Return the future of a call, whose result is on this node once it is done."""
        future = ref.future()
        future.add_done_callback(self._wake)
        return future

    def _wake(self, _: Any) -> None:
        with suppress(BlockingIOError):  # a full pipe is ready anyway
            os.write(self._wakes.fileno(), b".")

    def _value_of(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except RayTaskError as error:
            # An error for the user is raised as it is, without Ray's traceback.
            if isinstance(error.cause, ScalerlError):
                raise error.cause from None
            raise self.lost(brief_error(error.cause)) from error
        except RayError as error:
            raise self.lost(cause_of(error, self.pid, self.node), ActorLostError) from error


def cause_of(error: BaseException, pid: int, node: str) -> str:
    """Return the cause of an actor's death in a few words.

    Ray reports it in many lines, whose wording differs between versions: they are shortened and not parsed.
    Ray reports no signal, so a killed process looks like one that crashed.
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
    """Return Ray's text as one short line, without its first line and the indented ones on the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line and not line.startswith("\t")]
    text = " ".join(lines[1:] or lines)
    return text if len(text) <= _CAUSE else text[: _CAUSE - 3].rstrip() + "..."


def _has_died(node: str) -> bool:
    """Return whether Ray has noticed the loss of a node, named as by `here`."""
    return any(not known["Alive"] and known["NodeID"][:8] in node for known in ray.nodes())
