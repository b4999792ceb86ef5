"""Verifiers of the task `dataset`: mathematical equality, exact comparison, or a custom function.

The answer of a completion is the text after the first `after`, or the whole text if that does not occur.
"""

import logging
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, Protocol

from scalerl.errors import InputError
from scalerl.kinds import load
from scalerl.rl.types import Prompt, Reward, as_reward

_WARM_UP = (
    *(r"\frac{1}{2}", r"3\sqrt{5}", "(1, 2)", r"\{-1, 0.5\}", "x^2 + 2x = 1", r"\pi < 4", "[0, 1)"),
    *(r"\sin x + \log 2", "$12$"),
)


class Verifier(Protocol):
    """Verifies the completions of a data set. A subclass must have `verify`."""

    takes_json: ClassVar[bool] = True
    """Whether answers of the data may be lists and objects, which `prompt.answer` then holds as JSON."""

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
    """+1 if the answer equals that of the data as mathematics (math-verify), else -1.

    The last `\\boxed{}` of the answer counts, or else its last expression, in LaTeX or plain.
    """

    after: str = "</think>"
    kind: Literal["math"] = "math"
    takes_json: ClassVar[bool] = False

    def prepare(self) -> None:
        """Load math-verify and parse typical answers, as its parser is loaded at its first use.

        Raises:
            InputError: it is not installed.
        """
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise InputError(
                "task.verifier: 'math' needs math-verify: pip install 'scalerl[train]'"
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of its missing time limit
        for text in _WARM_UP:  # .4 s here, instead of in every forked process
            self.verify(Prompt("", "", text), f"\\boxed{{{text}}}")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Compare; raises ValueError if math-verify cannot parse the answer of the data."""
        from math_verify import verify

        gold = _gold(prompt.answer)
        if all(isinstance(part, str) for part in gold):  # it falls back to comparing texts
            raise ValueError(f"math-verify cannot read the answer {prompt.answer!r}")
        answer = answer_of(text, self.after)
        box = last_box(answer)
        found = _expressions(answer if box is None else f"\\boxed{{{box}}}")
        return as_reward(bool(found) and verify(gold, found, timeout_seconds=None))


@dataclass(frozen=True)
class Exact(Verifier):
    """+1 if the answer is that of the data up to letter case, white space and Unicode forms, else -1.

    The content of the last `\\boxed{}` counts, or else the whole answer.
    """

    after: str = "</think>"
    kind: Literal["exact"] = "exact"
    takes_json: ClassVar[bool] = False

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Compare."""
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
    """Return the text after the first `after`, or all of it if there is none."""
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
    """Return the expressions that math-verify finds in a text; the process limits its time."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
