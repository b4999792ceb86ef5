"""`verifiers`: tasksets written for the package verifiers (0.4), of one turn or of several.

    task = "verifiers:my-taskset"

uses the installed package `my_taskset`, whose `__all__` names its `Taskset`, and its `Env` if it has one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, Self

from scalerl.errors import InputError, brief, brief_error
from scalerl.rl.tasks.environment import calls_in, tools_prompt, with_tools
from scalerl.rl.tasks.task import Task, split_off
from scalerl.rl.tasks.verifiers import answer_of
from scalerl.rl.types import Limits, Prompt, Reward, Split, UserText


@dataclass(frozen=True)
class VerifiersTaskset(Task):
    """The first `heldout` tasks of a taskset for evaluation, and the next `size` for training.

    The prompt is a task's system prompt and prompt, through the chat template; rewards do not see the
    thinking and its end. The value is the weighted sum of the rewards, as in verifiers, which has no pass
    rate: here a completion is correct if the reward `correct` is at least `correct_at`.
    """

    id: str
    """ID of the taskset, as in verifiers' own commands."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the taskset."""
    heldout: int = 100
    size: int | None = None
    """Number of training tasks; defaults to all that are left."""
    turns: int = 1
    """Maximum number of turns; a taskset with tools or an `Env` of its own needs more than one."""
    correct: str | None = None
    """The reward that defines the pass rate; defaults to the first by name."""
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
            InputError: verifiers or the taskset is not installed, or the taskset needs unsupported features.
        """
        prompts = [self._prompt(number, task) for number, task in enumerate(self._tasks)]
        return split_off(prompts, self.heldout, self.id)[split]

    def prepare(self) -> None:
        """Load the taskset, whose tasks score completions, and its tools."""
        _ = self._tools

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Return the answers to the calls in the last turn, or the response of the environment's user."""
        return self._play(self._task_of(prompt), turns)[0]

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Score the completion as the only turn of a rollout."""
        return self.verify_turns(prompt, [text])

    def verify_turns(self, prompt: Prompt, turns: Sequence[str]) -> Reward:
        """Score the completion as a rollout."""
        _, replay = self._play(self._task_of(prompt), turns, scored=True)
        rewards = {name: reward for name, reward in replay.trace.rewards.items() if reward}
        judge = min(rewards) if self.correct is None else self.correct
        if judge not in rewards:
            raise ValueError(f"task.correct: {self.id} has no reward {judge!r} among {', '.join(rewards)}")
        return Reward(sum(one.value for one in rewards.values()), rewards[judge].score >= self.correct_at)

    def _play(self, task: Any, turns: Sequence[str], scored: bool = False) -> tuple[list[str], _Replay]:
        """Return the messages that follow some turns of a task, and the replay of these turns."""
        replay = _Replay(*self._loaded, task, scored)
        shown = [(text, answer_of(text, self.after)) for text in turns]
        return asyncio.run(replay.play(shown)), replay

    def _task_of(self, prompt: Prompt) -> Any:
        return self._tasks[int(prompt.id.rpartition("/")[2])]

    def _prompt(self, number: int, task: Any) -> Prompt:
        data = task.data
        if isinstance(data.prompt, str):
            turns = [("user", data.prompt)]
        else:
            turns = [(message.role, message.content) for message in data.prompt or ()]
        if data.system_prompt is not None:
            turns.insert(0, ("system", data.system_prompt))
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
        """The taskset, its environment, and the role of the environment's only agent."""
        try:
            from verifiers.v1 import TasksetConfig
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
        env = plays.__new__(plays)  # without its constructor, which would load programs that drive agents
        env.config, env.taskset = config, taskset
        return taskset, env, next(iter(agent_config_fields(config)))

    @cached_property
    def _tasks(self) -> list[Any]:
        taskset, env, _ = self._loaded
        if self.size is None and not taskset.bounded:
            raise InputError(f"task.size: {self.id} has no end: say how many of its tasks to train on")
        tasks = list(islice(taskset, None if self.size is None else self.heldout + self.size))
        if tasks:
            self._check(taskset, env, tasks[0])
        return tasks

    def _check(self, taskset: Any, env: Any, task: Any) -> None:
        """Raise an InputError if the taskset needs more than text and tools in this process."""
        from verifiers.v1 import Env, SingleAgentEnv, Trace
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.session import hook_boundary
        from verifiers.v1.utils.decorators import discover_decorated

        tools = [*taskset.toolsets(taskset.config), *task.toolsets(task.config)]
        if self.turns == 1 and (tools or type(env) is not SingleAgentEnv):
            what = "tools" if tools else "turns of a user"
            raise InputError(f"task.turns: {self.id} has {what}: say how many turns a completion may have")
        hooks = ("setup", "finalize", "start", "stop")
        own = [f"{name}()" for name in hooks if getattr(type(env), name) is not getattr(Env, name)]
        apart = (getattr(t.config, "url", None) or getattr(t.config, "colocated", False) for t in tools)
        stops = (hook_boundary(stop, allow_trace=True) for stop in task.hooks("stop"))
        looks = discover_decorated(task, "intercept") or any(boundary is not Trace for boundary in stops)
        rewards = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        # Without a runtime, verifiers would silently leave a reward that needs one out of the sum.
        runtimes = (inspect.signature(reward).parameters.get("runtime") for reward in rewards)
        refused = {
            f"has an environment with {', '.join(own)}, which is not called here": own,
            "has several agents, and one is trained here": len(list(agent_config_fields(env.config))) > 1,
            "has tools of another process, and here they run in this one": any(apart),
            "looks at requests of a model, and there are none here": looks,
            "needs a container, and a completion here is text alone": task.NEEDS_CONTAINER or task.data.image,
            "has no reward": not rewards and type(env) is SingleAgentEnv,
            "has a reward that looks at a runtime, and there is none here": any(
                runtime is not None and runtime.default is inspect.Parameter.empty for runtime in runtimes
            ),
        }
        if why := next((why for why, found in refused.items() if found), ""):
            raise InputError(f"task.id: {self.id} {why}")


