"""Verification that cannot harm the run.

    rollouts -> text -> worker processes -> outcomes -> rewards, in order

A verifier is third-party code that runs on text written by a model. It has processes of its own, each with
limits of time and memory. A failed verification costs one completion, and its process if need be, and is
counted by its reason:

    raised     it raised an exception
    timeout    it exceeded the time limit (in a loop in C, say), and its process was killed
    nonsense   it returned no reward, or one that is not finite
    died       its process died, or ran out of memory

Such a completion gets the reward of a failure, and leaves the loss like a truncated one. What it does to its
process cannot affect other completions; `scalerl.rl.verify.supervisor` says how.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from scalerl.rl.config.recipe import HELDOUT, Recipe
from scalerl.rl.model.causal_lm import end_tokens
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.tasks.task import Task, verdict
from scalerl.rl.types import FAILED, Done, Limits, Mapped, Pending, Prompt, Reward, Rollout
from scalerl.rl.verify.verifier_pool import Outcome, SupervisedVerifiers, job_of

ODD = {
    "exit": "a verification called sys.exit or the like",
    "left": "a verification left a process or a thread behind",
    "changed": "a verification replaced builtins or functions of modules",
    "answer": "its answer did not belong to the completion it was given",
    "check": "its verdict differed from that of a new worker; new workers verified its completions again",
    "unsteady": "the verifier does not give one answer the same verdict twice",
}
"""Why a worker was replaced, for reasons by which the completion itself does not count as failed."""

Completion = tuple[Prompt, Sequence[np.ndarray]]
"""A completion to verify: its prompt, and the tokens of each turn of the model."""


class Verification(ABC):
    """Verifies rollouts, here or elsewhere; a truncated rollout fails whatever its text."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Verifications that failed, by reason."""
        self.examples: dict[str, str] = {}
        """The first failure of each reason: prompt and message."""
        self.restarts: Counter[str] = Counter()
        """Replaced workers, by reason; docs/howto/tasks.md lists the reasons."""
        self._reported: set[str] = set()

    @abstractmethod
    def submit(self, completions: Sequence[Completion]) -> Pending[list[Outcome]]:
        """Start verifying completions, one call at a time; return their outcomes, in order."""

    @abstractmethod
    def close(self) -> None:
        """Stop the processes."""

    def start(self, groups: Sequence[Sequence[Rollout]]) -> Pending[list[list[Reward]]]:
        """Start verifying; return the rewards of the completions of each group, in order."""
        completions = [(r.prompt, r.turns) for group in groups for r in group if not r.truncated]

        def rewards(outcomes: list[Outcome]) -> list[list[Reward]]:
            # Truncated completions were not submitted, so the outcomes are those of the others, in order.
            left = iter(outcomes)
            return [[FAILED if r.truncated else self.reward(r, next(left)) for r in g] for g in groups]

        return Mapped(rewards, self.submit(completions))

    def verify(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Reward]]:
        """Verify, and return the rewards of the completions of each group, in order."""
        pending = self.start(groups)
        pending.wait(math.inf)
        return pending.result()

    def reward(self, rollout: Rollout, outcome: Outcome) -> Reward:
        """Return the reward of a completion; count a failed verification."""
        self.restarts.update(outcome.get("restarts", {}))
        reason = outcome.get("failed")
        if reason is None:
            return Reward(outcome["value"], outcome["correct"])
        self.failures[reason] += 1
        self.examples.setdefault(reason, f"{rollout.prompt.id}: {outcome.get('detail', reason)}")
        return Reward(FAILED.value, FAILED.correct, reason)

    def new_failures(self) -> list[str]:
        """Return a line for each reason of a failure or a replaced worker that is new since the last call."""
        new = {reason: text for reason, text in self.examples.items() if reason not in self._reported}
        odd = [reason for reason in ODD if reason in self.restarts and reason not in self._reported]
        self._reported |= {*new, *odd}
        lines = [f"a verification failed ({reason}) at prompt {text}" for reason, text in new.items()]
        return lines + [f"a worker of the verifier was replaced ({why}): {ODD[why]}" for why in odd]


class DirectVerifier(Verification):
    """Verifies by a task that `is_trusted`, immediately and in this process."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        super().__init__()
        self._task, self._tokenizer = task, tokenizer

    def submit(self, completions: Sequence[Completion]) -> Pending[list[Outcome]]:
        """See `Verification.submit`; all are verified when this returns."""
        texts = texts_of(self._tokenizer, completions)
        pairs = zip(completions, texts, strict=True)
        rewards = [verdict(self._task, prompt, turns) for (prompt, _), turns in pairs]
        return Done([{"value": reward.value, "correct": reward.correct} for reward in rewards])

    def close(self) -> None:
        """Return: there is no process to stop."""


class PoolVerifier(Verification):
    """Verifies by the task, in processes of this machine, within `limits`."""

    def __init__(self, task: Task, tokenizer: Any, limits: Limits) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._pool = SupervisedVerifiers(task, limits)
        # A verifier that is never closed must not leave its processes behind.
        self._close = weakref.finalize(self, self._pool.close)

    def submit(self, completions: Sequence[Completion]) -> Pending[list[Outcome]]:
        """See `Verification.submit`."""
        texts = texts_of(self._tokenizer, completions)
        return self._pool.submit([job_of(p, turns) for (p, _), turns in zip(completions, texts, strict=True)])

    def close(self) -> None:
        """Stop the processes."""
        self._close()


def is_trusted(task: Task) -> bool:
    """Return whether a task is verified in the process of the run, without limits.

    Only `chain` is, without subclasses: its verifier is a pure function that takes 4 microseconds, and
    workers would take 27 % of the demonstration's time.
    """
    return type(task) is Chain


def load_verifier(recipe: Recipe, tokenizer: Any, name: str = HELDOUT) -> Verification:
    """Return the verifier of a recipe, or of one of its downstream suites: in processes of this machine
    unless its task is trusted."""
    sent = recipe.without_prompts()  # small, and of classes that other processes can import
    task, _ = sent.evaluated[name]
    return DirectVerifier(task, tokenizer) if is_trusted(task) else PoolVerifier(task, tokenizer, task.limits)


def texts_of(tokenizer: Any, completions: Sequence[Completion]) -> list[list[str]]:
    """Return the texts of the turns of completions, without their end tokens."""
    if not completions:  # a tokenizer would take an empty list for one empty text
        return []
    ends = end_tokens(tokenizer)
    tokens = [turn_T.tolist() for _, turns in completions for turn_T in turns]
    texts = iter(tokenizer.batch_decode([t[:-1] if t and t[-1] in ends else t for t in tokens]))
    return [list(islice(texts, len(turns))) for _, turns in completions]
