"""A server that speaks the protocol of vLLM, without a model, and as wrongly as it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from scalerl.rl.engine.vllm.protocol import LENGTH
from scalerl.rl.tasks.chain import END, END_OF_THINKING, VOCABULARY
from scalerl.rl.types import Prompt

KEY = "sesame"
CLOSE, DIGIT, STOP = VOCABULARY.index(END_OF_THINKING), VOCABULARY.index("7"), VOCABULARY.index(END)
TOKENS = [DIGIT, CLOSE, DIGIT, STOP]
PROMPTS = [Prompt(f"p/{i}", "3 + 4 =", "7") for i in range(4)]
_SEEDS = count()


def collect(generator: Any, n: int) -> Any:
    """Return the next `n` groups of a generator, once they are complete."""
    while generator.ready < n:
        generator.work()
    return generator.take(n)


def submit(generator: Any, prompts: Any = PROMPTS, samples: int = 2) -> None:
    """Have groups sampled."""
    for prompt in prompts:
        generator.submit(prompt, 0, samples)


class FaultyServer:
    """Answers to `paths` as it is told; every completion is `tokens`, each with log-probability -1.

    A fault is a function of the handler that answers instead; it returns true where it has.
    """

    def __init__(self, tokenizer: Any, tokens: list[int], port: int = 0) -> None:
        self.tokenizer, self.tokens = tokenizer, tokens
        self.longest = 96
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.faults: dict[str, Any] = {}
        self.flags: dict[str, Any] = {
            "shape": {},
            "dtype": "float32",
            "head_dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": 8,
            "seed": next(_SEEDS),
            "v2_model_runner": False,
            "length_control": True,
            "data_parallel": 1,
            "pipeline_parallel": 1,
            "speculative": False,
        }
        self.held = threading.Event()
        """Completions wait for it."""
        self.held.set()
        self.closing = False
        self.begun: dict[str, int] = {}
        """What the worker extension would say: tokens so far, by vLLM's name."""
        self.aborted: set[str] = set()
        handler = type("Handler", (_Handler,), {"peer": self})
        self._http = _Listener(("127.0.0.1", port), handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and drop every connection: what is held is never answered."""
        self.faults = {"*": drop}
        self.closing = True
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""


class _ClosingError(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    peer: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._answer(json.loads(self.rfile.read(length) or "null"))

    def _answer(self, body: Any) -> None:
        path, peer = urlsplit(self.path).path, self.peer
        peer.asked[path] += 1
        fault = peer.faults.get("*") or peer.faults.get(path)
        if fault and fault(self):
            self.close_connection = True
            return
        if path.startswith("/v1") and self.headers.get("Authorization") != f"Bearer {KEY}":
            self.send(401, {"error": "Unauthorized"})
            return
        try:
            self.send(200, getattr(self, path.strip("/").replace("/", "_"))(body))
        except _ClosingError:
            self.close_connection = True

    def send(self, status: int, value: Any) -> bool:
        """Answer with JSON, or with a text as it is."""
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return True

    def health(self, body: Any) -> Any:
        return None

    def v1_models(self, body: Any) -> Any:
        return {"data": [{"id": "served", "max_model_len": self.peer.longest}]}

    def tokenize(self, body: Any) -> Any:
        return {"tokens": self.peer.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}

    def is_paused(self, body: Any) -> Any:
        return {"is_paused": False}

    def pause(self, body: Any) -> Any:
        assert self.path == "/pause?mode=keep&clear_cache=false"
        return {"status": "paused"}

    def resume(self, body: Any) -> Any:
        return {"status": "resumed"}

    def collective_rpc(self, body: Any) -> Any:
        if body["method"] == "scalerl_describe":
            return {"results": [self.peer.flags]}
        if body["method"] == "scalerl_install":
            self.peer.loaded += body["args"]
        return {"results": [self.peer.begun]}

    def abort_requests(self, body: Any) -> Any:
        self.peer.aborted |= set(body["request_ids"])
        return {"status": "aborted"}

    def v1_completions(self, body: Any) -> Any:
        peer = self.peer
        peer.bodies.append(body)
        name = f"cmpl-{body['request_id']}-0"
        while not peer.held.wait(0.01) and name not in peer.aborted:
            if peer.closing:
                raise _ClosingError
        tokens = [] if name in peer.aborted else list(peer.tokens)
        at = json.loads(body["vllm_xargs"][LENGTH])["interrupt_at"] if "vllm_xargs" in body else None
        choice = {
            "finish_reason": "abort" if name in peer.aborted else "stop",
            "token_ids": tokens,
            "logprobs": {"token_logprobs": [-1.0 - 0.01 * (at or 0)] * len(tokens)},
        }
        return {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}


def status(code: int, value: Any = None) -> Any:
    """A fault: this status, always."""
    return lambda handler: handler.send(code, value)


def first(n: int, fault: Any) -> Any:
    """A fault of the first `n` times only."""
    left = [n]

    def once(handler: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fault(handler)

    return once


def after(n: int, fault: Any) -> Any:
    """A fault of all times but the first `n`."""
    left = [n]

    def later(handler: Any) -> bool:
        left[0] -= 1
        return left[0] < 0 and fault(handler)

    return later


def slow(seconds: float) -> Any:
    """A fault: it answers rightly, and late."""

    def late(handler: Any) -> bool:
        time.sleep(seconds)
        return False

    return late


def drop(handler: Any) -> bool:
    """A fault: the connection ends without an answer."""
    handler.close_connection = True
    return True


@contextmanager
def died(peer: FaultyServer, generator: Any, tokenizer: Any) -> Iterator[FaultyServer]:
    """The server has ended, which the generator knows, and another is in its place."""
    peer.close()
    while generator.installed != -1:
        generator.work()
    revived = FaultyServer(tokenizer, TOKENS, peer.port)
    try:
        yield revived
    finally:
        revived.close()
