"""Files of a checkpoint of two ranks that are damaged, cut off or gone: the sound one before it is used."""

import json
import random
import shutil
from dataclasses import replace

import learner_work
import pytest
from learner_ranks import Ranks, free_port

from scalerl.errors import InputError
from scalerl.record.reader import RunRecord
from scalerl.rl.config.settings import Checkpointing, Evaluation, Steps
from scalerl.rl.loop.resume import find_checkpoint

OLDER, NEWER, LAST = 2, 4, 6


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """A function that makes or resumes a run on two ranks; returns the warnings of the first."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    return lambda recipe, run, **options: ranks(2, learner_work.run, recipe, run, free_port(), options)[0]


@pytest.fixture(scope="module")
def run_recipe(tiny_recipe):
    return replace(
        tiny_recipe,
        budget=Steps(LAST),
        checkpoint=Checkpointing(steps=2, minutes=0),
        evaluation=Evaluation(count=1, samples=1),
    )


@pytest.fixture(scope="module")
def cut(run_recipe, on_ranks, tmp_path_factory):
    """A run on two ranks that was cut, with two checkpoints."""
    run = tmp_path_factory.mktemp("cut") / "run"
    assert not [line for line in on_ranks(run_recipe, run, until=NEWER) if "checkpoint" in line]
    return run


def path_of(run, step=NEWER):
    return run / "checkpoints" / f"step-{step:05d}"


def files_of(checkpoint):
    return sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file())


def flip(path):
    """200 bytes, anywhere."""
    data, rng = bytearray(path.read_bytes()), random.Random(0)
    for _ in range(200):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def zeros(path):
    """What a crash of the machine may leave of a file that was not synced."""
    path.write_bytes(bytes(path.stat().st_size))


def delete(path):
    path.unlink()


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [flip, cut_off, zeros, delete, replace_by_folder]


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_all_that_a_resume_and_a_reader_of_the_model_need_is_watched_over(cut):
    """So that the next tests damage what they are meant to."""
    needed = {"config.json", "tokenizer.json", "training/state.json", "training/arrays.safetensors"}
    shards = {"learner/.metadata", "learner/__0_0.distcp", "learner/__1_0.distcp"}
    found = files_of(path_of(cut))
    assert {*needed, *shards} <= {*found}
    assert any(name.startswith("model-") for name in found)


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damaged_file_has_the_checkpoint_before_it_used(cut, tmp_path, caplog, damage):
    saved = find_checkpoint(cut)
    assert saved is not None
    assert saved["step"] == NEWER
    run = tmp_path / "run"
    shutil.copytree(cut, run)
    for name in files_of(path_of(run)):
        damage(path_of(run) / name)
        caplog.clear()
        saved = find_checkpoint(run)
        assert saved is not None
        assert saved["step"] == OLDER
        (line,) = caplog.messages
        assert line.startswith(f"{path_of(run)} is damaged (")
        assert name in line
        assert line.endswith("): passed over")
        shutil.rmtree(path_of(run))
        shutil.copytree(path_of(cut), path_of(run))


def test_a_run_goes_on_from_the_sound_checkpoint_on_all_ranks(cut, run_recipe, on_ranks, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(cut, run)
    flip(path_of(run) / "learner" / "__1_0.distcp")  # which rank 0, that chooses, may not even read
    (line,) = on_ranks(run_recipe, run, resume=True)
    assert f"{path_of(run)} is damaged (learner/__1_0.distcp" in line
    lost = json.loads((run / "lost.jsonl").read_text().splitlines()[0])
    assert lost["lost"]["steps"] == NEWER - OLDER
    assert [row["step"] for row in RunRecord.read(run).steps()] == [*range(1, LAST + 1)]


def test_where_none_is_sound_the_run_is_refused_and_nothing_touched(cut, run_recipe, on_ranks, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(cut, run)
    flip(path_of(run) / "learner" / "__0_0.distcp")
    delete(path_of(run, OLDER) / "learner" / ".metadata")
    before = content(run)
    *warnings, line = on_ranks(run_recipe, run, resume=True)
    assert len(warnings) == 2
    assert f"{run}: none of its checkpoints can be used" in line
    assert content(run) == before
    with pytest.raises(InputError, match="none of its checkpoints can be used"):
        find_checkpoint(run)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut_off, delete])
def test_every_file_damaged_in_turn_in_a_run_that_is_resumed(cut, run_recipe, on_ranks, tmp_path, damage):
    for number, name in enumerate(files_of(path_of(cut))):
        run = tmp_path / str(number)
        shutil.copytree(cut, run)
        damage(path_of(run) / name)
        (line,) = on_ranks(run_recipe, run, resume=True)
        assert f"{path_of(run)} is damaged (" in line
        assert name in line
        assert [row["step"] for row in RunRecord.read(run).steps()] == [*range(1, LAST + 1)]
