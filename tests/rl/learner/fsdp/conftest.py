"""Ranks that train on the batches of a tiny model."""

from dataclasses import replace

import pytest
from learner_ranks import Ranks

from scalerl.rl.config.optimiser import AdamW


@pytest.fixture
def ranks(tmp_path):
    """A function that runs another on the ranks of a process group."""
    return Ranks(tmp_path)


@pytest.fixture(scope="session")
def fsdp_recipe(tiny_recipe, save_model):
    """Three completions a pass, and a rate at which 20 steps change the model.

    Its logits are small, so that float32 keeps their log-probabilities to better than 1e-6.
    """
    return replace(
        tiny_recipe,
        model=save_model("llama", initializer_range=0.1),
        batch=replace(tiny_recipe.batch, micro=3),
        optimiser=AdamW(lr=3e-4, warmup_steps=2),
        temperature=0.8,
    )
