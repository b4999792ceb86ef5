"""The prompt pool: which prompt is drawn next, and which never again.

Prompts are drawn without replacement, pass after pass, each pass shuffled by the seed and its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from scalerl.rl.types import Group, Prompt


@dataclass(frozen=True)
class NoPositiveResampling:
    """A prompt whose pass rate has reached `threshold` is never drawn again (arXiv 2510.13786, section 2).

    The pass rate is over all completions of the prompt's whole history, or of its `latest` group alone;
    truncated ones count as failures.
    """

    threshold: float = 0.9
    history: Literal["all", "latest"] = "all"
    kind: Literal["no_positive_resampling"] = "no_positive_resampling"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError("threshold must be in (0, 1]")

    def retires(self, history: History) -> bool:
        """Whether a prompt with this history is done with."""
        correct, n = history.latest if self.history == "latest" else (history.correct, history.n)
        return n > 0 and correct / n >= self.threshold  # not correct >= threshold * n: .55 * 100 is above 55


@dataclass(frozen=True)
class Uniform:
    """Every prompt is drawn in every pass, whatever its pass rate."""

    kind: Literal["uniform"] = "uniform"

    def retires(self, history: History) -> bool:
        """Never."""
        return False


AnyCurriculum = NoPositiveResampling | Uniform
"""The curricula that a recipe can name."""


@dataclass
class History:
    """What became of a prompt's completions: over all of its groups, and of the latest (correct, n)."""

    correct: int = 0
    n: int = 0
    latest: tuple[int, int] = (0, 0)

    def add(self, correct: int, n: int) -> None:
        """Take note of a group."""
        self.correct, self.n, self.latest = self.correct + correct, self.n + n, (correct, n)


@dataclass
class PromptPool:
    """Draws prompts in passes, and learns from verified groups."""

    prompts: Sequence[Prompt]
    curriculum: AnyCurriculum
    seed: int
    passes: int = 0
    _queue: list[Prompt] = field(default_factory=list)
    _draws: Counter[str] = field(default_factory=Counter)
    _history: dict[str, History] = field(default_factory=dict)
    _retired: set[str] = field(default_factory=set)

    @property
    def left(self) -> int:
        """Prompts that can still be drawn."""
        return len(self.prompts) - len(self._retired)

    def draw(self) -> tuple[Prompt, int] | None:
        """The next prompt and how often it was drawn before; None when every prompt has been retired."""
        while True:
            while self._queue:
                prompt = self._queue.pop()
                if prompt.id not in self._retired:
                    self._draws[prompt.id] += 1
                    return prompt, self._draws[prompt.id] - 1
            if not self.left:
                return None
            order = np.random.default_rng([self.seed, self.passes]).permutation(len(self.prompts))
            self._queue = [self.prompts[i] for i in order]
            self.passes += 1

    def record(self, group: Group) -> None:
        """Take note of a verified group."""
        history = self._history.setdefault(group.prompt.id, History())
        history.add(int(group.correct_G.sum()), len(group.correct_G))
        if self.curriculum.retires(history):
            self._retired.add(group.prompt.id)

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {
            "passes": self.passes,
            "queue": [prompt.id for prompt in self._queue],
            "draws": dict(self._draws),
            "history": {name: dict(vars(history)) for name, history in self._history.items()},
            "retired": sorted(self._retired),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whose prompts must all be here."""
        by_id = {prompt.id: prompt for prompt in self.prompts}
        self.passes = state["passes"]
        self._queue = [by_id[name] for name in state["queue"]]
        self._draws = Counter(state["draws"])
        self._history = {
            name: History(h["correct"], h["n"], tuple(h["latest"])) for name, h in state["history"].items()
        }
        self._retired = set(state["retired"])
