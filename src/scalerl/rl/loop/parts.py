"""The parts of a run that may be elsewhere: learner, generator, verifier, evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from scalerl.errors import LearnerLostError
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import check_sampler, new_generator
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import model_of
from scalerl.rl.placement.evaluate import Evaluate, Evaluator
from scalerl.rl.placement.evaluate_aside import EvaluationProcess, EvaluatorAside
from scalerl.rl.placement.local import LocalGenerator
from scalerl.rl.types import Generator
from scalerl.rl.verify.verifier import Verification, load_verifier

Load = Callable[[Recipe, str], Any]
"""Makes the learner of a recipe and a model's folder."""


class Parts(Protocol):
    """Makes the parts of a run where its recipe wants them; they end with the run."""

    timeline: Any
    """Who did what when, where that is recorded: see `scalerl.rl.workers.ray.timeline`."""

    def went_back(self, error: LearnerLostError, step: int) -> None:
        """The run has begun again from a step, for that the learner of the parts before was lost."""
        ...

    def learner(self) -> Any:
        """The learner, at version 0: a `Learner`, or what has its methods."""
        ...

    def generator(self, learner: Any, version: int) -> Generator:
        """The generator, with the weights of `learner` as `version`."""
        ...

    def verifier(self, tokenizer: Any) -> Verification:
        """What judges completions."""
        ...

    def evaluate(self) -> Evaluate:
        """What evaluates."""
        ...


class PartsHere:
    """Parts in this process and in processes beside it, by the recipe's `placement`."""

    timeline = None

    def __init__(
        self, recipe: Recipe, model_folder: str, closing: ExitStack, aside: bool, load: Load
    ) -> None:
        self._recipe, self._model_folder, self._closing = recipe, model_folder, closing
        self._aside, self._load = aside, load

    def went_back(self, error: LearnerLostError, step: int) -> None:
        """See `Parts`."""

    def learner(self) -> Any:
        """See `Parts`."""
        return self._load(self._recipe, self._model_folder)

    def generator(self, learner: Any, version: int) -> Generator:
        """See `Parts`."""
        generator = place_generator(self._recipe, self._model_folder, learner, version)
        self._closing.callback(generator.close)
        return generator

    def verifier(self, tokenizer: Any) -> Verification:
        """See `Parts`."""
        verifier = load_verifier(self._recipe, tokenizer)
        self._closing.callback(verifier.close)
        return verifier

    def evaluate(self) -> Evaluate:
        """In a process of its own, where `aside` is true."""
        evaluate = self._evaluator_aside() if self._aside else Evaluator(self._recipe, self._model_folder)
        self._closing.callback(evaluate.close)
        return evaluate

    def _evaluator_aside(self) -> EvaluatorAside:
        recipe, prompts = self._recipe, self._recipe.task.prompts("heldout")
        start = partial(EvaluationProcess, recipe.without_prompts(), self._model_folder, prompts)
        return EvaluatorAside(start, recipe.timeouts)


def parts_of(
    recipe: Recipe, model_folder: str, closing: ExitStack, folder: Path, aside: bool, load: Load
) -> Parts:
    """The parts of `recipe`: on the cluster that is connected to, where it has one; logs go to `folder`.

    Elsewhere `load` makes the learner, and evaluations have a process of their own if `aside` is true.
    """
    if recipe.cluster is None:
        return PartsHere(recipe, model_folder, closing, aside, load)
    from scalerl.rl.placement.ray.parts import RayParts

    return RayParts(recipe, model_folder, closing, folder)


def place_generator(
    recipe: Recipe, model_folder: str | Path, learner: Learner, version: int = 0
) -> Generator:
    """The generator of a run, where the recipe places it, with the weights of `learner` as `version`.

    Raises:
        InputError: model or tokenizer do not fit the recipe, or the KV cache does not fit the memory.
    """
    tokenizer, sampling = check_sampler(recipe, model_folder, learner.model)
    if recipe.placement.kind == "inline":
        generator = new_generator(
            recipe, model_of(recipe, model_folder), tokenizer, sampling, recipe.decode_slots
        )
        generator.start(learner.weights(), version)
        return generator
    n_processes = recipe.placement.generators
    return LocalGenerator(recipe, str(model_folder), learner.weights(), n_processes, version)