def _why(error: Exception) -> str:
    """Return the reason in a line; pydantic's first line only counts what is wrong."""
    found = error.errors() if hasattr(error, "errors") else ()  # pyright: ignore[reportAttributeAccessIssue]
    return "; ".join(f"config.{one['loc'][0]}: {one['msg']}" for one in found) or brief_error(error)


class _UnansweredError(BaseException):
    """The model has no recorded turn left; a BaseException, so that no environment's `except` catches it."""


class _Replay:
    """A completion replayed as a rollout: this object is the environment's only agent, with recorded turns.

    Env.run -> agents.ROLE.interaction(task) -> turn(message)    the user's turns, from `Env.run`
    Toolset -> its tools, in this process                        the answers to the model's calls
    @stop   -> called before every turn of the model

    `trace` has the rollout, and its rewards if `scored`.
    """

    def __init__(self, taskset: Any, env: Any, role: str, task: Any, scored: bool = False) -> None:
        self._taskset, self._env, self._task, self._scored = taskset, env, task, scored
        self._agents = SimpleNamespace(**{role: self})
        self._follows: list[str] = []
        """Texts since the model's last turn."""
        self.tools: dict[str, tuple[Any, Any]] = {}
        """MCP server and description of each tool, by the name that the model uses."""

    async def play(self, turns: Sequence[tuple[str, str]]) -> list[str]:
        """Return the messages after some turns (each whole, and without thinking); empty if it has ended."""
        self._turns = deque(turns)
        async with AsyncExitStack() as stack:
            shared = self._taskset.toolsets(self._taskset.config)
            own = self._task.toolsets(self._task.config)
            for toolset in (*shared, *own):
                await stack.enter_async_context(toolset._exit_stack)
                await toolset.setup()
                if toolset in own:
                    await toolset.setup_task(self._task.data)
                await self._register(toolset)
            try:
                await self._env.run(self._task, self._agents)
            except _UnansweredError:
                return self._follows
        return []

    # -- the interface of an agent, called by the environment ------------------------------------------------

    async def run(self, task: Any) -> Any:
        """Play a task without a user."""
        async with self.interaction(task):
            await self.turn()
        return self.trace

    def interaction(self, task: Any) -> Self:
        """Start a rollout in which the caller plays the user."""
        from verifiers.v1 import AgentConfig, AgentInfo, SystemMessage, Trace, TraceTask, UserMessage
        from verifiers.v1.state import state_cls

        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=AgentConfig())
        self.trace: Any = Trace(task=about, state=state_cls(type(task))(), agent=agent, ok=True)
        if task.data.system_prompt is not None:
            self._add(SystemMessage(content=task.data.system_prompt))
        prompt = task.data.prompt or []
        for message in [UserMessage(content=prompt)] if isinstance(prompt, str) else prompt:
            self._add(message)
        self._stops = task.hooks("stop")
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error: object, *_: object) -> None:
        if error is None:
            self.trace.stop("user_closed")
            if self._scored:
                await self._task.score(self.trace)

    async def turn(self, message: str | None = None) -> Any:
        """Return the model's turn after the user's message, and its further turns after tool calls."""
        from verifiers.v1 import AssistantMessage, Segment, ToolCall, ToolMessage, UserMessage
        from verifiers.v1.utils.decorators import invoke

        if message is not None:
            self._add(UserMessage(content=message))
            self._follows = [UserText(message)]
        start = len(self.trace.nodes)
        while True:
            for stop in self._stops:
                found = invoke(stop, {"trace": self.trace, type(self.trace): self.trace})
                if await found if hasattr(found, "__await__") else found:
                    self.trace.stop(stop.__name__)
                    return Segment(messages=[], terminated=True)
            if not self._turns and not self._scored:
                raise _UnansweredError
            if not self._turns:
                self.trace.stop("max_turns")
                return Segment(messages=[], terminated=True)
            whole, text = self._turns.popleft()
            self._follows, raw = [], calls_in(whole) if self.tools else []
            calls = [ToolCall(id=f"call-{n}", **_parsed(call)) for n, call in enumerate(raw)]
            self._add(AssistantMessage(content=text, tool_calls=calls or None), sampled=True)
            if not calls:
                return Segment(messages=[node.message for node in self.trace.nodes[start:]])
            if self._turns or not self._scored:  # the calls of the last turn are not made
                for call in calls:
                    self._follows.append(await self._answer(call))
                    content = self._follows[-1]
                    self._add(ToolMessage(tool_call_id=call.id, name=call.name, content=content))

    # -- tools -----------------------------------------------------------------------------------------------

    async def _register(self, toolset: Any) -> None:
        from mcp.server.mcpserver import MCPServer

        async def pull() -> Any:
            state = self.trace.state  # the state itself; verifiers would send copies between processes
            return state if isinstance(state, toolset._state_cls) else toolset._inert_state

        async def push(before: bytes) -> None:
            pass

        toolset._pull_state, toolset._push_state = pull, push
        server = MCPServer(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        prefix = f"{toolset.server_name}_" if toolset.server_name else ""
        for tool in await server.list_tools():
            self.tools[prefix + tool.name] = server, tool

    async def _answer(self, call: Any) -> str:
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        if call.name not in self.tools:
            return f"error: no tool {call.name}; there are: {', '.join(self.tools)}"
        server, tool = self.tools[call.name]
        try:
            found = await server.call_tool(tool.name, json.loads(call.arguments))
        except Exception as error:  # becomes the answer, as in verifiers' own server
            return str(error)
        return str(mcp_content_to_chat_content(found.content))

    def _add(self, message: Any, sampled: bool = False) -> None:
        from verifiers.v1 import MessageNode

        nodes = self.trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


def _parsed(call: str) -> dict[str, Any]:
    """Return the name and arguments of a call; text that is not JSON becomes the arguments."""
    try:
        found = json.loads(call)
        return {"name": str(found["name"]), "arguments": json.dumps(found.get("arguments", {}))}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {"name": "", "arguments": call}
