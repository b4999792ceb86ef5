"""How the completions of a dataset are judged: by mathematics, by exact comparison, or by one's own function.

The answer of a completion is what follows the first `after`; where that does not occur, it is the whole text.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from scalerl.errors import InputError
from scalerl.rl.types import Prompt, Reward

_WARM_UP = (
    r"\frac{1}{2}",
    r"3\sqrt{5}",
    "(1, 2)",
    r"\{-1, 0.5\}",
    "x^2 + 2x = 1",
    r"\pi < 4",
    "[0, 1)",
    r"\sin x + \log 2",
    "$12$",
)


@dataclass(frozen=True)
class Math:
    """+1 if the answer equals that of the data as mathematics (math-verify), else -1.

    Of an answer the last `\\boxed{}` counts; without one, the last expression, in LaTeX or plain.
    """

    after: str = "</think>"
    kind: Literal["math"] = "math"

    def prepare(self) -> None:
        """Load math-verify, and have it read what answers are made of: it loads its parser when first used.

        Raises:
            InputError: it is not installed.
        """
        try:
            import math_verify  # noqa: F401
        except ImportError as error:
            raise InputError(
                "task.verifier: 'math' needs math-verify: pip install 'scalerl[train]'"
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
        for text in _WARM_UP:  # .4 s, which every process that is forked from this one would take again
            self.verify(Prompt("", "", text), f"\\boxed{{{text}}}")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Compare; raises ValueError where math-verify cannot read the answer of the data."""
        from math_verify import verify

        gold = _gold(prompt.answer)
        if all(isinstance(part, str) for part in gold):  # what it cannot read it would compare as text
            raise ValueError(f"math-verify cannot read the answer {prompt.answer!r}")
        answer = answer_of(text, self.after)
        box = last_box(answer)
        found = _expressions(answer if box is None else f"\\boxed{{{box}}}")
        return _verdict(bool(found) and verify(gold, found, timeout_seconds=None))


@dataclass(frozen=True)
class Exact:
    """+1 if the answer is that of the data but for letter case, white space and Unicode forms, else -1.

    Of an answer with a `\\boxed{}`, what is in the last one counts; without one, all of it.
    """

    after: str = "</think>"
    kind: Literal["exact"] = "exact"

    def prepare(self) -> None:
        """Nothing needs to be loaded."""

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Compare."""
        answer = answer_of(text, self.after)
        box = last_box(answer)
        return _verdict(normalised(answer if box is None else box) == normalised(prompt.answer))


@dataclass(frozen=True)
class Function:
    """A function of one's own, `package.module:name` or `path/to/file.py:name`.

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
        """Load the function.

        Raises:
            InputError: there is no such function.
        """
        if not callable(self._function):
            raise InputError(f"task.verifier.name: {self.name} is no function")

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Call the function."""
        verdict = self._function(prompt, text)
        return _verdict(verdict) if isinstance(verdict, bool) else verdict

    @cached_property
    def _function(self) -> Callable[[Prompt, str], Any]:
        source, _, name = self.name.rpartition(":")
        try:
            return getattr(_module(source), name)
        except Exception as error:  # whatever a module of others does as it is loaded
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"task.verifier.name: {self.name} cannot be loaded ({why})") from error


def answer_of(text: str, after: str) -> str:
    """What follows the first `after`, or all of the text where there is none."""
    before, found, rest = text.partition(after) if after else (text, "", "")
    return rest if found else before


def last_box(text: str) -> str | None:
    """What stands in the last `\\boxed{}` that is closed, or None."""
    opened: list[tuple[int, bool]] = []
    start, stop = -1, -1
    for match in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):  # an escaped brace is none
        symbol = match[0]
        if symbol == "}" and opened:
            at, is_box = opened.pop()
            if is_box and at > start:
                start, stop = at, match.start()
        elif symbol == "{" or len(symbol) > 2:
            opened.append((match.end(), len(symbol) > 2))
    return text[start:stop] if start >= 0 else None


def normalised(text: str) -> str:
    """Letter case, runs of white space and compatible Unicode forms made one."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _verdict(correct: bool) -> Reward:
    return Reward(1.0 if correct else -1.0, correct)


@lru_cache(maxsize=1024)  # the completions of a group share it
def _gold(answer: str) -> list[Any]:
    box = last_box(answer)
    return _expressions(f"\\boxed{{{answer.strip(' $') if box is None else box}}}")


def _expressions(text: str) -> list[Any]:
    """What math-verify reads in a text; the time limit is that of the process."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    configs = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, configs, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _module(source: str) -> Any:
    """A module by its name, or from its file."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
