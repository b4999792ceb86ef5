"""A run folder that is locked, moved, removed, written to by others, or set apart."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from killed_at import DONE, KILLED, killed_at

from scalerl.errors import InputError, WriteError
from scalerl.record.folder import RunFolder
from scalerl.record.writer import RunWriter
from scalerl.rl.loop.resume import check_started


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_is_claimed_once_and_again_after_its_end(tmp_path):
    one = RunFolder.claim(tmp_path / "a" / "run")
    with pytest.raises(InputError, match="another process is writing this run"):
        RunFolder.claim(tmp_path / "a" / "run")
    with pytest.raises(InputError, match="another process is writing this run"):
        RunWriter(tmp_path / "a" / "run", {})
    one.close()
    assert not list((tmp_path / "a").iterdir())  # nothing was written
    RunFolder.claim(tmp_path / "a" / "run").close()


def test_what_is_no_empty_folder_is_refused_for_a_new_run(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for name in ("file", "full"):
        with pytest.raises(InputError, match="exists already"):
            RunFolder.claim(tmp_path / name, new=True)
    with pytest.raises(InputError, match="nothing can be written there"):
        RunFolder.claim(tmp_path / "file")


def test_many_that_claim_a_folder_at_once_are_one_at_a_time(tmp_path):
    """It comes and goes meanwhile, as what was made for a claim and is empty is removed."""
    code = f"""
import os, sys
from scalerl.errors import InputError
from scalerl.record.folder import RunFolder
held = 0
for _ in range(300):
    try:
        folder = RunFolder.claim({str(tmp_path / "runs" / "run")!r})
    except InputError as error:
        assert "another process is writing" in str(error), error
        continue
    # Whoever has it is alone in it, and it is at its path.
    os.close(os.open({str(tmp_path / "held")!r}, os.O_CREAT | os.O_EXCL))
    assert os.path.samestat(os.stat(folder.path), os.fstat(folder.handle))
    os.remove({str(tmp_path / "held")!r})
    folder.close()
    held += 1
