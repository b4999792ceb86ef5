"""Evaluations by the vLLM servers of a run, beside its training.

Every server gets completions of an evaluation as soon as it has the version that is evaluated, before those
of training; it installs no other version until they are complete (`scalerl.rl.engine.vllm.server_pool`).
Verdicts come from processes of this machine, in a thread, while servers go on.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.sampling import RequestFactory
from scalerl.rl.placement.evaluate import EvaluationResult, result_of
from scalerl.rl.types import Rollout, Weights
from scalerl.rl.verify.verifier import load_verifier

if TYPE_CHECKING:
    from scalerl.rl.engine.vllm.generator import VllmGenerator


class ServedEvaluator:
    """Evaluates by the servers of `generator`; see `scalerl.rl.placement.evaluate.Evaluate`.

    `seconds` of a result are those that all servers together needed for it, as if they had done nothing else.
    """

    def __init__(self, recipe: Recipe, generator: VllmGenerator) -> None:
        self._generator, self._n_kept = generator, recipe.samples.evaluation
        factory = RequestFactory(
            generator.tokenizer, replace(generator.sampling, seed=recipe.evaluation.seed)
        )
        n_samples = recipe.evaluation.samples
        self._requests = [
            request
            for i, prompt in enumerate(recipe.task.prompts("heldout"))
            for request in factory.requests(i, (prompt, 0, n_samples))
        ]
        self._verifier = load_verifier(recipe, generator.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._counted = 0.0
        """Seconds of servers that earlier results have."""
        self._sampled = deque[Future[list[tuple[Rollout, ...]]]]()

    def __call__(self, weights: Weights, version: int) -> Future[EvaluationResult]:
        """Start to evaluate `weights`."""
        sampled = self._generator.evaluate(self._requests, weights, version)
        self._sampled.append(sampled)
        return self._thread.submit(self._verify, version, sampled)

    def close(self) -> None:
        """Stop the processes that verify; what is still sampled is made again when the run is resumed."""
        for sampled in self._sampled:
            sampled.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._verifier.close()

    def _verify(self, version: int, sampled: Future[list[tuple[Rollout, ...]]]) -> EvaluationResult:
        groups = sampled.result()
        self._sampled.popleft()
        until = self._generator.evaluated_seconds
        seconds, self._counted = (until - self._counted) / self._generator.n_servers, until
        verdicts = self._verifier.verify(groups)
        return result_of(version, groups, verdicts, seconds, self._generator.tokenizer, self._n_kept)
