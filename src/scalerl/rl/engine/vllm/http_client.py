"""A vLLM server over HTTP, as a process of a pool, and the meaning of its errors.

spawn --_reach--> started --call--> answer ...            kill: the calls are abandoned

answer in time                 returned to the caller
429, 503                       the server is full, or starting: the request is retried with back-off
dropped, silent, another 5xx   `WorkerLostError`: the caller waits for the server
anything else                  a `WorkerError` that names the server and the remedy
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from scalerl.errors import WorkerError, brief, brief_error
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.requirements import WORKER
from scalerl.rl.sync.vllm_client import SampledTokens, VllmClient
from scalerl.rl.workers.backend import Backend, Message, Target, WorkerLostError, WorkerProcess, message

_LOG = logging.getLogger("scalerl")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""First and longest back-off, in seconds, before a request to a full server is retried."""
IDLE = 2.0
"""Seconds after which an idle connection is not reused: vLLM drops it after 5, perhaps just as it is used."""
_NAME = re.compile(r"cmpl-(.+?)-0(?:-[0-9a-f]+)?")
"""vLLM's name of a request, which contains ours."""


@dataclass(frozen=True)
class HttpServers(Backend):
    """A backend that connects to the servers of the settings, in the running event loop."""

    settings: Vllm

    def spawn(self, name: str, number: int, target: Target, *arguments: Any) -> HttpServer:
        """See `Backend.spawn`; the server is already running."""
        return HttpServer(name, self.settings.urls[number], self.settings)


