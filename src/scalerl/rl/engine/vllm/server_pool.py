"""The servers, each kept alive and up to date, in an event loop of a thread of its own.

    waiting    completions in order of admission; one goes to a server as soon as a row is free there
    keep       one task a server: start it, or reach it; then install weights as they are offered, until it
               is gone; then again, with what was in flight there begun again
    complete   one task a completion

An update in flight: no completion is sent; `/pause?mode=keep` ends once no step is under way, and leaves the
KV cache as it is; the worker extension loads the weights, and answers how many tokens each completion has of
those that had begun: the tokens of the old version. One that had not begun is called back, and sent again
under the new version, so that the version in its cache salt is the one that reads its prompt; `/resume`.
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
from scalerl.rl.engine.vllm.client import Client, Wanted, check_server
from scalerl.rl.engine.vllm.completions import (
    Event,
    FailedRequest,
    Flight,
    Installed,
    Restarted,
    parsed,
)
from scalerl.rl.engine.vllm.kept import Kept, Times
from scalerl.rl.engine.vllm.protocol import LENGTH, rule_to_json
from scalerl.rl.engine.vllm.server import Server
from scalerl.rl.sync.vllm_http import FileTransport, Gone, VllmTransport
from scalerl.rl.types import Weights

_LOG = logging.getLogger("scalerl")
MOST_DEATHS = 5
"""Deaths of a server in a row, with no completion in between, that end the run."""
MOST_TRIES = 3
"""Times that a server which is well may drop a completion, before it counts as dead."""
LOOK_EVERY = 5.0
"""Seconds between two looks at a server: whether it is well, and how far its completions are."""
CALLS_BACK, CALL_BACK_SECONDS = 500, 0.02
"""How often completions are called back that have not begun, and how long each call waits for them."""
_NAME = re.compile(r"cmpl-(.+?)-0(?:-[0-9a-f]+)?")
"""vLLM's own name of a request, around ours."""


