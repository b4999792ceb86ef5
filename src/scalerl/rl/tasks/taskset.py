"""`verifiers`: tasksets written for the package verifiers (0.4), of one turn or of several.

    task = "verifiers:my-taskset"

is the installed package `my_taskset`, whose `__all__` names its `Taskset`, and its `Env` if it has one.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

from scalerl.errors import InputError, brief, brief_error
from scalerl.rl.tasks.environment import tools_prompt, with_tools
from scalerl.rl.tasks.task import Task
from scalerl.rl.tasks.taskset_replay import Replay
from scalerl.rl.types import Limits, Prompt, Reward, Split


@dataclass(frozen=True)
class VerifiersTaskset(Task):
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
    turns: int = 1
    """Turns at most; a taskset with tools, or with an `Env` of its own, needs more than one."""
    correct: str | None = None
    """The reward that the pass rate is of; the first by name where it is not given."""
    correct_at: float = 1.0
    after: str = "</think>"
    limits: Limits = field(default_factory=Limits)
    kind: Literal["verifiers"] = "verifiers"

    def __post_init__(self) -> None:
        if self.heldout < 1 or self.turns < 1 or (self.size is not None and self.size < 1):
            raise ValueError("size, heldout and turns must be at least 1")

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the prompts of a split.

        Raises:
            InputError: verifiers or the taskset is not installed, or the taskset needs what is not here.
        """
        prompts = [self._prompt(number, task) for number, task in enumerate(self._tasks)]
        if len(prompts) <= self.heldout:
            raise InputError(
                f"task.heldout: {self.id} has {len(prompts)} tasks, and {self.heldout} are held out"
            )
        return prompts[: self.heldout] if split == "heldout" else prompts[self.heldout :]

    def prepare(self) -> None:
        """Load the taskset, whose tasks score, and what plays them."""
        _ = self._tools

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Return what the calls in the last turn answer, or what the environment's user says to it."""
        return self._play(self._task_of(prompt), turns)[0]

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Score the completion as the only turn of a rollout."""
        return self.verify_turns(prompt, [text])

    def verify_turns(self, prompt: Prompt, turns: Sequence[str]) -> Reward:
        """Score the completion as a rollout."""
        trace = self._play(self._task_of(prompt), turns, scored=True)[1].trace
        return self._reward({name: (one.score, one.value) for name, one in trace.rewards.items() if one})

    def _play(self, task: Any, turns: Sequence[str], scored: bool = False) -> tuple[list[str], Replay]:
        """Return what follows some turns of a task, and how they were played."""
        replay = Replay(*self._loaded, task, scored)
        shown = []
        for text in turns:
            _, thought, answer = text.partition(self.after)
            shown.append((text, answer if thought else text))
        return asyncio.run(replay.play(shown)), replay

    def _task_of(self, prompt: Prompt) -> Any:
        return self._tasks[int(prompt.id.rpartition("/")[2])]

    def _reward(self, scores: Mapping[str, tuple[float, float]]) -> Reward:
        """From each reward's score and weighted score."""
        judge = min(scores) if self.correct is None else self.correct
        if judge not in scores:
            raise ValueError(f"task.correct: {self.id} has no reward {judge!r} among {', '.join(scores)}")
        return Reward(sum(value for _, value in scores.values()), scores[judge][0] >= self.correct_at)

    def _prompt(self, number: int, task: Any) -> Prompt:
        data = task.data
        turns = (
            [("user", data.prompt)]
            if isinstance(data.prompt, str)
            else [(message.role, message.content) for message in data.prompt or ()]
        )
        if data.system_prompt is not None:
            turns = [("system", data.system_prompt), *turns]
        if data.prompt is None:  # the environment's user speaks first
            turns += [("user", str(text)) for text in self._play(task, [])[0]]
        if not turns or turns[-1][0] != "user" or not all(isinstance(text, str) for _, text in turns):
            raise InputError(f"task: task {number} of {self.id} does not end with a user's turn of text")
        answer = str(getattr(data, "answer", ""))
        prompt = Prompt(f"{self.id}/{number}", turns[-1][1], answer, tuple(turns))
        return with_tools(prompt, self._tools) if self._tools else prompt

    @cached_property
    def _tools(self) -> str:
        """The description of the tools, if there are any."""
        tools = self._play(self._tasks[0], [])[1].tools if self._tasks else {}
        described = [
            {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            for name, (_, tool) in tools.items()
        ]
        return tools_prompt([{"type": "function", "function": one} for one in described]) if tools else ""

    @cached_property
    def _loaded(self) -> tuple[Any, Any, str]:
        """The taskset, its environment and the one agent of that."""
        try:
            from verifiers.v1 import Env, TasksetConfig
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.utils.generic import concrete_type
            from verifiers.v1.utils.loaders import env_config_type, environment_class, taskset_class
        except ImportError as error:
            raise InputError("task: verifiers needs a package: pip install 'scalerl[verifiers]'") from error
        try:
            made = taskset_class(self.id)
            settings = (concrete_type(made, TasksetConfig) or TasksetConfig)(id=self.id, **self.config)
            taskset, plays = made(settings), environment_class(self.id)
            config = env_config_type(self.id).model_validate({"taskset": settings})
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise InputError(f"task.id: {brief(self.id)} cannot be loaded ({_why(error)})") from error
        if self.size is None and not taskset.bounded:
            raise InputError(f"task.size: {self.id} has no end: say how many of its tasks to train on")
        roles = list(agent_config_fields(config))
        hooks = "setup", "finalize", "start", "stop"
        if own := [name for name in hooks if getattr(plays, name) is not getattr(Env, name)]:
            raise InputError(
                f"task.id: the environment of {self.id} has {own[0]}(), which is not called here"
            )
        if len(roles) > 1:
            raise InputError(f"task.id: {self.id} has agents {', '.join(roles)}, and one is trained here")
        env = plays.__new__(plays)  # its constructor would load programs that drive agents
        env.config, env.taskset = config, taskset
        return taskset, env, roles[0]

    @cached_property
    def _tasks(self) -> list[Any]:
        taskset, env, _ = self._loaded
        tasks = list(islice(taskset, None if self.size is None else self.heldout + self.size))
        if tasks:
            self._check(taskset, env, tasks[0])
        return tasks

    def _check(self, taskset: Any, env: Any, task: Any) -> None:
        """Refuse what needs more than text and tools of this process."""
        from verifiers.v1 import SingleAgentEnv, Trace
        from verifiers.v1.session import hook_boundary
        from verifiers.v1.utils.decorators import discover_decorated

        tools = [*taskset.toolsets(taskset.config), *task.toolsets(task.config)]
        if self.turns == 1 and (tools or type(env) is not SingleAgentEnv):
            what = "tools" if tools else "turns of a user"
            raise InputError(f"task.turns: {self.id} has {what}: say how many turns a completion may have")
        if any(getattr(t.config, "url", None) or getattr(t.config, "colocated", False) for t in tools):
            raise InputError(
                f"task.id: {self.id} has tools of another process, and here they run in this one"
            )
        stops = (hook_boundary(stop, allow_trace=True) for stop in task.hooks("stop"))
        if discover_decorated(task, "intercept") or any(boundary is not Trace for boundary in stops):
            raise InputError(f"task.id: {self.id} looks at requests of a model, and there are none here")
        if task.NEEDS_CONTAINER or task.data.image:
            raise InputError(f"task.id: {self.id} needs a container, and a completion here is text alone")
        rewards = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        if not rewards and type(env) is SingleAgentEnv:
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
