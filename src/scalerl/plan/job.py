"""The part of a recipe that the simulation needs, and the lengths of its completions.

Shapes in names: B groups, G completions of a group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalerl.errors import InputError
from scalerl.rl.algo.schedule import AnySchedule
from scalerl.rl.tasks.mix import Mix
from scalerl.rl.tasks.task import Task, prompts_of

if TYPE_CHECKING:
    from scalerl.rl.config.recipe import Recipe

_LETTERS_OF_A_TOKEN = 4
_P95 = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Truncation:
    """The lengths at which a recipe ends completions, at most `longest`.

    With an `interrupt`, thinking is ended at a length drawn uniformly between its two bounds, and `phrase`
    and answer follow.
    """

    longest: int
    interrupt: tuple[int, int] | None = None
    phrase: int = 0


@dataclass(frozen=True)
class Lengths:
    """Decoded tokens of a completion: log-normal with `mean` and `p95`, before the recipe's `Truncation`."""

    mean: float
    p95: float
    within: float = 1.0
    """Share of the variance between completions of one prompt; the rest is between prompts."""
    answer: int = 0
    """Tokens of an answer after an interruption."""
    prompt: int = 0
    """Tokens of a prompt."""

    def __post_init__(self) -> None:
        if min(self.answer, self.prompt) < 0 or not 0 <= self.within <= 1:
            raise ValueError("answer and prompt must not be negative, and within must be a share")
        # The limit of a log-normal: ln(p95 / mean) is largest at sigma = 1.645, where it is 1.645^2 / 2.
        if not 0 < self.mean <= self.p95 <= self.mean * math.exp(_P95**2 / 2):
            raise ValueError("mean must be above 0, and p95 between it and 3.87 times it")

    def draw(self, rng: np.random.Generator, n_groups: int, samples: int, cut: Truncation) -> np.ndarray:
        """Draw the lengths of the completions of `n_groups` groups, at least 1 each: (B, G)."""
        z_BG = math.sqrt(1 - self.within) * rng.standard_normal((n_groups, 1))
        z_BG = z_BG + math.sqrt(self.within) * rng.standard_normal((n_groups, samples))
        # The smaller root of ln(p95 / mean) = 1.645 sigma - sigma^2 / 2.
        sigma = _P95 - math.sqrt(max(_P95**2 - 2 * math.log(self.p95 / self.mean), 0.0))
        length_BG = np.exp(math.log(self.mean) - sigma**2 / 2 + sigma * z_BG)
        if cut.interrupt is not None:
            low, high = cut.interrupt
            # Both ends included, as in `LengthRule.draw`.
            at_BG = rng.integers(low, high + 1, length_BG.shape)
            length_BG = np.where(length_BG > at_BG, at_BG + cut.phrase + self.answer, length_BG)
        return np.clip(np.rint(length_BG), 1, cut.longest).astype(np.int64)


@dataclass(frozen=True)
class PlannedEvaluations:
    """Evaluations on the held-out prompts; suites of other benchmarks are left out."""

    every: float = math.inf
    """Steps between evaluations."""
    prompts: int = 0
    samples: int = 1
    slots: int = 1
    """Completions decoded at once."""
    by_generators: bool = False
    """Whether all generators evaluate, instead of an evaluator (as vLLM servers do)."""

    @property
    def completions(self) -> int:
        """Completions of an evaluation."""
        return self.prompts * self.samples

    @classmethod
    def of(cls, recipe: Recipe) -> PlannedEvaluations:
        """Return the evaluations of a recipe; none if they are due at shares of a budget not in steps."""
        budget, own = recipe.budget, recipe.evaluation
        every = budget.amount / recipe.evaluations if budget.kind == "steps" else own.every or math.inf
        prompts = _held_out(recipe.task)
        slots = recipe.decode_slots if recipe.vllm else own.slots_for(prompts)
        return cls(max(every, 1.0), prompts, own.samples, slots, recipe.vllm is not None)


def _held_out(task: Task) -> int:
    """Return the number of held-out prompts of a task; for a data set, its setting, to avoid a download."""
    if isinstance(task, Mix):
        return sum(_held_out(one) for one in task.tasks.values())
    said = getattr(task, "heldout", None)
    return len(prompts_of(task, "heldout")) if said is None else said


@dataclass(frozen=True)
class PlannedJob:
    """Batches of `prompts` groups of `samples` completions, under a schedule."""

    prompts: int
    samples: int
    decode_slots: int
    schedule: AnySchedule
    cut: Truncation
    evaluations: PlannedEvaluations = PlannedEvaluations()
    overlapped: bool = False
    """Whether groups are collected while the trainers step, as with a learner sharded over a cluster."""

    def __post_init__(self) -> None:
        if min(self.prompts, self.samples, self.decode_slots) < 1 or not self.evaluations.every > 0:
            raise InputError(
                "prompts, samples, decode_slots and the steps between evaluations must be above 0"
            )

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.prompts * self.samples

    @property
    def batches_in_flight(self) -> int:
        """Batches that may be admitted before all generators have the weights of the first."""
        return self.schedule.in_flight_limit(self.prompts) // self.prompts

    @property
    def steps_of_a_phase(self) -> int:
        """Steps from one publication of the weights to the next."""
        return self.schedule.at_once(self.prompts) // self.prompts

    @classmethod
    def of(cls, recipe: Recipe) -> PlannedJob:
        """Make the job of a recipe."""
        cut = Truncation(recipe.context.sampled)
        if (control := recipe.length.interruption()) is not None:
            # Without a tokenizer, the tokens of the phrase are estimated from its letters.
            phrase = -(-len(control.phrase) // _LETTERS_OF_A_TOKEN)
            cut = Truncation(recipe.context.sampled + phrase, control.bounds(recipe.context.thinking), phrase)
        return cls(
            recipe.batch.prompts,
            recipe.batch.samples,
            recipe.decode_slots,
            recipe.schedule,
            cut,
            PlannedEvaluations.of(recipe),
            recipe.cluster is not None and recipe.cluster.learner.kind != "one",
        )
