"""What a recipe asks of the loop: the part of it that the simulation needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scalerl.errors import InputError
from scalerl.plan.lengths import Truncation
from scalerl.rl.algo.schedule import AnySchedule

if TYPE_CHECKING:
    from scalerl.rl.config.recipe import Recipe

_LETTERS_OF_A_TOKEN = 4
_WAY = {"object_store": "spread", "gloo": "tree", "nccl": "chain"}


@dataclass(frozen=True)
class PlannedJob:
    """Batches of `prompts` groups of `samples` completions, by a schedule, on generators of `rows` rows."""

    prompts: int
    samples: int
    rows: int
    schedule: AnySchedule
    cut: Truncation
    evaluate_every: float = math.inf
    """Steps from one evaluation to the next."""
    overlapped: bool = False
    """The driver works while the trainers step: with a learner that is sharded over a cluster."""
    way: str = "spread"
    """How the weights are sent; see `scalerl.plan.rates.Weights`."""
    micro: int = 64
    """Completions of a trainer's micro-batch."""

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples, self.rows) < 1 or not self.evaluate_every > 0:
            raise InputError("prompts, samples, rows and the steps between evaluations must be above 0")

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @classmethod
    def of(cls, recipe: Recipe) -> PlannedJob:
        """That of a recipe. With a budget that is not in steps, evaluations are left out."""
        by_steps = recipe.budget.kind == "steps"
        return cls(
            recipe.batch.prompts,
            recipe.batch.samples,
            recipe.rows,
            recipe.schedule,
            _cut(recipe),
            max(recipe.budget.amount / recipe.evaluation.count, 1.0) if by_steps else math.inf,
            recipe.cluster is not None and recipe.cluster.learner.kind != "one",
            _WAY[recipe.cluster.transport.kind] if recipe.cluster else "spread",
            recipe.batch.micro,
        )


def _cut(recipe: Recipe) -> Truncation:
    """The tokens of the phrase are guessed from its letters: this part of the package has no tokenizer."""
    length = recipe.length.interruption()
    if length is None:
        return Truncation(recipe.context.sampled)
    phrase = -(-len(length.phrase) // _LETTERS_OF_A_TOKEN)
    return Truncation(recipe.context.sampled + phrase, (length.low, length.high), phrase)
