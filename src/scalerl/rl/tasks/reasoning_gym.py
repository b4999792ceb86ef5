"""`reasoning_gym`: procedural problems with verifiers of the package reasoning-gym (arXiv 2505.24760).

    task = "reasoning-gym:chain_sum"

or a table, with what its `create_dataset` takes:

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
from scalerl.rl.tasks.task import SLOT, Task, check_presentation
from scalerl.rl.tasks.verifiers import answer_of, last_box
from scalerl.rl.types import Limits, Prompt, Reward, Split

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ReasoningGym(Task):
    """Problems of reasoning-gym: `size` to train on and `heldout` others, all from one seed.

    The answer of a completion is what stands in its last `<answer>` tags, else in its last `\\boxed{}`, else
    all of it, after the end of thinking. It is correct where the data set's own `score_answer` gives 1; with
    `partial_credit` the reward is that score, else +1 or -1.
    """

    name: str
    """A data set of reasoning-gym."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What its `create_dataset` takes, but for `seed` and `size`: the difficulty."""
    size: int = 2000
    heldout: int = 200
    seed: int = 0
    question: str = ""
    """A text of the problems' metadata to ask in place of their question, as `expression` of chain_sum."""
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
        """Return the problems of a split; the same text is asked once.

        Raises:
            InputError: reasoning-gym is not installed, has no such data set, or cannot make so many.
        """
        return self._prompts[split]

    def prepare(self) -> None:
        """Make the data set, whose scorer verifies."""
        _ = self._made

    def verify(self, prompt: Prompt, text: str) -> Reward:
        """Score the answer of a completion."""
        answer = answer_of(text, self.after)
        tagged, box = _TAGGED.findall(answer), last_box(answer)
        found = tagged[-1] if tagged else box if box is not None else answer
        # The entry is made again: what scorers need of it is not all text.
        entry = self._made[int(prompt.id.rpartition("/")[2])]
        score = float(self._made.score_answer(found.strip(), entry))
        correct = score >= 1.0
        return Reward(score if self.partial_credit else 1.0 if correct else -1.0, correct)

    @cached_property
    def _made(self) -> Any:
        """The data set, twice as large as is needed, as easy problems repeat."""
        try:
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise InputError("task: reasoning_gym needs a package: pip install 'scalerl[tasks]'") from error
        if self.name not in DATASETS:
            near = nearest(self.name, DATASETS)
            hint = f"; did you mean {near!r}?" if near else ""
            raise InputError(f"task.name: reasoning-gym has no {brief(self.name)}{hint}")
        size = 2 * (self.size + self.heldout)
        try:
            return create_dataset(self.name, seed=self.seed, size=size, **self.config)
        except (TypeError, ValueError, AssertionError) as error:
            raise InputError(f"task.config: {self.name} cannot be made ({brief_error(error)})") from error

    @cached_property
    def _prompts(self) -> dict[Split, list[Prompt]]:
        found: dict[str, Prompt] = {}
        for i in range(len(self._made)):
            prompt = self._prompt(i, self._made[i])
            found.setdefault(prompt.text, prompt)
            if len(found) == self.heldout + self.size:
                break
        prompts = list(found.values())
        if len(prompts) <= self.heldout:
            there = f"{self.name} has {len(prompts)} different problems"
            raise InputError(f"task.heldout: {there}, and {self.heldout} are held out")
        return {"heldout": prompts[: self.heldout], "train": prompts[self.heldout :]}

    def _prompt(self, number: int, entry: Mapping[str, Any]) -> Prompt:
        text = self.template.replace(SLOT, self._asked(entry).strip())
        system = [("system", self.system)] if self.system is not None else []
        messages = (*system, ("user", text)) if self.chat_template else None
        return Prompt(f"{self.name}/{number}", text, str(entry["answer"]), messages)

    def _asked(self, entry: Mapping[str, Any]) -> str:
        if not self.question:
            return entry["question"]
        texts = {key: value for key, value in entry["metadata"].items() if isinstance(value, str)}
        if self.question not in texts:
            raise InputError(
                f"task.question: {self.name} has {', '.join(texts)}, and no {brief(self.question)}"
            )
        return texts[self.question]
