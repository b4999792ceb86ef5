"""The prompt pool: which prompt is drawn next, and which are retired.

Prompts are drawn without replacement, pass after pass, each pass shuffled by the seed and its number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scalerl.rl.algo.checked import retires
from scalerl.rl.algo.curriculum import Curriculum, History
from scalerl.rl.types import Group, Prompt


@dataclass
class _Deck:
    """The prompts of one task of a mixture, or all."""

    prompts: Sequence[Prompt]
    weight: float
    seed: Sequence[int]
    drawn: int = 0
    passes: int = 0
    queue: list[Prompt] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    @property
    def left(self) -> int:
        """Prompts that can still be drawn."""
        return len(self.prompts) - len(self.retired)

    def draw(self) -> Prompt:
        """Return the next prompt that is not retired; there must be one."""
        while True:
            while self.queue:
                # Looked at here, as the queue of the pass was filled before some of its prompts were retired.
                prompt = self.queue.pop()
                if prompt.id not in self.retired:
                    self.drawn += 1
                    return prompt
            # Made anew for each pass, so that a resume needs none of its state.
            first, *more = self.seed
            order = np.random.default_rng([first, self.passes, *more]).permutation(len(self.prompts))
            self.queue = [self.prompts[i] for i in order]
            self.passes += 1


@dataclass
class PromptPool:
    """Draws prompts in passes, and retires them by the results of verified groups.

    With `weights`, by the start of the prompts' ids up to the first slash, each task has passes of its own,
    and is drawn as often as its weight says, as evenly as can be. A task whose prompts are all retired leaves
    its share to the others.
    """

    prompts: Sequence[Prompt]
    curriculum: Curriculum
    seed: int
    weights: Mapping[str, float] = field(default_factory=dict)
    # By prompt: the epoch is part of the key of random numbers, so that each draw samples anew.
    _epochs: Counter[str] = field(default_factory=Counter)
    _history: dict[str, History] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.weights:
            self._decks = {"": _Deck(self.prompts, 1.0, [self.seed])}
            return
        of: dict[str, list[Prompt]] = {name: [] for name in self.weights}
        for prompt in self.prompts:
            of[_task_of(prompt.id)].append(prompt)
        weights = enumerate(self.weights.items(), start=1)
        self._decks = {name: _Deck(of[name], weight, [self.seed, i]) for i, (name, weight) in weights}

    @property
    def left(self) -> int:
        """Prompts that can still be drawn."""
        return sum(deck.left for deck in self._decks.values())

    def draw(self) -> tuple[Prompt, int] | None:
        """Return the next prompt and its epoch; None when every prompt has been retired."""
        open_ = [deck for deck in self._decks.values() if deck.left]
        if not open_:
            return None
        # The task that is furthest behind its share: no chance in it, so that a resume draws the same.
        prompt = min(open_, key=lambda deck: (deck.drawn + 1) / deck.weight).draw()
        self._epochs[prompt.id] += 1
        return prompt, self._epochs[prompt.id] - 1

    def record(self, group: Group) -> None:
        """Record the result of a verified group."""
        # A copy, as the curriculum may raise.
        history = replace(self._history.get(group.prompt.id, History()))
        history.add(int(group.correct_G.sum()), len(group.correct_G))
        if retires(self.curriculum, history):
            self._deck_of(group.prompt.id).retired.add(group.prompt.id)
        self._history[group.prompt.id] = history

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        decks = {
            name: {"passes": d.passes, "drawn": d.drawn, "queue": [prompt.id for prompt in d.queue]}
            for name, d in self._decks.items()
        }
        return {
            "decks": decks,
            "epochs": dict(self._epochs),
            "history": {name: dict(vars(history)) for name, history in self._history.items()},
            "retired": sorted(set().union(*(deck.retired for deck in self._decks.values()))),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, whose prompts must all be here."""
        by_id = {prompt.id: prompt for prompt in self.prompts}
        for name, deck in state["decks"].items():
            mine = self._decks[name]
            mine.passes, mine.drawn = deck["passes"], deck["drawn"]
            mine.queue = [by_id[prompt] for prompt in deck["queue"]]
        self._epochs = Counter(state["epochs"])
        self._history = {
            name: History(h["correct"], h["n"], tuple(h["latest"])) for name, h in state["history"].items()
        }
        for name in state["retired"]:
            self._deck_of(name).retired.add(name)

    def _deck_of(self, prompt: str) -> _Deck:
        return self._decks[_task_of(prompt) if self.weights else ""]


def _task_of(prompt: str) -> str:
    return prompt.partition("/")[0]
