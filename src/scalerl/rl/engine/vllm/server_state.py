"""What the server pool keeps: servers, completions in flight, and a queue; and the events that it reports.

A server is to have the version of the oldest evaluation that has completions for it, and else the newest. So
versions are evaluated on the way, in order, and training goes on beside with what a server has: admission
control holds it back where that gets too old. Where a version is older than what training has sampled by (a
resumed run, a lost server), or is none that training samples by, the server first completes what training has
there, and gets no more of it until it has the newest again.
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
    """A server has installed these weights."""

    server: int
    version: int
    seconds: float


@dataclass(frozen=True)
class LostTokens:
    """A completion, or a turn of it, is sampled anew; when last seen, it had so many tokens after so many."""

    prompt: int
    tokens: int


@dataclass(frozen=True)
class Restarted:
    """A server was lost, and with it the completions of the groups with these sequence numbers."""

    server: int
    seq_nos: set[int]
    why: str


Event = Completed | Installed | LostTokens | Restarted | ScalerlError
"""An event of the pool; after an error there are no more."""


@dataclass(eq=False)
class ServedEvaluation:
    """Completions that are all sampled by one version of the weights, by any of the servers."""

    version: int
    waiting: list[Request]
    """Those that no server has, in their order (a heap)."""
    salt: str
    n_requests: int
    offered: bool = False
    """Training samples by this version, too."""
    weights: Any = None
    """Those of the version, as the transport holds them."""
    environment: TurnsThread | None = None
    answering: int = 0
    """Completions that wait for its answer."""
    completed: list[Completed] = field(default_factory=list)
    done: Future[list[tuple[Rollout, ...]]] = field(default_factory=Future)


@dataclass
class Flight:
    """A request on its way to a server, or being sampled there."""

    request: Request
    number: int
    salt: str
    """Of the prefix cache that it may use, but for its first version."""
    marks: list[tuple[int, int]]
    """See `Completed`."""
    seen: int = 0
    """Tokens that it was last seen to have."""
    task: asyncio.Task[None] | None = None
    evaluation: ServedEvaluation | None = None
    """What it is a part of; None for one of training."""

    @property
    def name(self) -> str:
        """Its name in servers."""
        return f"{self.salt}.{self.number}"

    @property
    def key(self) -> tuple[int, Request]:
        """What it is, however often it is sent."""
        return id(self.evaluation), self.request


class Times(NamedTuple):
    """Seconds of a server, or parts of each second: what it evaluates takes a part of its work and time."""

    worked: float = 0.0
    held: float = 0.0
    """It took part."""
    evaluated: float = 0.0
    startup: float = 0.0

    def plus(self, parts: Times, seconds: float) -> Times:
        """Return the same after so many seconds, with these parts in each."""
        return Times(*(spent + seconds * part for spent, part in zip(self, parts, strict=True)))


@dataclass(eq=False)
class ServerState(PoolWorker, VllmClient):
    """A server: a worker that is started by us, or a server that others have started."""

    log: Path | None = None
    """Its log, on its node, where it is started by us."""
    node: str = ""
    """Where it was last; empty on this machine."""
    arguments: Sequence[str] = ()
    """Those of vLLM's command that it is started with."""
    log_start: int = 0
    """Bytes that the log had before its last start."""
    cache_bytes: int | None = None
    """Of its KV cache; None before the first start."""
    seed: int | None = None
    """Of its sampler; None before it is known."""
    installed: int = -1
    open: bool = False
    """Completions are sent to it."""
    trains: bool = False
    """Those of training, too."""
    reported: int = -1
    """The newest version that was reported as installed: training is sampled by none before it."""
    rejoining: bool = False
    """It was lost, and does not take part again yet."""
    proven: bool = False
    """It has completed something."""
    serving: asyncio.Task[None] | None = None
    """What keeps it up to date, once it has started."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Those without an answer yet."""
    _numbers: Iterator[int] = field(default_factory=count)
    _counted: tuple[float, Times, Times] = (0.0, Times(), Times())
    """An instant, the seconds until then, and the parts of each second from then on."""

    @property
    def times(self) -> Times:
        """Seconds until now, all at one instant; may be read by any thread."""
        while True:
            counted = at, spent, parts = self._counted
            now = time.perf_counter()
            if counted is self._counted:  # it has not changed before `now`
                return spent.plus(parts, now - at)

    def count_time(self, parts: Times) -> None:
        """Count from now on these parts of each second."""
        (at, spent, before), now = self._counted, time.perf_counter()
        # One assignment of a new object: a reader in another thread sees the old or the new.
        self._counted = now, spent.plus(before, now - at), parts

    def count_work(self) -> None:
        """Count the seconds from now on as work where completions are in flight, by what these are for."""
        # Completions are decoded together, so each counts for an equal part of the time.
        evaluating = self.evaluating / len(self.in_flight) if self.in_flight else 0.0
        working = 1.0 - evaluating if self.in_flight else 0.0
        self.count_time(Times(working, held=1.0 - evaluating, evaluated=evaluating))

    @property
    def evaluating(self) -> int:
        """Completions of evaluations in flight."""
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
            # Not wait_for, which in Python 3.11 drops a cancellation where the call is settled already.
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError as error:
            raise WorkerLostError(f"{self.name}: {method} took longer than {seconds:g} s") from error
        finally:
            del self.calls[number]

    def settle(self, number: int, value: Any) -> None:
        """Give a call its answer, or the error."""
        if (call := self.calls.get(number)) and not call.done():  # else it was given up
            (call.set_exception if isinstance(value, Exception) else call.set_result)(value)

    def see(self, progress: Mapping[str, int]) -> None:
        """Record how many tokens completions have, by the names of their flights."""
        for flight in self.in_flight.values():
            # A completion that has ended is not in the progress any more, nor one that has not begun.
            flight.seen = progress.get(flight.name, flight.seen)


