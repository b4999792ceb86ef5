"""The cost of a model whose config.json is odd: a number, or one line."""

import json
import math

import pytest
from hostile_logs import alarm
from hypothesis import example, given, settings
from odd_configs import DEEP, mutated

from scalerl import InputError
from scalerl.cli.main import main
from scalerl.ingest.flops import model_cost

CONFIG = {
    **{"model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0]},
    **{"decoder_sparse_step": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": None},
    **{"shared_expert_intermediate_size": 96, "n_inner": None, "_name_or_path": "mine"},
    "layer_types": ["full_attention"] * 3,
}


def cost_of(folder, text):
    """Of a folder with this config.json, held to what it must be; None where it is refused."""
    (folder / "config.json").write_text(text)
    refusal, cost = "", None
    with alarm(30):
        try:
            cost = model_cost(folder)
        except InputError as error:
            refusal = str(error)
    if cost is None:
        assert "\n" not in refusal
        assert str(folder / "config.json") in refusal
        assert len(refusal) < 500
        return None
    flops = cost.forward(1e15, 1e6)
    assert math.isfinite(flops)
    assert flops > 0
    assert isinstance(cost.model, str)
    return cost


@settings(max_examples=300)
@example(text='{"hidden_size": 8}')
@example(text=DEEP[0])
@given(text=mutated(CONFIG))
def test_an_odd_config_is_a_cost_or_a_line(tmp_path, text):
    cost_of(tmp_path, text)


def test_a_sound_config_is_a_cost(tmp_path):
    assert cost_of(tmp_path, json.dumps(CONFIG)) is not None


@pytest.mark.parametrize(
    "text", ['{"hidden_size": 1e300}', '{"num_hidden_layers": 1%s}' % ("0" * 300), DEEP[1]]
)
def test_a_log_with_an_odd_model_is_refused_in_a_line(tmp_path, text, capsys):
    log, model = tmp_path / "log.jsonl", tmp_path / "config.json"
    log.write_text('{"step": 1, "eval_reward": 0.5}\n{"step": 2, "eval_reward": 0.6}\n')
    model.write_text(text)
    words = ["ingest", str(log), "-o", str(tmp_path / "run"), "--model", str(model)]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(model) in err
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_config_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match="larger than 4 MiB"):
        model_cost(tmp_path)
