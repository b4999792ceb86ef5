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
from scalerl.rl.placement.evaluate_aside import EvaluationWorker, EvaluatorAside
from scalerl.rl.sync.object_store import StoredWeights, store
from scalerl.rl.types import Prompt, Weights
from scalerl.rl.workers.ray.actors import (
    Calls,
    LostError,
    SupervisedActor,
    WorkerActor,
    actors_of,
    value_of,
)
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import WorkerLostError


class EvaluationActor(WorkerActor):
    """An `Evaluator` in an actor."""

    def __init__(self) -> None:
        self._began, self._beats = time.perf_counter(), 0

    def start(self, recipe: Recipe, model_folder: str, prompts: Sequence[Prompt]) -> float:
        """Load model and verifier; return the seconds that it took."""
        torch.set_num_threads(1)
        self._evaluator = Evaluator(recipe, model_folder, prompts, self._beat)
        return time.perf_counter() - self._began

    @ray.method(concurrency_group="life")
    def beats(self) -> int:
        """Return a number that rises with the progress of the evaluation under way."""
        return self._beats

    def evaluate(self, weights: StoredWeights, version: int) -> EvaluationResult:
        """Sample every held-out prompt, and verify the completions."""
        # `fetch` raises LearnerLostError where the learner is gone: that is no loss of this actor.
        return self._evaluator.evaluate(weights.fetch(), version)

    def _beat(self) -> None:
        self._beats += 1


class SupervisedEvaluation(EvaluationWorker):
    """An actor that evaluates. Room is waited for within `timeouts.start`, as is its start."""

    def __init__(
        self, handle: Any, arguments: Sequence[Any], limits: ClusterTimeouts, timeline: Timeline
    ) -> None:
        self._timeline = timeline
        self._actor = SupervisedActor("the evaluation", handle, limits.heartbeat)
        calls = handle.where.remote(), handle.start.remote(*arguments)
        self._starting = Calls(dict.fromkeys(calls, self._actor), limits.start, "started")
        self._evaluating: Calls | None = None
        self._beats_call: Any = None

    def submit(self, weights: StoredWeights, version: int) -> None:
        """See `EvaluationWorker.submit`."""
        call = self._actor.handle.evaluate.remote(weights, version)
        # No deadline of the call: `EvaluatorAside` has one, from the last heartbeat on.
        self._evaluating = Calls({call: self._actor}, math.inf, "evaluated")

    def poll(self, seconds: float) -> EvaluationResult | None:
        """See `EvaluationWorker.poll`."""
        if not self.started:
            if self._starting.wait(seconds):
                where, self.startup = self._starting.result()
                self._actor.placed(where)
                self.started, self.beats = True, 1
                self._timeline.arrived("evaluate", self._actor.name, self._actor.node)
            return None
        assert self._evaluating is not None
        if self._evaluating.wait(seconds):
            return self._evaluating.result()[0]
        # Not `ping`, which is answered while the evaluation hangs: `beats` rises with decode steps.
        if self._beats_call is None:
            self._beats_call = self._actor.handle.beats.remote()
        elif ray.wait([self._beats_call], timeout=0)[0]:
            call, self._beats_call = self._beats_call, None
            self.beats = 1 + value_of(call, self._actor)
        return None

    def kill(self, why: WorkerLostError | None = None) -> None:
        """See `EvaluationWorker.kill`."""
        self._actor.kill()
        if why is not None:
            lost = why if isinstance(why, LostError) else self._actor.lost(str(why))
            self._timeline.event("lost", "evaluate", lost.who, lost.node, str(lost), lost.at)


def evaluator_on(recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> EvaluatorAside:
    """Return what evaluates by an actor that has the resources of a generator."""
    cluster, limits = recipe.on_cluster, recipe.on_cluster.timeouts
    request = actors_of(EvaluationActor, {"life": 1}, cluster.generator, session.room["evaluation"])
    arguments = recipe.without_prompts(), model_folder, recipe.task.prompts("heldout")

    def pack(weights: Weights) -> StoredWeights:
        return store(weights, cluster.transport.bucket_mib, limits.weights)

    # Its start includes the wait for room, which is the cluster's to bound.
    timeouts = replace(recipe.timeouts, start=max(recipe.timeouts.start, limits.start))
    return EvaluatorAside(
        lambda: SupervisedEvaluation(request(0), arguments, limits, timeline), timeouts, pack
    )
