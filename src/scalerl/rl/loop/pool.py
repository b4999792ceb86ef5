"""The prompt pool: which prompt is drawn next, and which are retired.

Prompts are drawn without replacement, pass after pass, each pass shuffled by the seed and its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalerl.rl.algo.curriculum import Curriculum, History
from scalerl.rl.types import Group, Prompt


@dataclass
class PromptPool:
    """Draws prompts in passes, and retires them by the results of verified groups."""

    prompts: Sequence[Prompt]
    curriculum: Curriculum
    seed: int
    passes: int = 0
    _queue: list[Prompt] = field(default_factory=list)
    # By prompt: the epoch is part of the key of random numbers, so that each draw samples anew.
    _epochs: Counter[str] = field(default_factory=Counter)
    _history: dict[str, History] = field(default_factory=dict)
    _retired: set[str] = field(default_factory=set)

    @property
    def left(self) -> int:
        """Prompts that can still be drawn."""
        return len(self.prompts) - len(self._retired)

    def draw(self) -> tuple[Prompt, int] | None:
        """Return the next prompt and its epoch; None when every prompt has been retired."""
        while True:
            while self._queue:
                # Looked at here, as the queue of the pass was filled before some of its prompts were retired.
                prompt = self._queue.pop()
                if prompt.id not in self._retired:
                    self._epochs[prompt.id] += 1
                    return prompt, self._epochs[prompt.id] - 1
            if not self.left:
                return None
            # Made anew for each pass, so that a resume needs none of its state.
            order = np.random.default_rng([self.seed, self.passes]).permutation(len(self.prompts))
            self._queue = [self.prompts[i] for i in order]
            self.passes += 1

    def record(self, group: Group) -> None:
        """Record the result of a verified group."""
        history = self._history.setdefault(group.prompt.id, History())
        history.add(int(group.correct_G.sum()), len(group.correct_G))
        if self.curriculum.retires(history):
            self._retired.add(group.prompt.id)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {
            "passes": self.passes,
            "queue": [prompt.id for prompt in self._queue],
            "epochs": dict(self._epochs),
            "history": {name: dict(vars(history)) for name, history in self._history.items()},
            "retired": sorted(self._retired),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whose prompts must all be here."""
        by_id = {prompt.id: prompt for prompt in self.prompts}
        self.passes = state["passes"]
        self._queue = [by_id[name] for name in state["queue"]]
        self._epochs = Counter(state["epochs"])
        self._history = {
            name: History(h["correct"], h["n"], tuple(h["latest"])) for name, h in state["history"].items()
        }
        self._retired = set(state["retired"])
