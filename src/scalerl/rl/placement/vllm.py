"""vLLM as the engine of a run with any placement: its workers generate, and evaluate beside training."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from scalerl.rl.config.engine import Vllm
from scalerl.rl.config.recipe import HELDOUT, Recipe
from scalerl.rl.engine.build import check_sampler
from scalerl.rl.engine.sampling import RequestFactory
from scalerl.rl.engine.vllm.generator import VllmGenerator
from scalerl.rl.engine.vllm.launch import Place
from scalerl.rl.engine.vllm.turns import TurnsThread
from scalerl.rl.placement.evaluate import EvaluationResult, result_of, with_suites
from scalerl.rl.types import Rollout, Weights
from scalerl.rl.verify.environment import load_environment
from scalerl.rl.verify.verifier import load_verifier


def start_vllm(
    recipe: Recipe,
    model_folder: str,
    settings: Vllm,
    learner: Any,
    version: int,
    around: ExitStack,
    *,
    place: Place,
    timeline: Any = None,
) -> VllmGenerator:
    """Return the generator of a recipe once its servers have the learner's weights; `around` closes it.

    The other arguments are those of `VllmGenerator`.

    Raises:
        InputError: model or tokenizer do not fit the recipe, or as in `VllmGenerator`.
    """
    tokenizer, sampling = check_sampler(recipe, model_folder, learner.model)
    generator = VllmGenerator(
        settings,
        sampling,
        tokenizer,
        model_folder,
        learner.weights(),
        version,
        slots=recipe.decode_slots,
        precision=recipe.precision,
        timeline=timeline,
        place=place,
        environment=load_environment(recipe, tokenizer),
    )
    around.enter_context(closing(generator))
    generator.wait_until_started()
    return generator


class ServedEvaluator:
    """The evaluator by the vLLM servers of `generator`, beside training; see `Evaluate`.

    Every server gets completions of an evaluation as soon as it has the evaluated version, before those of
    training (`scalerl.rl.engine.vllm.server_state`). A thread lets processes of this machine verify
    completions while servers continue.

    `seconds` of a result are the time for which all servers together would have been busy with it alone.
    """

    def __init__(self, recipe: Recipe, generator: VllmGenerator) -> None:
        self._generator, self._n_kept = generator, recipe.samples.evaluation
        factory = RequestFactory(
            generator.tokenizer, replace(generator.sampling, seed=recipe.evaluation.seed)
        )
        self._requests = {
            name: [
                request
                for i, prompt in enumerate(task.prompts("heldout"))
                for request in factory.requests(i, (prompt, 0, samples))
            ]
            for name, (task, samples) in recipe.evaluated.items()
        }
        self._verifiers = {name: load_verifier(recipe, generator.tokenizer, name) for name in self._requests}
        self._environments = {
            name: TurnsThread(environment, generator.sampling)
            for name in self._requests
            if (environment := load_environment(recipe, generator.tokenizer, name))
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._counted = 0.0
        """Seconds of servers that are counted in earlier results."""
        self._sampled = deque[Future[list[tuple[Rollout, ...]]]]()

    def __call__(
        self, weights: Weights, version: int, suites: Sequence[str] = ()
    ) -> Future[EvaluationResult]:
        """Start to evaluate `weights`."""
        names = HELDOUT, *suites
        for name in names:
            wanted = self._requests[name], weights, version, self._environments.get(name)
            self._sampled.append(self._generator.evaluate(*wanted))
        return self._thread.submit(self._verify, version, names)

    def close(self) -> None:
        """Stop the processes that verify; a resumed run makes the unfinished evaluations."""
        for sampled in self._sampled:
            sampled.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for part in (*self._verifiers.values(), *self._environments.values()):
            part.close()

    def _verify(self, version: int, names: Sequence[str]) -> EvaluationResult:
        found = {name: self._verify_one(version, name) for name in names}
        return with_suites(found.pop(HELDOUT), found)

    def _verify_one(self, version: int, name: str) -> EvaluationResult:
        groups = self._sampled[0].result()
        self._sampled.popleft()
        until = self._generator.evaluated_seconds
        seconds, self._counted = (until - self._counted) / self._generator.n_servers, until
        verdicts, n_kept = self._verifiers[name].verify(groups), self._n_kept if name == HELDOUT else 0
        return result_of(version, groups, verdicts, seconds, self._generator.tokenizer, n_kept)
