import json
import resource
import shutil
from dataclasses import replace

import pytest
import torch

from scalerl.errors import InputError, WriteError
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.model.causal_lm import load_model, load_tokenizer
from scalerl.rl.model.demo_base import BaseModel, build_base
from scalerl.rl.model.named import find_model
from scalerl.rl.tasks.chain import VOCABULARY, Chain, Demonstrations

SPEC = BaseModel(
    Demonstrations(Chain(k_max=2, heldout_per_length=10, train_per_length=10), 6),
    hidden_size=32,
    max_careful_steps=60,
    imperfect_steps=10,
)


def test_the_base_model_is_built_once_and_is_a_function_of_its_spec(tmp_path):
    seen = []
    folder = build_base(SPEC, tmp_path / "one", seen.append)
    assert seen[0].text.startswith("step 0 ")
    first, last = (float(progress.text.split()[-1]) for progress in (seen[0], seen[-1]))
    assert last < first - 0.5  # nats per token
    assert [progress.milestone for progress in seen] == [True, False, False, False]
    cost = json.loads((folder / "base.json").read_text())
    assert cost["steps"] == 70
    assert cost["seconds"] > 0
    calls = len(seen)
    assert build_base(SPEC, tmp_path / "one", seen.append) == folder
    assert len(seen) == calls  # found, not trained
    again = build_base(SPEC, tmp_path / "two")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert [p.name for p in (tmp_path / "one").iterdir()] == [folder.name]  # nothing is left aside
    assert replace(SPEC, seed=1).fingerprint != SPEC.fingerprint
    assert (
        replace(SPEC, demonstrations=replace(SPEC.demonstrations, slip=0.04)).fingerprint != SPEC.fingerprint
    )


def test_the_base_model_ends_its_completions(tmp_path):
    folder = build_base(SPEC, tmp_path)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = tokenizer("+ 7 </think> 7", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        p_V = model(input_ids=ids).logits[0, -1].softmax(-1)
    assert p_V[VOCABULARY.index("<eos>")] > 0.5


def test_a_base_model_that_another_process_has_made_meanwhile_is_taken(tmp_path):
    spec = replace(SPEC, max_careful_steps=1, imperfect_steps=1)
    other = build_base(spec, tmp_path / "other")
    here = tmp_path / "here" / other.name
    assert build_base(spec, here.parent, lambda _: shutil.copytree(other, here, dirs_exist_ok=True)) == here
    assert list(here.parent.iterdir()) == [here]


def test_a_disk_without_room_for_the_base_model_is_one_error_and_leaves_nothing(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # bytes; the weights take more
    try:
        with pytest.raises(WriteError, match="the model could not be saved"):
            build_base(replace(SPEC, max_careful_steps=1, imperfect_steps=1), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["/nowhere/models/base", "./base", "nowhere/models/base"])
def test_a_folder_that_is_not_there_is_no_name_on_the_hub(name):
    with pytest.raises(InputError, match=f"model: no folder {name}$"):
        find_model(replace(load_recipe("demo"), model=name))
