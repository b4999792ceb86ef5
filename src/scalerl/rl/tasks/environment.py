"""`env`: a data set with tools, in classes like those for `environment_factory` of TRL's GRPOTrainer.

    reset(**row)     starts an episode; returns None, or a text that is appended to the prompt
    other methods    tools, unless their names start with `_`; they need type hints and a Google-style
    docstring get_reward()     optional: the reward, a bool for +1 and -1, or a number

The system prompt lists the tools, and the model calls them, in the Hermes format of Qwen's chat templates:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

An instance lives for one call of a worker: every turn starts with `reset` and repeats all earlier calls.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from scalerl.errors import InputError, brief_error, in_one_line
from scalerl.own_code import load
from scalerl.rl.tasks.dataset import Dataset, DatasetRow
from scalerl.rl.types import Prompt, Reward, as_reward

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NO_TOOLS = ("reset", "get_reward")
# The exact words of the chat templates of Qwen2.5 and Qwen3.
_SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Environment(Dataset):
    """Prompts of a data set, and a class with tools; `docs/howto/tasks.md` describes the class."""

    kind: Literal["env"] = "env"  # pyright: ignore[reportIncompatibleVariableOverride]
    environment: str = ""
    """The class, `path/to/file.py:Class` or `package.module:Class`."""
    turns: int = 8
    """Maximum number of turns; the calls of the last one are not made."""
    answer: str = "*"
    """The argument of `reset`: the whole row (`*`), or one column."""
    correct_at: float = 1.0
    """If the class has `get_reward`, a completion is correct from this reward on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.environment.rpartition(":")[::2]):
            raise ValueError("environment must be 'package.module:Class' or 'path/to/file.py:Class'")
        if self.turns < 2:
            raise ValueError("turns must be at least 2: the calls of the last one are not made")

    def prepare(self) -> None:
        """Load the class, and the verifier if the class has no reward."""
        _, rewards = self._loaded
        if not rewards:
            self.verifier.prepare()

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Return the answers to the calls in the last turn, one text each; empty if it has no call."""
        return self._replay(prompt, turns)[1] if calls_in(turns[-1]) else []

    def verify(self, prompt: Prompt, text: str) -> Reward | bool:
        """Verify a completion of one turn."""
        return self.verify_turns(prompt, [text])

    def verify_turns(self, prompt: Prompt, turns: Sequence[str]) -> Reward | bool:
        """Return the environment's reward; if it has none, verify the last turn."""
        _, rewards = self._loaded
        if not rewards:
            return self.verifier.verify(prompt, turns[-1])
        environment, _ = self._replay(prompt, turns[:-1])
        found = _result(environment.get_reward())
        value = as_reward(found).value if isinstance(found, bool) else float(found)
        return Reward(value, value >= self.correct_at)

    def reference(self, prompt: Prompt) -> str | None:
        """Return a right answer if the verifier scores; if the environment does, none is known."""
        _, rewards = self._loaded
        return None if rewards else self.verifier.reference(prompt)

    def _replay(self, prompt: Prompt, turns: Sequence[str]) -> tuple[Any, list[str]]:
        """Return an environment after some turns, and its answers to the last one."""
        environment = self._loaded[0]()
        environment.reset(**self._row(prompt.answer))
        tools, answers = _tools_of(environment), list[str]()
        for turn in turns:
            answers = [_answer(tools, call) for call in calls_in(turn)]
        return environment, answers

    @cached_property
    def _loaded(self) -> tuple[Callable[[], Any], bool]:
        """Return the factory of environments, and whether they have a reward of their own."""
        name = self.environment
        try:
            make = load(name)
        except InputError as error:
            raise InputError(f"task.environment: {error}") from error
        with in_one_line(f"task.environment: {name} cannot be made"):
            made = make()
        if not callable(getattr(made, "reset", None)):
            raise InputError(f"task.environment: {name} has no reset(**row)")
        if not _tools_of(made):
            raise InputError(f"task.environment: {name} has no tool, which is a method without an underscore")
        rewards = callable(getattr(made, "get_reward", None))
        if not rewards and self.answer == "*" and not self.verifier.takes_json:
            raise InputError(
                f"task.environment: {name} has no get_reward(): set task.answer to the column of the answer, "
                "or task.verifier to one that takes the whole row"
            )
        return make, rewards

    @cached_property
    def _tools(self) -> str:
        from transformers.utils.chat_template_utils import get_json_schema

        make, _ = self._loaded
        # Raises if an argument lacks a type hint or a description.
        with in_one_line(f"task.environment: the tools of {self.environment} cannot be described"):
            return tools_prompt([get_json_schema(tool) for tool in _tools_of(make()).values()])

    # -- rows -----------------------------------------------------------------------------------------------

    def _row(self, answer: str) -> dict[str, Any]:
        return json.loads(answer) if self.answer == "*" else {self.answer: answer}

    def _conversation(self, row: DatasetRow) -> list[tuple[str, str]]:
        *before, (role, text) = super()._conversation(row)
        (make, _), values = self._loaded, self._row(self._answer(row))
        reset = f"{row.place}: reset of {self.environment}"
        with in_one_line(f"{reset} raised an error"):
            found = make().reset(**values)
        if found is not None and not isinstance(found, str):
            raise InputError(f"{reset} returns {type(found).__name__}, not a text or None")
        return [*before, (role, text + (found or ""))]

    def _prompt(self, row: DatasetRow, name: str, messages: list[tuple[str, str]]) -> Prompt:
        prompt = super()._prompt(row, name, messages)
        return prompt if prompt.messages is None else with_tools(prompt, self._tools)

    def _answer(self, row: DatasetRow) -> str:
        if self.answer == "*":
            return json.dumps(row.values, ensure_ascii=False, default=str)
        return super()._answer(row)


def tools_prompt(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the description of tools for a system prompt, from their JSON schemas."""
    return _SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def with_tools(prompt: Prompt, tools: str) -> Prompt:
    """Return a prompt of messages with that description after its system prompt."""
    messages = prompt.messages or ()
    system = [text for role, text in messages[:1] if role == "system"]
    shown = ("system", "\n\n".join([*system, tools])), *messages[len(system) :]
    return replace(prompt, messages=shown)


def calls_in(turn: str) -> list[str]:
    """Return the raw text of each tool call in a turn, without those in its thinking."""
    return _CALL.findall(turn.rpartition("</think>")[2])


def _tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    # Look at the class, as inspecting the instance would evaluate its properties.
    found = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in found if not name.startswith("_") and name not in _NO_TOOLS]
    return {name: getattr(environment, name) for name in names}


def _answer(tools: Mapping[str, Callable[..., Any]], call: str) -> str:
    """Make a call, or a list of calls; an error of the call or the tool becomes the answer."""
    try:
        found = json.loads(call)
        results = []
        for one in found if isinstance(found, list) else [found]:
            name = str(one.get("name") if isinstance(one, dict) else one)
            if name not in tools:
                raise ValueError(f"no tool {name}; there are: {', '.join(tools)}")
            results.append(str(_result(tools[name](**one.get("arguments", {})))))
        return "\n".join(results)
    except MemoryError:
        raise
    except Exception as error:
        return f"error: {brief_error(error)}"


def _result(value: Any) -> Any:
    """Return the result of a method, after awaiting it if it is a coroutine."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value
