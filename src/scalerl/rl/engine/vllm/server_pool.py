"""The servers, each kept running and up to date, in an event loop of a thread of its own.

    queue        requests in order of admission, and the version that a server is to have for them; one is
                 sent as soon as a server has a free decode slot
    supervise    one task a server: start or reach it; install that version, until it is lost; then again,
                 with its completions in flight sampled anew
    sample       one task a completion

An update in flight: no completion is sent; the pause returns once no step is under way, and leaves the KV
cache as it is; the worker extension loads the weights, and returns how many tokens each completion
has of those that had started: the tokens of the old version. One that had not started is aborted, and sent
again under the new version, so that the version in its cache salt is the one that reads its prompt;
`/resume`.
"""

import asyncio
import heapq
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalerl.errors import ScalerlError, WorkerError, brief_error
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import Completed, completed_of, sampling_params
from scalerl.rl.engine.vllm.requirements import Requirements, check_server
from scalerl.rl.engine.vllm.server_state import (
    Event,
    Flight,
    Installed,
    RequestQueue,
    Restarted,
    ServedEvaluation,
    ServerState,
    Times,
)
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.sync.vllm_client import ServerLostError
from scalerl.rl.sync.vllm_weights import FileTransport, IpcTransport, NcclTransport
from scalerl.rl.types import Weights

_LOG = logging.getLogger("scalerl")
MAX_LOSSES = 5
"""Losses of a server in a row, with no completion in between, that end the run."""
MAX_TRIES = 3
"""Times that a server which is well may drop a completion, before it counts as lost."""
CHECK_EVERY = 5.0
"""Seconds between two checks of a server: whether it is well, and how far its completions are."""
ABORTS, ABORT_SECONDS = 500, 0.02
"""How often completions are aborted that have not started, and how long each abort is waited for."""


