"""Generation by vLLM: a `Generator` whose completions are sampled by servers over HTTP.

    this thread    groups, counters, order of admission; what a resume needs
    the pool's     servers, updates in flight, requests (`scalerl.rl.engine.vllm.server_pool`)

Shapes in names: T tokens of a completion.
"""

from __future__ import annotations

import atexit
import platform
import queue
import resource
import secrets
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from os import environ
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from scalerl.errors import InputError, ScalerlError
from scalerl.rl.config.cluster import Vllm
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import sampling_of
from scalerl.rl.engine.ordered import OrderedGroups, sum_of
from scalerl.rl.engine.sampling import GroupRequest, RequestFactory, Sampling
from scalerl.rl.engine.vllm.client import Client, Wanted
from scalerl.rl.engine.vllm.completions import (
    Completed,
    Event,
    FailedRequest,
    Installed,
    Lost,
    Restarted,
)
from scalerl.rl.engine.vllm.follow import follow
from scalerl.rl.engine.vllm.kept import Times
from scalerl.rl.engine.vllm.protocol import shape_of
from scalerl.rl.engine.vllm.server import Server, find_python, flags, place_servers
from scalerl.rl.engine.vllm.server_pool import ServerPool
from scalerl.rl.model.causal_lm import FlopCount, dtype_of, empty_model, load_tokenizer
from scalerl.rl.types import Counters, Rollout, Weights


