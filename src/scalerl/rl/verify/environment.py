"""Environments of several turns: the workers of a task answer the turns of the model.

    tokens of the turns so far -> texts -> a new worker: `Task.respond` -> texts -> tokens of the answer

A new process makes every answer and replays the completion: nothing is kept between two turns, and nothing
that one completion does to its process affects another.

Shapes in names: T tokens of an answer.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.rl.config.recipe import HELDOUT, Recipe
from scalerl.rl.model.causal_lm import answer_tokens
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Prompt, UserText
from scalerl.rl.verify.verifier import texts_of
from scalerl.rl.verify.verifier_pool import Jobs, SupervisedVerifiers, job_of

_LOG = logging.getLogger("scalerl")


class TaskEnvironment:
    """Answers the turns of completions, in processes of this machine, within the limits of the task.

    Raises:
        InputError: something that the task needs cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.turns = task.turns
        """Maximum number of turns of a completion."""
        self.tokenizer = tokenizer
        self.reported: set[str] = set()
        """Reasons of failures that have been warned about."""
        self._pool = SupervisedVerifiers(task, task.limits)
        # An environment that is never closed must not leave its processes behind.
        self._close = weakref.finalize(self, self._pool.close)

    def ask(self, prompt: Prompt, turns: Sequence[np.ndarray]) -> TurnAnswer:
        """Start answering the last turn of a completion, from the tokens of each of its turns."""
        (texts,) = texts_of(self.tokenizer, [(prompt, turns)])
        return TurnAnswer(self, prompt, self._pool.submit_beside([job_of(prompt, {"turns": texts})]))

    def poll(self, seconds: float) -> None:
        """Receive available answers, waiting at most `seconds` for one."""
        self._pool.poll(seconds)

    def wait(self, answers: Sequence[TurnAnswer]) -> None:
        """Wait until these answers are there; each has the time limit of the task."""
        for answer in answers:
            # This ends, as the supervisor stops an answer beyond the time limit, which then has failed.
            answer.jobs.wait(math.inf)

    def close(self) -> None:
        """Stop the processes."""
        self._close()


@dataclass(frozen=True)
class TurnAnswer:
    """The answer to a turn; still in progress at first."""

    environment: TaskEnvironment
    prompt: Prompt
    jobs: Jobs

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self.jobs.done

    def result(self) -> np.ndarray | None:
        """Return the tokens of the answer, (T,), empty if the completion has ended; None if it failed.

        An environment fails by exceeding its time limit, say. The first one of each reason logs a warning.
        """
        (outcome,) = self.jobs.result()
        if (why := outcome.get("failed")) is None:
            answers = [UserText(text) if by_user else text for by_user, text in outcome["answers"]]
            return answer_tokens(self.environment.tokenizer, self.prompt, answers)
        if why not in self.environment.reported:
            self.environment.reported.add(why)
            detail = outcome.get("detail", why)
            text = "an environment failed (%s) at prompt %s: %s; such completions count as truncated"
            _LOG.warning(text, why, self.prompt.id, detail)
        return None


def load_environment(recipe: Recipe, tokenizer: Any, name: str = HELDOUT) -> TaskEnvironment | None:
    """Return the environment of a recipe's task, or of a downstream suite's; None for a task of one turn."""
    task, _ = recipe.evaluated[name]
    if task.turns == 1:
        return None
    # Workers receive each prompt with its turns, so they do not need the data set.
    sent, _ = recipe.without_prompts().evaluated[name]
    return TaskEnvironment(sent, tokenizer)
