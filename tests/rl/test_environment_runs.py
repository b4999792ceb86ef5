"""Runs with an environment: the tool is learnt, a resume is the same run, and generators may be elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest
from cut_runs import CutError, cut_at, lines, record_and_weights, run
from drawing import CALL, drawing_model, drawing_recipe, write_files
from record_checker import check

from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.checkpoint.store import load_state
from scalerl.rl.config.settings import BatchSize, Evaluation, Local, Steps, Suite
from scalerl.rl.evaluate import evaluate
from scalerl.rl.tasks.mix import Mix


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return drawing_model(tmp_path_factory.mktemp("drawing"))


@pytest.fixture
def recipe(model, tmp_path):
    return drawing_recipe(model, *write_files(tmp_path))


def test_a_tool_whose_answer_decides_is_learnt(recipe, tmp_path):
    """From calling it half of the time, and being right as often then; a guess is right one time in ten."""
    batch = BatchSize(prompts=4, samples=8, micro=32)
    run(replace(recipe, budget=Steps(8), batch=batch), tmp_path / "run")
    correct = [row["correct"] for row in lines(tmp_path / "run" / "steps.jsonl")]
    assert sum(correct[:2]) / 2 < 0.3
    assert sum(correct[-3:]) / 3 > sum(correct[:2]) / 2 + 0.15
    assert check(tmp_path / "run") == []
    samples = lines(tmp_path / "run" / "samples.jsonl")
    answers = {row["prompt"]: row["answer"] for row in lines(Path(recipe.task.path))}
    right = [row for row in samples if row["correct"]]
    assert right
    for row in right:
        digit = answers[" ".join(row["prompt_text"])]
        assert row["completion"].endswith(digit)
    called = [row for row in samples if row["completion"].startswith(CALL)]
    for row in called:  # the trajectory is there, with what the tool has answered
        letter = "ABCDEFGHIJ"[int(answers[" ".join(row["prompt_text"])])]
        assert row["completion"].startswith(f"{CALL}<eos>{letter}")
        assert row["length"] < 10
        assert row["finish"] in ("ended", "truncated")
    assert any(row["length"] == 4 and row["correct"] for row in called)  # call, end, digit, end


def test_a_run_that_was_cut_is_the_run_that_never_was(recipe, tmp_path):
    """With turns in flight while a checkpoint is made, as k = 2 batches more are admitted."""
    recipe = replace(recipe, schedule=PipelineRL(k=2), decode_slots=11, budget=Steps(5))
    run(recipe, tmp_path / "whole")
    with pytest.raises(CutError):
        run(recipe, tmp_path / "cut", progress=cut_at(3))
    state = load_state(tmp_path / "cut" / "checkpoints" / "step-00002" / "training")
    assert (state["generator"]["arrays"]["_asked_S"] >= 0).any()
    run(recipe, tmp_path / "cut", resume=True)
    assert record_and_weights(tmp_path / "cut") == record_and_weights(tmp_path / "whole")


def test_generators_in_processes_of_their_own(recipe, tmp_path):
    recipe = replace(recipe, placement=Local(generators=2), budget=Steps(3))
    run(recipe, tmp_path / "run")
    assert check(tmp_path / "run") == []
    samples = lines(tmp_path / "run" / "samples.jsonl")
    for source in ("training", "evaluation"):
        assert any(row["completion"].startswith(f"{CALL}<eos>") for row in samples if row["source"] == source)


def test_a_suite_and_a_mixture_have_their_turns(recipe, tmp_path):
    """A suite with turns beside a run without, and tasks with and without turns in one run."""
    plain = replace(recipe.task, turns=2)
    suite = Suite("drawn", recipe.task, samples=4)
    mixed = Mix({"two": plain, "three": recipe.task})
    recipe = replace(recipe, task=mixed, evaluation=Evaluation(samples=2, downstream=(suite,)))
    found = evaluate(recipe, suites=["drawn"])
    assert mixed.turns == 3
    assert found.correct_P.sum() > 0
    assert found.downstream["drawn"].correct_P.sum() > 0