class VllmGenerator(OrderedGroups):
    """Completions by vLLM, `rows` at once on each server; see `scalerl.rl.types.Generator`.

    Raises:
        InputError: there is no vLLM, or no room for its files.
        WorkerError: (by any method) a server is another than it must be, or dies again and again.
    """

    def __init__(
        self,
        settings: Vllm,
        sampling: Sampling,
        tokenizer: Any,
        model_folder: str,
        weights: Weights,
        version: int = 0,
        *,
        rows: int,
        precision: str = "float32",
        logs: str | Path = ".",
        purpose: str = "train",
        timeline: Any = None,
    ) -> None:
        """`logs` is the folder for the logs of our own servers; `purpose` sets caches apart; `timeline` (a
        `scalerl.rl.workers.ray` Timeline) records what each server did, and which joined or were lost."""
        super().__init__(version)
        self.sampling, self._settings = sampling, settings
        self._factory = RequestFactory(tokenizer, sampling)
        model: Any = empty_model(model_folder, dtype_of(precision))
        self._flop_count = FlopCount.of(model)
        self._counters = Counters()
        self._installed = [-1] * (len(settings.urls) or settings.servers)
        self._away: set[int] = set()
        """Servers that died, and do not take part again yet."""
        self._timeline, self._busy = timeline, [0.0] * len(self._installed)
        self.install_seconds: list[float] = []
        """Of the updates, from the pause to the end of it, in the order in which servers had them."""
        self.cached = 0
        """Tokens of prompts that were found in the prefix cache."""
        self.restarts = 0
        """Servers that died and were begun again."""
        self._error: ScalerlError | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        if not settings.urls:
            find_python(settings)
        try:
            folder = tempfile.mkdtemp(prefix="scalerl-", dir=settings.weights_folder)
        except OSError as error:
            raise InputError(f"weights_folder: {settings.weights_folder} ({error.strerror})") from error
        self._folder = Path(folder)
        self._key = secrets.token_hex(16)
        self._atexit = partial(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(self._atexit)
        _allow_connections(rows * len(self._installed))
        positions = sampling.max_prompt_tokens + sampling.length.max_tokens
        if settings.urls:
            clients = _remote(settings)
        else:
            arguments = flags(precision, sampling.fp32_logits, rows, positions)
            place = self._folder, Path(logs).absolute(), self._key
            clients = _own(settings, str(model_folder), arguments, *place)
        marks = sampling.length.end_of_thinking.tokens, sampling.length.phrase
        texts = tuple(tokenizer.decode(list(tokens)) for tokens in marks if tokens)
        shape = shape_of(model.config.get_text_config())
        wanted = Wanted(tokenizer, texts, shape, positions, precision, sampling.fp32_logits, rows)
        self._names = [client.name for client, _ in clients]
        self._pool = ServerPool(
            settings,
            sampling,
            wanted,
            f"{purpose}-{secrets.token_hex(4)}",
            self._folder,
            clients,
            weights,
            version,
            self._events.put,
        )

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        model_folder: str | Path,
        settings: Vllm,
        weights: Weights,
        version: int = 0,
        *,
        logs: str | Path,
        evaluation: bool = False,
        timeline: Any = None,
    ) -> VllmGenerator:
        """The generator of a recipe: for training, or for evaluations, with a seed and caches of their own.

        Raises:
            InputError: model or tokenizer do not fit the recipe, or what the constructor raises.
        """
        tokenizer = load_tokenizer(model_folder)
        seed = recipe.evaluation.seed if evaluation else recipe.seed
        shape = empty_model(model_folder, dtype_of(recipe.precision))
        return cls(
            settings,
            sampling_of(recipe, shape, tokenizer, seed),
            tokenizer,
            str(model_folder),
            weights,
            version,
            rows=recipe.decode_slots,
            precision=recipe.precision,
            logs=logs,
            purpose="evaluation" if evaluation else "train",
            timeline=timeline,
        )

    # -- the interface ---------------------------------------------------------------------------------------

    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        self._pool.submit(self._factory.requests(seq_no, group))

    def work(self) -> None:
        """Wait until something happens, and take note."""
        self._listen(block=True)

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight go on with them and their old KV cache."""
        self.version = version
        self._pool.offer(weights, version)

    @property
    def installed(self) -> int:
        """The version that every server has installed which is there; -1 where all have died."""
        self._listen(block=False)
        there = [version for i, version in enumerate(self._installed) if i not in self._away]
        return min(there, default=-1)

    @property
    def counters(self) -> Counters:
        """What has been spent. Decode steps are not known; of what was lost with a server, so many tokens as
        it was seen to have."""
        times = self._pool.times
        self._note_time(times)
        seconds, held, startup = (
            sum(of) for of in zip(*((t.worked, t.held, t.startup) for t in times), strict=True)
        )
        return sum_of([self._before, replace(self._counters, seconds=seconds, held=held, startup=startup)])

    @property
    def alive(self) -> int:
        """Servers that take part."""
        return sum(version >= 0 for version in self._installed)

    def _note_time(self, times: list[Times]) -> None:
        """Have the timeline know what each server did since it was last told."""
        before, self._busy = self._busy, [of.worked for of in times]
        for i, name in enumerate(self._names if self._timeline else ()):
            self._timeline.generated(name, self._node(i), time.time(), self._busy[i] - before[i])

    def wait_until_started(self) -> None:
        """Wait until every server has the first weights.

        Raises:
            WorkerError: one does not start, or is another than it must be.
        """
        while self.installed < self.version:
            self.work()

    @property
    def pids(self) -> list[int | None]:
        """Of the servers that were started here; None of one that is dead."""
        return self._pool.pids

    def close(self) -> None:
        """End the servers that were started here; what is in flight is lost."""
        self._pool.close()
        self._atexit()
        atexit.unregister(self._atexit)

    # -- events of the server pool ------------------------------------------------------------

    def _listen(self, block: bool) -> None:
        if self._error:
            raise self._error
        while block or not self._events.empty():
            self._take_note(self._events.get())
            block = False
        self._note_time(self._pool.times)

    def _take_note(self, event: Event) -> None:
        try:
            self._take(event)
        except ScalerlError as error:
            self._error = error
            raise

    def _take(self, event: Event) -> None:
        if isinstance(event, Completed):
            self._finish(event)
        elif isinstance(event, Installed):
            if self._installed[event.server] < 0:
                self._tell("arrived", event.server, f"takes part from version {event.version}")
            self._installed[event.server] = event.version
            self._away.discard(event.server)
            self.install_seconds.append(event.seconds)
        elif isinstance(event, Lost):
            self._count(event.prompt, event.tokens, 0, event.tokens)
        elif isinstance(event, Restarted):
            self._installed[event.server] = -1
            self._away.add(event.server)
            self._counters.restarted += len(event.seq_nos)
            self.restarts += 1
            self._tell("lost", event.server, f"is lost: {event.why}")
        else:
            assert isinstance(event, FailedRequest)
            raise event.error

    def _tell(self, kind: str, server: int, what: str) -> None:
        if self._timeline:
            name = self._names[server]
            self._timeline.event(kind, "generate", name, self._node(server), f"{name} {what}")

    def _node(self, server: int) -> str:
        urls = self._settings.urls
        return (urlsplit(urls[server]).hostname if urls else None) or platform.node()

    def _finish(self, completed: Completed) -> None:
        request = completed.request
        rollout = _rollout(completed, self.sampling)
        self._count(len(request.prompt_T), len(completed.token_T), completed.cached, rollout.length)
        self._add(request.seq_no, rollout)

    def _count(self, prompt: int, tokens: int, cached: int, sampled: int) -> None:
        """The last token is sampled and not read; those in the prefix cache are not read again."""
        first, last = cached + 1, prompt + tokens - 1
        positions = (first + last) * (last - first + 1) / 2
        self._counters.flops += self._flop_count.forward(last - first + 1, positions)
        self._counters.tokens += sampled
        self.cached += cached


def _rollout(completed: Completed, sampling: Sampling) -> Rollout:
    request, marks = completed.request, completed.marks
    n, forced, truncated = follow(
        sampling.length, completed.token_T, request.interrupt_at, sampling.end_token
    )
    sampled_T = np.ones(n, dtype=bool)
    sampled_T[forced] = False
    version_T = np.zeros(n, dtype=np.int32)
    for start, version in marks:
        version_T[start:] = version
    return request.rollout(
        token_T=completed.token_T[:n],
        sampled_T=sampled_T,
        logp_T=np.where(sampled_T, completed.logp_T[:n], 0).astype(np.float32),
        version_T=version_T,
        first_version=marks[0][1],
        truncated=truncated,
    )


def _allow_connections(n: int) -> None:
    """One for every completion under way: shells often allow 1024 files, and the system many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _remote(settings: Vllm) -> list[tuple[Client, Server | None]]:
    name = f"${settings.api_key_env}"
    key = environ.get(settings.api_key_env, "")
    clients: list[tuple[Client, Server | None]] = []
    for url in settings.urls:
        socket = url.removeprefix("unix://") if url.startswith("unix://") else None
        where = {"socket": socket} if socket else {"url": url.rstrip("/").removesuffix("/v1")}
        clients.append((Client(f"vLLM at {url}", key, name, **where), None))
    return clients


def _own(
    settings: Vllm, model_folder: str, arguments: list[str], folder: Path, logs: Path, key: str
) -> list[tuple[Client, Server | None]]:
    from torch import cuda

    servers = place_servers(settings, model_folder, arguments, folder, logs, key, cuda.device_count())
    return [
        (Client(f"vLLM server {s.index}", key, "nothing: it is ours", socket=s.socket), s) for s in servers
    ]
