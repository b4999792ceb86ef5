"""Verification in actors: the driver sends tokens, and goes on while they judge.

    a collection -> shares of completions -> whoever is free -> outcomes, in order

Every actor has a `Verifier` of its own, with the worker processes of `task.limits`. One that is lost is
replaced, and its share is judged anew by whoever is free: the outcomes do not depend on who judges.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray
import torch

from scalerl.errors import ScalerlError, WorkerError
from scalerl.rl.config.cluster import ClusterTimeouts
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.types import Pending, Prompt
from scalerl.rl.verify.pool import Outcome
from scalerl.rl.verify.verifier import Asked, Verification
from scalerl.rl.workers.ray.actors import Calls, LostError, SupervisedActor, gather, pause_after, remote
from scalerl.rl.workers.ray.session import Session, here
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import Attention

_LOG = logging.getLogger("scalerl")
MOST_DEATHS = 5
"""Verifiers that may be lost for each there is, with no share judged in between, before the run ends."""
SHARES = 4
"""Of a collection, for each verifier: who is quick takes more of them."""
_LOOK = 1.0  # seconds between two looks at who may be replaced

Share = tuple[list[dict[str, Any]], np.ndarray, np.ndarray]
"""Prompts of some completions, where the tokens of each end, and the tokens of all."""


class VerifierActor:
    """What `scalerl.rl.verify.verifier.Verifier` does, elsewhere."""

    @ray.method(concurrency_group="life")
    def where(self) -> tuple[str, int]:
        """Node and process."""
        return here()

    def start(self, recipe: Recipe, model_folder: str) -> None:
        """Load the tokenizer, and start the processes."""
        from scalerl.rl.verify.verifier import load_verifier

        torch.set_num_threads(1)
        self._verifier = load_verifier(recipe, load_tokenizer(model_folder))

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A heartbeat."""

    def judge(self, share: Share) -> list[Outcome]:
        """The outcome of every completion of a share."""
        begun = self._verifier.ask(_unpacked(share))
        begun.wait(math.inf)
        return begun.result()


