"""A completion as a rollout of the package verifiers (0.4): its turns are on record, the rest is run again.

Env.run -> agents.ROLE.interaction(task) -> turn(message)    the user's turns, as its `run` has them
Toolset -> its tools, in this process                        what the model's calls answer
@stop   -> before every turn that is asked of the model
"""

import json
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, Self

from scalerl.rl.tasks.environment import calls_in
from scalerl.rl.types import UserText


class Unanswered(BaseException):
    """The model is asked for a turn that is not on record; no `except Exception` of an environment's."""


class Replay:
    """Stands for the one agent of an environment. `trace` has the rollout, and its rewards where `scored`."""

    def __init__(self, taskset: Any, env: Any, role: str, task: Any, scored: bool = False) -> None:
        self._taskset, self._env, self._task, self._scored = taskset, env, task, scored
        self._agents = SimpleNamespace(**{role: self})
        self._follows: list[str] = []
        """Texts since the last turn."""
        self.tools: dict[str, tuple[Any, Any]] = {}
        """MCP server and description of each tool, by the name that the model calls it by."""

    async def play(self, turns: Sequence[tuple[str, str]]) -> list[str]:
        """Return what follows some turns (each whole, and without its thinking); none where it has ended."""
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
            except Unanswered:
                return self._follows
        return []

    # -- what an environment does with its agent -------------------------------------------------------------

    async def run(self, task: Any) -> Any:
        """Play a task without a user."""
        async with self.interaction(task):
            await self.turn()
        return self.trace

    def interaction(self, task: Any) -> Self:
        """Begin a rollout, which the caller is the user of."""
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
        """Return the model's turn after the user's, and those after its calls of tools."""
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
                raise Unanswered
            if not self._turns:
                self.trace.stop("max_turns")
                return Segment(messages=[], terminated=True)
            whole, text = self._turns.popleft()
            self._follows, raw = [], calls_in(whole) if self.tools else []
            calls = [ToolCall(id=f"call-{n}", **_parsed(call)) for n, call in enumerate(raw)]
            self._add(AssistantMessage(content=text, tool_calls=calls or None), sampled=True)
            if not calls:
                return Segment(messages=[node.message for node in self.trace.nodes[start:]])
            if self._turns or not self._scored:  # those of the last turn are not made
                for call in calls:
                    self._follows.append(await self._answer(call))
                    content = self._follows[-1]
                    self._add(ToolMessage(tool_call_id=call.id, name=call.name, content=content))

    # -- tools -----------------------------------------------------------------------------------------------

    async def _register(self, toolset: Any) -> None:
        from mcp.server.mcpserver import MCPServer

        async def pull() -> Any:
            state = self.trace.state  # the state itself, where verifiers sends copies between processes
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
        except Exception as error:  # as verifiers' own server answers
            return str(error)
        return str(mcp_content_to_chat_content(found.content))

    def _add(self, message: Any, sampled: bool = False) -> None:
        from verifiers.v1 import MessageNode

        nodes = self.trace.nodes
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))


def _parsed(call: str) -> dict[str, Any]:
    """Return name and arguments of a call; one that is no JSON is kept as its arguments."""
    try:
        found = json.loads(call)
        return {"name": str(found["name"]), "arguments": json.dumps(found.get("arguments", {}))}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {"name": "", "arguments": call}
