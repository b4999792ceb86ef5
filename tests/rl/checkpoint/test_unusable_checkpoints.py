"""Checkpoints that are damaged, incomplete or ahead of the record: passed over, and that is said."""

import multiprocessing
import shutil
import threading
import time
from dataclasses import replace

import pytest
from cut_runs import CutError, cut_at, lines, run, timeless
from record_checker import check
from small_runs import small_recipe

from scalerl.errors import InputError, WorkerError, WriteError
from scalerl.rl.config.settings import (
    Checkpointing,
    Evaluation,
)
from scalerl.rl.learner.load import load_learner
from scalerl.rl.train import train


@pytest.fixture(scope="module")
def recipe(guesser):
    # One sample a prompt: evaluations of which no spread is known.
    return small_recipe(guesser, evaluation=Evaluation(count=5, samples=1))


def damage_arrays(path):
    data = bytearray((path / "training" / "arrays.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "training" / "arrays.safetensors").write_bytes(data)


def cut_arrays(path):
    file = path / "training" / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_state(path):
    file = path / "training" / "state.json"
    file.write_bytes(file.read_bytes()[:-100])


def forget(path):
    (path / "training" / "state.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_arrays, cut_state, *(pytest.param(d, marks=pytest.mark.slow) for d in (cut_arrays, forget))],
)
def test_a_damaged_checkpoint_is_passed_over_and_told(recipe, tmp_path, damage, caplog):
    run(recipe, tmp_path / "whole")
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    damage(tmp_path / "run" / "checkpoints" / "step-00006")
    run(recipe, tmp_path / "run", resume=True)
    assert "step-00006 is damaged" in caplog.text
    assert lines(tmp_path / "run" / "lost.jsonl")[0]["lost"]["steps"] == 5
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_a_checkpoint_without_a_file_that_another_process_wrote_is_none(recipe, tmp_path, caplog):
    """A folder of the node alone, say: the older checkpoint stays."""

    def load(*arguments):
        learner = load_learner(*arguments)
        saver = learner.saver

        def of_two_nodes(near, resumable=True):
            write, whole = saver(near, resumable), learner.version <= 3
            return lambda folder: write(folder) | ({} if whole else {"learner/__1_0.distcp": [3, 4]})

        learner.saver = of_two_nodes
        return learner

    kept_one = replace(recipe, checkpoint=Checkpointing(3, keep=1))
    with pytest.raises(CutError):
        run(kept_one, tmp_path / "run", progress=cut_at(8), load=load)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00003"]
    assert "learner/__1_0.distcp: written by another process and not there" in caplog.text


def test_an_evaluation_that_a_new_process_cannot_make_leaves_a_checkpoint(recipe, tmp_path):
    """The model's folder is gone for a while, as the process that evaluates is lost."""
    model = shutil.copytree(recipe.model, tmp_path / "model")
    recipe = replace(recipe, model=str(model), checkpoint=Checkpointing(steps=0))

    def lose(progress):
        if progress.step == 1 and model.exists():
            evaluation = []
            while not evaluation:  # it starts beside the first steps
                evaluation = [p for p in multiprocessing.active_children() if p.name == "evaluation"]
                time.sleep(0.01)
            model.rename(tmp_path / "away")
            evaluation[0].kill()

    with pytest.raises(WorkerError, match=r"--resume goes on, and makes it"):
        train(recipe, tmp_path / "run", model, progress=lose)
    (tmp_path / "away").rename(model)
    last = lines(tmp_path / "run" / "steps.jsonl")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:05d}").is_dir()
    record = run(recipe, tmp_path / "run", resume=True)
    assert [point.step for point in record.evals] == [0, 3, 6, 9, 12, 14]
    assert check(tmp_path / "run") == []


def test_a_checkpoint_of_more_than_the_record_holds_is_passed_over(recipe, tmp_path, caplog):
    run(recipe, tmp_path / "whole")
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    steps = tmp_path / "run" / "steps.jsonl"
    kept = steps.read_bytes().splitlines(keepends=True)[:5]  # the checkpoint is of step 6
    steps.write_bytes(b"".join(kept))
    run(recipe, tmp_path / "run", resume=True)
    assert "steps.jsonl is not what it was at step 6" in caplog.text
    assert timeless(tmp_path / "run", edited=True) == timeless(tmp_path / "whole")


def test_checkpoints_that_cannot_be_used_are_kept_and_the_run_is_refused(recipe, tmp_path):
    with pytest.raises(CutError):
        run(recipe, tmp_path / "run", progress=cut_at(8))
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*"))
    (tmp_path / "run" / "evals.jsonl").write_text("")
    with pytest.raises(
        InputError, match=r"none of its checkpoints can be used; scalerl train .*run --restart begins anew"
    ):
        run(recipe, tmp_path / "run", resume=True)
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*")) == before


def test_a_stop_whose_checkpoint_fails_says_so(recipe, tmp_path):
    stop = threading.Event()

    def watch(progress):
        if progress.step == 2:
            shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
            (tmp_path / "run" / "checkpoints").write_text("no folder")
            stop.set()

    with pytest.raises(WriteError, match="step-00002: the checkpoint could not be saved"):
        run(recipe, tmp_path / "run", progress=watch, stop=stop)
