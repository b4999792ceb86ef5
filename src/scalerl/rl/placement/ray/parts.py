"""The parts of a run on a cluster, in place of those of `scalerl.rl.loop.parts`."""

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from scalerl.errors import LearnerLostError
from scalerl.rl.config.cluster import Fsdp2
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import check_sampler
from scalerl.rl.engine.ordered import Generator
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.load import load_learner
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.placement.evaluate import Evaluate, prompts_of
from scalerl.rl.placement.evaluate_aside import EvaluatorAside
from scalerl.rl.placement.ray.learner import RayLearner
from scalerl.rl.placement.ray.vllm import place_on_ray
from scalerl.rl.placement.rollouts import RolloutPool, RolloutWorker
from scalerl.rl.placement.vllm import ServedEvaluator, start_vllm
from scalerl.rl.sync.ray_weights import StoredWeights, store, transport_of
from scalerl.rl.types import Pending, Weights
from scalerl.rl.verify.verifier import Completion, Verification, load_verifier
from scalerl.rl.verify.verifier_pool import Outcome, VerifierPool, VerifierWorker
from scalerl.rl.workers.backend import Channel
from scalerl.rl.workers.ray.backend import RayActors
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.timeline import Timeline

T = TypeVar("T", bound=Any)
_SHARES = 4
"""Shares of a batch of completions per verifier; several, so that faster verifiers take more of them."""


class RayParts:
    """The parts of a run as Ray actors; `closing` kills them and frees their resources."""

    def __init__(
        self, recipe: Recipe, model_folder: str, closing: ExitStack, folder: str | Path = "."
    ) -> None:
        """Connect to the cluster; vLLM workers log to `folder`."""
        self._model_folder, self._closing, self._folder = model_folder, closing, Path(folder)
        self._session = Session(recipe.on_cluster, recipe.engine)
        self._recipe = replace(recipe, cluster=self._session.cluster)
        self.held = self._session.held
        """The devices that a process of each role counts as."""
        self.timeline = Timeline()
        closing.callback(self._session.close)

    def went_back(self, error: LearnerLostError, step: int) -> None:
        """Record that the run has gone back to a step, because a rank of the learner was lost."""
        what = f"{error}; the run goes on from step {step}"
        self.timeline.event("lost", "train", error.who, error.node, what, error.at)

    def learner(self) -> Learner | RayLearner:
        """Return the learner, in the driver or on actors."""
        if not isinstance(self._recipe.on_cluster.learner, Fsdp2):
            return load_learner(self._recipe, self._model_folder)
        return self._keep(RayLearner(self._recipe, self._model_folder, self._session, self.timeline))

    def generator(self, learner: Learner | RayLearner, version: int) -> Generator:
        """Return the generator, with the learner's weights as `version`."""
        self._generator = self._start_generator(learner, version)
        return self._generator

    def _start_generator(self, learner: Learner | RayLearner, version: int) -> Generator:
        recipe, model = self._recipe, self._model_folder
        cluster, limits = recipe.on_cluster, recipe.on_cluster.timeouts
        if engine := recipe.vllm:
            place = partial(place_on_ray, self._session, engine, model, self._folder.absolute())
            how: dict[str, Any] = {"place": place, "timeline": self.timeline}
            return start_vllm(recipe, model, engine, learner, version, self._closing, **how)
        check_sampler(recipe, model, learner.model)
        workers = [
            RolloutWorker(f"generator {i}", i, limits.decode, limits.start, weights_timeout=limits.weights)
            for i in range(cluster.generators)
        ]
        generator = RolloutPool(
            workers,
            RayActors(self._session, "generators", limits.heartbeat),
            (recipe.without_prompts(), model),
            transport_of(cluster, learner),
            learner.weights(),
            version,
            self.timeline,
            limits.start,
        )
        self._keep(generator).wait_until_started()
        return generator

    def verifier(self, tokenizer: Any) -> Verification:
        """Return the verifier, in processes beside the driver or in actors."""
        if self._recipe.on_cluster.verifiers:
            return self._keep(RayVerifier(self._recipe, self._model_folder, self._session, self.timeline))
        return self._keep(load_verifier(self._recipe, tokenizer))

    def evaluate(self, stop: threading.Event, activities: Any) -> Evaluate:
        """Return the evaluator: the vLLM servers, or an actor with the resources of a generator.

        `stop` is not used; `activities` are `scalerl.rl.loop.progress.Activities`.
        """
        recipe, cluster, limits = self._recipe, self._recipe.on_cluster, self._recipe.on_cluster.timeouts
        if recipe.vllm:
            return self._keep(ServedEvaluator(recipe, cast(Any, self._generator)))

        def pack(weights: Weights) -> StoredWeights:
            return store(weights, cluster.transport.bucket_mib, limits.weights)

        # Its start includes the wait for free resources, which `cluster.timeouts.start` limits.
        timeouts = replace(recipe.timeouts, start=max(recipe.timeouts.start, limits.start))
        actors = RayActors(self._session, "evaluation", limits.heartbeat)
        arguments = recipe.without_prompts(), self._model_folder, prompts_of(recipe)
        return self._keep(
            EvaluatorAside(actors, arguments, timeouts, pack, self.timeline, activities.evaluating)
        )

    def _keep(self, part: T) -> T:
        return self._closing.enter_context(closing(part))


class RayVerifier(Verification):
    """Verification by `[cluster] verifiers` actors: the driver sends tokens and continues while they verify.

    completions -> shares -> idle actors -> outcomes, in order

    Every actor has its own `Verifier`, with the worker processes of `task.limits`. A lost actor is replaced,
    and another verifies its share again: outcomes do not depend on which actor verifies.

    Raises:
        InputError: the verifier of the task cannot be loaded.
        WorkerError: the verifiers do not start; or (by the result of `submit`) are lost too often.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, timeline: Timeline) -> None:
        super().__init__()
        cluster, limits = recipe.on_cluster, recipe.on_cluster.timeouts
        smallest = recipe.task.limits.workers  # with fewer, some processes of an actor would be idle
        workers = [
            VerifierWorker(f"verifier {i}", i, limits.step, limits.start) for i in range(cluster.verifiers)
        ]
        self.pool = VerifierPool(
            workers,
            RayActors(session, "verifiers", limits.heartbeat),
            lambda n: max(math.ceil(n / (_SHARES * len(workers))), smallest),
            verify,
            (recipe.without_prompts(), model_folder),
            limits.start,
            timeline,
        )
        try:
            self.pool.start()
            self.pool.wait_until_started()
        except BaseException:
            self.close()
            raise

    def submit(self, completions: Sequence[Completion]) -> Pending[list[Outcome]]:
        """See `Verification.submit`; completions that were submitted before are abandoned."""
        return self.pool.submit(completions)

    def close(self) -> None:
        """Kill the actors."""
        self.pool.close()


def verify(channel: Channel, recipe: Recipe, model_folder: str) -> None:
    """Verify the shares that arrive at an actor."""
    torch.set_num_threads(1)
    verifier = load_verifier(recipe, load_tokenizer(model_folder))
    channel.send("started")
    while True:
        pending = verifier.submit(channel.receive())
        pending.wait(math.inf)
        channel.send("done", pending.result())