class RayVerifier(Verification):
    """Verification by `[cluster] verifiers` actors.

    Raises:
        InputError: what the task needs for judging cannot be loaded.
        WorkerError: the verifiers do not start; or (by what `ask` begins) are lost again and again.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> None:
        super().__init__()
        cluster = recipe.on_cluster
        self._timeouts: ClusterTimeouts = cluster.timeouts
        self._timeline = timeline
        self._least = recipe.task.limits.workers
        self._deaths = 0
        self._alone_since, self._attention = math.inf, Attention()
        self.lost: list[str] = []
        """What was said of each verifier that was lost."""
        ask = remote(VerifierActor, {"life": 1}, cluster.verifier, session.room["verifiers"])
        arguments = recipe.without_prompts(), model_folder

        def start(i: int) -> tuple[Any, Any]:
            handle = ask(i)
            return handle, handle.start.remote(*arguments)

        self._workers = [
            _VerifierWorker(f"verifier {i}", self._timeouts, lambda i=i: start(i))
            for i in range(cluster.verifiers)
        ]
        self._begin()

    def _begin(self) -> None:
        ends = time.monotonic() + self._timeouts.start
        try:
            for worker in self._workers:
                worker.fill()
            for worker in self._workers:
                worker.start_within(ends - time.monotonic())
                self._arrived(worker)
        except ScalerlError:
            self.close()
            raise

    def ask(self, completions: Sequence[Asked]) -> Pending[list[Outcome]]:
        """Share completions out; what was begun before is given up."""
        for worker in self._workers:
            worker.drop()
        size = max(math.ceil(len(completions) / (SHARES * len(self._workers))), self._least)
        judging = _RemoteVerdicts(self, [completions[i : i + size] for i in range(0, len(completions), size)])
        judging.wait(0.0)
        return judging

    def close(self) -> None:
        """End the actors."""
        for worker in self._workers:
            if worker.actor is not None:
                worker.actor.kill()

    def advance(
        self, waiting: deque[int], shares: Sequence[Sequence[Asked]], seconds: float
    ) -> dict[int, list[Outcome]]:
        """Give shares to whoever is free, wait `seconds` for outcomes, and replace whoever is lost."""
        for worker in self._workers:
            if worker.actor is None and time.monotonic() >= worker.fill_at:
                worker.fill()
            elif worker.free and waiting:
                number = waiting.popleft()
                worker.give(number, _packed(shares[number]))
        if under_way := [worker.ref for worker in self._workers if worker.ref is not None]:
            ray.wait(under_way, timeout=seconds)
        else:
            time.sleep(seconds)  # until a place may be filled again
        found: dict[int, list[Outcome]] = {}
        for worker in self._workers:
            try:
                before = worker.there
                found |= worker.outcomes()
                if worker.there and not before:
                    self._arrived(worker)
            except ScalerlError as error:  # what it cannot load here, another node may have
                self._lose(worker, error, waiting)
        self._deaths = 0 if found else self._deaths
        self._give_up_alone()
        return found

    def _arrived(self, worker: _VerifierWorker) -> None:
        assert worker.actor is not None
        name, node = worker.name, worker.actor.node
        self._timeline.event("arrived", "verify", name, node, f"{name} on {node} takes part")

    def _lose(self, worker: _VerifierWorker, error: ScalerlError, waiting: deque[int]) -> None:
        assert worker.actor is not None
        why = error if isinstance(error, LostError) else worker.actor.lost(str(error))
        self.lost.append(str(why))
        self._deaths += 1
        self._timeline.event("lost", "verify", why.who, why.node, str(why), why.at)
        shares = worker.vacate()
        others = any(other.there for other in self._workers)
        who = "others judge" if others else "another is waited for, to judge"
        _LOG.warning("%s%s", why, f"; {who} what it was given" if shares else "")
        waiting.extendleft(shares)
        if self._deaths > MOST_DEATHS * len(self._workers):
            raise WorkerError(f"{self._deaths} verifiers were lost with nothing judged in between: {why}")

    def _give_up_alone(self) -> None:
        """Not to wait for ever where nobody is left."""
        self._alone_since += self._attention.away()
        if any(worker.there for worker in self._workers):
            self._alone_since = math.inf
            return
        self._alone_since = min(self._alone_since, time.monotonic())
        if time.monotonic() - self._alone_since > self._timeouts.start:
            why = self.lost[-1] if self.lost else "none has started"
            raise WorkerError(f"no verifier is left, and none came within {self._timeouts.start:g} s: {why}")


class _RemoteVerdicts:
    """Shares that are being judged; see `scalerl.rl.types.Pending`. Who is lost is replaced while somebody
    waits."""

    def __init__(self, verifier: RayVerifier, shares: Sequence[Sequence[Asked]]) -> None:
        self._verifier, self._shares = verifier, shares
        self._waiting = deque(range(len(shares)))
        self._outcomes: dict[int, list[Outcome]] = {}

    def wait(self, seconds: float) -> bool:
        """Whether all are judged."""
        until = time.monotonic() + seconds
        while len(self._outcomes) < len(self._shares):
            left = until - time.monotonic()
            moment = min(max(left, 0.0), _LOOK)
            self._outcomes |= self._verifier.advance(self._waiting, self._shares, moment)
            if left <= 0:
                break
        return len(self._outcomes) == len(self._shares)

    def result(self) -> list[Outcome]:
        """The outcome of each completion, in order."""
        return [outcome for share in range(len(self._shares)) for outcome in self._outcomes[share]]


@dataclass
class _VerifierWorker:
    """Room for a verifier, and who has it."""

    name: str
    timeouts: ClusterTimeouts
    start: Callable[[], tuple[Any, Any]]
    actor: SupervisedActor | None = None
    there: bool = False
    """Whether it has started."""
    ref: Any = None
    """What it was asked for: where it is, to start, or to judge a share."""
    starting: Any = None
    """Its start, for as long as it waits for room."""
    share: int | None = None
    deaths: int = 0
    fill_at: float = 0.0
    _call: Calls | None = None

    @property
    def free(self) -> bool:
        """Whether it can be given a share."""
        return self.there and self._call is None

    def fill(self) -> None:
        """Ask for an actor; it comes when there is room."""
        handle, self.starting = self.start()
        self.actor = SupervisedActor(self.name, handle, self.timeouts.heartbeat)
        self.ref = handle.where.remote()
        self._call = Calls({self.ref: self.actor}, math.inf, "come")

    def start_within(self, seconds: float) -> None:
        """Wait until it has started."""
        assert self.actor is not None
        ends = time.monotonic() + seconds
        for what in ("come", "started"):
            gather({self.ref: self.actor}, max(ends - time.monotonic(), 0.0), what)
            self.outcomes()

    def give(self, number: int, share: Share) -> None:
        """Have it judge a share."""
        assert self.actor is not None
        self.ref, self.share = self.actor.handle.judge.remote(share), number
        self._call = Calls({self.ref: self.actor}, self.timeouts.step, "judged its share")

    def outcomes(self) -> dict[int, list[Outcome]]:
        """Those of its share, by the share's number, if it has judged it; waits for nothing.

        Raises:
            LostError: it does not live.
            ScalerlError: it cannot load what it needs.
        """
        if self.actor is None or self._call is None or not self._call.wait(0.0):
            return {}
        (found,) = self._call.result()
        if self.starting is not None:
            self.actor.settled(found)
            self.ref, self.starting = self.starting, None
            self._call = Calls({self.ref: self.actor}, self.timeouts.start, "started")
            return {}
        number, self._call, self.ref, self.share = self.share, None, None, None
        if number is None:
            self.there = True
            return {}
        self.deaths = 0
        return {number: found}

    def drop(self) -> None:
        """Nobody waits for its share any more."""
        self.share = None

    def vacate(self) -> list[int]:
        """End whoever has it, and keep it free for a while; the share that it judged."""
        assert self.actor is not None
        self.actor.kill()
        shares = [] if self.share is None else [self.share]
        self.actor = self.ref = self.starting = self.share = self._call = None
        self.there = False
        self.fill_at = time.monotonic() + pause_after(self.deaths)
        self.deaths += 1
        return shares


def _packed(completions: Sequence[Asked]) -> Share:
    tokens = [token_T for _, token_T in completions]
    ends = np.cumsum([len(token_T) for token_T in tokens], dtype=np.int64)
    return [asdict(prompt) for prompt, _ in completions], ends, np.concatenate(tokens)


def _unpacked(share: Share) -> list[Asked]:
    prompts, ends, token_S = share
    parts = np.split(token_S, ends[:-1])
    return [(Prompt.from_json(prompt), part) for prompt, part in zip(prompts, parts, strict=True)]