class HttpServer(WorkerProcess, VllmClient):
    """The connection to one server, at a URL or a Unix socket; it waits for the server to start."""

    def __init__(self, name: str, url: str, settings: Vllm) -> None:
        key = os.environ.get(settings.api_key_env, "")
        socket = url.removeprefix("unix://") if url.startswith("unix://") else None
        # A completion in flight holds a connection; with httpx's default of 100 others would wait.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE)
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, retries=0)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Clients of OpenAI's API are given a URL that ends in /v1, but /pause is not below it.
        base = "http://vllm" if socket else url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(transport=transport, base_url=base, headers=headers)
        self.name, self._key_name, self._model = name, f"${settings.api_key_env}", ""
        self._loop, self._started = asyncio.get_running_loop(), False
        self._starting = self._loop.create_task(self._reach(settings.start_seconds))

    def send(self, message: Any) -> None:
        """Do nothing: `call` is used in place of `WorkerProcess.send`."""

    def receive(self) -> list[Message]:
        """See `WorkerProcess.receive`."""
        if self._started or not self._starting.done():
            return []
        self._starting.result()
        self._started = True
        return [message("started")]

    def kill(self) -> None:
        """Start to close the connections."""
        self._closed = asyncio.run_coroutine_threadsafe(self._close(), self._loop)

    def join(self) -> None:
        """Wait until the connections are closed; to be called outside the event loop's thread."""
        self._closed.result()

    async def _close(self) -> None:
        self._starting.cancel()
        await self._http.aclose()

    async def _reach(self, seconds: float) -> None:
        until, log = time.monotonic() + seconds, _LOG.warning
        while True:
            try:
                return await self._check(5.0)
            except WorkerLostError as error:
                if time.monotonic() > until:
                    raise WorkerLostError(f"{error}; {seconds:g} s were waited for it") from error
                log("%s: waiting for it", error)
                log = _LOG.debug
                await asyncio.sleep(0.5)

    async def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """See `VllmClient`."""
        return await getattr(self, f"_{method}")(*arguments, seconds)

    async def _limits(self, seconds: float) -> tuple[str, int]:
        models = await self._request("/v1/models", seconds=seconds)
        try:
            self._model, longest = models["data"][0]["id"], int(models["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise WorkerError(f"{self.name}: {brief(models)} from /v1/models: not a vLLM server") from None
        return self._model, longest

    async def _tokenize(self, text: str, seconds: float) -> Any:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        found = await self._request("/tokenize", body, seconds=seconds)
        return found.get("tokens") if isinstance(found, dict) else None

    async def _describe(self, seconds: float) -> Any:
        try:
            found = (await self._call_workers("scalerl_describe", seconds))[0]
        except WorkerLostError as error:
            if not await self.is_well():
                raise
            raise WorkerError(f"{error}: start it with --worker-extension-cls {WORKER}") from error
        paused = await self._request("/is_paused", seconds=seconds)
        if isinstance(paused, dict) and paused.get("is_paused"):  # a trainer was killed during an update
            await self._resume(seconds)
        return found

    async def _complete(
        self,
        name: str,
        prompt_T: np.ndarray,
        salt: str,
        params: Mapping[str, Any],
        extra: Mapping[str, str],
        seconds: float,
    ) -> SampledTokens | None:
        body = {"model": self._model, "prompt": prompt_T.tolist(), "cache_salt": salt, "request_id": name}
        body |= {"return_token_ids": True, **params} | ({"vllm_xargs": dict(extra)} if extra else {})
        answer = await self._request("/v1/completions", body, seconds=seconds)
        try:
            (choice,) = answer["choices"]
            if choice["finish_reason"] == "abort":
                return None
            token_T = np.array(choice["token_ids"], dtype=np.int64)
            logp_T = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
            # If nothing was cached, vLLM leaves out the details or sets them to null.
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        except (KeyError, TypeError, ValueError, AttributeError):
            raise WorkerError(f"{self.name}: no tokens in its answer {brief(answer)}: is it vLLM?") from None
        return SampledTokens(token_T, logp_T, cached)

    async def _pause(self, seconds: float) -> None:
        params = {"mode": "keep", "clear_cache": "false"}
        await self._request("/pause", {}, params=params, seconds=seconds)

    async def _resume(self, seconds: float) -> None:
        await self._request("/resume", {}, seconds=seconds)

    async def _install(self, folder: Path, seconds: float) -> dict[str, int]:
        return self._by_name(await self._call_workers("scalerl_install", seconds, str(folder)))

    async def _progress(self, seconds: float) -> dict[str, int]:
        return self._by_name(await self._call_workers("scalerl_progress", seconds))

    async def _abort(self, names: Sequence[str], seconds: float) -> None:
        body = {"request_ids": [f"cmpl-{name}-0" for name in names]}
        await self._request("/abort_requests", body, seconds=seconds)

    async def _transfer(self, method: str, info: Mapping[str, Any], seconds: float) -> None:
        await self._request(f"/{method}", dict(info), seconds=seconds)

    async def _world_size(self, seconds: float) -> int:
        return (await self._request("/get_world_size", seconds=seconds))["world_size"]

    async def _check(self, seconds: float) -> None:
        await self._request("/health", seconds=seconds)

    async def _call_workers(self, method: str, seconds: float, *args: str) -> Any:
        # vLLM's own timeout expires first, so that its error message is returned.
        call = {"method": method, "args": list(args), "timeout": seconds}
        answer = await self._request("/collective_rpc", call, seconds=2 * seconds)
        try:
            found = answer["results"]
            found[0].items()
        except (KeyError, IndexError, TypeError, AttributeError):
            what = f"{self.name}: {brief(answer)} from /collective_rpc: not our extension"
            raise WorkerError(what) from None
        return found

    def _by_name(self, found: Sequence[Mapping[str, int]]) -> dict[str, int]:
        return {name[1]: n for worker in found for key, n in worker.items() if (name := _NAME.fullmatch(key))}

    async def _request(
        self, path: str, body: Any = None, *, seconds: float, params: Mapping[str, str] | None = None
    ) -> Any:
        """Return the parsed JSON response to a POST, or to a GET without a `body`; None if it is empty."""
        until, pause = time.monotonic() + seconds, FIRST_PAUSE
        while True:
            method = "GET" if body is None else "POST"
            try:
                # One deadline for all retries together.
                timeout = httpx.Timeout(max(until - time.monotonic(), 0.01), connect=10.0)
                response = await self._http.request(method, path, json=body, params=params, timeout=timeout)
            except httpx.TimeoutException as error:
                raise WorkerLostError(f"{self.name}: {path} took longer than {seconds:g} s") from error
            except httpx.TransportError as error:
                raise WorkerLostError(f"{self.name}: {path}: {brief_error(error)}") from error
            # Only these mean that the request was not started; retrying after others could sample twice.
            if response.status_code not in (429, 503):
                return self._read(path, response)
            if time.monotonic() + pause > until:
                full = f"full for {seconds:g} s ({response.status_code})"
                raise WorkerLostError(f"{self.name}: {path}: {full}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _read(self, path: str, response: httpx.Response) -> Any:
        status = response.status_code
        if status in (401, 403):
            raise WorkerError(f"{self.name} refuses the API key ({status}): set {self._key_name}")
        # Only vLLM's development mode has the routes /pause and /collective_rpc.
        if status == 404:
            why = _message(response)
            raise WorkerError(
                f"{self.name} has no {path} ({why}): not vLLM, or without VLLM_SERVER_DEV_MODE=1"
            )
        if status >= 500:
            raise WorkerLostError(f"{self.name}: {path}: status {status}, {_message(response)}")
        if status >= 300:
            raise WorkerError(f"{self.name} refuses {path} ({status}): {_message(response)}")
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise WorkerError(
                f"{self.name}: the answer to {path} is no JSON ({brief(response.text)}): is it vLLM?"
            ) from None


def _message(response: httpx.Response) -> str:
    """Return the message of an error response, in any of the formats of vLLM and others."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    return brief(text) if len(text) > 300 else text.strip()
