"""The parts of a run that may be in other processes: learner, generator, verifier and evaluator."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from scalerl.errors import LearnerLostError
from scalerl.record.activity import Count
from scalerl.rl.config.devices import Assignment, HeldDevices, assign
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import check_sampler, load_generator
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.ordered import Generator
from scalerl.rl.learner.learner import Learner
from scalerl.rl.loop.progress import EVALUATING, Activities
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.placement.evaluate import Evaluate, Evaluator, prompts_of
from scalerl.rl.placement.evaluate_aside import EvaluatorAside
from scalerl.rl.placement.rollouts import LocalGenerator
from scalerl.rl.verify.verifier import Verification, load_verifier
from scalerl.rl.workers.processes import Processes

if TYPE_CHECKING:
    from scalerl.rl.placement.ray.parts import RayParts

Load = Callable[[Recipe, str], Any]
"""Returns the learner for a recipe and a model's folder."""


class PartsHere:
    """The parts of a run on one machine, in the processes that the recipe's `placement` asks for.

    `closing` shuts them down. `scalerl.rl.placement.ray.parts.RayParts` has the same methods.
    """

    timeline: Any = None
    """What every process did when; recorded only on a cluster."""

    def __init__(
        self,
        recipe: Recipe,
        model_folder: str,
        closing: ExitStack,
        aside: bool,
        load: Load,
        folder: Path = Path(),
    ) -> None:
        """Assign devices to the parts; vLLM workers log to `folder`."""
        self._recipe, self._model_folder, self._closing = recipe, model_folder, closing
        self._aside, self._load, self._folder = aside, load, folder
        # Set by torchrun: the number of trainers on this machine.
        self._trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._devices = assign(recipe, gpus_in_use(), self._trainers)
        if engine := recipe.vllm:
            held = HeldDevices.of_vllm(engine, recipe.processes, self._devices.shared)
        else:
            held = self._devices.held if aside else replace(self._devices.held, apart=0.0)
        self.held = held
        """The devices that a process of each role counts as."""

    def went_back(self, error: LearnerLostError, step: int) -> None:
        """Do nothing: only a cluster records that a run went back to a step after it lost its learner."""

    def learner(self) -> Any:
        """Return the learner, at version 0: a `Learner`, or a class with its methods."""
        return self._load(self._recipe, self._model_folder)

    def generator(self, learner: Any, version: int) -> Generator:
        """Return the generator, with the learner's weights as `version`."""
        recipe, model = self._recipe, self._model_folder
        if engine := recipe.vllm:
            from scalerl.rl.engine.vllm.launch import place_workers
            from scalerl.rl.placement.vllm import start_vllm

            of_run = recipe.processes, self._trainers, model, self._folder.absolute()
            place = partial(place_workers, engine, *of_run)
            generator = start_vllm(recipe, model, engine, learner, version, self._closing, place=place)
        else:
            generator = place_generator(recipe, model, learner, version, self._devices)
            self._closing.callback(generator.close)
        self._generator = generator
        return generator

    def verifier(self, tokenizer: Any) -> Verification:
        """Return the verifier of completions."""
        verifier = load_verifier(self._recipe, tokenizer)
        self._closing.callback(verifier.close)
        return verifier

    def evaluate(self, stop: threading.Event, activities: Activities) -> Evaluate:
        """Return the evaluator: the vLLM servers, a process of its own if `aside`, or else this process.

        On a GPU that an in-process generator shares with the trainer, the evaluator always runs in this
        process and borrows the generator's model and KV cache: another process would need a second copy.
        An evaluator in this process abandons an evaluation once `stop` is set.
        """
        recipe, model_folder = self._recipe, self._model_folder

        def beat(done: int, of: int) -> None:
            if activities.due(EVALUATING):
                activities.doing(EVALUATING, Count(done, of, "completions"))

        on_one = self._devices.evaluator in self._devices.trainers
        if recipe.vllm:
            from scalerl.rl.placement.vllm import ServedEvaluator

            evaluator = ServedEvaluator(recipe, cast(Any, self._generator))
        elif on_one and isinstance(self._generator, TorchGenerator):
            evaluator = Evaluator(recipe, model_folder, beat=beat, lender=self._generator, stop=stop)
        elif self._aside:
            arguments = recipe.without_prompts(), model_folder, prompts_of(recipe)
            processes = Processes(devices=[self._devices.evaluator])
            evaluator = EvaluatorAside(processes, arguments, recipe.timeouts, beat=activities.evaluating)
        else:
            evaluator = Evaluator(recipe, model_folder, beat=beat, stop=stop)
        self._closing.callback(evaluator.close)
        return evaluator


def parts_of(
    recipe: Recipe, model_folder: str, closing: ExitStack, folder: Path, aside: bool, load: Load
) -> PartsHere | RayParts:
    """Return the parts of `recipe`: on its Ray cluster, which must be connected, or on this machine.

    Logs go to `folder`. Without a cluster, `load` makes the learner, and `aside` gives evaluations a process.
    """
    if recipe.cluster is None:
        return PartsHere(recipe, model_folder, closing, aside, load, folder)
    from scalerl.rl.placement.ray.parts import RayParts

    return RayParts(recipe, model_folder, closing, folder)


def place_generator(
    recipe: Recipe,
    model_folder: str | Path,
    learner: Learner,
    version: int = 0,
    devices: Assignment | None = None,
) -> Generator:
    """Return the generator where the recipe places it, with the learner's weights as `version`.

    Without `devices`, generator processes see the same devices as this process.
    """
    check_sampler(recipe, model_folder, learner.model)
    if recipe.placement.kind == "inline":
        generator = load_generator(recipe, model_folder, recipe.seed, recipe.decode_slots)
        generator.start(learner.weights(), version)
        return generator
    n_processes = recipe.placement.generators
    generating = devices.generators if devices else ()
    return LocalGenerator(recipe, str(model_folder), learner.weights(), n_processes, version, generating)
