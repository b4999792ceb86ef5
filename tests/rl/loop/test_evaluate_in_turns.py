"""Evaluations on the one GPU of a run: by the generator's engine, with the same results."""

import json
import multiprocessing
from dataclasses import replace

import pytest

from scalerl.rl.algo.length import ForcedInterruption
from scalerl.rl.algo.schedule import OffPolicy, PipelineRL
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import BatchSize, Context, Evaluation, Steps
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.train import train


@pytest.fixture(scope="module")
def recipe(small_base):
    return Recipe(
        model=str(small_base),
        task=Chain(k_max=2, heldout_per_length=20),
        budget=Steps(6),
        length=ForcedInterruption(phrase="! </think>", low=3, high=4),
        context=Context(prompt=6, thinking=4, answer=4),
        batch=BatchSize(prompts=4, samples=8),
        decode_slots=16,
        evaluation=Evaluation(count=3, samples=2, decode_slots=16),
    )


def results(folder):
    lines = (folder / "evals.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [[row[key] for key in ("step", "pass_rate", "mean_length", "entropy", "samples")] for row in rows]


@pytest.mark.parametrize("schedule", [PipelineRL(k=4), OffPolicy(k=3)])
def test_evaluations_take_turns_with_the_generator_on_one_gpu(recipe, schedule, tmp_path, monkeypatch):
    """Weights that are evaluated may be newer than the generator's, which in phases keeps its own."""
    recipe = replace(recipe, schedule=schedule)
    train(recipe, tmp_path / "aside", recipe.model)
    monkeypatch.setenv("SCALERL_GPUS", "1x80")
    seen = set()

    def note(progress):
        seen.update(process.name for process in multiprocessing.active_children())

    train(recipe, tmp_path / "turns", recipe.model, progress=note)
    assert "evaluation" not in seen
    assert results(tmp_path / "turns") == results(tmp_path / "aside")
    both = [(tmp_path / name / "groups.jsonl").read_text() for name in ("turns", "aside")]
    assert both[0] == both[1]
