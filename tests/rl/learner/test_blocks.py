"""Blocks that torch.compile has compiled: steps, weights and names are those of the model without it."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch._dynamo.utils import counters
from weight_arrays import arrays

from scalerl.errors import InputError
from scalerl.rl.algo.loss import Kl
from scalerl.rl.checkpoint.store import save_model as save
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.settings import BatchSize, LearnerSettings, Lora
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.load import load_learner
from scalerl.rl.learner.sharding import blocks_of, compile_blocks
from scalerl.rl.model.causal_lm import checkpoint_activations, load_model, load_tokenizer

COMPILED = LearnerSettings(compile=True)

# PyTorch hides the first one by itself, where warnings are no errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor", r"ignore:.torch\.jit\.:DeprecationWarning"
)


@pytest.fixture
def recipe(tiny_recipe, save_model):
    """Four completions a pass, of lengths that differ, and a rate at which three steps change the model."""
    return replace(
        tiny_recipe,
        model=save_model("qwen3", initializer_range=0.1),
        batch=replace(tiny_recipe.batch, micro=4),
        # Some gradients are 0 but for rounding, as that of GPT-2's bias of keys.
        optimiser=AdamW(lr=3e-4, warmup_steps=2, eps=1e-6),
    )


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # else it goes on without
        yield
    torch._dynamo.reset()


def assert_equal_steps(learner, expected, batches):
    """Three steps of both: loss, gradient and weights to 1e-5, and something was trained."""
    before = arrays(learner.weights())
    before = {name: weight.copy() for name, weight in before.items()}
    for batch in batches:
        found, other = asdict(learner.step(batch)), asdict(expected.step(batch))
        for name, value in found.items():
            assert value == pytest.approx(other[name], rel=1e-5, abs=1e-5, nan_ok=True), name
    weights, others = arrays(learner.weights()), arrays(expected.weights())
    assert weights.keys() == others.keys() == before.keys()
    for name, weight in weights.items():
        assert np.allclose(weight, others[name], rtol=1e-5, atol=1e-5), name
    assert max(np.abs(weights[name] - before[name]).max() for name in weights) > 1e-4


def test_blocks_that_are_traced_and_checkpointed_make_the_same_steps(recipe, sampled_batches):
    """Without code of inductor, and of one shape, as each takes its time."""
    recipe = replace(recipe, batch=replace(recipe.batch, micro=64))
    model, batches = load_model(recipe.model), sampled_batches(recipe.model, 1) * 3
    names = list(model.state_dict())
    checkpoint_activations(model)
    compile_blocks(model, "aot_eager")
    assert list(model.state_dict()) == names
    learner = Learner(model, replace(recipe, learner=COMPILED))
    assert_equal_steps(learner, load_learner(recipe, recipe.model), batches)
    assert counters["stats"]["unique_graphs"] >= 1


CASES = {
    "packed passes by tokens": ({"batch": BatchSize(micro_tokens=100)}, {"attention": "varlen"}),
    "checkpointed": ({}, {"activation_checkpointing": True}),
    "adapters": ({"lora": Lora(rank=2)}, {}),
    "divergence from the base model": ({"kl": Kl(coefficient=0.1)}, {}),
    "gpt2": ({"model": "gpt2"}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_learner_makes_the_same_steps(recipe, save_model, sampled_batches, tmp_path, case):
    changes, settings = CASES[case]
    if "model" in changes:
        changes = {"model": save_model(changes["model"], initializer_range=0.1)}
    recipe = replace(recipe, **changes)
    compiled = replace(recipe, learner=LearnerSettings(compile=True, **settings))
    learner, batches = load_learner(compiled, recipe.model), sampled_batches(recipe.model, 3)
    assert_equal_steps(learner, load_learner(recipe, recipe.model), batches)
    assert counters["stats"]["unique_graphs"] >= 1
    save(learner.saver(tmp_path), load_tokenizer(recipe.model), tmp_path / "saved")
    keys = [set(load_file(f"{folder}/model.safetensors")) for folder in (recipe.model, tmp_path / "saved")]
    assert keys[0] == keys[1]
    loaded = arrays(load_learner(recipe, tmp_path / "saved").weights())
    for name, weight in arrays(learner.weights()).items():
        assert np.array_equal(loaded[name], weight), name


def test_a_mixture_of_experts_is_refused_in_one_line(recipe, save_model):
    recipe = replace(recipe, model=save_model("qwen3_moe"), learner=COMPILED)
    with pytest.raises(InputError, match=r"learner\.compile: .* is a mixture of experts: leave it false"):
        load_learner(recipe, recipe.model)


def test_a_model_without_blocks_is_refused_by_its_type(llama_folder):
    model = load_model(llama_folder)
    model._no_split_modules = None  # type: ignore[assignment]
    with pytest.raises(InputError, match="a model of type llama can be neither sharded nor compiled"):
        blocks_of(model)
