"""`code`: programming problems, whose answers are run in a sandbox (`scalerl.rl.sandbox`).

    row -> prompt, tests         HumanEval, MBPP, pairs of input and output, or lists of asserts
    completion -> code -> tests in the sandbox -> reward 1 if all pass, else 0

The process that runs the code never decides the result of a test: the output of a program is compared here,
and asserts are evaluated in a sandbox of their own, on plain data that the code returns.
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
"""Programs that share `limits.memory_gib`: two run at once, beside the verifying processes."""
_MORE = 1 << 16  # bytes that a program may print beyond the expected output
_BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_FORMATS = (
    "`prompt`, `test` and `entry_point` (HumanEval); `text` and `test_list` (MBPP); or a prompt and `tests`, "
    "a list of {input, output} or of asserts"
)


@dataclass(frozen=True)
class Code(Dataset):
    """Programming problems of a data set; `docs/howto/tasks.md` has the formats and how they are verified."""

    kind: Literal["code"] = "code"  # pyright: ignore[reportIncompatibleVariableOverride]
    prompt: str = ""
    """The column of the problem; if empty, `prompt`, or `text` if there is no such column."""
    answer: str = field(init=False, default="*")
    verifier: Annotated[Verifier, Choice("verifiers", Verifier, AnyVerifier)] = field(
        init=False, default_factory=Math, repr=False
    )
    after: str = "</think>"
    """The end of thinking: code is searched for after its first occurrence."""
    sandbox: Literal["auto", "bwrap", "namespaces"] = "auto"
    """The sandbox for the code; `auto` uses the first that works."""
    python: str = ""
    """The Python that runs the code, with its packages; if empty, this one with only the standard library."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limits.memory_gib < 1 or self.limits.seconds < 1:
            raise ValueError("limits.memory_gib and limits.seconds must be at least 1 for code")

    def environment(self) -> dict[str, str]:
        """Return the sandbox and the Python that run the code on this machine.

        Raises:
            InputError: no sandbox works on this machine; the message says why, and what to install.
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
        """Return whether a program prints the expected output for each input, and exits with status 0."""
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
        """Return the reference code of the row, which HumanEval and MBPP have; None if there is none."""
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
        # The tests are the only place with the name of the function.
        return [("user", f"{text}\n\nYour code should pass these tests:\n\n" + "\n".join(map(str, shown)))]

    def _column(self, row: DatasetRow) -> str:
        return self.prompt or ("text" if "text" in row.values and "prompt" not in row.values else "prompt")

    def _answer(self, row: DatasetRow) -> str:
        problem = _problem(row, str(row.get(self._column(row))))
        return json.dumps(problem, ensure_ascii=False)


def _problem(row: DatasetRow, text: str) -> dict[str, Any]:
    """Return the tests of a row in the form that `verify` expects."""
    values = _filled(row.values)
    problem: dict[str, Any] = {"setup": "", "reference": "", "entry_point": "", "prompt": ""}
    if "entry_point" in values and "test" in values:
        problem |= {"tests": [values["test"]], "entry_point": values["entry_point"]}
        problem |= {"setup": text, "prompt": text}
        # Not as `reference`: in the tests, names that `reference` defines (for MBPP) stand for the code's.
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
    """Return the columns that are not empty: in a table of mixed formats, a row has empty columns."""
    return {name: value for name, value in values.items() if value not in (None, "", [])}


def _pair(test: Mapping[str, Any], row: DatasetRow) -> list[str]:
    pair = [test.get("input") or "", test.get("output")]
    if not all(isinstance(text, str) for text in pair):
        raise InputError(
            f"{row.place}: a test must be {{input, output}}, both texts, found {brief(dict(test))}"
        )
    return [str(text) for text in pair]


def code_of(answer: str, problem: Mapping[str, Any]) -> str:
    """Return the code in an answer: its last fenced block, or all of it if there is none.

    For HumanEval, the prompt precedes the code, which continues its function or defines it again.
    """
    blocks = _BLOCK.findall(answer)
    code = blocks[-1] if blocks else answer
    if not (prompt := problem.get("prompt")):
        return code
    defined = re.search(rf"^(async\s+)?def\s+{re.escape(problem['entry_point'])}\b", code, re.MULTILINE)
    return f"{prompt}\n{code}" if defined else prompt + code


def _lines(text: str) -> list[str]:
    """Return the lines of an output without trailing white space, and without trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _reward(correct: bool) -> Reward:
    return Reward(1.0 if correct else 0.0, correct)
