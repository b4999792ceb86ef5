"""`code`: programming problems, whose answers are run in a sandbox (`scalerl.rl.sandbox`).

    row -> prompt, tests         HumanEval, MBPP, pairs of input and output, or lists of asserts
    completion -> code -> tests in the sandbox -> reward 1 if all pass, else 0

What tests say is never decided in the process that ran the code: what a program prints is compared here, and
asserts are evaluated in a sandbox of their own, on plain data that the code returns.
"""

import ast
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from scalerl.errors import InputError, brief
from scalerl.kinds import Choice
from scalerl.rl.sandbox.find import find_backend, find_python
from scalerl.rl.sandbox.sandbox import Sandbox
from scalerl.rl.tasks.dataset import AnyVerifier, Dataset, DatasetRow
from scalerl.rl.tasks.verifiers import Math, Verifier, answer_of
from scalerl.rl.types import FAILED, Prompt, Reward

_SHARE = 0.8
"""Share of `limits.seconds` for the tests: code that takes longer is wrong, not a failed verification."""
_PROGRAMS = 4
"""Programs that `limits.memory_gib` is shared out to: two run at once, beside what verifies."""
_MORE = 1 << 16  # bytes that a program may print beyond what is expected
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_FORMATS = (
    "`prompt`, `test` and `entry_point` (HumanEval); `text` and `test_list` (MBPP); or a prompt and `tests`, "
    "a list of {input, output} or of asserts"
)


@dataclass(frozen=True)
class Code(Dataset):
    """Programming problems of a data set; `docs/howto/tasks.md` has the formats and how they are judged."""

    kind: Literal["code"] = "code"  # pyright: ignore[reportIncompatibleVariableOverride]
    prompt: str = ""
    """The column of the problem; empty: `prompt`, or `text` where there is none."""
    answer: str = field(init=False, default="*")
    verifier: Annotated[Verifier, Choice("verifiers", Verifier, AnyVerifier)] = field(
        init=False, default_factory=Math, repr=False
    )
    after: str = "</think>"
    """What ends the thinking: code is looked for after the first of these."""
    sandbox: Literal["auto", "bwrap", "namespaces"] = "auto"
    """What encloses the code; `auto` takes the first that works."""
    python: str = ""
    """The Python that runs the code, with its packages; empty: this one, with the standard library alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limits.memory_gib < 1 or self.limits.seconds < 1:
            raise ValueError("limits.memory_gib and limits.seconds must be at least 1 for code")

    def environment(self) -> dict[str, str]:
        """Return what runs the code here.

        Raises:
            InputError: no sandbox works on this machine; says why, and what to install.
        """
        sandbox = self._sandbox
        return {"sandbox": sandbox.backend.description, "python": sandbox.python.executable}

    def prepare(self) -> None:
        """Find a sandbox that works, and try it."""
        self.environment()

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Run the code of a completion in the sandbox: 1 if all tests pass, else 0.

        Raises:
            SandboxError: the sandbox did not start.
        """
        problem = json.loads(prompt.answer)
        code = code_of(answer_of(text, self.after), problem)
        seconds = _SHARE * self.limits.seconds
        if "pairs" in problem:
            return _reward(self._prints(code, problem["pairs"], time.monotonic() + seconds))
        given = {name: problem[name] for name in ("tests", "setup", "reference", "entry_point")}
        verdict = self._sandbox.check(code, given, seconds)
        if verdict.verdict == "unsupported":
            return Reward(FAILED.value, FAILED.correct, f"unsupported: {verdict.why}")
        return _reward(verdict.verdict == "passed")

    def _prints(self, code: str, pairs: list[list[str]], until: float) -> bool:
        """Return whether a program prints what is expected of each input, and exits with status 0."""
        for given, expected in pairs:
            left = until - time.monotonic()
            if left <= 0:
                return False
            ran = self._sandbox.run(code, given.encode(), left, len(expected.encode()) + _MORE)
            printed = ran.output.decode(errors="replace")
            if ran.stopped or ran.status != 0 or _lines(printed) != _lines(expected):
                return False
        return True

    @cached_property
    def _sandbox(self) -> Sandbox:
        backend, python = find_backend(self.sandbox, self.python), find_python(self.python)
        return Sandbox(backend, python, int(self.limits.memory_gib * 2**30 / _PROGRAMS))

    def reference(self, prompt: Prompt) -> str | None:
        """Return the code of the row, which HumanEval and MBPP have; where there is none, None."""
        problem = json.loads(prompt.answer)
        return problem.get("reference") or problem.get("solution") or None

    # -- rows -----------------------------------------------------------------------------------------------

    def _conversation(self, row: DatasetRow) -> list[tuple[str, str]]:
        text = row.get(self._column(row))
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{row.place}: column {self._column(row)!r} must be a text, found {brief(text)}")
        shown = _filled(row.values).get("test_list")
        if not shown:
            return [("user", text)]
        # The name of the function stands nowhere else.
        return [("user", f"{text}\n\nYour code should pass these tests:\n\n" + "\n".join(map(str, shown)))]

    def _column(self, row: DatasetRow) -> str:
        return self.prompt or ("text" if "text" in row.values and "prompt" not in row.values else "prompt")

    def _answer(self, row: DatasetRow) -> str:
        problem = _problem(row, str(row.get(self._column(row))))
        return json.dumps(problem, ensure_ascii=False)


