"""Runs whose folder is moved, removed, edited or emptied, and those that two processes want to go on with."""

import json
import logging
import shutil

import pytest
from cut_runs import EVERY, STEPS, CutError, content, cut_at, lines, recipe_of, record_and_weights, run

from scalerl.cli.main import main
from scalerl.errors import InputError, MovedError, WriteError
from scalerl.record.saved_weights import final_folder
from scalerl.rl.learner.load import load_learner


@pytest.fixture(scope="module")
def recipe(small_base):
    return recipe_of(small_base)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run that nobody touched."""
    path = tmp_path_factory.mktemp("whole") / "run"
    run(recipe, path)
    return path


@pytest.fixture(scope="module")
def cut(recipe, tmp_path_factory):
    """One that was killed after step 8: its last checkpoints are of steps 3 and 6."""
    path = tmp_path_factory.mktemp("cut") / "run"
    with pytest.raises(CutError):
        run(recipe, path, progress=cut_at(8))
    return path


@pytest.fixture
def copy(cut, tmp_path):
    return shutil.copytree(cut, tmp_path / "run")


# -- the lock ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["resume", "restart", "new"])
def test_a_run_that_is_loading_is_locked_already(recipe, copy, how):
    """Whatever is asked for: nothing of the folder may be read or made while another run begins in it."""
    path = copy if how != "new" else copy.parent / "new"
    before = content(copy)

    def record(path):
        return {name: data for name, data in content(path).items() if name != "progress.json"}

    def load(*arguments):
        for options in ({"resume": True}, {"restart": True}, {}):
            with pytest.raises(InputError, match=r"another process is writing this run|exists already"):
                run(recipe, path, **options)
        assert how != "resume" or record(copy) == before
        loaded.append(True)
        return load_learner(*arguments)

    loaded = []
    run(recipe, path, load=load, **({} if how == "new" else {how: True}))
    assert loaded
    assert [row["step"] for row in lines(path / "steps.jsonl")] == list(range(1, STEPS + 1))


def test_a_run_that_cannot_begin_leaves_no_folder(recipe, tmp_path):
    def load(*arguments):
        assert (tmp_path / "a" / "run").is_dir()
        raise InputError("no model")

    with pytest.raises(InputError, match="no model"):
        run(recipe, tmp_path / "a" / "run", load=load)
    assert not list((tmp_path / "a").iterdir())


# -- moved and removed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 8])
def test_a_run_whose_folder_is_moved_has_a_checkpoint_there_and_ends(recipe, whole, tmp_path, step):
    path, there = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    there.parent.mkdir()

    def move(progress):
        if progress.step == step and path.exists():
            path.rename(there)

    with pytest.raises(MovedError) as told:
        run(recipe, path, progress=move)
    at = lines(there / "steps.jsonl")[-1]["step"]
    assert str(told.value) == (
        f"{path}: the run folder was moved during the run, to {there}: "
        f"a checkpoint of step {at} is there, and scalerl train {there} --resume goes on"
    )
    assert step <= at <= step + 1  # it was noticed at once
    assert not path.exists()
    run(recipe, there, resume=True)
    assert record_and_weights(there) == record_and_weights(whole)
    assert not (there / "lost.jsonl").exists()


def test_a_run_whose_folder_is_moved_at_its_end_is_whole_there(recipe, whole, tmp_path):
    path, there = tmp_path / "run", tmp_path / "moved"

    def move(progress):
        if progress.step == STEPS and path.exists():
            path.rename(there)

    with pytest.raises(MovedError, match=r"moved: it has come to its end, and is whole there"):
        run(recipe, path, progress=move)
    assert not path.exists()
    assert record_and_weights(there) == record_and_weights(whole)
    run(recipe, there, resume=True)


def test_a_run_whose_place_another_one_takes_writes_nothing_into_that(recipe, copy, tmp_path):
    path, there, before = tmp_path / "other", tmp_path / "moved", content(copy)

    def move(progress):
        if progress.step == 4 and not there.exists():
            path.rename(there)
            copy.rename(path)

    with pytest.raises(MovedError, match="a checkpoint of step 4 is there"):
        run(recipe, path, progress=move)
    assert content(path) == before
    assert [row["step"] for row in lines(there / "steps.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("step", [4, 5, STEPS])
def test_a_run_whose_folder_is_removed_is_one_line_and_leaves_nothing(recipe, tmp_path, step):
    path = tmp_path / "run"

    def remove(progress):
        while progress.step == step and path.exists():  # a checkpoint that is written makes files meanwhile
            shutil.rmtree(path, ignore_errors=True)

    with pytest.raises(WriteError, match="the run folder was removed, or moved to another file system"):
        run(recipe, path, progress=remove)
    assert not path.exists()


def test_a_file_that_is_removed_is_not_begun_again(recipe, tmp_path):
    def remove(progress):
        if progress.step == 4:
            (tmp_path / "run" / "groups.jsonl").unlink(missing_ok=True)

    with pytest.raises(WriteError, match=r"groups\.jsonl: 0 bytes long, and \d+ were written"):
        run(recipe, tmp_path / "run", progress=remove)
    assert not (tmp_path / "run" / "groups.jsonl").exists()


# -- checkpoints that are gone -----------------------------------------------------------------------------


def test_a_run_whose_checkpoints_are_gone_is_refused_and_begins_anew_when_asked(recipe, whole, copy):
    shutil.rmtree(copy / "checkpoints")
    before = content(copy)
    says = rf"has had checkpoints, and none is left; scalerl train {copy} --restart begins anew"
    with pytest.raises(InputError, match=says):
        run(recipe, copy, resume=True)
    assert content(copy) == before
    run(recipe, copy, restart=True)
    assert record_and_weights(copy) == record_and_weights(whole)
    assert content(copy / "before-1") == before
    assert not (copy / "lost.jsonl").exists()  # which is of this run


def test_a_run_that_never_had_a_checkpoint_begins_anew_by_itself(recipe, whole, tmp_path, caplog):
    """One line in a job script starts and resumes; a job may end before its first checkpoint."""
    path = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(CutError):
            run(recipe, path, resume=True, progress=cut_at(EVERY - 1))
    run(recipe, path, resume=True)
    assert caplog.text.count("had no checkpoint yet: the run begins anew, and lost.jsonl keeps") == 2
    lost = lines(path / "lost.jsonl")
    assert [row["lost"]["steps"] for row in lost if "lost" in row] == [EVERY - 1] * 2
    kept = [json.loads(row["line"])["step"] for row in lost if row.get("file") == "steps.jsonl"]
    assert kept == [*range(1, EVERY)] * 2
    assert record_and_weights(path) == record_and_weights(whole)


def test_a_restart_is_for_runs_alone(recipe, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "report.html").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        run(recipe, tmp_path / "notes", restart=True)
    with pytest.raises(InputError, match="exists already"):
        run(recipe, tmp_path / "notes", resume=True)
    assert (tmp_path / "notes" / "report.html").read_text() == "mine"


def test_checkpoints_of_later_steps_are_kept_until_the_run_has_newer_ones(recipe, copy, caplog):
    damaged = copy / "checkpoints" / "step-00006"
    (damaged / "training" / "state.json").write_text("[]")
    with pytest.raises(CutError):
        run(recipe, copy, resume=True, progress=cut_at(5))
    assert "step-00006 is damaged" in caplog.text
    names = {path.name for path in (copy / "checkpoints").iterdir()}
    assert names == {"aside-00006", "step-00003"}
    with pytest.raises(CutError):
        run(recipe, copy, resume=True, progress=cut_at(8))
    names = {path.name for path in (copy / "checkpoints").iterdir()}
    assert names == {"step-00006", "step-00003"}


# -- the end and the record --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["steps.jsonl", "evals.jsonl"])
def test_final_weights_of_another_step_than_the_record_are_an_error(recipe, whole, tmp_path, name, capsys):
    path = shutil.copytree(whole, tmp_path / "run")
    rows = (path / name).read_text().splitlines(keepends=True)
    (path / name).write_text("".join(rows[:-1]))
    before = content(path)
    last = json.loads(rows[-2])["step"]
    with pytest.raises(
        InputError, match=rf"final holds the weights of step {STEPS}, and {name} ends at step {last}: put"
    ):
        run(recipe, path, resume=True)
    assert main(["train", str(path), "--resume"]) == 2
    assert f"scalerl train {path} --restart" in capsys.readouterr().err
    assert content(path) == before
    final_folder(path).rename(path / "elsewhere")  # as it says
    run(recipe, path, resume=True)
    assert record_and_weights(path) == record_and_weights(whole)


def test_a_finished_run_needs_no_checkpoints(recipe, whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "run")
    for checkpoint in (path / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    before = content(path)
    assert run(recipe, path, resume=True).evals[-1].step == STEPS
    assert content(path) == before


# -- what was edited ---------------------------------------------------------------------------------------


def edit(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def test_an_edited_recipe_is_refused_and_says_what_was_edited(copy, capsys):
    def change(config):
        config["recipe"]["loss"]["max_ratio"] = 9.0
        config["recipe"]["seed"] = 3

    edit(copy, change)
    before = content(copy)
    assert main(["train", str(copy), "--resume"]) == 2  # its recipe is the edited one
    said = capsys.readouterr().err
    for part in ("recipe.loss.max_ratio = 9.0, which was 5.0", "recipe.seed = 3, which was 0"):
        assert part in said
    assert "edited since the checkpoint of step 6" in said
    assert content(copy) == before


def test_other_edits_are_told_and_what_may_change_is_none(recipe, whole, copy, caplog):
    def change(config):
        config["name"] = "renamed"
        config["recipe"]["health"]["on_alarm"] = "pause"

    edit(copy, change)
    caplog.set_level(logging.WARNING, "scalerl")
    run(recipe, copy, resume=True)
    (said,) = [r.getMessage() for r in caplog.records if "edited" in r.getMessage()]
    assert 'name = "renamed", which was "scalerl"' in said
    assert "on_alarm" not in said
    assert record_and_weights(copy) == record_and_weights(whole)


def test_a_row_within_the_kept_record_makes_an_older_checkpoint_count(recipe, whole, copy, caplog):
    rows = (copy / "steps.jsonl").read_text().splitlines(keepends=True)
    (copy / "steps.jsonl").write_text("".join([*rows[:4], '{"foreign": 1}\n', *rows[4:]]))
    run(recipe, copy, resume=True)
    assert "steps.jsonl is not what it was at step 6" in caplog.text
    assert record_and_weights(copy) == record_and_weights(whole)
    assert lines(copy / "lost.jsonl")[0]["lost"]["steps"] == 5


FOREIGN = (
    b'{"step": 9}\n[]\n7\nno json\n\xff\n{"step": "x", "device_seconds": 3, "flops": [], "tokens": 1}\n{"st'
)


@pytest.mark.parametrize("name", ["steps.jsonl", "evals.jsonl", "groups.jsonl", "alarms.jsonl"])
def test_extra_rows_cost_a_resume_nothing(recipe, whole, copy, name):
    with (copy / name).open("ab") as file:
        file.write(FOREIGN)
    run(recipe, copy, resume=True)
    assert record_and_weights(copy) == record_and_weights(whole)
    assert lines(copy / "lost.jsonl")[0]["lost"]["steps"] == 2


CONFIGS = [
    *("", "{", "[]", "3", "null", "{}", '{"recipe": 3}', '{"recipe": [[1, 2]]}', "\x00", "[" * 10_000),
    '{"schema": 1, "recipe": {"model": 3}}',
    '{"schema": 99, "recipe": {}}',
]


@pytest.mark.parametrize("text", [*CONFIGS, None, "whole, cut", "devices"], ids=repr)
def test_a_config_that_is_damaged_is_one_line(copy, capsys, text):
    file = copy / "config.json"
    if text is None:
        file.unlink()
    elif text == "devices":
        edit(copy, lambda config: config.update(devices=5, budget=[], seed={}))
    else:
        file.write_text(file.read_text()[:-40] if text == "whole, cut" else text)
    before = content(copy)
    if text != "devices":  # which is told, and trained on
        assert main(["train", str(copy), "--resume"]) == 2
        said = capsys.readouterr().err.splitlines()
        assert [line for line in said if line.startswith("scalerl: ")] == said[-1:]
        assert content(copy) == before
    for command in (["fit"], ["report"]):
        assert main([*command, str(copy)]) in (0, 2, 3)
    if text == "devices":
        assert main(["train", str(copy), "--resume"]) in (0, 2)
