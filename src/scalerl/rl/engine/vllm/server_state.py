"""The state of the server pool: servers, completions in flight and a queue; and the events that it reports.

A server's target version is that of the oldest evaluation with completions left to send, otherwise the
newest. So versions are evaluated in order as they come, while training continues with the version that a
server has; admission control holds training back if that gets too old. A version may be older than the
installed one (after a resume or a lost server) or not be one that training samples by. The server then
completes its training requests first, and gets no more of them until it has the newest version again.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from scalerl.errors import ScalerlError
from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import Completed, groups_of
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.sync.vllm_client import VllmClient
from scalerl.rl.types import Rollout
from scalerl.rl.workers.backend import WorkerLostError
from scalerl.rl.workers.pool import PoolWorker


@dataclass(frozen=True)
class Installed:
    """A server has installed a version of the weights, in `seconds`."""

    server: int
    version: int
    seconds: float


@dataclass(frozen=True)
class LostTokens:
    """A completion or turn is sampled again; when last seen, it had `tokens` after a context of `prompt`."""

    prompt: int
    tokens: int


@dataclass(frozen=True)
class Restarted:
    """A server was lost, and with it completions of the groups with these sequence numbers."""

    server: int
    seq_nos: set[int]
    why: str


Event = Completed | Installed | LostTokens | Restarted | ScalerlError
"""An event of the pool; after an error there are no more."""


@dataclass(eq=False)
class ServedEvaluation:
    """An evaluation: completions that one version of the weights samples, on any of the servers."""

    version: int
    waiting: list[Request]
    """A heap of the requests that are not sent."""
    salt: str
    n_requests: int
    offered: bool = False
    """Whether training samples by this version too."""
    weights: Any = None
    """The weights of the version, as the transport holds them."""
    environment: TurnsThread | None = None
    answering: int = 0
    """Number of completions that wait for an answer of the environment."""
    completed: list[Completed] = field(default_factory=list)
    done: Future[list[tuple[Rollout, ...]]] = field(default_factory=Future)


@dataclass
class Flight:
    """A request that was sent to a server and has not completed."""

    request: Request
    number: int
    salt: str
    """Salt of the prefix cache, without the version that is appended to it."""
    marks: list[tuple[int, int]]
    """See `Completed`."""
    seen: int = 0
    """Number of tokens when last seen."""
    task: asyncio.Task[None] | None = None
    evaluation: ServedEvaluation | None = None
    """The evaluation that it belongs to; None for training."""

    @property
    def name(self) -> str:
        """Its name on the server."""
        return f"{self.salt}.{self.number}"

    @property
    def key(self) -> tuple[int, Request]:
        """Its identity, the same each time it is sent."""
        return id(self.evaluation), self.request


class Times(NamedTuple):
    """Seconds of a server, or shares of each second; `worked` and `held` leave out evaluations."""

    worked: float = 0.0
    held: float = 0.0
    """Time for which the server took part."""
    evaluated: float = 0.0
    startup: float = 0.0

    def plus(self, parts: Times, seconds: float) -> Times:
        """Return the times after `seconds` more, with these shares of each second."""
        return Times(*(spent + seconds * part for spent, part in zip(self, parts, strict=True)))


@dataclass(eq=False)
class ServerState(PoolWorker, VllmClient):
    """A server: a worker that the pool starts, or a server that others started."""

    log: Path | None = None
    """Its log, on its node, if the pool starts it."""
    node: str = ""
    """The node of its last start; empty on this machine."""
    arguments: Sequence[str] = ()
    """The arguments of vLLM's command."""
    log_start: int = 0
    """Size of the log before its last start, in bytes."""
    cache_bytes: int | None = None
    """Size of its KV cache; None before the first start."""
    seed: int | None = None
    """Seed of its sampler; None before it is known."""
    installed: int = -1
    open: bool = False
    """Whether completions are sent to it."""
    trains: bool = False
    """Whether completions of training are sent to it too."""
    reported: int = -1
    """The newest version that was reported as installed; training samples by no older one."""
    rejoining: bool = False
    """Whether it was lost and does not take part again yet."""
    proven: bool = False
    """Whether it has completed a request since the start of the pool."""
    serving: asyncio.Task[None] | None = None
    """The task that keeps it up to date, once it has started."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """The calls without an answer yet."""
    _numbers: Iterator[int] = field(default_factory=count)
    _counted: tuple[float, Times, Times] = (0.0, Times(), Times())
    """An instant, the times until then, and the shares of each second since."""

    @property
    def times(self) -> Times:
        """Times until now, all at one instant; any thread may read them."""
        while True:
            counted = at, spent, parts = self._counted
            now = time.perf_counter()
            if counted is self._counted:  # unchanged until `now`
                return spent.plus(parts, now - at)

    def count_time(self, parts: Times) -> None:
        """Count these shares of each second from now on."""
        (at, spent, before), now = self._counted, time.perf_counter()
        # One assignment of a new tuple: a reader in another thread sees either the old or the new one.
        self._counted = now, spent.plus(before, now - at), parts

    def count_work(self) -> None:
        """Count time from now on by the completions in flight: as work, as evaluation, or as only held."""
        # Completions are decoded together, so each counts for an equal share of the time.
        evaluating = self.evaluating / len(self.in_flight) if self.in_flight else 0.0
        working = 1.0 - evaluating if self.in_flight else 0.0
        self.count_time(Times(working, held=1.0 - evaluating, evaluated=evaluating))

    @property
    def evaluating(self) -> int:
        """Number of completions of evaluations in flight."""
        return sum(flight.evaluation is not None for flight in self.in_flight.values())

    async def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """See `VllmClient`."""
        if self.process is None:
            raise WorkerLostError(f"{self.name} is not started")
        if isinstance(self.process, VllmClient):
            return await self.process.call(method, *arguments, seconds=seconds)
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self.calls[number] = answer
        self.process.send((number, method, arguments))
        try:
            # Not wait_for: in Python 3.11 it drops a cancellation if the call is already settled.
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError as error:
            raise WorkerLostError(f"{self.name}: {method} took longer than {seconds:g} s") from error
        finally:
            del self.calls[number]

    def settle(self, number: int, value: Any) -> None:
        """Set the answer or the error of a call."""
        if (call := self.calls.get(number)) and not call.done():  # otherwise it was abandoned
            (call.set_exception if isinstance(value, Exception) else call.set_result)(value)

    def see(self, progress: Mapping[str, int]) -> None:
        """Record how many tokens completions have, by the names of their flights."""
        for flight in self.in_flight.values():
            # The progress has only completions that have started and not ended.
            flight.seen = progress.get(flight.name, flight.seen)


class RequestQueue:
    """The queue of requests to send, in order; those of evaluations come first."""

    def __init__(self, version: int, weights: Any, sampling: Sampling) -> None:
        self._sampling = sampling
        self.newest, self.weights = version, weights
        """The newest version, and its weights as the transport holds them."""
        self._training: list[Request] = []
        self._evaluations: list[ServedEvaluation] = []
        self._unfinished: list[ServedEvaluation] = []
        """Evaluations whose futures fail when the pool ends; any thread may access them."""
        self._ended: ScalerlError | None = None

    def add(self, requests: Iterable[Request]) -> None:
        """Add completions of training."""
        for request in requests:
            heapq.heappush(self._training, request)

    def put_back(self, flight: Flight) -> None:
        """Queue a completion to be sampled again."""
        heapq.heappush(flight.evaluation.waiting if flight.evaluation else self._training, flight.request)

    def announce(self, evaluation: ServedEvaluation) -> None:
        """Let an evaluation fail if the pool ends or has ended; any thread may call this."""
        # In this order: `end` in another thread either finds it in the list or has already set `_ended`.
        self._unfinished.append(evaluation)
        if self._ended:
            self.end(self._ended)

    def add_evaluation(self, evaluation: ServedEvaluation, weights: Any) -> None:
        """Add the requests of an evaluation, and its weights if they are not already held."""
        evaluation.offered = evaluation.version == self.newest
        evaluation.weights = self._held.get(evaluation.version, weights)
        self._evaluations.append(evaluation)

    def complete(self, evaluation: ServedEvaluation, completed: Completed) -> None:
        """Add a completion to its evaluation; the last one completes that."""
        evaluation.completed.append(completed)
        if len(evaluation.completed) < evaluation.n_requests:
            return
        groups = groups_of(evaluation.completed, self._sampling)
        self._evaluations.remove(evaluation)
        evaluation.weights = None
        self._unfinished.remove(evaluation)
        if evaluation.done.set_running_or_notify_cancel():  # set_result would raise on a cancelled future
            evaluation.done.set_result(groups)

    def end(self, error: ScalerlError) -> None:
        """Fail all evaluations, including later ones."""
        self._ended = error
        for evaluation in list(self._unfinished):
            with suppress(InvalidStateError):  # another thread was first
                evaluation.done.set_exception(error)

    def __iter__(self) -> Iterator[tuple[list[Request], ServedEvaluation | None]]:
        """Yield each heap of waiting requests, with its evaluation (None for training)."""
        yield from [(evaluation.waiting, evaluation) for evaluation in self._evaluations]
        yield self._training, None

    # -- versions --------------------------------------------------------------------------------------------

    def target(self, server: ServerState) -> int:
        """Return the target version of a server."""
        for flight in server.in_flight.values():
            if flight.evaluation:  # one version must sample all of its tokens
                return flight.evaluation.version
        return next((e.version for e in self._evaluations if e.waiting or e.answering), self.newest)

    def choose(self, server: ServerState) -> tuple[int, Any]:
        """Return the target version of a server, and its weights."""
        version = self.target(server)
        return version, self._held[version]

    @property
    def _held(self) -> dict[int, Any]:
        return {e.version: e.weights for e in self._evaluations} | {self.newest: self.weights}

    def is_offered(self, version: int) -> bool:
        """Return whether training may sample by a version."""
        return version in [self.newest, *(e.version for e in self._evaluations if e.offered)]

    def must_drain(self, server: ServerState, version: int) -> bool:
        """Return whether a server must complete its training requests before it installs a version."""
        trains = any(flight.evaluation is None for flight in server.in_flight.values())
        return trains and (version < server.installed or not self.is_offered(version))
