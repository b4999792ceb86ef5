"""Evaluations in an actor of their own: they stall nobody, and begin again where the actor is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch

from scalerl.errors import WorkerError
from scalerl.rl.cluster.members import LostError, Member, gather, pause_after, remote
from scalerl.rl.cluster.parcel import StoredWeights, store
from scalerl.rl.cluster.session import Session, here
from scalerl.rl.cluster.timeline import Timeline
from scalerl.rl.evaluate import Evaluation, Evaluator
from scalerl.rl.types import Prompt, Weights

_LOG = logging.getLogger("scalerl")
MOST_DEATHS = 5
"""Actors that may be lost in a row before the run ends."""


class EvaluationActor:
    """What `scalerl.rl.evaluate.Evaluator` does, elsewhere."""

    def start(self, recipe: Any, model_folder: str, prompts: Sequence[Prompt]) -> tuple[str, int]:
        """Load model and verifier; node and process."""
        torch.set_num_threads(1)
        self._evaluator = Evaluator(recipe, model_folder, prompts)
        return here()

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A sign of life."""

    def evaluate(self, weights: StoredWeights, version: int) -> Evaluation:
        """Sample every held-out prompt, and judge the completions."""
        return self._evaluator.evaluate(weights.fetch(), version)


class RayEvaluator:
    """Evaluates in an actor, in order, while training goes on; see `EvaluationProcess`."""

    def __init__(self, recipe: Any, model_folder: str, session: Session, timeline: Timeline) -> None:
        self._cluster, self._timeline = recipe.cluster, timeline
        share, put = recipe.cluster.generator, session.room["evaluation"]
        self._ask = remote(EvaluationActor, {"life": 1}, share, put)
        self._arguments = recipe.without_prompts(), model_folder, recipe.task.prompts("heldout")
        self._member: Member | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._closed = threading.Event()

    def __call__(self, weights: Weights, version: int) -> Future[Evaluation]:
        """Queue an evaluation of `weights`."""
        seconds = self._cluster.patience.weights
        stored = store(weights, self._cluster.transport.bucket_mib, seconds)
        return self._thread.submit(self._evaluate, stored, version)

    def close(self) -> None:
        """End the actor at once; what it has not done by now is done when the run is resumed."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if (member := self._member) is not None:
            member.kill()
        self._thread.shutdown(wait=True)

    def _evaluate(self, weights: StoredWeights, version: int) -> Evaluation:
        for death in range(1, MOST_DEATHS + 1):
            try:
                member = self._member or self._start()
                call = member.handle.evaluate.remote(weights, version)
                return gather({call: member}, self._cluster.patience.step, "evaluated")[0]
            except LostError as error:
                self._lose(error, death)
            if self._closed.wait(pause_after(death - 1)):
                break
        raise WorkerError(f"the evaluation of version {version} was given up")

    def _start(self) -> Member:
        if self._closed.is_set():
            raise WorkerError("the run has ended")
        silence = self._cluster.patience.silence
        self._member = member = Member("the evaluation", self._ask(0), silence)
        if self._closed.is_set():  # meanwhile, and without this one
            member.kill()
            raise WorkerError("the run has ended")
        start = member.handle.start.remote(*self._arguments)
        member.settled(gather({start: member}, self._cluster.patience.start, "started")[0])
        what = f"{member.name} on {member.node} takes part"
        self._timeline.event("arrived", "evaluate", member.name, member.node, what)
        return member

    def _lose(self, error: LostError, death: int) -> None:
        if self._member is not None:
            self._member.kill()
            self._member = None
        if self._closed.is_set():
            return
        if death >= MOST_DEATHS:
            raise error
        _LOG.warning("%s; it begins again", error)
        self._timeline.event("lost", "evaluate", error.who, error.node, str(error), error.at)
