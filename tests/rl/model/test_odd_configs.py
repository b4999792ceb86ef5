"""Models whose config.json is odd: loaded and sampled from, or refused in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hostile_logs import alarm
from hypothesis import given, settings
from odd_configs import mutated

from scalerl.errors import InputError
from scalerl.rl.engine.build import load_generator
from scalerl.rl.learner.load import load_learner
from scalerl.rl.model.causal_lm import empty_model, load_model

LLAMA = {
    **{
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "head_dim": 8,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96, "vocab_size": 20},
    **{"rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "float32", "tie_word_embeddings": False},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_bias": False},
    **{"eos_token_id": 1, "architectures": ["LlamaForCausalLM"], "layer_types": None, "sliding_window": None},
}


def use(recipe, folder):
    """All that a run does with a model before it trains, each of which may be refused in a line."""
    recipe = replace(recipe, model=str(folder))
    for step in (
        lambda: empty_model(folder, torch.float32),
        lambda: load_learner(recipe, folder),
        lambda: load_generator(recipe, folder, 0, 4),
    ):
        refusal = "none"
        with alarm(60):
            try:
                step()
            except InputError as error:
                refusal = str(error)
        assert "\n" not in refusal
        assert refusal


def with_config(llama_folder, place, text):
    if not place.exists():
        shutil.copytree(llama_folder, place)
    (place / "config.json").write_text(text)
    return place


@settings(max_examples=8)
@given(text=mutated(LLAMA))
def test_an_odd_config_is_a_model_or_a_line(tiny_recipe, llama_folder, tmp_path, text):
    use(tiny_recipe, with_config(llama_folder, tmp_path / "model", text))


@pytest.mark.slow
@settings(max_examples=200)
@given(text=mutated(LLAMA))
def test_many_odd_configs(tiny_recipe, llama_folder, tmp_path, text):
    use(tiny_recipe, with_config(llama_folder, tmp_path / "model", text))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**300}, "num_hidden_layers is 1000"),
        ({"hidden_size": "x"}, "hidden_size is 'x': expected a whole number"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads is \[2\]"),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"head_dim": -3}, "head_dim is -3"),
        ({"rope_parameters": "x"}, "cannot be loaded"),
        ({"num_hidden_layers": 5}, r"its files lack 27 tensors of its config\.json, as model\.layers\.2\."),
    ],
)
def test_what_is_wrong_is_named(llama_folder, tmp_path, change, said):
    config = json.loads((Path(llama_folder) / "config.json").read_text())
    with pytest.raises(InputError, match=said):
        load_model(with_config(llama_folder, tmp_path / "model", json.dumps(config | change)))
