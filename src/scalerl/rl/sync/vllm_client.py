"""Requests to a vLLM server over HTTP, and the meaning of its refusals.

answer in time                 returned to the caller
429, 503                       the server is full, or starting: the request is retried with back-off
dropped, silent, another 5xx   `ServerLostError`: the caller restarts the server, or waits for it
anything else                  a `WorkerError` that names the server and the remedy
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import httpx

from scalerl.errors import WorkerError, brief, brief_error

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a request to a server that is full is retried."""
IDLE = 2.0
"""Seconds after which a connection is not used again: vLLM drops one after 5, perhaps as it is used."""


class ServerLostError(Exception):
    """The server does not answer any more."""


class Client:
    """One server: at a `url`, or at a Unix socket where it was started here."""

    def __init__(
        self, name: str, key: str, key_name: str, *, url: str = "http://vllm", socket: str | None = None
    ) -> None:
        # A completion in flight holds a connection; httpx allows 100 by default, and others would wait.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE)
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, retries=0)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(transport=transport, base_url=url, headers=headers)
        self.name, self._key_name = name, key_name

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def request(
        self, path: str, body: Any = None, *, seconds: float, params: Mapping[str, str] | None = None
    ) -> Any:
        """Return the answer to a POST, or to a GET where there is no `body`: parsed JSON, None if empty.

        Raises:
            ServerLostError: it does not answer, or not in time.
            WorkerError: its answer shows that a retry is of no use.
        """
        until, pause = time.monotonic() + seconds, FIRST_PAUSE
        while True:
            method = "GET" if body is None else "POST"
            try:
                # One deadline for all tries together.
                timeout = httpx.Timeout(max(until - time.monotonic(), 0.01), connect=10.0)
                response = await self._http.request(method, path, json=body, params=params, timeout=timeout)
            except httpx.TimeoutException as error:
                raise ServerLostError(f"{self.name}: {path} took longer than {seconds:g} s") from error
            except httpx.TransportError as error:
                raise ServerLostError(f"{self.name}: {path}: {brief_error(error)}") from error
            # Only these say that the request was not begun; to send any other again could sample twice.
            if response.status_code not in (429, 503):
                return self._read(path, response)
            if time.monotonic() + pause > until:
                full = f"full for {seconds:g} s ({response.status_code})"
                raise ServerLostError(f"{self.name}: {path}: {full}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def is_well(self) -> bool:
        """Return whether the server answers at all."""
        try:
            await self.request("/health", seconds=5.0)
        except ServerLostError:
            return False
        return True

    async def progress(self, seconds: float) -> Any:
        """Return the tokens that the server has sampled so far of each completion, by its name there."""
        return await self.request("/collective_rpc", {"method": "scalerl_progress"}, seconds=seconds)

    def _read(self, path: str, response: httpx.Response) -> Any:
        status = response.status_code
        if status in (401, 403):
            raise WorkerError(f"{self.name} refuses the API key ({status}): set {self._key_name}")
        # /pause and /collective_rpc are routes of vLLM's development mode alone.
        if status == 404:
            why = _message(response)
            raise WorkerError(
                f"{self.name} has no {path} ({why}): not vLLM, or without VLLM_SERVER_DEV_MODE=1"
            )
        if status >= 500:
            raise ServerLostError(f"{self.name}: {path}: status {status}, {_message(response)}")
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
    """Return the message of an error, in the forms that vLLM and others have for it."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    return brief(text) if len(text) > 300 else text.strip()
