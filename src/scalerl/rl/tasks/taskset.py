"""`verifiers`: tasksets written for the package verifiers (0.4), of one turn.

    task = "verifiers:my-taskset"

is the installed package `my_taskset`, whose `__all__` names its `Taskset`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from scalerl.errors import InputError, brief, brief_error
from scalerl.rl.tasks.task import Task
from scalerl.rl.types import Limits, Prompt, Reward, Split


@dataclass(frozen=True)
class OneTurn(Task):
    """The first `heldout` tasks of a taskset to evaluate on, and the next `size` to train on.

    The prompt is a task's system prompt and prompt, through the chat template; thinking and its end
    are not shown to the rewards. The value is the weighted sum of the rewards, as in verifiers,
    which has no pass rate: here a completion is correct where the reward `correct` is at least `correct_at`.
    """

    id: str
    """Of the taskset, as verifiers' own commands take it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the taskset's config takes."""
    heldout: int = 100
    size: int | None = None
    """All that there are where it is not given."""
    correct: str | None = None
    """The reward that the pass rate is of; the first by name where it is not given."""
    correct_at: float = 1.0
    after: str = "</think>"
    limits: Limits = field(default_factory=Limits)
    kind: Literal["verifiers"] = "verifiers"

    def __post_init__(self) -> None:
        if self.heldout < 1 or (self.size is not None and self.size < 1):
            raise ValueError("size and heldout must be at least 1")

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of a split.

        Raises:
            InputError: verifiers or the taskset is not installed, or the taskset needs more than one turn.
        """
        prompts = [self._prompt(number, task.data) for number, task in enumerate(self._tasks)]
        if len(prompts) <= self.heldout:
            raise InputError(
                f"task.heldout: {self.id} has {len(prompts)} tasks, and {self.heldout} are held out"
            )
        return prompts[: self.heldout] if split == "heldout" else prompts[self.heldout :]

    def prepare(self) -> None:
        """Load the taskset, whose tasks score."""
        _ = self._tasks

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Score the completion as the only turn of a rollout."""
        from verifiers.v1 import AgentConfig
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

        task = self._tasks[int(prompt.id.rpartition("/")[2])]
        shown = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
        messages = [shown[role](content=content) for role, content in prompt.messages or ()]
        _, thought, answer = text.partition(self.after)
        messages.append(AssistantMessage(content=answer if thought else text))
        nodes = [
            MessageNode(parent=number - 1 if number else None, message=message)
            for number, message in enumerate(messages)
        ]
        nodes[-1].sampled = True
        asked = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=AgentConfig())
        trace = Trace(task=asked, agent=agent, nodes=nodes, ok=True, is_completed=True)
        asyncio.run(task.score(trace))
        return self._reward({name: (one.score, one.value) for name, one in trace.rewards.items() if one})

    def _reward(self, scores: Mapping[str, tuple[float, float]]) -> Reward:
        """From each reward's score and weighted score."""
        judge = min(scores) if self.correct is None else self.correct
        if judge not in scores:
            raise ValueError(f"task.correct: {self.id} has no reward {judge!r} among {', '.join(scores)}")
        return Reward(sum(value for _, value in scores.values()), scores[judge][0] >= self.correct_at)

    def _prompt(self, number: int, data: Any) -> Prompt:
        turns = (
            [("user", data.prompt)]
            if isinstance(data.prompt, str)
            else [(message.role, message.content) for message in data.prompt or ()]
        )
        if data.system_prompt is not None:
            turns = [("system", data.system_prompt), *turns]
        if not turns or turns[-1][0] != "user" or not all(isinstance(text, str) for _, text in turns):
            raise InputError(f"task: task {number} of {self.id} does not end with a user's turn of text")
        return Prompt(f"{self.id}/{number}", turns[-1][1], str(getattr(data, "answer", "")), tuple(turns))

    @cached_property
    def _tasks(self) -> list[Any]:
        try:
            from verifiers.v1 import TasksetConfig
            from verifiers.v1.utils.generic import concrete_type
            from verifiers.v1.utils.loaders import taskset_class
        except ImportError as error:
            raise InputError("task: verifiers needs a package: pip install 'scalerl[verifiers]'") from error
        try:
            made = taskset_class(self.id)
            settings = concrete_type(made, TasksetConfig) or TasksetConfig
            taskset = made(settings(id=self.id, **self.config))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise InputError(f"task.id: {brief(self.id)} cannot be loaded ({_why(error)})") from error
        if self.size is None and not taskset.bounded:
            raise InputError(f"task.size: {self.id} has no end: say how many of its tasks to train on")
        tasks = list(islice(taskset, None if self.size is None else self.heldout + self.size))
        if tasks:
            self._check(taskset, tasks[0])
        return tasks

    def _check(self, taskset: Any, task: Any) -> None:
        """Refuse what one turn of text cannot do: tools, containers, and rewards that look at one."""
        if taskset.toolsets(taskset.config) or task.toolsets(task.config):
            raise InputError(f"task.id: {self.id} has tools, and a completion here is one turn")
        if task.NEEDS_CONTAINER or task.data.image:
            raise InputError(f"task.id: {self.id} needs a container, and a completion here is text alone")
        rewards = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        if not rewards:
            raise InputError(f"task.id: {self.id} has no reward")
        needed = (inspect.signature(reward).parameters.get("runtime") for reward in rewards)
        if any(need is not None and need.default is inspect.Parameter.empty for need in needed):
            # verifiers leaves such a reward out of the sum where there is none.
            raise InputError(
                f"task.id: {self.id} has a reward that looks at a runtime, and there is none here"
            )


def _why(error: Exception) -> str:
    """In a line; pydantic's first line only counts what is wrong."""
    found = error.errors() if hasattr(error, "errors") else ()  # pyright: ignore[reportAttributeAccessIssue]
    return "; ".join(f"config.{one['loc'][0]}: {one['msg']}" for one in found) or brief_error(error)
