from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import learner_work
import numpy as np
import pytest
import torch
from greedy_loss import Greedy, allocate
from learner_ranks import Ranks
from safetensors.numpy import load_file
from weight_arrays import arrays

from scalerl.errors import OutOfMemoryError
from scalerl.rl.algo.loss import Decoupled, Gspo, Kl
from scalerl.rl.checkpoint.store import save_model
from scalerl.rl.config.settings import BatchSize, LearnerSettings, Lora
from scalerl.rl.learner.load import load_learner
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.weights import weights_of


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
        if logp is not None:
            assert torch.allclose(logp, logp_before, rtol=tolerance, atol=tolerance), i


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_twenty_steps_are_those_of_one_process(ranks, fsdp_recipe, sampled_batches, n_ranks, attention):
    batches = sampled_batches(fsdp_recipe.model, 5) * 4
    expected = plain(fsdp_recipe, batches)
    recipe = replace(fsdp_recipe, learner=LearnerSettings(attention=attention, chunk=50))
    results = ranks(n_ranks, learner_work.train, recipe, batches)
    for found, _ in results:
        assert_equal(found, expected)
    assert (expected[0][1] - expected[15][1]).abs().max() > 0.01  # the same batch, 15 steps later


ALONE = LearnerSettings(attention="varlen")
SHARED = LearnerSettings(tensor_parallel=2)


@pytest.mark.parametrize(
    ("n_before", "before", "n_after", "after"),
    [
        (2, ALONE, 1, ALONE),
        pytest.param(2, ALONE, 3, ALONE, marks=pytest.mark.slow),
        pytest.param(4, SHARED, 1, ALONE, id="products shared in two rows, then one rank"),
        pytest.param(1, ALONE, 2, SHARED, id="one rank, then products shared"),
    ],
)
def test_what_some_ranks_saved_goes_on_with_any_number(
    ranks, fsdp_recipe, sampled_batches, tmp_path, n_before, before, n_after, after
):
    batches = sampled_batches(fsdp_recipe.model, 4)
    folder = tmp_path / "saved"
    first, second = (replace(fsdp_recipe, learner=settings) for settings in (before, after))
    saved = ranks(n_before, learner_work.train_and_save, first, batches, folder)
    loaded = ranks(n_after, learner_work.load_and_train, second, batches[-1], folder)
    for stats, logp, version in loaded:
        assert version == 4
        assert_equal([(stats, logp)], [saved[0]])


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("llama", ALONE), ("gemma", ALONE), ("qwen3_moe", ALONE), ("llama", SHARED)],
    ids=["llama", "gemma", "qwen3_moe", "products shared"],
)
def test_the_saved_model_is_the_trained_one(
    ranks, fsdp_recipe, save_model, sampled_batches, tmp_path, architecture, settings
):
    """Gemma's embeddings are tied; the experts of a mixture lie in one tensor here and in many on disk."""
    recipe = replace(fsdp_recipe, model=save_model(architecture), learner=settings)
    batches, folder = sampled_batches(recipe.model, 2), tmp_path / "hf"
    weights, _ = ranks(2, learner_work.save_hf, recipe, batches, folder)
    saved = arrays(weights_of(load_model(tmp_path / "hf")))
    assert saved.keys() == weights.keys()
    for name, weight in saved.items():
        assert np.array_equal(weight, weights[name]), name
    assert keys_on_disk(tmp_path / "hf") == keys_on_disk(recipe.model)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_sharded_adapter_is_saved_as_that_of_one_process(
    ranks, fsdp_recipe, sampled_batches, tmp_path, precision
):
    recipe = replace(fsdp_recipe, lora=Lora(rank=2, targets=("q_proj", "down_proj")), precision=precision)
    alone = load_learner(recipe, recipe.model)
    save_model(alone.saver(tmp_path), load_tokenizer(recipe.model), tmp_path / "alone")
    ranks(2, learner_work.save_hf, recipe, [], tmp_path / "hf")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        found, expected = ((tmp_path / of / "adapter" / name).read_bytes() for of in ("hf", "alone"))
        assert len(found) > 500
        assert found == expected, name


def keys_on_disk(folder):
    files = Path(folder).glob("*.safetensors")
    return {name for file in files for name in load_file(file)}


