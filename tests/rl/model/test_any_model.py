"""Models of many families through whole runs: the trainer computes what was sampled, and trains it."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from weight_arrays import arrays

from scalerl.curve import Points
from scalerl.errors import InputError
from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.settings import BatchSize, Evaluation, Steps
from scalerl.rl.model.causal_lm import load_model
from scalerl.rl.model.weights import weights_of
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.verifiers import Function
from scalerl.rl.train import train
from scalerl.rl.types import Limits

JUDGE = """
import zlib

def by_parity(prompt, text):
    return zlib.crc32(text.encode()) % 2 == 1

def torn(prompt, text):
    if prompt.text.startswith("9"):
        raise KeyError("too large")
    return by_parity(prompt, text)
"""


@pytest.fixture
def make_recipe(tiny_recipe, jsonl, tmp_path):
    """A function that makes the recipe of three on-policy steps of a model, with a verifier of one's own."""
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = [{"prompt": f"{x} + {y} =", "answer": "0"} for x in range(10) for y in range(1, 4)]

    def make(model, judge="by_parity"):
        task = Dataset(
            jsonl(rows),
            heldout=10,
            chat_template=False,
            verifier=Function(f"{tmp_path / 'judge.py'}:{judge}"),
            limits=Limits(workers=1),
        )
        return replace(
            tiny_recipe,
            model=str(model),
            task=task,
            schedule=PipelineRL(k=0),
            curriculum=Uniform(),
            budget=Steps(3),
            temperature=1.5,  # so that completions of every family come to an end
            batch=BatchSize(prompts=4, samples=8, micro=16),
            evaluation=Evaluation(count=1, samples=8),
        )

    return make


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "qwen3_moe", "mixtral", "gemma", "gpt2", "gpt_neox", "opt"]
)
def test_three_steps_of_any_family(family, save_model, make_recipe, tmp_path):
    folder = save_model(family)
    record = train(make_recipe(folder), tmp_path / "run", folder, evaluate_aside=False)
    steps = record.steps()
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert not row["skipped"]
        assert row["staleness_max"] == 0
        # On-policy every ratio is one: the log-probabilities of generator and trainer are the same.
        assert row["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert row["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert [point.step for point in record.evals] == [0, 3]
    assert record.evals[-1].failed == 0
    before = arrays(weights_of(load_model(folder)))
    after = arrays(weights_of(load_model(record.path / "checkpoints" / "final")))
    assert before.keys() == after.keys()
    assert max(float(np.abs(after[name] - before[name]).max()) for name in before) > 1e-4


@pytest.mark.parametrize("family", ["granite", "cohere"])
def test_a_model_that_scales_its_logits_is_refused_before_anything_is_written(
    family, save_model, make_recipe, tmp_path
):
    folder = save_model(family)
    with pytest.raises(InputError, match=r"sampled wrongly.*scaled or capped") as caught:
        train(make_recipe(folder), tmp_path / "run", folder, evaluate_aside=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_with_a_noisy_router_is_refused(save_model, make_recipe, tmp_path):
    folder = save_model("mixtral", router_jitter_noise=0.1)
    with pytest.raises(InputError, match="something else while it is trained"):
        train(make_recipe(folder), tmp_path / "run", folder, evaluate_aside=False)


def test_a_model_of_16_bits_passes_the_probe_at_any_temperature(save_model, make_recipe, tmp_path):
    folder = save_model("qwen3", dtype=torch.bfloat16)
    for temperature in (0.3, 2.0):
        recipe = replace(make_recipe(folder), precision="bfloat16", temperature=temperature)
        record = train(recipe, tmp_path / f"run{temperature}", folder, evaluate_aside=False)
        assert len(record.steps()) == 3


def test_verifications_that_fail_are_told_once_recorded_and_warned_of(
    llama_folder, make_recipe, tmp_path, caplog
):
    recipe = make_recipe(llama_folder, "torn")
    record = train(recipe, tmp_path / "run", llama_folder, evaluate_aside=False)
    lost = [prompt.text[0] in "56789" for prompt in recipe.task.prompts("heldout")]
    assert 0 < sum(lost) < 10
    with (record.path / "evals.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    for row, point in zip(rows, record.evals, strict=True):
        # Truncated completions are never asked about.
        assert 0 < row["failed"] <= np.mean(lost)
        assert point.failed == row["failed"]
    failed = [row["failed"] for row in record.steps()]
    assert all(row.keys() <= {"raised"} for row in failed)
    assert sum(row.get("raised", 0) for row in failed) > 0
    warned = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    (told,) = [line for line in warned if "verification" in line]
    assert "a verification failed (raised) at prompt dataset/" in told
    assert "KeyError: 'too large'" in told
    (doubt,) = [text for text in Points.from_record(record, "steps").warnings if "verification" in text]
    assert f"{max(p.failed for p in record.evals):.1%} of the completions failed at step" in doubt
