"""Reward functions that were written for TRL and verl, as they are.

Both take columns of the data, which is why they need `task.answer = "*"`: the whole row.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from scalerl.errors import InputError
from scalerl.rl.tasks.verifiers import Verifier, load_function
from scalerl.rl.types import Prompt, Reward

ANSWERS = ("answer", "solution", "ground_truth", "target")
"""Columns in which data for TRL usually have the answer: TRL itself has no name for it."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # which TRL does not pass on either


@dataclass(frozen=True)
class Trl(Verifier):
    """TRL's `reward_funcs`: `reward(prompts, completions, **columns) -> list[float]`.

    The value is the weighted sum of the functions' scores, where None counts nothing, as in TRL. A completion
    is correct where the score of the function `correct` reaches `correct_at`. Prompts and completions are
    lists of messages where the data has messages, else texts. Tokens, `trainer_state` and the functions that
    log are not passed: a function that needs them raises.
    """

    functions: tuple[str, ...]
    """Each `file.py:name` or `module:name`."""
    weights: tuple[float, ...] = ()
    """One for each function; without any, 1."""
    correct: str | None = None
    """The name of the function that the pass rate is of; the first where it is not given."""
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
    number, or the dictionary's `score`. A completion is correct where the dictionary's `acc` says so, as verl
    evaluates then, and else where the value reaches `correct_at`.
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
        """Return the ground truth, where it is a text or a number."""
        return _text((_row(prompt).get("reward_model") or {}).get("ground_truth"))


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
