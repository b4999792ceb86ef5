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


@dataclass(frozen=True)
class PlannedJob:
    """Batches of `prompts` groups of `samples` completions, by a schedule."""

    prompts: int
    samples: int
    decode_slots: int
    schedule: AnySchedule
    cut: Truncation
    evaluate_every: float = math.inf
    """Steps from one evaluation to the next."""
    overlapped: bool = False
    """Groups are collected while the trainers step: with a learner that is sharded over a cluster."""

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples, self.decode_slots) < 1 or not self.evaluate_every > 0:
            raise InputError(
                "prompts, samples, decode_slots and the steps between evaluations must be above 0"
            )

    @property
    def completions(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def batches_in_flight(self) -> int:
        """Batches that may be admitted before the weights of the first are installed."""
        return self.schedule.in_flight_limit(self.prompts) // self.prompts

    @property
    def steps_of_a_phase(self) -> int:
        """Steps from one publication of the weights to the next."""
        return self.schedule.at_once(self.prompts) // self.prompts

    @classmethod
    def of(cls, recipe: Recipe) -> PlannedJob:
        """That of a recipe. With a budget that is not in steps, evaluations are left out."""
        by_steps = recipe.budget.kind == "steps"
        return cls(
            recipe.batch.prompts,
            recipe.batch.samples,
            recipe.decode_slots,
            recipe.schedule,
            _cut(recipe),
            max(recipe.budget.amount / recipe.evaluation.count, 1.0) if by_steps else math.inf,
            recipe.cluster is not None and recipe.cluster.learner.kind != "one",
        )


def _cut(recipe: Recipe) -> Truncation:
    """The tokens of the phrase are guessed from its letters: this part of the package has no tokenizer."""
    length = recipe.length.interruption()
    if length is None:
        return Truncation(recipe.context.sampled)
    phrase = -(-len(length.phrase) // _LETTERS_OF_A_TOKEN)
    return Truncation(recipe.context.sampled + phrase, (length.low, length.high), phrase)
