"""Generation by vLLM: a `Generator` whose completions are sampled in workers, or by servers over HTTP.

this thread          groups, counters, order of admission, the state for a resume
the pool's thread    servers, updates in flight, requests (`scalerl.rl.engine.vllm.server_pool`)
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
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch import cuda

from scalerl.errors import InputError, ScalerlError
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.ordered import Generator, sum_of
from scalerl.rl.engine.sampling import GroupRequest, Request, RequestFactory, Sampling
from scalerl.rl.engine.vllm.completions import Completed, rollout_of
from scalerl.rl.engine.vllm.launch import Place, Servers
from scalerl.rl.engine.vllm.protocol import shape_of
from scalerl.rl.engine.vllm.requirements import Requirements
from scalerl.rl.engine.vllm.server_pool import ServerPool
from scalerl.rl.engine.vllm.server_state import (
    Event,
    Installed,
    LostTokens,
    Restarted,
    ServedEvaluation,
    ServerState,
    Times,
)
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.model.causal_lm import FlopCount, dtype_of, empty_model
from scalerl.rl.model.out_of_memory import leave_share
from scalerl.rl.types import Counters, Rollout, Weights
from scalerl.rl.verify.environment import TaskEnvironment


class VllmGenerator(Generator):
    """A generator by vLLM, with `slots` completions at once on each server; see `Generator` for its methods.

    Raises:
        InputError: there is no vLLM, or its folder of weights cannot be made.
        WorkerError: (by any method) a server does not meet the requirements, or is lost too often.
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
        slots: int,
        precision: str = "float32",
        timeline: Any = None,
        place: Place | None = None,
        environment: TaskEnvironment | None = None,
    ) -> None:
        """Connect to the servers of the settings, or start workers by `place` if these name none.

        `timeline` (a `scalerl.rl.workers.ray` Timeline) records the work of servers, and which joined or were
        lost. `environment` answers the turns of completions; without one they have one turn."""
        super().__init__(version)
        self.sampling, self.tokenizer, self._settings = sampling, tokenizer, settings
        self._factory = RequestFactory(tokenizer, sampling)
        model: Any = empty_model(model_folder, dtype_of(precision))
        self._flop_count = FlopCount.of(model)
        self._counters = Counters()
        self.update_seconds: list[float] = []
        """Seconds of each weight update, from pausing the server to resuming it, in order."""
        self.cached = 0
        """Number of prompt tokens that were found in the prefix cache."""
        self.restarts = 0
        """Number of times that a server was lost and restarted."""
        self._error: ScalerlError | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            folder = tempfile.mkdtemp(prefix="scalerl-", dir=settings.weights_folder)
        except OSError as error:
            raise InputError(f"weights_folder: {settings.weights_folder} ({error.strerror})") from error
        self._folder = Path(folder)
        # Also at exit: in /dev/shm a leftover copy of the model would occupy memory.
        self._remove_folder = atexit.register(partial(shutil.rmtree, folder, ignore_errors=True))
        marks = sampling.length.end_of_thinking.tokens, sampling.length.phrase
        texts = tuple(tokenizer.decode(list(tokens)) for tokens in marks if tokens)
        shape = shape_of(model.config.get_text_config())
        positions = sampling.max_prompt_tokens + sampling.length.max_tokens
        required = Requirements(tokenizer, texts, shape, positions, precision, sampling.fp32_logits, slots)
        if settings.urls:
            from scalerl.rl.engine.vllm.http_client import HttpServers

            states = [ServerState(f"vLLM at {url}", i) for i, url in enumerate(settings.urls)]
            servers = Servers(settings, states, HttpServers(settings))
            _allow_connections(slots * len(states))
        else:
            assert place is not None
            servers = place(required.flags(), self._folder)
        self._servers = servers.states
        # A single GPU is the learner's too, unless that is on actors and this process uses no GPU.
        self._shares = len(servers.gpus) == 1 and cuda.memory_allocated() > 0
        if self._shares:
            leave_share(settings.gpu_memory)
        self._installed = [-1] * len(self._servers)
        self._lost: set[int] = set()
        """Servers that were lost and have not rejoined."""
        self._timeline, self._worked = timeline, [0.0] * len(self._servers)
        # A salt, as a server may have cached these prompts for another run's weights of the same version.
        self._salt, self._evaluations = secrets.token_hex(4), count()
        self._environment = TurnsThread(environment, sampling) if environment else None
        self._pool = ServerPool(
            servers,
            sampling,
            required,
            f"train-{self._salt}",
            self._folder,
            weights,
            version,
            self._events.put,
            self._environment,
        )

    # -- the interface ---------------------------------------------------------------------------------------

    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        self._pool.submit(self._factory.requests(seq_no, group))

    def work(self) -> None:
        """Wait for an event of the server pool and handle it."""
        self._receive(block=True)

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight continue with them on the old weights' KV cache."""
        self.version = version
        self._pool.offer(weights, version)

    def evaluate(
        self,
        requests: Sequence[Request],
        weights: Weights,
        version: int,
        environment: TurnsThread | None = None,
    ) -> Future[list[tuple[Rollout, ...]]]:
        """Start to sample completions by `weights` alone, beside those of training.

        They share only the servers with training: they have their own prefix cache, and training's counters
        leave them out. `environment` answers their turns. The future returns them by group and sample; it
        fails with the error that ends the generator.
        """
        salt = f"evaluation-{self._salt}-{next(self._evaluations)}"
        evaluation = ServedEvaluation(version, sorted(requests), salt, len(requests), environment=environment)
        self._pool.evaluate(evaluation, weights)
        return evaluation.done

    @property
    def evaluated_seconds(self) -> float:
        """Seconds spent on evaluations, summed over servers."""
        return sum(server.times.evaluated for server in self._servers)

    @property
    def installed(self) -> int:
        """The newest version that all servers which take part have installed; -1 if all are lost."""
        self._receive(block=False)
        # A lost server installs nothing: if it counted, admission would stop for the others too.
        taking_part = [version for i, version in enumerate(self._installed) if i not in self._lost]
        return min(taking_part, default=-1)

    @property
    def counters(self) -> Counters:
        """Counters so far, including the work before a resume; decode steps are unknown.

        Of a completion lost with its server, the tokens that were last seen are counted."""
        times = self._record_times()
        spent = replace(
            self._counters,
            seconds=sum(of.worked for of in times),
            held=sum(of.held for of in times),
            startup=sum(of.startup for of in times),
        )
        return sum_of([self._before, spent])

    @property
    def n_servers(self) -> int:
        """Number of servers, whether or not they take part."""
        return len(self._servers)

    @property
    def alive(self) -> int:
        """Number of servers that take part."""
        return sum(version >= 0 for version in self._installed)

    def wait_until_started(self) -> None:
        """Wait until every server has the first weights.

        Raises:
            WorkerError: a server does not start, or does not meet the requirements.
        """
        while self.installed < self.version:
            self.work()

    def close(self) -> None:
        """Stop the servers that this generator started; completions in flight are lost."""
        self._pool.close()
        if self._shares:
            leave_share(0.0)
        if self._environment:
            self._environment.close()
        self._remove_folder()
        atexit.unregister(self._remove_folder)

    # -- events of the server pool ---------------------------------------------------------------------------

    def _receive(self, block: bool) -> None:
        if self._error:
            # Every later call raises it again, because no more events will come.
            raise self._error
        try:
            while block or not self._events.empty():
                self._handle(self._events.get())
                block = False
        except ScalerlError as error:
            self._error = error
            raise
        self._record_times()

    def _handle(self, event: Event) -> None:
        if isinstance(event, Completed):
            request, rollout = event.request, rollout_of(event, self.sampling)
            read, sampled = len(request.prompt_T), rollout.length
            for turn in request.turns:
                n = int(turn.sampled_T.sum())
                self._count(read, n, turn.cached, n)
                read, sampled = read + len(turn.token_T), sampled - n
            self._count(read, len(event.token_T), event.cached, sampled)
            self._add(request.seq_no, rollout)
        elif isinstance(event, Installed):
            if self._installed[event.server] < 0:
                self._record("arrived", event.server, f"takes part from version {event.version}")
            self._installed[event.server] = event.version
            # With these weights a lost server takes part again.
            self._lost.discard(event.server)
            self.update_seconds.append(event.seconds)
        elif isinstance(event, LostTokens):
            self._count(event.prompt, event.tokens, 0, event.tokens)
        elif isinstance(event, Restarted):
            self._installed[event.server] = -1
            self._lost.add(event.server)
            # The groups stay assigned: the pool samples their completions again, with the same seeds.
            self._counters.restarted += len(event.seq_nos)
            self.restarts += 1
            self._record("lost", event.server, f"is lost: {event.why}")
        else:
            raise event

    def _record(self, kind: str, server: int, what: str) -> None:
        if self._timeline:
            name = self._servers[server].name
            self._timeline.event(kind, "generate", name, self._node(server), f"{name} {what}")

    def _record_times(self) -> list[Times]:
        """Add each server's work since the last call to the timeline; return the times of all servers."""
        times = [server.times for server in self._servers]
        before, self._worked = self._worked, [of.worked for of in times]
        for i, server in enumerate(self._servers if self._timeline else ()):
            worked = self._worked[i] - before[i]
            self._timeline.generated(server.name, self._node(i), time.time(), worked)
        return times

    def _node(self, server: int) -> str:
        urls = self._settings.urls
        here = self._servers[server].node or platform.node()
        return (urlsplit(urls[server]).hostname if urls else None) or here

    def _count(self, prompt: int, tokens: int, cached: int, sampled: int) -> None:
        """Count a completion or turn; its last token is sampled but not read, nor are cached tokens read."""
        first, last = cached + 1, prompt + tokens - 1
        positions = (first + last) * (last - first + 1) / 2
        self._counters.flops += self._flop_count.forward(last - first + 1, positions)
        self._counters.tokens += sampled
        self.cached += cached


def _allow_connections(n: int) -> None:
    """Raise the limit of open files for `n` connections, one a completion; many shells allow only 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
