"""The servers, each kept running and up to date, in an event loop of a thread of its own.

    waiting      requests in order of admission; one is sent as soon as a server has a free decode slot
    supervise    one task a server: start or reach it; install weights as they are offered, until it is lost;
                 then again, with its completions in flight sampled anew
    complete     one task a completion

An update in flight: no completion is sent; `/pause?mode=keep` returns once no step is under way, and leaves
the KV cache as it is; the worker extension loads the weights, and returns how many tokens each completion
has of those that had started: the tokens of the old version. One that had not started is aborted, and sent
again under the new version, so that the version in its cache salt is the one that reads its prompt;
`/resume`.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import ScalerlError, WorkerError, brief, brief_error
from scalerl.rl.config.cluster import Vllm
from scalerl.rl.engine.sampling import Request, Sampling
from scalerl.rl.engine.vllm.completions import parse_answer
from scalerl.rl.engine.vllm.protocol import LENGTH, rule_to_json
from scalerl.rl.engine.vllm.requirements import Requirements, check_server
from scalerl.rl.engine.vllm.server_state import Event, Flight, Installed, Restarted, ServerState
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
        self._drops: Counter[Request] = Counter()
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
            for server in self._servers:
                server.wake.set()

        self._call(offer)

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
        except ScalerlError as error:
            self._report(error)
        except BaseException as error:
            _LOG.debug("vLLM's thread", exc_info=True)
            self._report(WorkerError(f"generation by vLLM cannot go on: {brief_error(error)}"))
        finally:
            self._ready.set()

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

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            heapq.heappush(self._waiting, request)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what waits to servers with free decode slots, those with the fewest completions first."""
        while self._waiting:
            free = [s for s in self._servers if s.open and len(s.flights) < self._required.slots]
            if not free:
                return
            server = min(free, key=lambda s: len(s.flights))
            self._sent += 1
            name = f"{self._salt}.{self._sent}"
            flight = Flight(heapq.heappop(self._waiting), name, [(0, server.installed)])
            server.flights[name] = flight
            server.count_work()
            flight.task = asyncio.create_task(self._complete(server, flight))

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
            self._queue([flight.request])
            return
        server.proven, server.losses = True, 0
        self._drops.pop(flight.request, None)
        self._report(completed)
        self._send_waiting()

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
            "cache_salt": f"{self._salt}-{flight.marks[0][1]}",
            "request_id": flight.name,
        }
        if self._settings.request_seeds:
            body["seed"] = int(request.key.view(np.int64))  # vLLM's seeds are signed
        if self._rule:
            control = {"rule": self._rule, "interrupt_at": request.interrupt_at}
            body["vllm_xargs"] = {LENGTH: json.dumps(control | {"end_tokens": sampling.end_tokens})}
        return body

    async def _handle_drop(self, server: ServerState, flight: Flight, error: ServerLostError) -> None:
        """Send the request again where the server is well; else count the server as lost."""
        request = flight.request
        self._drops[request] += 1
        if self._drops[request] < MAX_TRIES and server.lost is None and await server.client.is_well():
            if flight.seen:
                self._report(flight.loss)
            self._remove(server, flight)
            self._queue([request])
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
        requests = [flight.request for flight in server.flights.values()]
        _LOG.warning("%s: it is started again, with %d completions", why, len(requests))
        for flight in server.flights.values():
            if flight.seen:
                self._report(flight.loss)
            if flight.task:
                flight.task.cancel()
        server.flights.clear()
        self._weights.forget(server.client)
        server.count_time()
        server.open, server.rejoining, server.lost, server.installed = False, True, None, -1
        self._report(Restarted(server.index, {request.seq_no for request in requests}, why))
        self._queue(requests)

    async def _reach(self, server: ServerState) -> None:
        """Start a server of our own, and wait until it answers."""
        settings = self._settings
        server.count_time(starting=True)
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
            if server.installed != self._weights.version:
                server.open = False
                seconds = await self._install(server)
                if server.rejoining and server.installed != self._weights.version:
                    continue  # others may have a newer version: what was admitted since must not be staler
                server.open, server.rejoining = True, False
                self._report(Installed(server.index, server.installed, seconds))
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

    async def _install(self, server: ServerState) -> float:
        """Install the newest weights; return the seconds from the pause to its end."""
        client, seconds = server.client, self._settings.answer_seconds
        if server.installed >= 0:  # the first weights are a part of its start
            server.count_time(holding=True, working=True)
        async with self._weights.newest() as (version, source):
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
        server.installed = version
        server.count_work()
        return time.perf_counter() - started

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
            self._queue([flight.request])


def _parse_progress(server: ServerState, answer: Any) -> dict[str, int]:
    """Return the tokens of completions by the names of their flights."""
    progress: dict[str, int] = {}
    try:
        for worker in answer["results"]:
            progress |= {found[1]: n for key, n in worker.items() if (found := _NAME.fullmatch(key))}
    except (KeyError, TypeError, AttributeError):
        raise WorkerError(f"{server.client.name}: {brief(answer)} from /collective_rpc") from None
    return progress
