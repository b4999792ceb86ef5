"""Verification that cannot hurt the run.

    rollouts -> text -> worker processes -> outcomes -> rewards, in order

A verifier is code of others on text that a model wrote. It runs in processes of its own, each with a limit of
time and memory. What it does to itself costs one completion, and its process if need be, and is counted:

    raised     it raised an exception
    timeout    it was not done within the time limit (in a loop in C, say): its process is killed
    nonsense   it returned no reward, or one that is not finite
    died       its process died, or ran out of memory

Such a completion gets the reward of a failure, and leaves the loss as a truncated one does. What it does to
its process reaches no other completion: `scalerl.rl.verify.supervisor` has how.
"""

from __future__ import annotations

import json
import math
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import FAILED, Done, Limits, Pending, Prompt, Reward, Rollout
from scalerl.rl.verify.pool import Outcome, Workers

ODD = {
    "exit": "a verification called sys.exit or the like",
    "left": "a verification left a process or a thread behind",
    "changed": "a verification replaced builtins or functions of modules",
    "answer": "its answer did not belong to the completion it was given",
    "check": "its verdict differed from that of a new worker; new workers have judged its completions again",
    "unsteady": "the verifier does not give one answer the same verdict twice",
}
"""Why a worker was replaced, where the completion itself does not count as failed for it."""

Asked = tuple[Prompt, np.ndarray]
"""A completion to be judged: prompt and tokens."""


class Verification(ABC):
    """Judges rollouts, wherever that is done: a truncated one has failed, whatever it says."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Verifications that failed, by reason."""
        self.examples: dict[str, str] = {}
        """The first failure of each reason: prompt and message."""
        self.restarts: Counter[str] = Counter()
        """Workers that were replaced, by reason; docs/tasks.md has them."""
        self._told: set[str] = set()

    @abstractmethod
    def ask(self, completions: Sequence[Asked]) -> Pending[list[Outcome]]:
        """Begin to judge completions, one call at a time; their outcomes, in order."""

    @abstractmethod
    def close(self) -> None:
        """End the processes."""

    def begin(self, groups: Sequence[Sequence[Rollout]]) -> Pending[list[list[Reward]]]:
        """Begin to judge; the rewards of the completions of each group, in order."""
        asked = [(r.prompt, r.token_T) for group in groups for r in group if not r.truncated]
        return _Judging(self, groups, self.ask(asked))

    def judge(self, groups: Sequence[Sequence[Rollout]]) -> list[list[Reward]]:
        """The rewards of the completions of each group, in order, waited for."""
        begun = self.begin(groups)
        begun.wait(math.inf)
        return begun.result()

    def reward(self, rollout: Rollout, outcome: Outcome) -> Reward:
        """The reward of a completion; one whose verification failed is counted."""
        self.restarts.update(outcome.get("restarts", {}))
        reason = outcome.get("failed")
        if reason is None:
            return Reward(outcome["value"], outcome["correct"])
        self.failures[reason] += 1
        self.examples.setdefault(reason, f"{rollout.prompt.id}: {outcome.get('detail', reason)}")
        return Reward(FAILED.value, FAILED.correct, reason)

    def new_failures(self) -> list[str]:
        """A line for every reason that has shown since the last call: what failed, and what was replaced."""
        new = {reason: text for reason, text in self.examples.items() if reason not in self._told}
        odd = [reason for reason in ODD if reason in self.restarts and reason not in self._told]
        self._told |= {*new, *odd}
        lines = [f"a verification failed ({reason}) at prompt {text}" for reason, text in new.items()]
        return lines + [f"a worker of the verifier was replaced ({why}): {ODD[why]}" for why in odd]


@dataclass
class _Judging:
    """Groups that are being judged; see `scalerl.rl.types.Pending`."""

    by: Verification
    groups: Sequence[Sequence[Rollout]]
    outcomes: Pending[list[Outcome]]

    def wait(self, seconds: float) -> bool:
        return self.outcomes.wait(seconds)

    def result(self) -> list[list[Reward]]:
        outcomes = iter(self.outcomes.result())
        return [
            [FAILED if r.truncated else self.by.reward(r, next(outcomes)) for r in g] for g in self.groups
        ]


class DirectVerifier(Verification):
    """Judges by a task that is `trusted`, in this process and at once."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        super().__init__()
        self._task, self._tokenizer = task, tokenizer

    def ask(self, completions: Sequence[Asked]) -> Pending[list[Outcome]]:
        """See `Verification.ask`; all are judged when this returns."""
        texts = _texts(self._tokenizer, completions)
        rewards = [self._task.verify(prompt, t) for (prompt, _), t in zip(completions, texts, strict=True)]
        return Done([{"value": reward.value, "correct": reward.correct} for reward in rewards])

    def close(self) -> None:
        """There is nothing to end."""


class PoolVerifier(Verification):
    """Judges by the task, in processes of this machine, within `limits`.

    Raises:
        InputError: what the task needs for judging cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, tokenizer: Any, limits: Limits) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._workers = Workers(task, limits)
        self._close = weakref.finalize(self, self._workers.close)

    def ask(self, completions: Sequence[Asked]) -> Pending[list[Outcome]]:
        """Begin to judge; see `Verification.ask`."""
        texts = _texts(self._tokenizer, completions)
        jobs = [json.dumps([asdict(p), text]) for (p, _), text in zip(completions, texts, strict=True)]
        return self._workers.begin([job.encode() for job in jobs])

    def close(self) -> None:
        """End the processes."""
        self._close()


def load_verifier(recipe: Recipe, tokenizer: Any) -> Verification:
    """The verifier of a recipe, in processes of this machine unless its task is trusted."""
    task = recipe.without_prompts().task  # which other processes can import, and without its prompts
    return DirectVerifier(task, tokenizer) if task.trusted else PoolVerifier(task, tokenizer, task.limits)


def _texts(tokenizer: Any, completions: Sequence[Asked]) -> list[str]:
    """The texts of completions without their end tokens."""
    if not completions:  # which a tokenizer takes for one empty text
        return []
    end = tokenizer.eos_token_id
    tokens = [token_T.tolist() for _, token_T in completions]
    return tokenizer.batch_decode([t[:-1] if t and t[-1] == end else t for t in tokens])
