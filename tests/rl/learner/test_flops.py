from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import learner_recipe
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from scalerl.rl.algo.advantage import BatchStd
from scalerl.rl.algo.averaging import PromptAverage
from scalerl.rl.algo.loss import Kl
from scalerl.rl.config.settings import BatchSize
from scalerl.rl.learner.batch import make_batch
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import FlopCount, load_model
from scalerl.rl.types import Group, Reward

# Hidden 32, intermediate 48, 2 layers, 4 heads of 8 with 2 of keys and values, vocabulary 19:
# per layer q and o 32 x 32 each, k and v 32 x 16 each, gate, up and down 32 x 48 each; the head 32 x 19.
WEIGHTS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 19
PER_POSITION = 4 * 2 * 32  # scores and mixture: 2 x 2 per layer and hidden unit


@pytest.mark.parametrize("tied", [False, True])
def test_flop_count_by_hand(save_model, tied):
    count = FlopCount.of(load_model(save_model("llama", tie_word_embeddings=tied)))
    assert count == FlopCount(WEIGHTS, PER_POSITION)
    # Three tokens that attend to 1, 2 and 3 positions.
    assert count.forward(3, 6) == 2 * WEIGHTS * 3 + PER_POSITION * 6


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe", "gpt2"])
def test_flop_count_is_what_torch_counts(save_model, architecture):
    folder, n = save_model(architecture, tie_word_embeddings=True), 11
    eager: Any = {"attn_implementation": "eager"}
    if architecture == "qwen3_moe":
        eager["experts_implementation"] = "eager"  # torch does not count what is fused
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **eager)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(n)[None], use_cache=False)
    # Eager attention computes the masked half as well: n positions for each of n tokens.
    assert counter.get_total_flops() == FlopCount.of(model).forward(n, n * n)


@pytest.fixture
def sampled(llama_folder, make_generator, uneven_prompts):
    generator = make_generator(llama_folder, rows=3)
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 4)
    return generator, generator.collect(6)


def cost(lengths_N):
    """Every token but the last is read, and attends to itself and all before it."""
    read_N = np.array(lengths_N) - 1
    return float(2 * WEIGHTS * read_N.sum() + PER_POSITION * (read_N * (read_N + 1) // 2).sum())


def test_a_generator_counts_each_completion_once(llama_folder, make_generator, uneven_prompts):
    generator = make_generator(llama_folder, rows=3)
    for epoch in range(4):
        for prompt in uneven_prompts:
            generator.submit(prompt, epoch, 1)
    rollouts = [rollout for group in generator.collect(24) for rollout in group]
    assert generator.counters.flops == cost([len(r.prompt_T) + len(r.token_T) for r in rollouts])
    assert generator.counters.tokens == sum(r.length for r in rollouts)


def test_a_prompt_that_a_group_shares_counts_once(llama_folder, make_generator, uneven_prompts):
    generator = make_generator(llama_folder, rows=24)  # all start together
    for prompt in uneven_prompts:
        generator.submit(prompt, 0, 4)
    groups = generator.collect(6)
    lengths = [len(r.prompt_T) + len(r.token_T) for group in groups for r in group]
    spared = [len(group[0].prompt_T) + 1 for group in groups for _ in range(3)]  # `cost` takes one off
    assert generator.counters.flops == cost(lengths) - cost(spared)


def test_a_learner_counts_forward_and_backward(sampled, llama_folder):
    rewards = [[Reward(float(r.token_T.sum() % 2), True) for r in rollouts] for rollouts in sampled[1]]
    batch = make_batch(list(map(Group.of, sampled[1], rewards)), BatchStd(), PromptAverage(), 100)
    assert len(batch) > 4  # several micro-batches
    recipe = learner_recipe(batch=BatchSize(micro=4))
    stats = Learner(load_model(llama_folder), recipe).step(batch)
    expected = 0.0
    for group in set(batch.group_N.tolist()):
        prompt, length_G = batch.prompt_N[batch.group_N == group][0], batch.length_N[batch.group_N == group]
        expected += cost([prompt + 1])  # all of it is read, and once for its group
        expected += sum(cost([length]) - cost([prompt + 1]) for length in length_G)
    assert stats.flops == 3 * expected
    learner = Learner(load_model(llama_folder), replace(recipe, kl=Kl(0.1)), load_model(llama_folder))
    assert learner.step(batch).flops == 4 * expected  # and one pass of the base model
