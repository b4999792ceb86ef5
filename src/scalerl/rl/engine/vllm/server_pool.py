"""The servers, each kept running and up to date, in an event loop of a thread of its own.

    waiting      requests in order of admission; one is sent as soon as a server has a free decode slot
    evaluations  requests that go before those, each to a server with the version to be evaluated
    supervise    one task a server: start or reach it; install the version that it is to have, until it is
                 lost; then again, with its completions in flight sampled anew
    complete     one task a completion

An update in flight: no completion is sent; `/pause?mode=keep` returns once no step is under way, and leaves
the KV cache as it is; the worker extension loads the weights, and returns how many tokens each completion
has of those that had started: the tokens of the old version. One that had not started is aborted, and sent
again under the new version, so that the version in its cache salt is the one that reads its prompt;
`/resume`.

A server is to have the version of the oldest evaluation that has completions for it, and else the newest. So
versions are evaluated on the way, in order, and training goes on beside with what a server has: admission
control holds it back where that gets too old. Where a version is older than what training has sampled by (a
resumed run, a lost server), or is none that training samples by, the server first completes what training has
there, and gets no more of it until it has the newest again.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import ScalerlError, WorkerError, brief, brief_error
from scalerl.rl.config.cluster import Vllm
from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import Completed, parse_answer
from scalerl.rl.engine.vllm.protocol import LENGTH, rule_to_json
from scalerl.rl.engine.vllm.requirements import Requirements, check_server
from scalerl.rl.engine.vllm.server_state import (
    Event,
    Flight,
    Installed,
    Restarted,
    ServedEvaluation,
    ServerState,
)
from scalerl.rl.sync.vllm_client import ServerLostError
from scalerl.rl.sync.vllm_weights import FileTransport, NcclTransport
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
_NAME = re.compile(r"cmpl-(.+?)-0(?:-[0-9a-f]+)?")
"""vLLM's own name of a request, around ours."""


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
    ) -> None:
        self._settings, self._sampling, self._required = settings, sampling, required
        self._salt, self._folder, self._servers, self._report = salt, folder, servers, report
        self._first: tuple[Weights, int] | None = (weights, version)
        self._rule = rule_to_json(sampling.length) if sampling.length.phrase else None
        self._waiting: list[Request] = []
        self._evaluations: list[ServedEvaluation] = []
        self._unfinished: list[ServedEvaluation] = []
        """Evaluations whose futures fail where the loop ends; of both threads."""
        self._ended: ScalerlError | None = None
        self._drops: Counter[tuple[int, Request]] = Counter()
        self._sent = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        self._ready.wait()

    # -- from the other thread -------------------------------------------------------------------------------

    def submit(self, requests: list[Request]) -> None:
        """Queue completions."""
        self._call(lambda: self._queue(requests))

    def offer(self, weights: Weights, version: int) -> None:
        """Have all servers install new weights."""

        def offer() -> None:
            self._weights.offer(weights, version)
            self._wake()

        self._call(offer)

    def evaluate(self, evaluation: ServedEvaluation, weights: Weights) -> None:
        """Have completions sampled by `weights`, which are exactly the version of the evaluation."""

        def begin() -> None:
            evaluation.offered = evaluation.version == self._weights.version
            self._weights.keep(weights, evaluation.version)
            self._evaluations.append(evaluation)
            self._wake()
            self._send_waiting()

        self._unfinished.append(evaluation)
        self._call(begin)
        if self._ended:
            self._fail_evaluations(self._ended)

    def close(self) -> None:
        """Stop the servers that were started here, and close the connections to the others."""
        self._call(lambda: self._stop.set())
        self._thread.join(timeout=60)

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, which was reported as an event
            self._loop.call_soon_threadsafe(function)

    # -- in the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
            self._ended = WorkerError("generation by vLLM was stopped")
        except ScalerlError as error:
            self._ended = error
            self._report(error)
        except BaseException as error:
            _LOG.debug("vLLM's thread", exc_info=True)
            self._ended = WorkerError(f"generation by vLLM cannot go on: {brief_error(error)}")
            self._report(self._ended)
        finally:
            self._ready.set()
            assert self._ended is not None
            self._fail_evaluations(self._ended)

    def _fail_evaluations(self, error: ScalerlError) -> None:
        for evaluation in list(self._unfinished):
            with suppress(InvalidStateError):  # the other thread was first
                evaluation.done.set_exception(error)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        assert self._first is not None
        weights, version = self._first
        self._first = None  # a model's worth of memory
        self._weights = (
            NcclTransport(weights, version)
            if self._settings.transport == "nccl"
            else FileTransport(self._folder, weights, version)
        )
        del weights
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._ready.set()
        tasks = [asyncio.create_task(self._supervise(server)) for server in self._servers]
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stop, self._failure, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            flights = [f.task for server in self._servers for f in server.flights.values() if f.task]
            for task in [stop, *tasks, *flights]:
                task.cancel()
            await asyncio.gather(stop, *tasks, *flights, return_exceptions=True)
            for server in self._servers:
                await server.client.close()
            processes = [server.process for server in self._servers if server.process]
            await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))

    def _queue(self, requests: Iterable[Request]) -> None:
        for request in requests:
            heapq.heappush(self._waiting, request)
        self._send_waiting()

    def _queue_again(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            heapq.heappush(flight.evaluation.waiting if flight.evaluation else self._waiting, flight.request)
        self._send_waiting()
        self._wake()

    def _send_waiting(self) -> None:
        """Send what waits to servers with free decode slots, those with the fewest completions first."""
        for evaluation in self._evaluations:
            self._send(evaluation.waiting, evaluation)
        self._send(self._waiting)

    def _send(self, waiting: list[Request], evaluation: ServedEvaluation | None = None) -> None:
        def takes(server: ServerState) -> bool:
            fits = server.installed == evaluation.version if evaluation else server.trains
            return server.open and fits and len(server.flights) < self._required.slots

        salt = evaluation.salt if evaluation else self._salt
        while waiting and (free := [server for server in self._servers if takes(server)]):
            server = min(free, key=lambda s: len(s.flights))
            self._sent += 1
            name, marks = f"{salt}.{self._sent}", [(0, server.installed)]
            flight = Flight(heapq.heappop(waiting), name, marks, evaluation=evaluation)
            server.flights[name] = flight
            server.count_work()
            flight.task = asyncio.create_task(self._complete(server, flight))

    # -- versions --------------------------------------------------------------------------------------------

    def _target(self, server: ServerState) -> int:
        """Return the version that a server is to have."""
        for flight in server.flights.values():
            if flight.evaluation:
                return flight.evaluation.version
        return next((e.version for e in self._evaluations if e.waiting), self._weights.version)

    def _is_offered(self, version: int) -> bool:
        offered = [evaluation.version for evaluation in self._evaluations if evaluation.offered]
        return version == self._weights.version or version in offered

    def _must_drain(self, server: ServerState, version: int) -> bool:
        """Return whether a server must complete what training has there before it installs a version."""
        trains = any(flight.evaluation is None for flight in server.flights.values())
        return trains and (version < server.installed or not self._is_offered(version))

    def _wake(self) -> None:
        """Send no more to servers that have another version than they are to have, and wake them."""
        for server in self._servers:
            server.open &= server.installed == self._target(server)
            if not server.open:
                server.wake.set()

    # -- a completion ----------------------------------------------------------------------------------------

    async def _complete(self, server: ServerState, flight: Flight) -> None:
        # A task that failed silently would leave its completion in flight for ever.
        try:
            await self._sample(server, flight)
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)

    async def _sample(self, server: ServerState, flight: Flight) -> None:
        body, seconds = self._body(server, flight), self._settings.request_seconds
        try:
            answer = await server.client.request("/v1/completions", body, seconds=seconds)
            completed = parse_answer(server.client.name, answer, flight.request, flight.marks)
        except ServerLostError as error:
            await self._handle_drop(server, flight, error)
            return
        self._remove(server, flight)
        if completed is None:  # it was aborted
            self._queue_again([flight])
            return
        server.proven, server.losses = True, 0
        self._drops.pop(flight.key, None)
        if evaluation := flight.evaluation:
            self._add_to(evaluation, completed)
        else:
            self._report(completed)
        self._send_waiting()
        self._wake()

    def _add_to(self, evaluation: ServedEvaluation, completed: Completed) -> None:
        evaluation.completed.append(completed)
        if len(evaluation.completed) == evaluation.n_requests:
            self._evaluations.remove(evaluation)
            self._unfinished.remove(evaluation)
            self._weights.release(evaluation.version)
            evaluation.done.set_result(evaluation.completed)

    def _body(self, server: ServerState, flight: Flight) -> dict[str, Any]:
        sampling, request = self._sampling, flight.request
        body = {
            "model": server.model,
            "prompt": request.prompt_T.tolist(),
            "max_tokens": sampling.length.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,  # the end tokens of `Sampling` alone end a completion
            "stop_token_ids": list(sampling.end_tokens),
            "skip_special_tokens": False,
            "cache_salt": f"{flight.name.rpartition('.')[0]}-{flight.marks[0][1]}",
            "request_id": flight.name,
        }
        if flight.evaluation or self._settings.request_seeds:
            body["seed"] = int(request.key.view(np.int64))  # vLLM's seeds are signed
        if self._rule:
            control = {"rule": self._rule, "interrupt_at": request.interrupt_at}
            body["vllm_xargs"] = {LENGTH: json.dumps(control | {"end_tokens": sampling.end_tokens})}
        return body

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
        if server.process:
            why, log = f"{why} ({server.process.exit_reason()})", f"; its log is {server.process.log}"
            server.process.kill()
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
        server.count_time()
        server.open, server.rejoining, server.lost, server.installed = False, True, None, -1
        groups = {flight.request.seq_no for flight in flights if not flight.evaluation}
        self._report(Restarted(server.index, groups, why))
        self._queue_again(flights)

    def _report_loss(self, flight: Flight) -> None:
        """Have the tokens counted that training loses."""
        if flight.seen and not flight.evaluation:
            self._report(flight.loss)

    async def _reach(self, server: ServerState) -> None:
        """Start a server of our own, and wait until it answers."""
        settings = self._settings
        server.count_time(starting=1.0)
        if server.process:
            await asyncio.to_thread(server.process.start)
        until, warned = time.monotonic() + settings.start_seconds, False
        while True:
            try:
                await server.client.request("/health", seconds=5.0)
                break
            except ServerLostError as error:
                if server.process and not server.process.pid:
                    raise ServerLostError(f"{server.client.name} ended as it started") from error
                if time.monotonic() > until:
                    why = f"{error}; {settings.start_seconds:g} s were waited for it"
                    raise ServerLostError(why) from error
                if not warned and not server.process:
                    _LOG.warning("%s: waiting for it", error)
                warned = True
                await asyncio.sleep(0.5)
        server.model, server.seed = await check_server(server.client, self._required, settings.answer_seconds)
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
            version = self._target(server)
            server.open = server.installed == version
            if not server.open and not self._must_drain(server, version):
                await self._install(server)
                continue
            self._send_waiting()
            with suppress(TimeoutError):
                await asyncio.wait_for(server.wake.wait(), CHECK_EVERY)
                continue
            await self._check(server)

    async def _check(self, server: ServerState) -> None:
        """Check that the server is well, and see how far its completions are: these are lost with it."""
        seconds = self._settings.answer_seconds
        await server.client.request("/health", seconds=seconds)
        if server.flights:
            server.see(_parse_progress(server, await server.client.progress(seconds)))

    async def _install(self, server: ServerState) -> None:
        """Install the version that it is to have, and report whether training samples by it."""
        client, seconds = server.client, self._settings.answer_seconds
        if server.installed >= 0:  # the first weights are a part of its start
            server.count_time(holding=1.0, working=1.0)
        async with self._weights.chosen(lambda: self._target(server)) as (version, source):
            if version == server.installed or self._must_drain(server, version):  # it has changed meanwhile
                server.count_work()
                return
            started = time.perf_counter()
            pause = {"mode": "keep", "clear_cache": "false"}
            await client.request("/pause", {}, params=pause, seconds=seconds)
            try:
                progress = await self._load(server, source)
                server.see(progress)
                for flight in server.flights.values():
                    if flight.name in progress:
                        flight.marks.append((progress[flight.name], version))
                await self._abort_unstarted(server, progress)
            finally:
                await client.request("/resume", {}, seconds=seconds)
            # Of a server that comes back, others may be ahead: what was admitted since must not be staler.
            least = self._weights.version if server.rejoining else server.reported
            server.trains = self._is_offered(version) and version >= least
        server.installed = version
        server.count_work()
        if server.trains:
            server.rejoining, server.reported = False, version
            self._report(Installed(server.index, version, time.perf_counter() - started))

    async def _load(self, server: ServerState, source: Any) -> dict[str, int]:
        """Have the weights loaded; return the tokens of the completions that had started, by flight."""
        try:
            answer = await self._weights.load(server.client, source, self._settings.answer_seconds)
        except ServerLostError as error:
            if not await server.client.is_well():
                raise
            raise WorkerError(
                f"{error}: the weights could not be installed (another model, or a server without "
                "--worker-extension-cls; see its log)"
            ) from error
        return _parse_progress(server, answer)

    async def _abort_unstarted(self, server: ServerState, started: Mapping[str, int]) -> None:
        """Queue again the completions that had not started, and wait for those that have just ended."""
        flights = [flight for name, flight in server.flights.items() if name not in started]
        for _ in range(ABORTS):  # the server cannot abort a request that has not reached it yet
            flights = [flight for flight in flights if flight.name in server.flights]
            if not flights:
                return
            body = {"request_ids": [f"cmpl-{flight.name}-0" for flight in flights]}
            await server.client.request("/abort_requests", body, seconds=self._settings.answer_seconds)
            tasks = [flight.task for flight in flights if flight.task]
            await asyncio.wait(tasks, timeout=ABORT_SECONDS)
        for flight in [flight for flight in flights if flight.name in server.flights]:
            if flight.task:
                flight.task.cancel()
            self._remove(server, flight)
            self._queue_again([flight])


def _parse_progress(server: ServerState, answer: Any) -> dict[str, int]:
    """Return the tokens of completions by the names of their flights."""
    progress: dict[str, int] = {}
    try:
        for worker in answer["results"]:
            progress |= {found[1]: n for key, n in worker.items() if (found := _NAME.fullmatch(key))}
    except (KeyError, TypeError, AttributeError):
        raise WorkerError(f"{server.client.name}: {brief(answer)} from /collective_rpc") from None
    return progress
