"""From a recipe to the parts of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.rl.generator import Sampling, TorchGenerator
from scalerl.rl.learner import Learner
from scalerl.rl.length import LengthRule
from scalerl.rl.model import load_model, load_tokenizer
from scalerl.rl.recipe import Recipe
from scalerl.rl.types import Reward, Rollout, Task

FAILED = Reward(-1.0, False)


def load_generator(
    recipe: Recipe, model_folder: str | Path, seed: int, rows: int
) -> Callable[[], TorchGenerator]:
    """Load model and tokenizer once; each call of the result makes a generator with an empty cache."""
    model = load_model(model_folder)
    tokenizer = load_tokenizer(model_folder)
    length = LengthRule.resolve(
        recipe.length, tokenizer, recipe.context.thinking, recipe.context.answer, recipe.end_of_thinking
    )
    needed = recipe.context.prompt + length.max_tokens
    config: Any = model.config
    if needed > config.max_position_embeddings:
        raise InputError(
            f"context: prompt, thinking, phrase and answer need {needed} positions, and the model has "
            f"{config.max_position_embeddings}"
        )
    sampling = Sampling(
        recipe.temperature, recipe.fp32_logits, seed, recipe.context.prompt, length, tokenizer.eos_token_id
    )
    return lambda: TorchGenerator(model, tokenizer, sampling, rows)


def load_learner(recipe: Recipe, model_folder: str | Path) -> Learner:
    """The learner of a recipe, at version 0."""
    return Learner(
        load_model(model_folder),
        recipe.loss,
        recipe.optimiser,
        recipe.temperature,
        recipe.fp32_logits,
        recipe.batch.micro,
    )


def verifier(task: Task, tokenizer: Any) -> Callable[[Rollout], Reward]:
    """Judges rollouts: a truncated one has failed, whatever it says; the task judges the others' text."""

    def verify(rollout: Rollout) -> Reward:
        if rollout.truncated:
            return FAILED
        return task.verify(rollout.prompt, tokenizer.decode(rollout.token_T))

    return verify
