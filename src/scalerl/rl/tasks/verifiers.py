"""Verifiers of the task `dataset`: mathematics, exact comparison, a custom function, those of TRL and verl.

The answer of a completion is the text after the first `after`, or the whole text if that does not occur.
Reward functions written for TRL and verl are called as they are. They take columns of the data, so they need
`task.answer = "*"`, the whole row.
"""

import json
import logging
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, Protocol

from scalerl.errors import InputError
from scalerl.own_code import load
from scalerl.rl.types import Prompt, Reward, as_reward

_WARM_UP = (
    *(r"\frac{1}{2}", r"3\sqrt{5}", "(1, 2)", r"\{-1, 0.5\}", "x^2 + 2x = 1", r"\pi < 4", "[0, 1)"),
    *(r"\sin x + \log 2", "$12$"),
)
ANSWERS = ("answer", "solution", "ground_truth", "target")
"""Usual columns of the answer in data for TRL, which has no name for it itself."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # TRL does not pass these on either


class Verifier(Protocol):
    """Verifier of completions for a data set; a subclass must have `verify`."""

    takes_json: ClassVar[bool] = True
    """Whether answers in the data may be lists and objects, which `prompt.answer` then holds as JSON."""

    def prepare(self) -> None:
        """Load what `verify` needs; see `scalerl.rl.tasks.task.Task.prepare`."""

    @abstractmethod
    def verify(self, prompt: Prompt, text: str) -> Reward | bool:
        """Verify the text of a completion; see `scalerl.rl.tasks.task.Task.verify`."""
        ...

    def reference(self, prompt: Prompt) -> str | None:
        """Return a right answer; see `scalerl.rl.tasks.task.Task.reference`."""
        return prompt.answer


@dataclass(frozen=True)
class Math(Verifier):
    """+1 if the answer is mathematically equal to that of the data (math-verify), else -1.

    The last `\\boxed{}` of the answer counts, or else its last expression, in LaTeX or plain text.
    """

    after: str = "</think>"
    kind: Literal["math"] = "math"
    takes_json: ClassVar[bool] = False

    def prepare(self) -> None:
        """Load math-verify and parse typical answers, as its parser is loaded on first use.

        Raises:
            InputError: it is not installed.
        """
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise InputError(
                "task.verifier: 'math' needs math-verify: pip install 'scalerl[train]'"
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that it has no time limit
        for text in _WARM_UP:  # takes .4 s here, once, instead of in every forked process
            self.verify(Prompt("", "", text), f"\\boxed{{{text}}}")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Compare the answers; raise a ValueError if math-verify cannot parse that of the data."""
        from math_verify import verify

        gold = _gold(prompt.answer)
        if all(isinstance(part, str) for part in gold):  # math-verify would fall back to comparing texts
            raise ValueError(f"math-verify cannot read the answer {prompt.answer!r}")
        answer = answer_of(text, self.after)
        box = last_box(answer)
        found = _expressions(answer if box is None else f"\\boxed{{{box}}}")
        return as_reward(bool(found) and verify(gold, found, timeout_seconds=None))


@dataclass(frozen=True)
class Exact(Verifier):
    """+1 if the answer equals that of the data up to letter case, white space and Unicode forms, else -1.

    The content of the last `\\boxed{}` counts, or else the whole answer.
    """

    after: str = "</think>"
    kind: Literal["exact"] = "exact"
    takes_json: ClassVar[bool] = False

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Compare the answers."""
        return as_reward(normalised(final_answer(text, self.after)) == normalised(prompt.answer))


@dataclass(frozen=True)
class Function(Verifier):
    """A custom function, `package.module:name` or `path/to/file.py:name`.

    It is called with the prompt (a `scalerl.rl.types.Prompt`) and the whole text of the completion without
    the end token, and returns a `Reward`, or a bool for +1 and -1. An answer that is a list or an object in
    the data is JSON in `prompt.answer`.
    """

    name: str
    kind: Literal["function"] = "function"

    def __post_init__(self) -> None:
        if not all(self.name.rpartition(":")[::2]):
            raise ValueError("name must be 'package.module:function' or 'path/to/file.py:function'")

    def prepare(self) -> None:
        """Load the function."""
        load_function(self.name, "name")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Call the function."""
        return as_reward(load_function(self.name, "name")(prompt, text))