class RequestQueue:
    """Completions that no server has yet, in their order: those of evaluations first."""

    def __init__(self, version: int, weights: Any, sampling: Sampling) -> None:
        self._sampling = sampling
        self.newest, self.weights = version, weights
        """The version that training is to sample by, as the transport holds it."""
        self._training: list[Request] = []
        self._evaluations: list[ServedEvaluation] = []
        self._unfinished: list[ServedEvaluation] = []
        """Evaluations whose futures fail where there are no servers any more; of any thread."""
        self._ended: ScalerlError | None = None

    def add(self, requests: Iterable[Request]) -> None:
        """Add completions of training."""
        for request in requests:
            heapq.heappush(self._training, request)

    def put_back(self, flight: Flight) -> None:
        """Add a completion that is to be sampled again."""
        heapq.heappush(flight.evaluation.waiting if flight.evaluation else self._training, flight.request)

    def announce(self, evaluation: ServedEvaluation) -> None:
        """Have an evaluation fail with the servers from now on; may be called by any thread."""
        # In this order: `end` in another thread either finds it in the list, or has set `_ended` before.
        self._unfinished.append(evaluation)
        if self._ended:
            self.end(self._ended)

    def add_evaluation(self, evaluation: ServedEvaluation, weights: Any) -> None:
        """Add the completions of an evaluation, with its weights unless these are held already."""
        evaluation.offered = evaluation.version == self.newest
        evaluation.weights = self._held.get(evaluation.version, weights)
        self._evaluations.append(evaluation)

    def complete(self, evaluation: ServedEvaluation, completed: Completed) -> None:
        """Note a completion of an evaluation, which may be the last."""
        evaluation.completed.append(completed)
        if len(evaluation.completed) < evaluation.n_requests:
            return
        groups = groups_of(evaluation.completed, self._sampling)
        self._evaluations.remove(evaluation)
        evaluation.weights = None
        self._unfinished.remove(evaluation)
        if evaluation.done.set_running_or_notify_cancel():  # a result of a cancelled one would raise
            evaluation.done.set_result(groups)

    def end(self, error: ScalerlError) -> None:
        """Have all evaluations fail, those to come as well."""
        self._ended = error
        for evaluation in list(self._unfinished):
            with suppress(InvalidStateError):  # another thread was first
                evaluation.done.set_exception(error)

    def __iter__(self) -> Iterator[tuple[list[Request], ServedEvaluation | None]]:
        """Yield the heaps of what waits, with the evaluations that they are of."""
        yield from [(evaluation.waiting, evaluation) for evaluation in self._evaluations]
        yield self._training, None

    # -- versions --------------------------------------------------------------------------------------------

    def target(self, server: ServerState) -> int:
        """Return the version that a server is to have."""
        for flight in server.in_flight.values():
            if flight.evaluation:  # all of its tokens are to be sampled by one version
                return flight.evaluation.version
        return next((e.version for e in self._evaluations if e.waiting or e.answering), self.newest)

    def choose(self, server: ServerState) -> tuple[int, Any]:
        """Return the version that a server is to have, and its weights."""
        version = self.target(server)
        return version, self._held[version]

    @property
    def _held(self) -> dict[int, Any]:
        return {e.version: e.weights for e in self._evaluations} | {self.newest: self.weights}

    def is_offered(self, version: int) -> bool:
        """Return whether training may sample by a version."""
        return version in [self.newest, *(e.version for e in self._evaluations if e.offered)]

    def must_drain(self, server: ServerState, version: int) -> bool:
        """Return whether a server must complete what training has there before it installs a version."""
        trains = any(flight.evaluation is None for flight in server.in_flight.values())
        return trains and (version < server.installed or not self.is_offered(version))
