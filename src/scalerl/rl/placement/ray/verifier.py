"""Verification in actors: the driver sends tokens, and goes on while they verify.

    completions -> shares -> idle actors -> outcomes, in order

Every actor has a `Verifier` of its own, with the worker processes of `task.limits`. One that is lost is
replaced, and its share is verified again by another: the outcomes do not depend on which actor verifies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.types import Pending, Prompt
from scalerl.rl.verify.pool import Jobs, Outcome
from scalerl.rl.verify.verifier import Completion, Verification
from scalerl.rl.workers.ray.actors import SupervisedActor, WorkerActor, actors_of
from scalerl.rl.workers.ray.pool import ActorPool, ActorWorker
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.ray.timeline import Timeline

SHARES = 4
"""Of a collection, for each verifier: a quick one takes more of them."""
_LOOK = 1.0  # seconds between two polls, at most

Share = tuple[list[dict[str, Any]], np.ndarray, np.ndarray]
"""Prompts of some completions, where the tokens of each end, and the tokens of all."""


class VerifierActor(WorkerActor):
    """A `Verification` in an actor."""

    def start(self, recipe: Recipe, model_folder: str) -> None:
        """Load the tokenizer, and start the processes."""
        from scalerl.rl.verify.verifier import load_verifier

        torch.set_num_threads(1)
        self._verifier = load_verifier(recipe, load_tokenizer(model_folder))

    def verify(self, share: Share) -> list[Outcome]:
        """Return the outcome of every completion of a share."""
        pending = self._verifier.submit(_unpacked(share))
        pending.wait(math.inf)
        return pending.result()


@dataclass(eq=False)
class VerifierWorker(ActorWorker):
    """A place for a verifier, and its share of completions."""

    share: list[int] | None = None
    """Those that it verifies; None where it is idle, or where they are not waited for any more."""

    def verify(self, share: list[int], packed: Share) -> None:
        """Send it a share."""
        assert self.actor is not None
        self.share, self.called_at = share, time.monotonic()
        self.call = self.actor.handle.verify.remote(packed)

    def check_work(self, actor: SupervisedActor) -> None:
        """See `ActorWorker.check_work`."""
        actor.check_life()
        if self.call is not None and time.monotonic() - self.called_at > self.timeouts.step:
            raise actor.lost(f"it has not verified its share within {self.timeouts.step:g} s")


class RayVerifier(ActorPool[VerifierWorker], Verification):
    """Verification by `[cluster] verifiers` actors.

    Raises:
        InputError: what the task needs for its verifier cannot be loaded.
        WorkerError: the verifiers do not start; or (by what `submit` returns) are lost again and again.
    """

    noun, role = "verifier", "verify"

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> None:
        Verification.__init__(self)
        cluster = recipe.on_cluster
        ActorPool.__init__(self, cluster.timeouts, timeline)
        self._smallest = recipe.task.limits.workers
        self._jobs = Jobs(0, 1, self._advance)
        self._completions: Sequence[Completion] = ()
        request = actors_of(VerifierActor, {"life": 1}, cluster.verifier, session.room["verifiers"])
        arguments = recipe.without_prompts(), model_folder

        def start(i: int) -> tuple[Any, Any]:
            handle = request(i)
            return handle, handle.start.remote(*arguments)

        self._workers = [
            VerifierWorker(f"verifier {i}", self._timeouts, lambda i=i: start(i))
            for i in range(cluster.verifiers)
        ]
        self._start()

    def submit(self, completions: Sequence[Completion]) -> Pending[list[Outcome]]:
        """Share completions out; those that were submitted before are given up."""
        for worker in self._workers:
            worker.share = None
        # Not smaller than the processes of an actor, of which some would be idle.
        size = max(math.ceil(len(completions) / (SHARES * len(self._workers))), self._smallest)
        self._completions, self._jobs = completions, Jobs(len(completions), size, self._advance)
        self._jobs.wait(0.0)  # the actors start now, not when the driver first waits
        return self._jobs

    def _advance(self, seconds: float) -> None:
        for worker in self._workers:
            if worker.taking_part and worker.call is None and (share := self._jobs.take()):
                worker.verify(share, _packed([self._completions[i] for i in share]))
        self._poll(min(seconds, _LOOK))

    def _started(self, worker: VerifierWorker) -> None:
        assert worker.actor is not None
        worker.taking_part = True
        self._timeline.arrived(self.role, worker.name, worker.actor.node)

    def _received(self, worker: VerifierWorker, value: list[Outcome]) -> None:
        self._losses = worker.losses = 0
        # The share of an earlier `submit` is not waited for: its indices mean other completions now.
        if worker.share is not None:
            self._jobs.complete(worker.share, value)
        worker.share = None

    def _release(self, worker: VerifierWorker) -> str:
        worker.release()
        share, worker.share = worker.share, None
        if share is None:
            return ""
        self._jobs.put_back(share)
        who = "others verify" if self.alive else "another is waited for, to verify"
        return f"; {who} what it was given"


def _packed(completions: Sequence[Completion]) -> Share:
    tokens = [token_T for _, token_T in completions]
    ends = np.cumsum([len(token_T) for token_T in tokens], dtype=np.int64)
    return [asdict(prompt) for prompt, _ in completions], ends, np.concatenate(tokens)


def _unpacked(share: Share) -> list[Completion]:
    prompts, ends, token_S = share
    parts = np.split(token_S, ends[:-1])
    return [(Prompt.from_json(prompt), part) for prompt, part in zip(prompts, parts, strict=True)]
