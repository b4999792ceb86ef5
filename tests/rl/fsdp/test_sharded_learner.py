from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import learner_work
from scalerl.rl.fsdp.settings import Fsdp2
from scalerl.rl.lora import Lora
from scalerl.rl.loss import Gspo, Kl
from scalerl.rl.model import copy_weights, load_model
from scalerl.rl.setup import load_learner


def plain(recipe, batches):
    """The same by the learner of one process."""
    learner = load_learner(recipe, recipe.model)
    return [(learner.step(batch), learner_work.log_probs(learner, batch)) for batch in batches]


def assert_equal(found, expected, tolerance=1e-6):
    """Loss and log-probabilities of every step to the tolerance, the other stats to ten times that."""
    for i, ((stats, logp), (stats_before, logp_before)) in enumerate(zip(found, expected, strict=True)):
        for name, value in asdict(stats).items():
            other, most = asdict(stats_before)[name], tolerance * (1 if name == "loss" else 10)
            assert value == pytest.approx(other, rel=most, abs=most, nan_ok=True), (i, name)
        assert torch.allclose(logp, logp_before, rtol=tolerance, atol=tolerance), i


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_twenty_steps_are_those_of_one_process(ranks, fsdp_recipe, sampled_batches, n_ranks, packed):
    batches = sampled_batches(fsdp_recipe.model, 5) * 4
    expected = plain(fsdp_recipe, batches)
    results = ranks(n_ranks, learner_work.train, fsdp_recipe, batches, Fsdp2(packed=packed, chunk=50))
    for found, _ in results:
        assert_equal(found, expected)
    assert (expected[0][1] - expected[15][1]).abs().max() > 0.01  # the same batch, 15 steps later


@pytest.mark.parametrize("n_after", [1, 3])
def test_what_two_ranks_saved_goes_on_with_any_number(ranks, fsdp_recipe, sampled_batches, tmp_path, n_after):
    batches = sampled_batches(fsdp_recipe.model, 4)
    folder = tmp_path / "saved"
    before = ranks(2, learner_work.train_and_save, fsdp_recipe, batches, folder)
    after = ranks(n_after, learner_work.load_and_train, fsdp_recipe, batches[-1], folder)
    for stats, logp, version in after:
        assert version == 4
        assert_equal([(stats, logp)], [before[0]])


@pytest.mark.parametrize("architecture", ["llama", "gemma", "qwen3_moe"])
def test_the_saved_model_is_the_trained_one(
    ranks, fsdp_recipe, save_model, sampled_batches, tmp_path, architecture
):
    """Gemma's embeddings are tied; the experts of a mixture lie in one tensor here and in many on disk."""
    recipe = replace(fsdp_recipe, model=save_model(architecture))
    weights, _ = ranks(2, learner_work.save_hf, recipe, sampled_batches(recipe.model, 2), tmp_path / "hf")
    saved = copy_weights(load_model(tmp_path / "hf"))
    assert saved.keys() == weights.keys()
    for name, weight in saved.items():
        assert np.array_equal(weight, weights[name]), name
    assert keys_on_disk(tmp_path / "hf") == keys_on_disk(recipe.model)


def keys_on_disk(folder):
    files = Path(folder).glob("*.safetensors")
    return {name for file in files for name in load_file(file)}


CASES: dict[str, Any] = {
    "qwen3": ({"model": "qwen3"}, {}),
    "tied": ({"model": "gemma"}, {}),
    "mixture": ({"model": "qwen3_moe"}, {}),
    "mixtral": ({"model": "mixtral"}, {"packed": False}),
    "learned positions": ({"model": "gpt2"}, {}),
    "activation checkpointing": ({"activation_checkpointing": True}, {}),
    "reduced after every pass": ({}, {"sync": "pass"}),
    "passes by tokens": ({}, {"micro_tokens": 60}),
    "adapters": ({"lora": Lora(rank=2)}, {}),
    "divergence from the base model": ({"kl": Kl(coefficient=0.1)}, {}),
    "products shared": ({}, {"tensor_parallel": 2}),
    "products shared in two rows": ({}, {"tensor_parallel": 2}),
    "products shared, norms of heads": ({"model": "qwen3"}, {"tensor_parallel": 2}),
    "whole-completion ratios": ({"loss": Gspo()}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process(ranks, fsdp_recipe, save_model, sampled_batches, case):
    changes, settings = CASES[case]
    n_ranks = 4 if "rows" in case else 2
    if "model" in changes:
        changes = {"model": save_model(changes["model"], initializer_range=0.1)}
    recipe = replace(fsdp_recipe, **changes)
    batches = sampled_batches(recipe.model, 4)
    expected = plain(recipe, batches)
    first = load_learner(recipe, recipe.model).weights()
    for found, weights in ranks(n_ranks, learner_work.train, recipe, batches, Fsdp2(**settings)):
        assert_equal(found, expected)
        assert weights.keys() == first.keys()
        for name, weight in weights.items():
            assert np.array_equal(weight, first[name]), name