print(held)
"""
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], ended
    assert sum(int(out) for out, _ in ended) > 100


def test_lines_go_to_the_folder_that_was_opened_wherever_it_is_moved(tmp_path):
    writer = RunWriter(tmp_path / "run", {"name": "mine"})
    writer.step({"step": 1})
    (tmp_path / "run").rename(tmp_path / "moved")
    assert writer.folder.here() == tmp_path / "moved"
    other = RunWriter(tmp_path / "run", {"name": "another"})  # which takes the place that is free
    writer.step({"step": 2})
    other.step({"step": 7})
    assert (writer.folder.here(), other.folder.here()) == (tmp_path / "moved", tmp_path / "run")
    assert lines(tmp_path / "moved" / "steps.jsonl") == [{"step": 1}, {"step": 2}]
    assert lines(tmp_path / "run" / "steps.jsonl") == [{"step": 7}]
    assert sum(writer.lengths().values()) == 2 * len('{"step": 1}\n')
    writer.checkpointed()
    assert json.loads((tmp_path / "moved" / "config.json").read_text())["checkpointed"]
    assert "checkpointed" not in json.loads((tmp_path / "run" / "config.json").read_text())


@pytest.mark.parametrize("again", [False, True], ids=["removed", "made again"])
def test_a_folder_that_was_removed_is_one_line_and_nothing_new_is_made(tmp_path, again):
    writer = RunWriter(tmp_path / "run", {})
    writer.step({"step": 1})
    shutil.rmtree(tmp_path / "run")
    if again:
        (tmp_path / "run").mkdir()
    with pytest.raises(WriteError, match="the run folder was removed"):
        writer.step({"step": 2})
    with pytest.raises(WriteError, match="the run folder was removed"):
        writer.checkpointed()
    assert not list(tmp_path.glob("run/*"))


def test_a_link_to_a_run_folder_is_its_path(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "run").symlink_to("there")
    writer = RunWriter(tmp_path / "run", {})
    writer.step({"step": 1})
    assert writer.folder.here() == tmp_path / "run"
    assert (tmp_path / "there" / "steps.jsonl").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(""),
        lambda path: path.write_text(path.read_text() + '{"step": 5}\n'),
        lambda path: os.truncate(path, 3),
    ],
    ids=["removed", "emptied", "added to", "cut"],
)
def test_a_file_that_another_program_has_changed_ends_the_run(tmp_path, change):
    writer = RunWriter(tmp_path / "run", {})
    writer.step({"step": 1})
    change(tmp_path / "run" / "steps.jsonl")
    with pytest.raises(WriteError, match=r"steps\.jsonl: .* another program has removed or changed it"):
        writer.lengths()
    with pytest.raises(WriteError, match=r"steps\.jsonl: .* another program has removed or changed it"):
        writer.step({"step": 2})
    writer.alarm({"step": 1})  # other files are as they were


def a_run(path):
    writer = RunWriter(path, {"name": "old"})
    writer.step({"step": 1})
    (path / "checkpoints" / "step-00001").mkdir(parents=True)
    for name in ("lost.jsonl", "report.html", "vllm-0.log", "notes.txt"):
        (path / name).write_text(name)
    writer.close()
    return {file.relative_to(path) for file in path.rglob("*")}


def test_what_is_set_apart_is_whole_and_what_is_no_part_of_a_run_stays(tmp_path):
    path = tmp_path / "run"
    for n in (1, 2):
        before = a_run(path)
        place = RunFolder.claim(path)
        assert place.set_apart() == path / f"before-{n}"
        assert place.set_apart() is None
        place.close()
        found = {file.relative_to(path / f"before-{n}") for file in (path / f"before-{n}").rglob("*")}
        assert {str(file) for file in before - found if "before-" not in str(file)} == {"notes.txt"}
        (path / "notes.txt").unlink()
        RunFolder.claim(path, new=True).close()  # a new run may begin there


@pytest.mark.parametrize("resumed", [False, True], ids=["restarted again", "resumed, then restarted again"])
def test_setting_apart_that_is_killed_at_any_moment_leaves_the_run_whole(tmp_path, resumed):
    path = tmp_path / "run"
    for step in range(1, 200):
        before = {str(file) for file in a_run(path)} - {"notes.txt"}

        def set_apart():
            RunFolder.claim(path).set_apart()

        status = killed_at(step, path, set_apart)
        place = RunFolder.claim(path)
        found = {str(file.relative_to(path)) for file in path.rglob("*")} - {"notes.txt"}
        apart = {str(file.relative_to(path / "before-1")) for file in (path / "before-1").rglob("*")}
        assert before in (found, apart), step
        goes_on = resumed and before == found
        if goes_on:
            writer = RunWriter.resume(place, {"steps.jsonl": len('{"step": 1}\n')})
            writer.step({"step": 2})
            writer.close()
        place.set_apart()
        place.close()
        assert not (path / "before-2").exists()
        found = {str(file.relative_to(path / "before-1")) for file in (path / "before-1").rglob("*")}
        assert found == before, step
        steps = [{"step": 1}, {"step": 2}][: 1 + goes_on]
        assert lines(path / "before-1" / "steps.jsonl") == steps
        shutil.rmtree(path)
        if status == DONE:
            assert step > 8
            return
        assert status == KILLED
    pytest.fail("it did not come to its end")


def test_what_an_older_restart_left_halfway_is_overwritten_by_no_other(tmp_path):
    path = tmp_path / "run"
    a_run(path)
    (path / ".before.part" / "checkpoints" / "step-00002").mkdir(parents=True)
    (path / ".before.part" / "steps.jsonl").write_text('{"step": 7}\n')
    place = RunFolder.claim(path)
    assert place.set_apart() == path / "before-2"
    assert lines(path / "before-1" / "steps.jsonl") == [{"step": 7}]
    assert lines(path / "before-2" / "steps.jsonl") == [{"step": 1}]


@pytest.mark.parametrize(
    "start",
    [lambda path: RunWriter(path, {}), lambda path: RunFolder.claim(path, new=True), check_started],
    ids=["written", "new", "resumed"],
)
def test_a_cut_under_way_is_applied_to_no_other_run(tmp_path, start):
    """As `rm -r run/*` leaves it behind a resume that was killed."""
    path = tmp_path / "run"
    path.mkdir()
    (path / ".cut.part").write_text('{"cut": {"steps.jsonl": 0}}\n')
    with pytest.raises(InputError, match=r"run/\.cut\.part exists already: .* remove it"):
        start(path)
    assert [file.name for file in path.iterdir()] == [".cut.part"]


def test_a_claim_that_fails_leaves_the_folder_unlocked(tmp_path):
    path, longest = tmp_path / "run", "before-" + "9" * 248  # after which no name is left for another
    (path / ".before.part").mkdir(parents=True)
    (path / longest).mkdir()
    with pytest.raises(InputError, match="nothing can be written there") as error:
        RunFolder.claim(path)
    (path / longest).rmdir()
    RunFolder.claim(path).close()
    assert error.tb is not None  # which holds what the failed one had opened


def test_closing_removes_no_folder_of_another_process(tmp_path):
    folder = RunFolder.claim(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    folder.close()
    assert (tmp_path / "run").is_dir()
