"""`mix`: several tasks in one run, drawn by weight, each with its own verifier and held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from scalerl.kinds import Choice
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.tasks.code import Code
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.environment import Environment
from scalerl.rl.tasks.reasoning_gym import ReasoningGym
from scalerl.rl.tasks.task import Task
from scalerl.rl.tasks.taskset import VerifiersTaskset
from scalerl.rl.types import Limits, Prompt, Reward, Split

OneTask = Chain | Dataset | Code | Environment | ReasoningGym | VerifiersTaskset
"""The tasks of the package that a mixture can hold."""


@dataclass(frozen=True)
class Mix(Task):
    """Tasks by name, with which the ids of their prompts start; a batch mixes all tasks.

    The pass rate is over all held-out prompts; each task sets how many it has.
    """

    tasks: Annotated[Mapping[str, Task], Choice("tasks", Task, OneTask, each=True)]
    weights: Mapping[str, float] = field(default_factory=dict)
    """How often prompts of each task are drawn, relative to the others; by default all equally."""
    limits: Limits = field(default_factory=Limits)
    """Limits of verifications, for all tasks."""
    turns: int = field(default=1, init=False)
    """The maximum of the tasks."""
    kind: Literal["mix"] = "mix"

    def __post_init__(self) -> None:
        if len(self.tasks) < 2:
            raise ValueError("tasks must have two or more")
        if odd := [name for name in self.tasks if not name or "/" in name]:
            raise ValueError(f"tasks: {odd[0]!r} is no name: it must not be empty, or hold a slash")
        if unknown := self.weights.keys() - self.tasks.keys():
            raise ValueError(f"weights: there is no task {min(unknown)!r}")
        object.__setattr__(self, "turns", max(task.turns for task in self.tasks.values()))
        if not self.weights:
            object.__setattr__(self, "weights", dict.fromkeys(self.tasks, 1.0))
        if missing := self.tasks.keys() - self.weights.keys():
            raise ValueError(f"weights: {min(missing)!r} has none")
        if not all(0 < weight < float("inf") for weight in self.weights.values()):
            raise ValueError("weights must be positive numbers")

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of all tasks, task by task."""
        return [
            replace(prompt, id=f"{name}/{prompt.id}")
            for name, task in self.tasks.items()
            for prompt in task.prompts(split)
        ]

    def prepare(self) -> None:
        """Load what the verifiers need."""
        for task in self.tasks.values():
            task.prepare()

    def verify(self, prompt: Prompt, text: str) -> Reward | bool:
        """Verify by the task of the prompt."""
        task, own = self._own(prompt)
        return task.verify(own, text)

    def verify_turns(self, prompt: Prompt, turns: Sequence[str]) -> Reward | bool:
        """Verify by the task of the prompt."""
        task, own = self._own(prompt)
        return task.verify_turns(own, turns)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Respond by the task of the prompt, within that task's number of turns."""
        task, own = self._own(prompt)
        return task.respond(own, turns) if len(turns) < task.turns else ()

    def reference(self, prompt: Prompt) -> str | None:
        """Return the reference from the task of the prompt."""
        task, own = self._own(prompt)
        return task.reference(own)

    def without(self, ids: frozenset[str]) -> Mix | None:
        """Return the mixture without these prompts; None if one belongs to a task that drops none."""
        tasks = dict(self.tasks)
        for name, task in self.tasks.items():
            own = frozenset(id.partition("/")[2] for id in ids if id.startswith(f"{name}/"))
            kept = task.without(own) if own else task
            if kept is None:
                return None
            tasks[name] = kept
        return replace(self, tasks=tasks)

    def _own(self, prompt: Prompt) -> tuple[Task, Prompt]:
        name, _, own = prompt.id.partition("/")
        return self.tasks[name], replace(prompt, id=own)
