"""The learner of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.check import check_training
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import checkpoint_activations, model_of
from scalerl.rl.model.lora import add_adapters


def load_learner(recipe: Recipe, model_folder: str | Path) -> Learner:
    """The learner of a recipe, at version 0.

    Raises:
        InputError: the model cannot be loaded, or computes at random while it is trained.
    """
    plain = model_of(recipe, model_folder)
    check_training(plain, recipe.model)
    model: Any = add_adapters(plain, recipe.lora, recipe.seed)
    if recipe.activation_checkpointing:
        checkpoint_activations(model)
    return Learner(
        model,
        recipe.loss,
        recipe.optimiser,
        recipe.temperature,
        recipe.fp32_logits in ("both", "trainer"),
        recipe.batch.micro,
        recipe.kl,
        model_of(recipe, model_folder).requires_grad_(False) if recipe.kl.coefficient else None,
        recipe.engine.kind != "transformers",
    )