@dataclass(frozen=True)
class Trl(Verifier):
    """TRL's `reward_funcs`: `reward(prompts, completions, **columns) -> list[float]`.

    The value is the weighted sum of the functions' scores, without those that are None, as in TRL. A
    completion is correct if the score of the function `correct` reaches `correct_at`. Prompts and completions
    are lists of messages if the data has messages, else texts. Tokens, `trainer_state` and logging functions
    are not passed: a function that needs them raises.
    """

    functions: tuple[str, ...]
    """Each is `file.py:name` or `module:name`."""
    weights: tuple[float, ...] = ()
    """One per function; all default to 1."""
    correct: str | None = None
    """The name of the function that defines the pass rate; defaults to the first."""
    correct_at: float = 1.0
    kind: Literal["trl"] = "trl"

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError("functions must name a function, 'file.py:name' or 'module:name'")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(f"weights: {len(self.weights)} for {len(self.functions)} functions")
        if self.correct not in (None, *self._names):
            raise ValueError(f"correct: no function {self.correct!r} among {', '.join(self._names)}")

    def prepare(self) -> None:
        """Load the functions."""
        for name in self.functions:
            load_function(name, "functions")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Call each function with a batch of one."""
        row = _row(prompt)
        shown, completion = prompt.text, text
        if isinstance(row.get("prompt"), list):
            shown = [{"role": role, "content": content} for role, content in prompt.messages or ()]
            completion = [{"role": "assistant", "content": text}]
        batch = {name: [value] for name, value in row.items() if name not in _NOT_COLUMNS}
        batch |= {"prompts": [shown], "completions": [completion]}
        scores = [load_function(name, "functions")(**batch)[0] for name in self.functions]
        weighted = zip(scores, self.weights or [1.0] * len(scores), strict=True)
        value = sum(weight * float(score) for score, weight in weighted if score is not None)
        judge = scores[self._names.index(self.correct) if self.correct else 0]
        return Reward(value, judge is not None and float(judge) >= self.correct_at)

    def reference(self, prompt: Prompt) -> str | None:
        """Return the text of the first column of `ANSWERS` that the row has."""
        row = _row(prompt)
        return next(filter(None, (_text(row.get(name)) for name in ANSWERS)), None)

    @property
    def _names(self) -> list[str]:
        return [function.rpartition(":")[2] for function in self.functions]


@dataclass(frozen=True)
class Verl(Verifier):
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, a number or a dictionary.

    `ground_truth` is `reward_model.ground_truth` of the row, as in verl's Parquet files. The value is the
    number, or the dictionary's `score`. A completion is correct if the dictionary's `acc` is true, as in
    verl's evaluation, or without `acc` if the value reaches `correct_at`.
    """

    score: str
    """The function: `file.py:name` or `module:name`."""
    correct_at: float = 1.0
    kind: Literal["verl"] = "verl"

    def prepare(self) -> None:
        """Load the function."""
        load_function(self.score, "score")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Call the function."""
        row = _row(prompt)
        model = row.get("reward_model") or {}
        if "data_source" not in row or "ground_truth" not in model:
            raise ValueError("the row has no data_source, or no reward_model.ground_truth, as for verl")
        score = load_function(self.score, "score")
        columns = {"data_source": row["data_source"], "extra_info": row.get("extra_info")}
        found = score(solution_str=text, ground_truth=model["ground_truth"], **columns)
        result = found if isinstance(found, Mapping) else {"score": found}
        value = float(result["score"])
        return Reward(value, bool(result["acc"]) if "acc" in result else value >= self.correct_at)

    def reference(self, prompt: Prompt) -> str | None:
        """Return the ground truth if it is a text or a number."""
        return _text((_row(prompt).get("reward_model") or {}).get("ground_truth"))


@cache
def load_function(name: str, key: str) -> Callable[..., Any]:
    """Return the function that `key` of a verifier names, `package.module:name` or `path/to/file.py:name`.

    Raises:
        InputError: there is no such function.
    """
    try:
        found = load(name)
    except InputError as error:
        raise InputError(f"task.verifier.{key}: {error}") from error
    if not callable(found):
        raise InputError(f"task.verifier.{key}: {name} is no function")
    return found


def answer_of(text: str, after: str) -> str:
    """Return the text after the first `after`, or all of the text if that does not occur."""
    before, found, rest = text.partition(after) if after else (text, "", "")
    return rest if found else before


def final_answer(text: str, after: str) -> str:
    """Return the content of the last `\\boxed{}` of the answer, or else the whole answer."""
    answer = answer_of(text, after)
    box = last_box(answer)
    return answer if box is None else box


def last_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{}` that is closed, or None."""
    opened: list[tuple[int, bool]] = []
    start, stop = -1, -1
    for match in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):  # escaped braces do not nest
        symbol = match[0]
        if symbol == "}" and opened:
            at, is_box = opened.pop()
            if is_box and at > start:
                start, stop = at, match.start()
        elif symbol == "{" or len(symbol) > 2:
            opened.append((match.end(), len(symbol) > 2))
    return text[start:stop] if start >= 0 else None


def normalised(text: str) -> str:
    """Normalise letter case, white space and compatible Unicode forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


@lru_cache(maxsize=1024)  # the completions of a group share it
def _gold(answer: str) -> list[Any]:
    box = last_box(answer)
    return _expressions(f"\\boxed{{{answer.strip(' $') if box is None else box}}}")


def _expressions(text: str) -> list[Any]:
    """Return the expressions that math-verify finds in a text; the worker process limits its time."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int | float) else None


def _row(prompt: Prompt) -> dict[str, Any]:
    try:
        row = json.loads(prompt.answer)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise InputError("the verifier needs the whole row: task.answer must be '*'")
    return row