CASES: dict[str, Any] = {
    "qwen3": ({"model": "qwen3"}, {}),
    "tied": ({"model": "gemma"}, {}),
    "mixture": ({"model": "qwen3_moe"}, {}),
    "mixtral": ({"model": "mixtral"}, {}),
    "packed, with positions of its own": ({"model": "opt"}, {"attention": "varlen"}),
    "packed": ({"model": "qwen3"}, {"attention": "varlen"}),
    "learned positions": ({"model": "gpt2"}, {}),
    "activation checkpointing": ({}, {"activation_checkpointing": True, "attention": "varlen"}),
    "moments on the CPU": ({}, {"offload_optimiser": True}),
    "reduced once a step": ({}, {"reduce": "step"}),
    "passes by tokens": ({"batch": BatchSize(micro_tokens=60)}, {}),
    "packed passes by tokens": ({"batch": BatchSize(micro_tokens=60)}, {"attention": "varlen"}),
    "adapters": ({"lora": Lora(rank=2)}, {}),
    "divergence from the base model": ({"kl": Kl(coefficient=0.1)}, {}),
    "products shared": ({}, {"tensor_parallel": 2}),
    "products shared in two rows": ({}, {"tensor_parallel": 2}),
    "products shared, norms of heads": ({"model": "qwen3"}, {"tensor_parallel": 2}),
    "whole-completion ratios": ({"loss": Gspo()}, {}),
    "a proximal policy": ({"loss": Decoupled(updates=3), "batch": BatchSize(micro_tokens=60)}, {}),
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
    first = arrays(load_learner(recipe, recipe.model).weights())
    on_ranks = replace(recipe, learner=LearnerSettings(**settings))
    for found, weights in ranks(n_ranks, learner_work.train, on_ranks, batches):
        assert_equal(found, expected)
        assert weights.keys() == first.keys()
        for name, weight in weights.items():
            assert np.array_equal(weight, first[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_ranks_equal_one_process(ranks, fsdp_recipe, sampled_batches, tmp_path, checkpointed):
    batches = sampled_batches(fsdp_recipe.model, 1) * 3
    recipe = replace(fsdp_recipe, batch=BatchSize(micro=64))  # one shape, as each takes half a minute
    expected = plain(recipe, batches)
    settings = LearnerSettings(compile=True, activation_checkpointing=checkpointed)
    recipe = replace(recipe, learner=settings)
    for found, weights in ranks(2, learner_work.train, recipe, batches):
        assert_equal(found, expected, 1e-5)
        assert weights.keys() == arrays(load_learner(fsdp_recipe, fsdp_recipe.model).weights()).keys()
    ranks(2, learner_work.save_hf, recipe, batches[:1], tmp_path / "hf")
    assert keys_on_disk(tmp_path / "hf") == keys_on_disk(recipe.model)


def some_rows(batch, rows):
    arrays = {name: getattr(batch, name)[rows] for name in vars(batch) if name[-2:] in ("_N", "NT")}
    return replace(batch, **arrays)


@pytest.mark.parametrize("n_rows", [0, 1, 2])
def test_batches_of_fewer_rows_than_ranks(ranks, fsdp_recipe, sampled_batches, n_rows):
    """In the middle of others, as the ranks that have nothing must stay in step."""
    one, two = sampled_batches(fsdp_recipe.model, 2)
    batches = [one, some_rows(two, slice(n_rows)), one]
    learner = load_learner(fsdp_recipe, fsdp_recipe.model)
    expected = [(learner.step(batch), None) for batch in batches]
    for found in ranks(3, learner_work.steps, fsdp_recipe, batches):
        assert_equal([(stats, None) for stats in found], expected)


def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks(ranks, fsdp_recipe, sampled_batches):
    batch = sampled_batches(fsdp_recipe.model, 1)[0]
    advantage_N = batch.advantage_N.copy()
    advantage_N[0] = np.nan  # of one rank alone
    broken = replace(batch, advantage_N=advantage_N)
    for error in ranks(2, learner_work.steps, fsdp_recipe, [batch, broken], allow_failure=True):
        assert "DivergedError: step 2: the gradient is not finite" in error


def test_a_low_precision_is_that_of_one_process(ranks, fsdp_recipe, save_model, sampled_batches):
    """Weights in bfloat16 that a small rate moves by way of their masters, and a head in float32."""
    model = save_model("llama", dtype=torch.bfloat16, initializer_range=0.1)
    recipe = replace(fsdp_recipe, model=model, precision="bfloat16")
    batches = sampled_batches(model, 4)
    expected = plain(recipe, batches)
    for found, weights in ranks(2, learner_work.train, recipe, batches):
        for (stats, logp), (stats_before, logp_before) in zip(found, expected, strict=True):
            assert stats.loss == pytest.approx(stats_before.loss, abs=5e-3)
            assert stats.grad_norm == pytest.approx(stats_before.grad_norm, rel=2e-2)
            assert (logp - logp_before).abs().mean() < 5e-3
        for name, weight in arrays(load_learner(recipe, model).weights()).items():
            assert np.array_equal(weights[name], weight), name


def test_a_run_of_one_process_goes_on_with_two(ranks, fsdp_recipe, sampled_batches, tmp_path):
    batches, folder = sampled_batches(fsdp_recipe.model, 3), tmp_path / "saved"
    learner = load_learner(fsdp_recipe, fsdp_recipe.model)
    for batch in batches[:-1]:
        learner.step(batch)
    folder.mkdir()
    learner.saver(folder)(folder)
    expected = learner.step(batches[-1]), learner_work.log_probs(learner, batches[-1])
    for found in ranks(2, learner_work.restore_and_train, fsdp_recipe, batches[-1], folder):
        assert_equal([found], [expected])


def test_a_run_of_two_processes_goes_on_with_one(ranks, fsdp_recipe, sampled_batches, tmp_path):
    batches, folder = sampled_batches(fsdp_recipe.model, 3), tmp_path / "saved"
    expected, _ = ranks(2, learner_work.train_and_save, fsdp_recipe, batches, folder)
    learner = load_learner(fsdp_recipe, fsdp_recipe.model)
    learner.restore(folder)
    assert learner.version == len(batches) - 1
    assert_equal([(learner.step(batches[-1]), learner_work.log_probs(learner, batches[-1]))], [expected])


def test_tokens_are_scored_by_the_weights_that_were_held(ranks, fsdp_recipe, sampled_batches):
    batches = sampled_batches(fsdp_recipe.model, 2)
    expected = learner_work.held_scores(load_learner(fsdp_recipe, fsdp_recipe.model), batches)
    for found in ranks(2, learner_work.hold_and_train, fsdp_recipe, batches):
        for tensor, other in zip(found, expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)


def test_a_model_that_cannot_be_loaded_is_told_on_all_ranks(ranks, fsdp_recipe, tmp_path):
    recipe = replace(fsdp_recipe, model=str(tmp_path))
    for error in ranks(2, learner_work.train, recipe, [], allow_failure=True):
        assert f"InputError: model {tmp_path} cannot be loaded" in error


def test_half_a_checkpoint_is_none(ranks, fsdp_recipe, sampled_batches, tmp_path):
    batches, folder = sampled_batches(fsdp_recipe.model, 2), tmp_path / "saved"
    ranks(2, learner_work.train_and_save, fsdp_recipe, batches, folder)
    (folder / learner_work.DISK / ".metadata").unlink()
    for error in ranks(2, learner_work.load_and_train, fsdp_recipe, batches[0], folder, allow_failure=True):
        assert "no whole checkpoint" in error


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_rank_that_is_lost_is_told_and_not_waited_for(tmp_path, fsdp_recipe, sampled_batches, how):
    ranks = Ranks(tmp_path, timeout=4.0)
    batch = sampled_batches(fsdp_recipe.model, 1)[0]
    recipe = replace(fsdp_recipe, learner=replace(fsdp_recipe.learner, timeout=4.0))
    first, _ = ranks(2, learner_work.lose_one, recipe, batch, how, allow_failure=True)
    assert "WorkerError: learner: another of its processes has ended, or was silent for 4 s" in first


def test_a_rank_that_runs_out_says_so_and_ends_the_others(tmp_path, fsdp_recipe, sampled_batches):
    recipe = replace(fsdp_recipe, loss=Greedy(), batch=BatchSize(prompts=2, samples=4, micro=3))
    batches = sampled_batches(recipe.model, 2)
    ranks = Ranks(tmp_path, timeout=20.0)
    other, full = ranks(2, learner_work.run_out_on_rank_1, recipe, batches, allow_failure=True)
    assert "OutOfMemoryError: trainer: out of memory (an allocation of 1,048,576.0 GiB failed)" in full
    assert "WorkerError: learner: another of its processes has ended" in other


def test_a_step_of_the_optimiser_that_does_not_end_is_torn(fsdp_recipe, sampled_batches, monkeypatch):
    learner, (batch,) = load_learner(fsdp_recipe, fsdp_recipe.model), sampled_batches(fsdp_recipe.model, 1)
    monkeypatch.setattr(learner._optimiser, "step", lambda lr: allocate())
    with pytest.raises(OutOfMemoryError) as caught:
        learner.step(batch)
    assert caught.value.torn
    assert learner.version == 0
