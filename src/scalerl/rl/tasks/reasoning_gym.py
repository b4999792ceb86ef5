"""`reasoning_gym`: procedural problems with verifiers of the package reasoning-gym (arXiv 2505.24760).

    task = "reasoning-gym:chain_sum"

or a table, with arguments of its `create_dataset`:

    [task]
    kind = "reasoning_gym"
    name = "chain_sum"
    config = {min_terms = 2, max_terms = 3}
    template = "{prompt}\\nAnswer with the number alone."
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from scalerl.errors import InputError, brief, brief_error, nearest
from scalerl.rl.tasks.task import SLOT, Task, check_presentation, split_off
from scalerl.rl.tasks.verifiers import answer_of, final_answer
from scalerl.rl.types import Limits, Prompt, Reward, Split

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ReasoningGym(Task):
    """Problems of reasoning-gym: `size` to train on and `heldout` others, all from one seed.

    The answer of a completion is searched for after the end of thinking: the content of the last `<answer>`
    tags, else of the last `\\boxed{}`, else the whole text. It is correct if the data set's own
    `score_answer` gives 1; with `partial_credit` the reward is that score, else +1 or -1.
    """

    name: str
    """A data set of reasoning-gym."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its `create_dataset` that set the difficulty, so not `seed` and `size`."""
    size: int = 2000
    heldout: int = 200
    seed: int = 0
    question: str = ""
    """A text in the problems' metadata to ask instead of their question: `expression` of chain_sum, say."""
    template: str = SLOT
    """Text around the problem, which replaces `{prompt}`."""
    system: str | None = None
    chat_template: bool = True
    after: str = "</think>"
    partial_credit: bool = False
    limits: Limits = field(default_factory=Limits)
    kind: Literal["reasoning_gym"] = "reasoning_gym"

    def __post_init__(self) -> None:
        if taken := {"seed", "size"} & self.config.keys():
            raise ValueError(f"config.{min(taken)}: set task.{min(taken)}")
        if self.size < 1 or self.heldout < 1 or self.seed < 0:
            raise ValueError("size and heldout must be at least 1, and seed not negative")
        check_presentation(self.template, self.system, self.chat_template)

    def prompts(self, split: Split) -> list[Prompt]:
        """Return the problems of a split, without duplicates.

        Raises:
            InputError: reasoning-gym is not installed, has no such data set, or cannot make enough problems.
        """
        return self._prompts[split]

    def prepare(self) -> None:
        """Make the data set, whose scorer verifies."""
        _ = self._made

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Score the answer of a completion."""
        tagged = _TAGGED.findall(answer_of(text, self.after))
        found = tagged[-1] if tagged else final_answer(text, self.after)
        # The entry is made again, as scorers need parts of it that are not text.
        entry = self._made[int(prompt.id.rpartition("/")[2])]
        score = float(self._made.score_answer(found.strip(), entry))
        correct = score >= 1.0
        return Reward(score if self.partial_credit else 1.0 if correct else -1.0, correct)

    @cached_property
    def _made(self) -> Any:
        """The data set, twice as large as needed, as easy problems repeat."""
        try:
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise InputError("task: reasoning_gym needs a package: pip install 'scalerl[tasks]'") from error
        if self.name not in DATASETS:
            near = nearest(self.name, DATASETS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise InputError(f"task.name: reasoning-gym has no data set {brief(self.name)}{hint}")
        size = 2 * (self.size + self.heldout)
        try:
            return create_dataset(self.name, seed=self.seed, size=size, **self.config)
        except (TypeError, ValueError, AssertionError) as error:
            raise InputError(f"task.config: {self.name} cannot be made ({brief_error(error)})") from error

    @cached_property
    def _prompts(self) -> dict[Split, list[Prompt]]:
        system = [("system", self.system)] if self.system is not None else []
        found: dict[str, Prompt] = {}
        for number in range(len(self._made)):
            entry = self._made[number]
            asked = {key: value for key, value in entry["metadata"].items() if isinstance(value, str)}
            if self.question and self.question not in asked:
                there = ", ".join(asked)
                raise InputError(f"task.question: {self.name} has {there}, and no {brief(self.question)}")
            question = asked[self.question] if self.question else entry["question"]
            text = self.template.replace(SLOT, question.strip())
            messages = (*system, ("user", text)) if self.chat_template else None
            found.setdefault(text, Prompt(f"{self.name}/{number}", text, str(entry["answer"]), messages))
            if len(found) == self.heldout + self.size:
                break
        return split_off(list(found.values()), self.heldout, self.name)
