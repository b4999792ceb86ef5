"""Evaluations in an actor: a worker of `scalerl.rl.placement.evaluate_aside`, replaced where it is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from scalerl.rl.config.cluster import ClusterTimeouts
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.placement.evaluate import EvaluationResult, Evaluator
from scalerl.rl.placement.evaluate_aside import EvaluatorAside
from scalerl.rl.sync.object_store import StoredWeights, store
from scalerl.rl.types import Prompt, Weights
from scalerl.rl.workers.ray.actors import Calls, LostError, SupervisedActor, remote, value_of
from scalerl.rl.workers.ray.session import Session, here
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import WorkerLostError


class EvaluationActor:
    """What `scalerl.rl.placement.evaluate.Evaluator` does, elsewhere."""

    def __init__(self) -> None:
        self._began, self._beats = time.perf_counter(), 0

    def start(
        self, recipe: Recipe, model_folder: str, prompts: Sequence[Prompt]
    ) -> tuple[tuple[str, int], float]:
        """Load model and verifier; node and process, and the seconds that it took."""
        torch.set_num_threads(1)
        self._evaluator = Evaluator(recipe, model_folder, prompts, self._beat)
        return here(), time.perf_counter() - self._began

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A heartbeat."""

    @ray.method(concurrency_group="life")
    def beats(self) -> int:
        """A number that rises with the progress of the evaluation under way."""
        return self._beats

    def evaluate(self, weights: StoredWeights, version: int) -> EvaluationResult:
        """Sample every held-out prompt, and judge the completions."""
        return self._evaluator.evaluate(weights.fetch(), version)

    def _beat(self) -> None:
        self._beats += 1


class SupervisedEvaluation:
    """An actor that evaluates; see `scalerl.rl.placement.evaluate_aside.EvaluationWorker`.

    Room is waited for within `timeouts.start`, and a heartbeat within `timeouts.heartbeat`.
    """

    def __init__(
        self, handle: Any, arguments: Sequence[Any], limits: ClusterTimeouts, timeline: Timeline
    ) -> None:
        self._timeline = timeline
        self._actor = SupervisedActor("the evaluation", handle, limits.heartbeat)
        start = handle.start.remote(*arguments)
        self._starting: Calls | None = Calls({start: self._actor}, limits.start, "started")
        self._evaluating: Calls | None = None
        self._asked: Any = None
        self.beats, self.startup = 0, 0.0

    @property
    def started(self) -> bool:
        """See `EvaluationWorker`."""
        return self._starting is None

    def begin(self, weights: StoredWeights, version: int) -> None:
        """See `EvaluationWorker`."""
        call = self._actor.handle.evaluate.remote(weights, version)
        self._evaluating = Calls({call: self._actor}, math.inf, "evaluated")

    def poll(self, seconds: float) -> EvaluationResult | None:
        """See `EvaluationWorker`."""
        if self._starting is not None:
            if self._starting.wait(seconds):
                self._arrive()
            return None
        assert self._evaluating is not None
        if self._evaluating.wait(seconds):
            return self._evaluating.result()[0]
        if self._asked is None:
            self._asked = self._actor.handle.beats.remote()
        elif ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            self.beats = 1 + value_of(asked, self._actor)
        return None

    def kill(self, why: WorkerLostError | None = None) -> None:
        """See `EvaluationWorker`."""
        self._actor.kill()
        if why is not None:
            lost = why if isinstance(why, LostError) else self._actor.lost(str(why))
            self._timeline.event("lost", "evaluate", lost.who, lost.node, str(lost), lost.at)

    def _arrive(self) -> None:
        assert self._starting is not None
        (where, self.startup), self._starting = self._starting.result()[0], None
        self._actor.settled(where)
        self.beats += 1
        actor = self._actor
        what = f"{actor.name} on {actor.node} takes part"
        self._timeline.event("arrived", "evaluate", actor.name, actor.node, what)


def evaluator_on(recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> EvaluatorAside:
    """Evaluations by an actor with the share of a generator."""
    cluster, limits = recipe.on_cluster, recipe.on_cluster.timeouts
    ask = remote(EvaluationActor, {"life": 1}, cluster.generator, session.room["evaluation"])
    arguments = recipe.without_prompts(), model_folder, recipe.task.prompts("heldout")

    def pack(weights: Weights) -> StoredWeights:
        return store(weights, cluster.transport.bucket_mib, limits.weights)

    # Its start includes the wait for room, which is the cluster's to bound.
    timeouts = replace(recipe.timeouts, start=max(recipe.timeouts.start, limits.start))
    return EvaluatorAside(lambda: SupervisedEvaluation(ask(0), arguments, limits, timeline), timeouts, pack)
