"""The prompt pool: which prompt is drawn next, and which are retired.

Prompts are drawn without replacement in passes; the seed and the number of a pass determine its order.
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
    """The prompts of one task of a mixture, or all prompts if there is no mixture."""

    prompts: Sequence[Prompt]
    weight: float
    seed: Sequence[int]
    drawn: int = 0
    passes: int = 0
    queue: list[Prompt] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    @property
    def left(self) -> int:
        """Number of prompts that can still be drawn."""
        return len(self.prompts) - len(self.retired)

    def draw(self) -> Prompt:
        """Return the next prompt that is not retired; there must be one."""
        while True:
            while self.queue:
                # Checked here: the prompt may have been retired since the queue was filled.
                prompt = self.queue.pop()
                if prompt.id not in self.retired:
                    self.drawn += 1
                    return prompt
            # A new random generator for each pass, so that a resume needs no generator state.
            first, *more = self.seed
            order = np.random.default_rng([first, self.passes, *more]).permutation(len(self.prompts))
            self.queue = [self.prompts[i] for i in order]
            self.passes += 1


@dataclass
class PromptPool:
    """The pool of training prompts: draws them in passes, and retires them by the results of verified groups.

    The keys of `weights` are tasks: the part of a prompt's id before the first slash. With them each task has
    its own passes and is drawn in proportion to its weight, as evenly as possible. A task whose prompts are
    all retired leaves its share to the others.
    """

    prompts: Sequence[Prompt]
    curriculum: Curriculum
    seed: int
    weights: Mapping[str, float] = field(default_factory=dict)
    # Draws of each prompt. The epoch is part of the key of random numbers, so each draw samples anew.
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
        """Number of prompts that can still be drawn."""
        return sum(deck.left for deck in self._decks.values())

    def draw(self) -> tuple[Prompt, int] | None:
        """Return the next prompt and its epoch, or None if every prompt is retired."""
        open_ = [deck for deck in self._decks.values() if deck.left]
        if not open_:
            return None
        # The task furthest behind its share. This uses no randomness, so a resume draws the same prompts.
        prompt = min(open_, key=lambda deck: (deck.drawn + 1) / deck.weight).draw()
        self._epochs[prompt.id] += 1
        return prompt, self._epochs[prompt.id] - 1

    def record(self, group: Group) -> None:
        """Record the result of a verified group."""
        # A copy, so that a curriculum that raises leaves the history unchanged.
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
        """Continue from `state`; the pool must have all its prompts."""
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
