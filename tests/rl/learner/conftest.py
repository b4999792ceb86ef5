"""Batches that a tiny model sampled, and ranks that train on them."""

import functools
from dataclasses import replace

import pytest
from learner_ranks import Ranks

from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.types import Group, Reward


@pytest.fixture(scope="session")
def sampled_batches(make_generator, uneven_prompts):
    """A function that makes `n` batches of completions that a model sampled, of 1 to 40 tokens each."""

    @functools.cache
    def sampled(folder, seed):
        generator = make_generator(folder, temperature=0.8, seed=seed)
        for prompt in uneven_prompts[:3]:
            generator.submit(prompt, 0, 4)
        groups = [
            Group.of(rollouts, [Reward(1.0 if r.token_T.sum() % 2 else -1.0, True) for r in rollouts])
            for rollouts in generator.collect(3)
        ]
        return make_batch(groups, BatchStd(), PromptAverage(), 100)

    return lambda folder, n: [sampled(folder, seed) for seed in range(n)]


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
