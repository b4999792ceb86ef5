"""What a vLLM server is asked over HTTP, and what its refusals mean.

answer in time                 goes back to the caller
429, 503                       it is full, or starting: asked again, later and later
dropped, silent, another 5xx   `Gone`: the caller has it started again, or waits for it
anything else                  a `WorkerError` that names the server and what would be right
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from scalerl.errors import WorkerError, brief, brief_error
from scalerl.rl.engine.vllm.protocol import WORKER, complaints
from scalerl.rl.sync.vllm_http import Gone

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a server that is full is asked again."""
IDLE = 2.0
"""Seconds after which a connection is not used again: vLLM drops one after 5, perhaps as it is used."""


class Client:
    """One server: at a `url`, or at a Unix socket where it is ours."""

    def __init__(
        self, name: str, key: str, key_name: str, *, url: str = "http://vllm", socket: str | None = None
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE)
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, retries=0)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(transport=transport, base_url=url, headers=headers)
        self.name, self._key_name = name, key_name

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def ask(
        self, path: str, body: Any = None, *, seconds: float, params: Mapping[str, str] | None = None
    ) -> Any:
        """What the server answers to a POST, or to a GET where there is no `body`; parsed, where it is JSON.

        Raises:
            Gone: it does not answer, or not in time.
            WorkerError: it answers what cannot be helped.
        """
        until, pause = time.monotonic() + seconds, FIRST_PAUSE
        while True:
            method = "GET" if body is None else "POST"
            try:
                timeout = httpx.Timeout(max(until - time.monotonic(), 0.01), connect=10.0)
                response = await self._http.request(method, path, json=body, params=params, timeout=timeout)
            except httpx.TimeoutException as error:
                raise Gone(f"{self.name}: {path} took longer than {seconds:g} s") from error
            except httpx.TransportError as error:
                raise Gone(f"{self.name}: {path}: {brief_error(error)}") from error
            if response.status_code not in (429, 503):
                return self._read(path, response)
            if time.monotonic() + pause > until:
                raise Gone(f"{self.name}: {path}: full for {seconds:g} s ({response.status_code})")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def is_well(self) -> bool:
        """Whether the server answers at all."""
        try:
            await self.ask("/health", seconds=5.0)
        except Gone:
            return False
        return True

    async def progress(self, seconds: float) -> Any:
        """Tokens that the server has sampled so far of each completion in flight, by its name there."""
        return await self.ask("/collective_rpc", {"method": "scalerl_progress"}, seconds=seconds)

    def _read(self, path: str, response: httpx.Response) -> Any:
        status = response.status_code
        if status in (401, 403):
            raise WorkerError(f"{self.name} refuses the API key ({status}): set {self._key_name}")
        if status == 404:
            why = _message(response)
            raise WorkerError(
                f"{self.name} has no {path} ({why}): not vLLM, or without VLLM_SERVER_DEV_MODE=1"
            )
        if status >= 500:
            raise Gone(f"{self.name}: {path}: status {status}, {_message(response)}")
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
    """What an error says, in the forms that vLLM and others have for it."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    return brief(text) if len(text) > 300 else text.strip()


@dataclass(frozen=True)
class Wanted:
    """What a server must be."""

    tokenizer: Any
    texts: tuple[str, ...]
    """Which it must split into the same tokens."""
    shape: Mapping[str, Any]
    """Of the model, by `shape_of`."""
    positions: int
    precision: str
    fp32_logits: bool
    rows: int


async def check_server(client: Client, wanted: Wanted, seconds: float) -> str:
    """See that it is a vLLM server as it is wanted; returns the name of its model.

    Raises:
        WorkerError: it is not.
        Gone: it does not answer.
    """
    models = await client.ask("/v1/models", seconds=seconds)
    try:
        name, longest = models["data"][0]["id"], int(models["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise WorkerError(f"{client.name}: {brief(models)} from /v1/models: not a vLLM server") from None
    if longest < wanted.positions:
        raise WorkerError(
            f"{client.name}: {name} takes {longest} tokens, the recipe needs {wanted.positions} "
            "(--max-model-len)"
        )
    for text in wanted.texts:
        ours = wanted.tokenizer(text, add_special_tokens=False)["input_ids"]
        body = {"model": name, "prompt": text, "add_special_tokens": False}
        theirs = await client.ask("/tokenize", body, seconds=seconds)
        if not isinstance(theirs, dict) or theirs.get("tokens") != ours:
            raise WorkerError(
                f"{client.name}: {name} has another tokenizer ({brief(text)} is {brief(ours)} here): "
                "serve the model that the recipe names"
            )
    await _check_flags(client, wanted, seconds)
    paused = await client.ask("/is_paused", seconds=seconds)
    if isinstance(paused, dict) and paused.get(
        "is_paused"
    ):  # a trainer was killed in the middle of an update
        await client.ask("/resume", {}, seconds=seconds)
    return name


async def _check_flags(client: Client, wanted: Wanted, seconds: float) -> None:
    answer: Any = None
    try:
        answer = await client.ask("/collective_rpc", {"method": "scalerl_describe"}, seconds=seconds)
        other = {name: n for name, n in answer["results"][0]["shape"].items() if n != wanted.shape[name]}
        wrong = list(complaints(answer["results"][0], wanted.precision, wanted.fp32_logits, wanted.rows))
    except Gone as error:
        if not await client.is_well():
            raise
        raise WorkerError(f"{error}: start it with --worker-extension-cls {WORKER}") from error
    except (KeyError, IndexError, TypeError):
        raise WorkerError(f"{client.name}: {brief(answer)} from /collective_rpc: not our extension") from None
    if other:
        ours = {name: wanted.shape[name] for name in other}
        raise WorkerError(f"{client.name}: it serves another model ({other}, and {ours} here)")
    if wrong:
        raise WorkerError(f"{client.name}: start it with {', '.join(wrong)}")
