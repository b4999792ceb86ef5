"""Environments of several turns: what follows a turn of the model, from the workers of a task.

    tokens of the turns so far -> texts -> a new worker: `Task.respond` -> texts -> tokens that follow

Every answer has a process of its own, which replays the completion: nothing is kept between two turns, and
what one completion does to its process reaches no other.

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
        InputError: what the task needs cannot be loaded.
        WorkerError: the processes do not start.
    """

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.turns = task.turns
        """Turns that a completion has, at most."""
        self.tokenizer = tokenizer
        self.reported: set[str] = set()
        """Reasons of failures that a warning has named."""
        self._pool = SupervisedVerifiers(task, task.limits)
        # An environment that is forgotten must not leave its processes behind.
        self._close = weakref.finalize(self, self._pool.close)

    def ask(self, prompt: Prompt, turns: Sequence[np.ndarray]) -> TurnAnswer:
        """Start to answer the last of the turns of a completion, each as its tokens."""
        (texts,) = texts_of(self.tokenizer, [(prompt, turns)])
        return TurnAnswer(self, prompt, self._pool.submit_beside([job_of(prompt, {"turns": texts})]))

    def poll(self, seconds: float) -> None:
        """Receive what answers there are, within so many seconds."""
        self._pool.poll(seconds)

    def wait(self, answers: Sequence[TurnAnswer]) -> None:
        """Wait until some answers are there: each has the time limit of the task."""
        for answer in answers:
            # Not without end: the supervisor ends what runs longer than the limit, and that is an answer.
            answer.jobs.wait(math.inf)

    def close(self) -> None:
        """Stop the processes."""
        self._close()


@dataclass(frozen=True)
class TurnAnswer:
    """What follows a turn; under way at first."""

    environment: TaskEnvironment
    prompt: Prompt
    jobs: Jobs

    @property
    def done(self) -> bool:
        """Whether it is there."""
        return self.jobs.done

    def result(self) -> np.ndarray | None:
        """Return the tokens that follow the turn, (T,): none where the completion has ended.

        None where the environment has failed: it was not done in time, say. The first time is a warning.
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
    """Return the environment of a recipe's task, or of that of a downstream suite; None for tasks of one
    turn."""
    task, _ = recipe.evaluated[name]
    if task.turns == 1:
        return None
    # Workers answer turns of prompts that they are sent: the data set itself is not sent to each.
    sent, _ = recipe.without_prompts().evaluated[name]
    return TaskEnvironment(sent, tokenizer)
