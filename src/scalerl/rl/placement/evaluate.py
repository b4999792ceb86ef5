"""Evaluation on the held-out prompts, by one version of the weights, with a KV cache of its own.

Temperature, length rule and seed are fixed for the run, so that two evaluations differ only by their weights.
Downstream suites are sampled after the held-out prompts, whose results they do not change by a bit.

Shapes in names: P held-out prompts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from scalerl.errors import ScalerlError
from scalerl.rl.config.recipe import HELDOUT, Recipe
from scalerl.rl.engine.build import load_generator
from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.types import Prompt, Reward, Rollout, Weights
from scalerl.rl.verify.environment import load_environment
from scalerl.rl.verify.samples import sample_row, spread_over
from scalerl.rl.verify.verifier import load_verifier


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation; shares are of completions, lengths in sampled tokens."""

    version: int
    correct_P: np.ndarray
    """Number of correct completions of each held-out prompt."""
    failed: float
    """Share of completions whose verification failed; they count as not correct."""
    truncated: float
    interrupted: float
    mean_length: float
    entropy: float
    """Nats per token at the sampling temperature: minus the mean log-probability of sampled tokens."""
    seconds: float
    startup: float = 0.0
    """Seconds spent starting evaluation processes since the previous evaluation."""
    samples: tuple[dict[str, Any], ...] = ()
    """Some completions as text: lines of samples.jsonl."""
    downstream: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """Results of downstream suites, by name; their seconds are also in `seconds`."""


def prompts_of(recipe: Recipe) -> dict[str, list[Prompt]]:
    """Return the evaluated prompts by set: `HELDOUT`, and every downstream suite by its name."""
    return {name: task.prompts("heldout") for name, (task, _) in recipe.evaluated.items()}


class Evaluate(Protocol):
    """The interface of evaluators, which evaluate weights now or later."""

    def __call__(
        self, weights: Weights, version: int, suites: Sequence[str] = ()
    ) -> Future[EvaluationResult]:
        """Start to evaluate `weights` of a `version` on the held-out prompts and on downstream suites."""
        ...

    def close(self) -> None:
        """Stop its processes; unfinished evaluations are lost."""
        ...


def result_of(
    version: int,
    groups: Sequence[tuple[Rollout, ...]],
    verdicts: Sequence[Sequence[Reward]],
    seconds: float,
    tokenizer: Any,
    n_kept: int,
) -> EvaluationResult:
    """Return the result from completions by prompt and their rewards, with the text of `n_kept` of them."""
    rollouts = [rollout for group in groups for rollout in group]
    return EvaluationResult(
        version=version,
        correct_P=np.array([sum(reward.correct for reward in rewards) for rewards in verdicts]),
        failed=float(np.mean([bool(reward.failed) for rewards in verdicts for reward in rewards])),
        truncated=float(np.mean([r.truncated for r in rollouts])),
        interrupted=float(np.mean([r.interrupted for r in rollouts])),
        mean_length=float(np.mean([r.length for r in rollouts])),
        entropy=-float(np.concatenate([r.logp_T[r.sampled_T] for r in rollouts]).mean(dtype=np.float64)),
        seconds=seconds,
        samples=tuple(
            sample_row("evaluation", version, groups[i][0], verdicts[i][0], tokenizer)
            for i in spread_over(len(groups), n_kept)
        ),
    )


def with_suites(heldout: EvaluationResult, suites: Mapping[str, EvaluationResult]) -> EvaluationResult:
    """Return the result of the held-out prompts with those of suites, and the seconds of all."""
    seconds = heldout.seconds + sum(result.seconds for result in suites.values())
    return replace(heldout, seconds=seconds, downstream=suites)


_LOOK = 0.5  # seconds between two calls of `beat` while completions are verified


class EvaluationStoppedError(Exception):
    """The run stops: an evaluation was abandoned between two decode steps or during verification."""


class Evaluator:
    """The evaluator in this process.

    It calls `beat` with the number of sampled completions and of all, before every decode step and during
    verification. Once `stop` is set, it abandons an evaluation there: the future is never done, and a resume
    makes the evaluation from the weights in the checkpoint. `lender` is training's generator in this process,
    whose model and KV cache it borrows, because one device may not have room for two of them.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_folder: str,
        prompts: Mapping[str, Sequence[Prompt]] | None = None,
        beat: Callable[[int, int], None] = lambda done, of: None,
        lender: TorchGenerator | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._beat, self._lender, self._seed = beat, lender, recipe.evaluation.seed
        self._stop = stop or threading.Event()
        self._samples = {name: samples for name, (_, samples) in recipe.evaluated.items()}
        self._n_kept = recipe.samples.evaluation
        self._prompts = prompts_of(recipe) if prompts is None else prompts
        if lender is None:
            slots = recipe.evaluation.slots_for(len(self._prompts[HELDOUT]))
            self._generator = load_generator(recipe, model_folder, self._seed, slots, "evaluation")
        else:
            self._generator = lender
        self._verifiers = {
            name: load_verifier(recipe, self._generator.tokenizer, name) for name in self._prompts
        }
        self._environments = {
            name: load_environment(recipe, self._generator.tokenizer, name) for name in self._prompts
        }

    def evaluate(self, weights: Weights, version: int, suites: Sequence[str] = ()) -> EvaluationResult:
        """Sample every held-out prompt with `weights`, then those of suites, and verify the completions.

        Raises:
            EvaluationStoppedError: `stop` is set.
        """
        with nullcontext(self._generator) if self._lender is None else self._lender.lent(self._seed) as own:
            started = time.perf_counter()
            # All decode slots are free, and old KV cache entries are overwritten before they are read.
            own.update(weights, version)
            heldout = self._evaluate(own, HELDOUT, started)
            return with_suites(heldout, {s: self._evaluate(own, s, time.perf_counter()) for s in suites})

    def _evaluate(self, generator: TorchGenerator, suite: str, started: float) -> EvaluationResult:
        prompts, n_samples = self._prompts[suite], self._samples[suite]
        of = len(prompts) * n_samples
        generator.environment = self._environments[suite]
        for prompt in prompts:
            generator.submit(prompt, 0, n_samples)
        while unfinished := generator.unfinished:
            self._go_on(of - unfinished, of)
            generator.work()
        groups = generator.take(len(prompts))
        pending = self._verifiers[suite].start(groups)
        while not pending.wait(_LOOK):  # each verification has its own time limit
            self._go_on(of, of)
        seconds, n_kept = time.perf_counter() - started, self._n_kept if suite == HELDOUT else 0
        return result_of(generator.version, groups, pending.result(), seconds, generator.tokenizer, n_kept)

    def _go_on(self, done: int, of: int) -> None:
        self._beat(done, of)
        if self._stop.is_set():
            raise EvaluationStoppedError

    def __call__(
        self, weights: Weights, version: int, suites: Sequence[str] = ()
    ) -> Future[EvaluationResult]:
        """Evaluate now; the future is done, unless the run stops."""
        future: Future[EvaluationResult] = Future()
        try:
            with suppress(EvaluationStoppedError):
                future.set_result(self.evaluate(weights, version, suites))
        except ScalerlError as error:  # from verification processes or from a task
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Stop the processes of verifiers and environments."""
        for process in (*self._verifiers.values(), *self._environments.values()):
            if process is not None:
                process.close()