def _problem(row: DatasetRow, text: str) -> dict[str, Any]:
    """Return the tests of a row, as `verify` takes them."""
    values = _filled(row.values)
    problem: dict[str, Any] = {"setup": "", "reference": "", "entry_point": "", "prompt": ""}
    if "entry_point" in values and "test" in values:
        problem |= {"tests": [values["test"]], "entry_point": values["entry_point"]}
        problem |= {"setup": text, "prompt": text}
        # Not the reference, whose definitions the tests of MBPP take for those of the code.
        if solution := values.get("canonical_solution"):
            problem |= {"solution": text + solution}
    elif "test_list" in values:
        setup = [values.get("test_setup_code", ""), *values.get("test_imports", ())]
        problem |= {"tests": list(values["test_list"]), "setup": "\n".join(filter(None, setup))}
        problem |= {"reference": values.get("code", "")}
    elif isinstance(tests := values.get("tests"), list) and all(isinstance(test, Mapping) for test in tests):
        return {"pairs": [_pair(test, row) for test in tests]}
    elif isinstance(tests, list):
        problem |= {"tests": tests}
    else:
        raise InputError(f"{row.place}: no tests in a format that is known: {_FORMATS}")
    parts = {"tests": problem["tests"], "prompt or set-up": [problem["setup"]]}
    parts |= {"code": [problem["reference"]], "entry_point": [problem["entry_point"]]}
    for what, sources in parts.items():
        for source in sources:
            try:
                ast.parse(source)
            except (SyntaxError, ValueError, TypeError) as error:
                why = f"its {what} is no Python ({error}): {brief(source)}"
                raise InputError(f"{row.place}: {why}") from error
    return problem


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that hold something: a table has empty ones where a row has another format."""
    return {name: value for name, value in values.items() if value not in (None, "", [])}


def _pair(test: Mapping[str, Any], row: DatasetRow) -> list[str]:
    pair = [test.get("input") or "", test.get("output")]
    if not all(isinstance(text, str) for text in pair):
        raise InputError(
            f"{row.place}: a test must be {{input, output}}, both texts, found {brief(dict(test))}"
        )
    return [str(text) for text in pair]


def code_of(answer: str, problem: Mapping[str, Any]) -> str:
    """Return the code in an answer: the last fenced block, or all of it where there is none.

    For HumanEval the prompt comes before it, whose function it continues, or defines again with its name.
    """
    blocks = _BLOCK.findall(answer)
    code = blocks[-1] if blocks else answer
    if not (prompt := problem.get("prompt")):
        return code
    defined = re.search(rf"^(async\s+)?def\s+{re.escape(problem['entry_point'])}\b", code, re.MULTILINE)
    return f"{prompt}\n{code}" if defined else prompt + code


def _lines(text: str) -> list[str]:
    """Return the lines of an output without white space at their ends, and without empty ones at its end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _reward(correct: bool) -> Reward:
    return Reward(1.0 if correct else 0.0, correct)