class ServerPool:
    """The servers `clients`, each with its process where it is ours. `say` is told what happens."""

    def __init__(
        self,
        settings: Vllm,
        sampling: Sampling,
        wanted: Wanted,
        salt: str,
        folder: Path,
        clients: list[tuple[Client, Server | None]],
        weights: Weights,
        version: int,
        say: Callable[[Event], None],
    ) -> None:
        self._settings, self._sampling, self._wanted = settings, sampling, wanted
        self._salt, self._folder, self._say = salt, folder, say
        self._first: tuple[Weights, int] | None = (weights, version)
        self._rule = rule_to_json(sampling.length) if sampling.length.phrase else None
        self._waiting: list[Request] = []
        self._servers = [Kept(index, *server) for index, server in enumerate(clients)]
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
        """Have all servers go on with new weights."""

        def take() -> None:
            self._weights.offer(weights, version)
            for server in self._servers:
                server.wake.set()

        self._call(take)

    @property
    def times(self) -> list[Times]:
        """Seconds of each server."""
        return [server.times for server in self._servers]

    @property
    def pids(self) -> list[int | None]:
        """Of the servers of our own."""
        return [server.process.pid for server in self._servers if server.process]

    def close(self) -> None:
        """End the servers of our own, and let go of the others."""
        self._call(lambda: self._stop.set())
        self._thread.join(timeout=60)

    def _call(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended: that has been said
            self._loop.call_soon_threadsafe(what)

    # -- in the loop -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except ScalerlError as error:
            self._say(FailedRequest(error))
        except BaseException as error:
            _LOG.debug("vLLM's thread", exc_info=True)
            self._say(FailedRequest(WorkerError(f"generation by vLLM cannot go on: {brief_error(error)}")))
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._weights = self._transport()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._ready.set()
        tasks = [asyncio.create_task(self._keep(server)) for server in self._servers]
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([stop, self._broken, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            flights = [f.task for server in self._servers for f in server.flights.values() if f.task]
            for task in [stop, *tasks, *flights]:
                task.cancel()
            await asyncio.gather(stop, *tasks, *flights, return_exceptions=True)
            for server in self._servers:
                await server.client.close()
            own = [server.process for server in self._servers if server.process]
            await asyncio.gather(*(asyncio.to_thread(process.end) for process in own))

    def _transport(self) -> VllmTransport:
        assert self._first is not None
        weights, version = self._first
        self._first = None  # a model's worth of memory
        if self._settings.transport == "nccl":
            from scalerl.rl.sync.vllm_nccl import NcclTransport

            return NcclTransport(weights, version)
        return FileTransport(self._folder, weights, version)

    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            heapq.heappush(self._waiting, request)
        self._pump()

    def _pump(self) -> None:
        """Send what waits to servers with free rows."""
        while self._waiting:
            free = [s for s in self._servers if s.open and len(s.flights) < self._wanted.rows]
            if not free:
                return
            server = min(free, key=lambda s: len(s.flights))
            self._send(server, heapq.heappop(self._waiting))

    def _send(self, server: Kept, request: Request) -> None:
        self._sent += 1
        flight = Flight(request, f"{self._salt}.{self._sent}", [(0, server.installed)])
        server.count_time(at_work=True)
        server.flights[flight.name] = flight
        flight.task = asyncio.create_task(self._complete(server, flight))

    # -- a completion ----------------------------------------------------------------------------------------

    async def _complete(self, server: Kept, flight: Flight) -> None:
        """A task that ended silently would leave its completion in flight for ever."""
        try:
            await self._ask(server, flight)
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)

    async def _ask(self, server: Kept, flight: Flight) -> None:
        try:
            answer = await server.client.ask(
                "/v1/completions", self._body(server, flight), seconds=self._settings.request_seconds
            )
            completed = parsed(server.client.name, answer, flight)
        except Gone as error:
            await self._dropped(server, flight, error)
            return
        self._landed(server, flight)
        if completed is None:  # called back
            self._queue([flight.request])
            return
        server.ever, server.deaths = True, 0
        self._drops.pop(flight.request, None)
        self._say(completed)
        self._pump()

    def _body(self, server: Kept, flight: Flight) -> dict[str, Any]:
        sampling, request = self._sampling, flight.request
        body = {
            "model": server.model,
            "prompt": request.prompt_T.tolist(),
            "max_tokens": sampling.length.max_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": int(request.key.view(np.int64)),  # vLLM takes signed seeds
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,  # the recipe's end token alone ends a completion
            "stop_token_ids": [sampling.end_token],
            "skip_special_tokens": False,
            "cache_salt": f"{self._salt}-{flight.marks[0][1]}",
            "request_id": flight.name,
        }
        if self._rule:
            control = {"rule": self._rule, "interrupt_at": request.interrupt_at}
            body["vllm_xargs"] = {LENGTH: json.dumps(control | {"end_token": sampling.end_token})}
        return body

    async def _dropped(self, server: Kept, flight: Flight, error: Gone) -> None:
        """Send it again where the server is well, or have the server started again."""
        request = flight.request
        self._drops[request] += 1
        if self._drops[request] < MOST_TRIES and server.lost is None and await server.client.is_well():
            if flight.seen:
                self._say(flight.loss)
            self._landed(server, flight)
            self._queue([request])
            return
        server.lost = server.lost or error
        server.wake.set()

    def _landed(self, server: Kept, flight: Flight) -> None:
        server.flights.pop(flight.name, None)
        server.count_time(at_work=bool(server.flights))

    # -- a server --------------------------------------------------------------------------------------------

    async def _keep(self, server: Kept) -> None:
        while True:
            try:
                await self._reach(server)
                await self._serve(server)
            except Gone as error:
                self._remove_lost(server, error)

    def _remove_lost(self, server: Kept, why: Gone) -> None:
        """Count the death, and put what was in flight back."""
        words = f" ({server.process.last_words()})" if server.process else ""
        if server.process:
            server.process.kill()
        server.deaths += 1
        # One that has completed nothing is likely to be wrong; but what ends it may come before its first.
        most = MOST_DEATHS if server.ever else int(server.installed >= 0)
        if server.deaths > most:
            log = f"; its log is {server.process.log}" if server.process else ""
            times = f" {server.deaths} times in a row" if server.deaths > 1 else ""
            raise WorkerError(f"{why}{words}: the server failed{times}{log}")
        requests = [flight.request for flight in server.flights.values()]
        _LOG.warning("%s%s: it is begun again, with %d completions", why, words, len(requests))
        for loss in server.losses():
            self._say(loss)
        for flight in server.flights.values():
            if flight.task:
                flight.task.cancel()
        server.flights.clear()
        self._weights.forget(server.client)
        server.count_loss()
        server.open, server.away, server.lost, server.installed = False, True, None, -1
        self._say(Restarted(server.index, {request.seq_no for request in requests}, f"{why}{words}"))
        self._queue(requests)

    async def _reach(self, server: Kept) -> None:
        """Start it where it is ours, and wait until it answers."""
        settings = self._settings
        server.count_start()
        if server.process:
            await asyncio.to_thread(server.process.start)
        until, waiting = time.monotonic() + settings.start_seconds, False
        while True:
            try:
                await server.client.ask("/health", seconds=5.0)
                break
            except Gone as error:
                if server.process and not server.process.pid:
                    raise Gone(f"{server.client.name} ended as it started") from error
                if time.monotonic() > until:
                    raise Gone(f"{error}; {settings.start_seconds:g} s were waited for it") from error
                if not waiting and not server.process:
                    _LOG.warning("%s: waiting for it", error)
                waiting = True
                await asyncio.sleep(0.5)
        server.model = await check_server(server.client, self._wanted, settings.answer_seconds)

    async def _serve(self, server: Kept) -> None:
        """Install what is offered, for as long as it lives."""
        while True:
            server.wake.clear()
            if server.lost:
                raise server.lost
            if server.installed != self._weights.version:
                server.open = False
                seconds = await self._install(server)
                if server.away and server.installed != self._weights.version:
                    continue  # the others may be further: what was admitted since must not be older
                server.open, server.away = True, False
                self._say(Installed(server.index, server.installed, seconds))
                self._pump()
            with suppress(TimeoutError):
                await asyncio.wait_for(server.wake.wait(), LOOK_EVERY)
                continue
            await self._look(server)

    async def _look(self, server: Kept) -> None:
        """Whether it is well, and how far its completions are: what is lost if it dies is known so far."""
        seconds = self._settings.answer_seconds
        await server.client.ask("/health", seconds=seconds)
        if server.flights:
            server.see(self._progress(server, await server.client.progress(seconds)))

    async def _install(self, server: Kept) -> float:
        """Install the newest weights; seconds from the pause to the end of it."""
        seconds = self._settings.answer_seconds
        if server.installed >= 0:  # the first weights are a part of its start
            server.count_time(at_work=True)
        async with self._weights.newest() as (version, source):
            started = time.perf_counter()
            await server.client.ask(
                "/pause", {}, params={"mode": "keep", "clear_cache": "false"}, seconds=seconds
            )
            try:
                progress = await self._load(server, source)
                server.see(progress)
                for flight in server.flights.values():
                    if flight.name in progress:
                        flight.marks.append((progress[flight.name], version))
                await self._call_back(server, progress)
            finally:
                await server.client.ask("/resume", {}, seconds=seconds)
        server.installed = version
        server.count_time(at_work=bool(server.flights))
        return time.perf_counter() - started

    async def _load(self, server: Kept, source: Any) -> dict[str, int]:
        """Have the weights loaded; how many tokens the completions have that had begun, by our names."""
        try:
            answer = await self._weights.load(server.client, source, self._settings.answer_seconds)
        except Gone as error:
            if not await server.client.is_well():
                raise
            raise WorkerError(
                f"{error}: the weights could not be installed (another model, or a server without "
                "--worker-extension-cls; see its log)"
            ) from error
        return self._progress(server, answer)

    @staticmethod
    def _progress(server: Kept, answer: Any) -> dict[str, int]:
        progress: dict[str, int] = {}
        try:
            for worker in answer["results"]:
                progress |= {found[1]: n for key, n in worker.items() if (found := _NAME.fullmatch(key))}
        except (KeyError, TypeError, AttributeError):
            raise WorkerError(f"{server.client.name}: {brief(answer)} from /collective_rpc") from None
        return progress

    async def _call_back(self, server: Kept, begun: Mapping[str, int]) -> None:
        """Take back the completions that have not begun, and wait for those that have just ended."""
        others = {name: flight for name, flight in server.flights.items() if name not in begun}
        for _ in range(CALLS_BACK):  # what is only arriving there is not known yet
            left = {name: flight for name, flight in others.items() if name in server.flights}
            if not left:
                return
            body = {"request_ids": [f"cmpl-{name}-0" for name in left]}
            await server.client.ask("/abort_requests", body, seconds=self._settings.answer_seconds)
            tasks = [flight.task for flight in left.values() if flight.task]
            await asyncio.wait(tasks, timeout=CALL_BACK_SECONDS)
        for flight in [flight for name, flight in others.items() if name in server.flights]:
            if flight.task:  # nobody waits for it any more
                flight.task.cancel()
            self._landed(server, flight)
            self._queue([flight.request])