class ServerPool:
    """The thread that keeps `servers`; `report` is called in it with every event."""

    def __init__(
        self,
        settings: Vllm,
        sampling: Sampling,
        required: Requirements,
        salt: str,
        folder: Path,
        servers: list[ServerState],
        weights: Weights,
        version: int,
        report: Callable[[Event], None],
        environment: TurnsThread | None = None,
    ) -> None:
        self._settings, self._sampling, self._required = settings, sampling, required
        self._salt, self._servers, self._report, self._environment = salt, servers, report, environment
        if settings.transport in ("ipc", "nccl"):
            self._weights = (IpcTransport if settings.transport == "ipc" else NcclTransport)(weights, version)
        else:
            self._weights = FileTransport(folder, weights, version)
        self._offered = version
        self._queue = RequestQueue(version, sampling)
        self._drops: Counter[tuple[int, Request]] = Counter()
        self._sent = 0
        self._tasks = set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    # -- from the other thread -------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        """Queue completions."""

        def submit() -> None:
            self._queue.add(requests)
            self._send_waiting()

        self._call(submit)

    def offer(self, weights: Weights, version: int) -> None:
        """Have all servers install new weights, which may change as soon as this returns."""
        held, self._offered = hold(weights), version

        def offer() -> None:
            self._weights.offer(held, version)
            self._queue.newest = version
            self._wake()

        self._call(offer)

    def evaluate(self, evaluation: ServedEvaluation, weights: Weights) -> None:
        """Have completions sampled by `weights`, which are exactly the version of the evaluation."""
        held = None if evaluation.version == self._offered else hold(weights)  # no second copy of the newest

        def begin() -> None:
            self._weights.keep(held, evaluation.version)
            self._queue.add_evaluation(evaluation)
            self._wake()
            self._send_waiting()

        self._call(begin)
        self._queue.announce(evaluation)

    def close(self) -> None:
        """Stop the servers that were started here, and close the connections to the others."""
        self._call(self._end)
        self._thread.join(timeout=60)

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, which was reported as an event
            self._loop.call_soon_threadsafe(function)

    # -- in the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended: ScalerlError = WorkerError("generation by vLLM was stopped")
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            ended = error if isinstance(error, ScalerlError) else _unexpected(error)
            self._report(ended)
        finally:
            self._queue.end(ended)

    async def _main(self) -> None:
        for server in self._servers:
            self._start(self._supervise(server))
        try:
            await self._ended
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(server.client.close() for server in self._servers))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, whose failure ends the pool: its completion would be in flight for ever."""

        def note(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                self._end(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(note)
        return task

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended.done():
            return
        if error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _queue_again(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            self._queue.put_back(flight)
        self._send_waiting()
        self._wake()

    def _send_waiting(self) -> None:
        """Send what waits to servers with free decode slots, those with the fewest completions first."""
        for waiting, evaluation in self._queue:
            self._send(waiting, evaluation)

    def _send(self, waiting: list[Request], evaluation: ServedEvaluation | None) -> None:
        def takes(server: ServerState) -> bool:
            fits = server.installed == evaluation.version if evaluation else server.trains
            return server.open and fits and len(server.flights) < self._required.slots

        salt, ahead = evaluation.salt if evaluation else self._salt, list[Request]()
        while waiting and (free := [server for server in self._servers if takes(server)]):
            request = heapq.heappop(waiting)
            # Versions never fall within a completion.
            if not (free := [server for server in free if server.installed >= request.version]):
                ahead.append(request)
                continue
            # Its turns are in the cache of one; any other reads them again.
            server = min(free, key=lambda s: (s.index != request.server, len(s.flights)))
            self._sent += 1
            name, marks = f"{salt}.{self._sent}", [(0, server.installed)]
            flight = Flight(request, name, marks, evaluation=evaluation)
            server.flights[name] = flight
            server.count_work()
            flight.task = self._start(self._sample(server, flight))
        for request in ahead:
            heapq.heappush(waiting, request)

    def _wake(self) -> None:
        """Send no more to servers that have another version than they are to have, and wake them."""
        for server in self._servers:
            server.open &= server.installed == self._queue.target(server)
            if not server.open:
                server.wake.set()

    # -- a completion ----------------------------------------------------------------------------------------

    async def _sample(self, server: ServerState, flight: Flight) -> None:
        request, seconds = flight.request, self._settings.request_seconds
        first = request.turns[0].first_version if request.turns else flight.marks[0][1]
        salt = f"{flight.name.rpartition('.')[0]}-{first}"
        seeded = self._settings.request_seeds or flight.evaluation is not None
        wanted = flight.name, request.context_T, salt, *sampling_params(self._sampling, request, seeded)
        try:
            answer = await server.client.call("complete", *wanted, seconds=seconds)
        except ServerLostError as error:
            await self._handle_drop(server, flight, error)
            return
        self._remove(server, flight)
        if answer is None:  # it was aborted
            self._queue_again([flight])
            return
        completed = completed_of(server.client.name, answer, request, flight.marks)
        server.proven, server.losses = True, 0
        self._drops.pop(flight.key, None)
        if environment := flight.evaluation.environment if flight.evaluation else self._environment:
            found = await self._next_turn(environment, flight, completed)
            if isinstance(found, Request):
                flight.request = replace(found, server=server.index)
                self._queue_again([flight])
                return
            completed = found
        if flight.evaluation is None:
            self._report(completed)
        elif self._queue.complete(flight.evaluation, completed):
            self._weights.release(flight.evaluation.version)
        self._send_waiting()
        self._wake()

    async def _next_turn(
        self, environment: TurnsThread, flight: Flight, completed: Completed
    ) -> Request | Completed:
        """Have the environment answer a turn; its slot is another's meanwhile."""
        self._send_waiting()
        if flight.evaluation is None:
            return await environment.next_turn(completed)
        flight.evaluation.answering += 1  # no server goes on to other weights
        try:
            return await environment.next_turn(completed)
        finally:
            flight.evaluation.answering -= 1

    async def _handle_drop(self, server: ServerState, flight: Flight, error: ServerLostError) -> None:
        """Send the request again where the server is well; else count the server as lost."""
        self._drops[flight.key] += 1
        if self._drops[flight.key] < MAX_TRIES and server.lost is None and await server.client.is_well():
            self._report_loss(flight)
            self._remove(server, flight)
            self._queue_again([flight])
            return
        server.lost = server.lost or error
        server.wake.set()

    def _remove(self, server: ServerState, flight: Flight) -> None:
        server.flights.pop(flight.name, None)
        server.count_work()

    # -- a server --------------------------------------------------------------------------------------------

    async def _supervise(self, server: ServerState) -> None:
        while True:
            try:
                await self._reach(server)
                await self._serve(server)
            except ServerLostError as error:
                self._handle_loss(server, error)

    def _handle_loss(self, server: ServerState, error: ServerLostError) -> None:
        """Queue the completions of a lost server again.

        Raises:
            WorkerError: it was lost too often.
        """
        why, log = str(error), ""
        if server.client.log:
            why, log = f"{why} ({server.client.exit_reason()})", f"; its log is {server.client.log}"
        server.client.kill()
        server.losses += 1
        # A server that has completed nothing is likely to be wrong, but may be lost before its first.
        if server.losses > (MAX_LOSSES if server.proven else int(server.installed >= 0)):
            times = f" {server.losses} times in a row" if server.losses > 1 else ""
            raise WorkerError(f"{why}: the server failed{times}{log}")
        flights = list(server.flights.values())
        _LOG.warning("%s: it is started again, with %d completions", why, len(flights))
        for flight in flights:
            self._report_loss(flight)
            if flight.task:
                flight.task.cancel()
        server.flights.clear()
        self._weights.forget(server.client)
        server.count_time(Times())
        server.open, server.rejoining, server.lost, server.installed = False, True, None, -1
        groups = {flight.request.seq_no for flight in flights if not flight.evaluation}
        self._report(Restarted(server.index, groups, why))
        self._queue_again(flights)

    def _report_loss(self, flight: Flight) -> None:
        """Have the tokens counted that training loses."""
        if flight.seen and not flight.evaluation:
            self._report(flight.loss)

    async def _reach(self, server: ServerState) -> None:
        """Start a worker, or wait until a server answers, and check what it is."""
        settings = self._settings
        server.count_time(Times(startup=1.0))
        await server.client.reach(settings.start_seconds)
        server.seed = await check_server(server.client, self._required, settings.answer_seconds)
        twins = [s for s in self._servers if s is not server and s.seed == server.seed]
        if twins and not settings.request_seeds:
            # By one seed the first completions of both would have the same random numbers.
            what = f"{server.client.name} has the --seed of {twins[0].client.name} ({server.seed})"
            raise WorkerError(f"{what}: start each with another, or set request_seeds")

    async def _serve(self, server: ServerState) -> None:
        """Install what is offered, until the server is lost."""
        while True:
            server.wake.clear()
            if server.lost:
                raise server.lost
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
            await self._check(server)

    async def _check(self, server: ServerState) -> None:
        """Check that the server is well, and see how far its completions are: these are lost with it."""
        seconds = self._settings.answer_seconds
        await server.client.call("check", seconds=seconds)
        if server.flights:
            server.see(await server.client.call("progress", seconds=seconds))

    async def _install(self, server: ServerState) -> None:
        """Install the version that it is to have, and report whether training samples by it."""
        client, seconds = server.client, self._settings.answer_seconds
        if server.installed >= 0:  # the first weights are a part of its start
            server.count_time(Times(worked=1.0, held=1.0))
        async with self._weights.chosen(lambda: self._queue.target(server)) as (version, source):
            # It may have changed meanwhile.
            if version == server.installed or self._queue.must_drain(server, version):
                server.count_work()
                return
            started = time.perf_counter()
            await client.call("pause", seconds=seconds)
            try:
                progress = await self._load(server, source)
                server.see(progress)
                for flight in server.flights.values():
                    if flight.name in progress:
                        flight.marks.append((progress[flight.name], version))
                await self._abort_unstarted(server, progress)
            finally:
                await client.call("resume", seconds=seconds)
            # Of a server that comes back, others may be ahead: what was admitted since must not be staler.
            least = self._queue.newest if server.rejoining else server.reported
            server.trains = self._queue.is_offered(version) and version >= least
        server.installed = version
        server.count_work()
        if server.trains:
            server.rejoining, server.reported = False, version
            self._report(Installed(server.index, version, time.perf_counter() - started))

    async def _load(self, server: ServerState, source: Any) -> dict[str, int]:
        """Have the weights loaded; return the tokens of the completions that had started, by flight."""
        try:
            return await self._weights.load(server.client, source, self._settings.answer_seconds)
        except ServerLostError as error:
            if not await server.client.is_well():
                raise
            raise WorkerError(
                f"{error}: the weights could not be installed (another model, or a server without "
                "--worker-extension-cls; see its log)"
            ) from error

    async def _abort_unstarted(self, server: ServerState, started: Mapping[str, int]) -> None:
        """Queue again the completions that had not started, and wait for those that have just ended."""
        flights = [flight for name, flight in server.flights.items() if name not in started]
        for _ in range(ABORTS):  # the server cannot abort a request that has not reached it yet
            flights = [flight for flight in flights if flight.name in server.flights]
            if not flights:
                return
            names = [flight.name for flight in flights]
            await server.client.call("abort", names, seconds=self._settings.answer_seconds)
            tasks = [flight.task for flight in flights if flight.task]
            await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        for flight in [flight for flight in flights if flight.name in server.flights]:
            if flight.task:
                flight.task.cancel()
            self._remove(server, flight)
            self._queue_again([flight])


def _unexpected(error: BaseException) -> WorkerError:
    _LOG.debug("vLLM's thread", exc_info=error)
    return WorkerError(f"generation by vLLM cannot go on: {brief_error(error)}")
