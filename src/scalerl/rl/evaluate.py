"""Evaluation on the held-out prompts: one version of the weights, with a KV cache of its own.

Temperature, length rule and seed are fixed for the run, so that two evaluations differ by their weights
alone.

Shapes in names: P held-out prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import active_children, get_context
from typing import Any, Protocol

import numpy as np
import torch

from scalerl.rl.process import deaf_to_interrupts, follow_the_parent
from scalerl.rl.setup import load_generator, load_verifier
from scalerl.rl.types import Prompt, Weights


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one evaluation; shares are of completions, lengths in sampled tokens."""

    version: int
    correct_P: np.ndarray
    """Correct completions of each held-out prompt."""
    failed: float
    """Completions whose verification failed; they count as not correct."""
    truncated: float
    interrupted: float
    mean_length: float
    entropy: float
    """Nats per token at the sampling temperature: minus the mean log-probability of what was sampled."""
    seconds: float


class Evaluate(Protocol):
    """Evaluates weights, now or later."""

    def __call__(self, weights: Weights, version: int) -> Future[Evaluation]:
        """The evaluation of `weights`, which are `version`."""
        ...

    def close(self) -> None:
        """Let go of what is held; what is not done is lost."""
        ...


class Evaluator:
    """Evaluates in this process."""

    def __init__(self, recipe: Any, model_folder: str, prompts: Sequence[Prompt] | None = None) -> None:
        self._n_samples = recipe.evaluation.samples
        self._prompts = recipe.task.prompts("heldout") if prompts is None else prompts
        rows = recipe.evaluation.rows_for(len(self._prompts))
        self._generator = load_generator(recipe, model_folder, recipe.evaluation.seed, rows)
        self._verifier = load_verifier(recipe, self._generator.tokenizer)

    def evaluate(self, weights: Weights, version: int) -> Evaluation:
        """Sample every held-out prompt with `weights`, and judge the completions."""
        started = time.perf_counter()
        generator = self._generator  # all rows are free; old cache entries are overwritten before use
        generator.update(weights, version)
        for prompt in self._prompts:
            generator.submit(prompt, 0, self._n_samples)
        groups = generator.collect(len(self._prompts))
        verdicts = self._verifier.judge(groups)
        rollouts = [rollout for group in groups for rollout in group]
        return Evaluation(
            version=version,
            correct_P=np.array([sum(reward.correct for reward in rewards) for rewards in verdicts]),
            failed=float(np.mean([bool(reward.failed) for rewards in verdicts for reward in rewards])),
            truncated=float(np.mean([r.truncated for r in rollouts])),
            interrupted=float(np.mean([r.interrupted for r in rollouts])),
            mean_length=float(np.mean([r.length for r in rollouts])),
            entropy=-float(np.concatenate([r.logp_T[r.sampled_T] for r in rollouts]).mean(dtype=np.float64)),
            seconds=time.perf_counter() - started,
        )

    def __call__(self, weights: Weights, version: int) -> Future[Evaluation]:
        """Evaluate now; the future is already done."""
        future: Future[Evaluation] = Future()
        future.set_result(self.evaluate(weights, version))
        return future

    def close(self) -> None:
        """End the processes that verify."""
        self._verifier.close()


class EvaluationProcess:
    """Evaluates in a process of its own, in order, while training goes on."""

    def __init__(self, recipe: Any, model_folder: str) -> None:
        spawn, others = get_context("spawn"), active_children()
        self._pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=follow_the_parent)
        prompts = recipe.task.prompts("heldout")
        with deaf_to_interrupts():
            # No arguments of its start: Python waits until a process has read those, even where it is dead.
            self._latest: Future[Any] = self._pool.submit(
                _start, recipe.without_prompts(), model_folder, prompts
            )
        self._processes = [process for process in active_children() if process not in others]

    def __call__(self, weights: Weights, version: int) -> Future[Evaluation]:
        """Queue an evaluation of `weights`."""
        self._latest = future = self._pool.submit(_evaluate, dict(weights), version)
        return future

    def close(self) -> None:
        """End the process at once; what it has not done by now is done when the run is resumed."""
        if not self._latest.done():
            for process in self._processes:
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)


_evaluator: Callable[[], Evaluator]


def _start(recipe: Any, model_folder: str, prompts: Sequence[Prompt]) -> None:
    """What fails is raised by the evaluations."""
    global _evaluator
    torch.set_num_threads(1)
    _evaluator = cache(partial(Evaluator, recipe, model_folder, prompts))


def _evaluate(weights: Weights, version: int) -> Evaluation:
    return _evaluator().evaluate(weights, version)
