"""The pool of vLLM servers, each kept running and up to date, in the event loop of a thread (`LoopPool`).

    queue        requests in order of admission, and the target version of servers; a request is sent as soon
                 as a server has a free decode slot
    serve        one task a server: check it, then install each target version, until the server is lost
    sample       one task a completion

    spawned --started--> checked --installed--> open <--another version is offered--> paused, installed
       ^--back-off-- lost, in any state: it exits, starts too late, or does not answer a call in time;
                     its completions are queued again

In an in-flight update no completions are sent. The pause returns once no step is running, and keeps the KV
cache. The worker extension loads the weights and returns how many tokens each started completion has: those
of the old version. A completion that has not started is aborted and sent again under the new version, so that
the version in its cache salt is the one that reads its prompt. Then the server resumes.
"""

import asyncio
import heapq
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalerl.errors import ScalerlError, WorkerError, brief_error
from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import Completed, completed_of, sampling_params
from scalerl.rl.engine.vllm.launch import Servers, exit_reason, of_cache
from scalerl.rl.engine.vllm.requirements import Requirements, check_server
from scalerl.rl.engine.vllm.server_state import (
    Event,
    Flight,
    Installed,
    LostTokens,
    RequestQueue,
    Restarted,
    ServedEvaluation,
    ServerState,
    Times,
)
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.engine.vllm.worker import serve
from scalerl.rl.sync.vllm_weights import FileTransport, IpcTransport, NcclTransport, VllmTransport
from scalerl.rl.types import Weights
from scalerl.rl.workers.backend import ActorLostError, Message, WorkerLostError
from scalerl.rl.workers.loop_pool import LoopPool
from scalerl.rl.workers.pool import MOST_LOSSES

_LOG = logging.getLogger("scalerl")
MAX_TRIES = 3
"""Number of drops of one completion after which even a healthy server counts as lost."""
CHECK_EVERY = 5.0
"""Seconds between two checks of a server's health and of the progress of its completions."""
ABORTS, ABORT_SECONDS = 500, 0.02
"""Most attempts to abort completions that have not started, and the seconds to wait after each."""


