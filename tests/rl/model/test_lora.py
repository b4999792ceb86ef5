import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import learner_recipe
from weight_arrays import arrays, stream

from scalerl.errors import InputError
from scalerl.rl.checkpoint.store import save_model
from scalerl.rl.config.optimiser import AdamW
from scalerl.rl.config.settings import Lora
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.score import Scorer
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.lora import add_adapters
from scalerl.rl.model.weights import load_weights, weights_of

TOKEN_MT = torch.arange(12)[None] + 3
WANTED_MT = torch.ones(1, 11, dtype=torch.bool)


@pytest.fixture
def learner(llama_folder):
    model = add_adapters(load_model(llama_folder), Lora(rank=4, alpha=8), 0)
    return Learner(model, learner_recipe(optimiser=AdamW(lr=1e-2, warmup_steps=0)))


def train(learner):
    """A few steps that raise the probability of one completion."""
    for _ in range(3):
        logp_MT, _ = learner.score(TOKEN_MT.numpy(), WANTED_MT.numpy())
        (-logp_MT.sum()).backward()
        learner._optimiser.adamw.step()
        learner._optimiser.adamw.zero_grad()


def test_only_the_adapters_are_trained_and_they_begin_as_nothing(learner, llama_folder):
    trained = {n for n, p in learner.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    plain = load_model(llama_folder)
    assert sum(p.numel() for p in learner._masters) < 0.5 * sum(p.numel() for p in plain.parameters())
    for name, weight in weights_of(plain):
        np.testing.assert_array_equal(weight, arrays(learner.weights())[name])


def test_what_is_published_is_a_plain_model_that_computes_the_same(learner, llama_folder):
    before = stream(arrays(learner.weights()))
    train(learner)
    plain = load_model(llama_folder)
    assert {name for name, _ in learner.weights()} == {name for name, _ in plain.named_parameters()}
    load_weights(plain, learner.weights())
    expected, _ = learner.score(TOKEN_MT.numpy(), WANTED_MT.numpy())
    found, _ = Scorer(plain, 1.0, True)(TOKEN_MT.numpy(), WANTED_MT.numpy())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    load_weights(plain, before)
    unchanged, _ = Scorer(plain, 1.0, True)(TOKEN_MT.numpy(), WANTED_MT.numpy())
    assert (unchanged - expected).abs().max() > 1e-2


def test_a_checkpoint_is_a_plain_model(learner, tmp_path, llama_folder):
    train(learner)
    tokenizer = load_tokenizer(llama_folder)
    save_model(learner.saver(tmp_path), tokenizer, tmp_path / "final")
    saved = arrays(weights_of(load_model(tmp_path / "final")))
    for name, weight in arrays(learner.weights()).items():
        np.testing.assert_array_equal(saved[name], weight)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # read by peft
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "mlp.up_proj")], ids=str)
def test_peft_loads_the_adapter_of_a_checkpoint_onto_the_base_model(llama_folder, tmp_path, targets):
    from peft import PeftModel

    adapted = add_adapters(load_model(llama_folder), Lora(rank=4, alpha=8, targets=targets), 0)
    learner = Learner(adapted, learner_recipe(optimiser=AdamW(lr=1e-2, warmup_steps=0)))
    train(learner)
    save_model(learner.saver(tmp_path), load_tokenizer(llama_folder), tmp_path / "final")
    config = json.loads((tmp_path / "final" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(llama_folder)
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == (names if targets == ("all-linear",) else ["q_proj", "up_proj"])
    base = load_model(llama_folder).eval()
    plain = base(input_ids=TOKEN_MT).logits
    theirs = PeftModel.from_pretrained(base, tmp_path / "final" / "adapter")(input_ids=TOKEN_MT).logits
    torch.testing.assert_close(theirs, adapted(input_ids=TOKEN_MT).logits, atol=0, rtol=0)
    # The model beside it has the adapter merged, and must not be given it once more.
    merged = load_model(tmp_path / "final")(input_ids=TOKEN_MT).logits
    torch.testing.assert_close(merged, theirs, atol=1e-5, rtol=1e-5)
    assert (plain - theirs).abs().max() > 1e-2


def test_adapters_are_on_the_layers_that_targets_names(llama_folder):
    def adapted(*targets):
        model = add_adapters(load_model(llama_folder), Lora(rank=2, targets=targets), 0)
        return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}

    n_layers = json.loads(Path(llama_folder, "config.json").read_text())["num_hidden_layers"]
    layers = [f"model.layers.{i}" for i in range(n_layers)]
    assert adapted("q_proj", "v_proj") == {f"{at}.self_attn.{n}_proj" for at in layers for n in "qv"}
    assert adapted("layers.1.mlp.up_proj") == {"model.layers.1.mlp.up_proj"}
    assert adapted("all-linear", "q_proj") == adapted("all-linear")
    assert len(adapted("all-linear")) == 7 * len(layers)
    for wrong in ("qproj", "proj", "lm_head", "embed_tokens", "input_layernorm"):
        with pytest.raises(InputError, match=f"lora.targets: no linear layer '{wrong}'.*down_proj, gate"):
            adapted(wrong)
    with pytest.raises(ValueError, match="targets must name layers"):
        Lora(targets=())


@pytest.mark.parametrize(("rank", "alpha"), [(4, 8), (4, 32), (8, 32)])
def test_an_adapter_adds_alpha_over_rank_of_its_product(llama_folder, rank, alpha):
    model = add_adapters(load_model(llama_folder), Lora(rank=rank, alpha=alpha), 0)
    adapters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in adapters.items():
            if ".lora_B." in name:
                parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(1))
    plain = arrays(weights_of(load_model(llama_folder)))
    merged = arrays(Learner(model, learner_recipe()).weights())
    name = "model.layers.0.self_attn.q_proj"
    A, B = (adapters[f"{name}.lora_{part}.default.weight"].detach().numpy() for part in "AB")
    expected = plain[f"{name}.weight"] + alpha / rank * B @ A
    np.testing.assert_allclose(merged[f"{name}.weight"], expected, atol=1e-5)
    assert np.abs(expected - plain[f"{name}.weight"]).max() > 0.1
