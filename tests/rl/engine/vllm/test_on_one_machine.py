"""Runs of the placement `local` with vLLM: nothing of them needs Ray."""

import sys
from dataclasses import replace

import pytest
from cluster_runs import check_record
from faulty_server import KEY

from scalerl.errors import InputError
from scalerl.rl.config.engine import Vllm
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import Local
from scalerl.rl.train import train

SMALL = [
    *("task.k_max=2", "task.heldout_per_length=4", "context.prompt=6", "decode_slots=8", "schedule.k=2"),
    *("batch.prompts=2", "batch.samples=4", "evaluation.samples=2", "budget.kind=steps", "samples.every=0"),
    *("curriculum.kind=uniform", "zero_variance=keep", "checkpoint.steps=1", "evaluation.count=2"),
]


def recipe_of(engine, *more):
    return replace(load_recipe("demo", [*SMALL, *more]), placement=Local(), engine=engine)


def test_a_run_is_generated_and_evaluated_by_servers_and_resumed(peer, llama_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALERL_VLLM_API_KEY", KEY)
    monkeypatch.setitem(sys.modules, "ray", None)
    engine, folder = Vllm(urls=(peer.url,), tensor_parallel=4, weights_folder=str(tmp_path)), tmp_path / "run"
    recipe = recipe_of(engine, "budget.amount=2")
    train(recipe, folder, llama_folder, until=1)
    # What only says where and how it generates may change.
    again = replace(recipe, engine=replace(engine, answer_seconds=60.0))
    train(again, folder, llama_folder, resume=True)
    record = check_record(folder, 2)
    assert [(point.step, point.version) for point in record.evals] == [(0, 0), (1, 1), (2, 2)]
    assert record.config["placement"] == "local"
    assert record.config["devices"]["held"] == {"generate": 4, "train": 1, "evaluate": 4}
    assert record.config["recipe"]["engine"]["answer_seconds"] == 60.0
    assert peer.loaded
    with pytest.raises(InputError, match=r'has engine\.kind = "vllm", and this recipe "auto"'):
        train(replace(recipe, engine=load_recipe("demo").engine), folder, llama_folder, resume=True)


def test_without_vllm_a_run_is_refused_before_anything_is_written(llama_folder, tmp_path):
    recipe = recipe_of(Vllm(python="/nowhere/bin/python"), "budget.amount=2")
    with pytest.raises(InputError, match="no vLLM: /nowhere/bin/python"):
        train(recipe, tmp_path / "run", llama_folder)
    assert not (tmp_path / "run").exists()