class ServerPool(LoopPool[ServerState]):
    """The pool of servers; it calls `report` in its thread with every event."""

    noun, role = "server", "generate"

    def __init__(
        self,
        servers: Servers,
        sampling: Sampling,
        required: Requirements,
        salt: str,
        folder: Path,
        weights: Weights,
        version: int,
        report: Callable[[Event], None],
        environment: TurnsThread | None = None,
    ) -> None:
        super().__init__(servers.states, servers.backend, serve)
        self._settings, self._gpus = servers.settings, servers.gpus
        self._sampling, self._required = sampling, required
        self._salt, self._folder, self._report, self._environment = salt, str(folder), report, environment
        by_kind: dict[str, type[VllmTransport]] = {"ipc": IpcTransport, "nccl": NcclTransport}
        transport = servers.transport or by_kind.get(self._settings.transport)
        self._weights = transport() if transport else FileTransport(folder)
        self._offered = version
        self._queue = RequestQueue(version, self._weights.hold(weights, version), sampling)
        self._drops: Counter[tuple[int, Request]] = Counter()
        self._sent = 0
        self.start()

    # -- from the other thread -------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        """Queue completions of training."""

        def submit() -> None:
            self._queue.add(requests)
            self._send_waiting()

        self._call(submit)

    def offer(self, weights: Weights, version: int) -> None:
        """Make all servers install new weights; the caller may change these as soon as this returns."""
        held, self._offered = self._weights.hold(weights, version), version

        def offer() -> None:
            self._queue.newest, self._queue.weights = version, held
            self._wake()

        self._call(offer)

    def evaluate(self, evaluation: ServedEvaluation, weights: Weights) -> None:
        """Queue an evaluation; `weights`, of its version, alone sample its completions."""
        # The newest weights need no second copy.
        version = evaluation.version
        held = None if version == self._offered else self._weights.hold(weights, version)

        def begin() -> None:
            self._queue.add_evaluation(evaluation, held)
            self._wake()
            self._send_waiting()

        self._call(begin)
        self._queue.announce(evaluation)

    # -- in the loop -----------------------------------------------------------------------------------------

    def _stopped(self, error: BaseException | None) -> None:
        ended = WorkerError("generation by vLLM was stopped")
        if error:
            _LOG.debug("vLLM's thread", exc_info=error)
            what = f"generation by vLLM cannot go on: {brief_error(error)}"
            self._report(ended := error if isinstance(error, ScalerlError) else WorkerError(what))
        self._queue.end(ended)

    def _queue_again(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self._queue.put_back(flight)
        self._send_waiting()
        self._wake()

    def _send_waiting(self) -> None:
        """Send waiting requests to servers with free decode slots, the least loaded server first."""
        for waiting, evaluation in self._queue:
            self._send_from(waiting, evaluation)

    def _send_from(self, waiting: list[Request], evaluation: ServedEvaluation | None) -> None:
        def takes(server: ServerState) -> bool:
            fits = server.installed == evaluation.version if evaluation else server.trains
            return server.open and fits and len(server.in_flight) < self._required.slots

        salt, ahead = evaluation.salt if evaluation else self._salt, list[Request]()
        while waiting and (free := [server for server in self._workers if takes(server)]):
            request = heapq.heappop(waiting)
            # Versions never decrease within a completion.
            if not (free := [server for server in free if server.installed >= request.version]):
                ahead.append(request)
                continue
            # Its earlier turns are in the cache of one server; any other would read them again.
            server = min(free, key=lambda s: (s.number != request.server, len(s.in_flight)))
            self._sent += 1
            flight = Flight(request, self._sent, salt, [(0, server.installed)], evaluation=evaluation)
            server.in_flight[self._sent] = flight
            server.count_work()
            flight.task = self._start_task(self._sample(server, flight))
        for request in ahead:
            heapq.heappush(waiting, request)

    def _wake(self) -> None:
        """Stop sending to servers that do not have their target version, and wake them."""
        for server in self._workers:
            server.open &= server.installed == self._queue.target(server)
            if not server.open:
                server.wake.set()

    # -- a completion ----------------------------------------------------------------------------------------

    async def _sample(self, server: ServerState, flight: Flight) -> None:
        request, seconds = flight.request, self._settings.request_seconds
        first = request.turns[0].first_version if request.turns else flight.marks[0][1]
        seeded = self._settings.request_seeds or flight.evaluation is not None
        params = sampling_params(self._sampling, request, seeded)
        wanted = flight.name, request.context_T, f"{flight.salt}-{first}", *params
        try:
            answer = await server.call("complete", *wanted, seconds=seconds)
        except WorkerLostError as error:
            return await self._handle_drop(server, flight, error)
        self._remove(server, flight)
        if answer is None:  # it was aborted
            self._queue_again([flight])
            return
        completed = completed_of(server.name, answer, request, flight.marks)
        server.proven, server.losses = True, 0
        self._drops.pop(flight.key, None)
        if environment := flight.evaluation.environment if flight.evaluation else self._environment:
            found = await self._next_turn(environment, flight, completed)
            if isinstance(found, Request):
                flight.request = replace(found, server=server.number)
                self._queue_again([flight])
                return
            completed = found
        if flight.evaluation is None:
            self._report(completed)
        else:
            self._queue.complete(flight.evaluation, completed)
        self._send_waiting()
        self._wake()

    async def _next_turn(
        self, environment: TurnsThread, flight: Flight, completed: Completed
    ) -> Request | Completed:
        """Let the environment answer a turn; its decode slot is free meanwhile."""
        self._send_waiting()
        if flight.evaluation is None:
            return await environment.next_turn(completed)
        flight.evaluation.answering += 1  # keeps the evaluation's version the target of servers
        try:
            return await environment.next_turn(completed)
        finally:
            flight.evaluation.answering -= 1

    async def _handle_drop(self, server: ServerState, flight: Flight, error: WorkerLostError) -> None:
        """Send the request again if the server is healthy; otherwise count the server as lost."""
        self._drops[flight.key] += 1
        if self._drops[flight.key] < MAX_TRIES and await server.is_well():
            self._report_loss(flight)
            self._remove(server, flight)
            self._queue_again([flight])
        else:
            self._lose(server, error)

    def _remove(self, server: ServerState, flight: Flight) -> None:
        server.in_flight.pop(flight.number, None)
        server.count_work()

    # -- a server --------------------------------------------------------------------------------------------

    def _spawn(self, worker: ServerState) -> None:
        worker.count_time(Times(startup=1.0))
        worker.log_start = worker.log.stat().st_size if worker.log and worker.log.exists() else 0
        # Random: with one seed two workers, or a worker and its restart, would draw the same numbers.
        seed = ["--seed", str(secrets.randbits(31))]
        self._arguments = self._folder, [*seed, *worker.arguments, *of_cache(worker.cache_bytes or 0)]
        super()._spawn(worker)

    def _started(self, worker: ServerState, value: Any) -> None:
        assert worker.process is not None
        worker.node, names = worker.process.node, value.split(",") if value else ()
        worker.gpus = tuple(self._gpus.index(name) for name in names if name in self._gpus)
        worker.serving = self._start_task(self._serve(worker))

    def _received(self, worker: ServerState, message: Message) -> None:
        number, value, *again = message.value
        if again:  # the call was refused
            value = (WorkerLostError if again[0] else WorkerError)(f"{worker.name}: {value}")
        worker.settle(number, value)

    def _lose(self, worker: ServerState, error: WorkerLostError) -> None:
        if worker.log and not self._backend.elsewhere:
            error = WorkerLostError(f"{error} ({exit_reason(worker.log, worker.log_start)})")
        super()._lose(worker, error)
        for number in worker.calls:
            worker.settle(number, error)

    def _check_losses(self, worker: ServerState, error: WorkerLostError) -> None:
        # A server that has completed nothing is probably set up wrongly, but one that has weights may be lost
        # once before its first completion. A lost actor is no such sign: Ray may place several on a dying
        # node before it notices.
        proven = worker.proven or isinstance(error, ActorLostError)
        if worker.losses > (MOST_LOSSES if proven else int(worker.installed >= 0)):
            times = f" {worker.losses} times in a row" if worker.losses > 1 else ""
            log = f"; its log is {worker.log}" if worker.log else ""
            raise WorkerError(f"{error}: the server failed{times}{log}")

    def _fate(self, work: Mapping[int, Flight]) -> str:
        return f": it is started again, with {len(work)} completions"

    def _reassign(self, worker: ServerState, work: Mapping[int, Flight]) -> None:
        for task in [worker.serving, *(flight.task for flight in work.values())]:
            if task:
                task.cancel()
        for flight in work.values():
            self._report_loss(flight)
        self._weights.forget(worker)
        worker.count_time(Times())
        worker.open, worker.rejoining, worker.installed, worker.serving = False, True, -1, None
        groups = {flight.request.seq_no for flight in work.values() if not flight.evaluation}
        self._report(Restarted(worker.number, groups, self.lost[-1]))
        self._queue_again(work.values())

    def _report_loss(self, flight: Flight) -> None:
        """Report the tokens of a completion of training that are lost."""
        if flight.seen and not flight.evaluation:
            self._report(LostTokens(len(flight.request.context_T), flight.seen))

    async def _serve(self, server: ServerState) -> None:
        """Install each target version and check the server's health, until it is lost."""
        process, seconds = server.process, self._settings.answer_seconds
        try:
            await self._check(server)
            while True:
                server.wake.clear()
                version = self._queue.target(server)
                server.open = server.installed == version
                if not server.open and not self._queue.must_drain(server, version):
                    await self._install(server)
                    continue
                self._send_waiting()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_EVERY):
                        await server.wake.wait()
                    continue
                await server.call("check", seconds=seconds)
                if server.in_flight:  # if the server is lost, the tokens seen last are counted
                    server.see(await server.call("progress", seconds=seconds))
        except WorkerLostError as error:
            if server.process is process:  # otherwise its loss is already handled
                self._lose(server, error)

    async def _check(self, server: ServerState) -> None:
        """Check that a server that has started meets the requirements."""
        settings = self._settings
        if server.gpus and server.cache_bytes is None:
            server.cache_bytes = await server.call("cache_bytes", seconds=settings.start_seconds)
        server.seed = await check_server(server, self._required, settings.answer_seconds)
        twins = [s for s in self._workers if s is not server and s.seed == server.seed]
        if twins and not settings.request_seeds:
            # With one seed, the first completions of both servers would get the same random numbers.
            what = f"{server.name} has the --seed of {twins[0].name} ({server.seed})"
            raise WorkerError(f"{what}: start each with another, or set request_seeds")

    async def _install(self, server: ServerState) -> None:
        """Install a server's target version; report it if training samples by it."""
        seconds = self._settings.answer_seconds
        if server.installed >= 0:  # the first weights are part of start-up
            server.count_time(Times(worked=1.0, held=1.0))
        version, source = await self._weights.chosen(server, lambda: self._queue.choose(server))
        # The state of the server may have changed meanwhile.
        if version == server.installed or self._queue.must_drain(server, version):
            server.count_work()
            return
        started = time.perf_counter()
        await server.call("pause", seconds=seconds)
        try:
            progress = await self._load(server, source)
            server.see(progress)
            for flight in server.in_flight.values():
                if flight.name in progress:
                    flight.marks.append((progress[flight.name], version))
            await self._abort_unstarted(server, progress)
        finally:
            await server.call("resume", seconds=seconds)
        # Others may be ahead of a server that rejoins: groups admitted since must not get staler weights.
        least = self._queue.newest if server.rejoining else server.reported
        server.trains = self._queue.is_offered(version) and version >= least
        server.installed = version
        server.count_work()
        if server.trains:
            server.rejoining, server.reported = False, version
            self._report(Installed(server.number, version, time.perf_counter() - started))

    async def _load(self, server: ServerState, source: Any) -> dict[str, int]:
        """Load the weights into a server; return the tokens of each started completion, by flight name."""
        try:
            return await self._weights.load(server, source, self._settings.answer_seconds)
        except WorkerLostError as error:
            if not await server.is_well():
                raise
            raise WorkerError(
                f"{error}: the weights could not be installed (another model, or a server without "
                "--worker-extension-cls; see its log)"
            ) from error

    async def _abort_unstarted(self, server: ServerState, started: Mapping[str, int]) -> None:
        """Abort and requeue the completions that had not started; wait for those that have just ended."""
        flights = [flight for flight in server.in_flight.values() if flight.name not in started]
        for _ in range(ABORTS):  # the server cannot abort a request that has not reached it yet
            flights = [flight for flight in flights if flight.number in server.in_flight]
            if not flights:
                return
            names = [flight.name for flight in flights]
            await server.call("abort", names, seconds=self._settings.answer_seconds)
            tasks = [flight.task for flight in flights if flight.task]
            await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        for flight in [flight for flight in flights if flight.number in server.in_flight]:
            if flight.task:
                flight.task.cancel()
            self._remove(server, flight)
            self._queue_again([flight])
