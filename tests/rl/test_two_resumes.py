"""Two processes that go on with one run, and one that is killed as it goes on: nothing is lost."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cut_runs import CutError, cut_at, lines, recipe_of, record_and_weights, run

SCRIPT = Path(__file__).parents[1] / "support" / "resumes.py"


@pytest.fixture(scope="module")
def runs(small_base, tmp_path_factory):
    """One that nobody touched, and one that was killed after step 8, with a checkpoint of step 6."""
    folder, recipe = tmp_path_factory.mktemp("runs"), recipe_of(small_base)
    run(recipe, folder / "whole")
    with pytest.raises(CutError):
        run(recipe, folder / "cut", progress=cut_at(8))
    return folder


@pytest.fixture
def tried(runs, small_base, tmp_path):
    """A function that tries resumes, and returns what became of each."""

    def tried(how, numbers):
        command = [sys.executable, str(SCRIPT), str(small_base), str(runs / "cut"), str(tmp_path), how]
        done = subprocess.run([*command, *map(str, numbers)], capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return tried


def check_whole(runs, path):
    """The run is the one that nobody touched, and what was lost is kept once."""
    assert record_and_weights(path) == record_and_weights(runs / "whole")
    lost = lines(path / "lost.jsonl")
    steps = [json.loads(row["line"])["step"] for row in lost if row.get("file") == "steps.jsonl"]
    assert sum(row["lost"]["steps"] for row in lost if "lost" in row) == len(steps)
    return steps


def check_race(runs, one):
    assert one["status"] in ([0, 2], [0, 0]), one  # the second may come when the first is at its end
    refused = [f"{one['path']}: another process is writing this run"]
    assert one["said"].splitlines() == refused * (one["status"] == [0, 2]), one
    assert check_whole(runs, Path(one["path"])) == [7, 8]
    return one["status"] == [0, 2]


def test_of_two_resumes_one_is_refused(runs, tried):
    assert any(check_race(runs, one) for one in tried("race", [0.0, 0.05]))


@pytest.mark.slow
def test_of_two_resumes_at_every_offset_one_is_refused(runs, tried):
    (alone,) = tried("race", [0.01])
    seconds = alone["seconds"]
    races = tried("race", [round(seconds * n / 30, 3) for n in range(36)])
    refused = [check_race(runs, one) for one in races]
    print(f"\n{sum(refused)} of {len(refused)} second resumes were refused, over {1.2 * seconds:.1f} s")
    assert sum(refused) >= 10  # the others came after the end of the first


@pytest.mark.slow
def test_of_two_commands_one_is_refused_in_one_line(runs, tmp_path):
    for later in (0.0, 0.3, 1.0, 3.0):
        path = shutil.copytree(runs / "cut", tmp_path / f"run-{later}")
        command = [sys.executable, "-m", "scalerl", "train", str(path), "--resume"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes)]
        time.sleep(later)
        processes.append(subprocess.Popen(command, **pipes))
        ended = [(p.communicate(timeout=300)[1], p.returncode) for p in processes]
        assert sorted(status for _, status in ended) == [0, 2], ended
        (said,) = [text for text, status in ended if status]
        assert said == f"scalerl: {path}: another process is writing this run\n"
        assert check_whole(runs, path) == [7, 8]


def check_kill(runs, one):
    killed, status = one["status"]
    assert killed in (0, 9), one
    assert (status, one["said"]) == (0, ""), one
    path = Path(one["path"])
    steps = check_whole(runs, path)
    assert steps[:2] == [7, 8]
    assert len({row["time"] for row in map(json.loads, _lost_lines(path))}) == len(steps)  # each once
    return killed == 9


def _lost_lines(path):
    return [row["line"] for row in lines(path / "lost.jsonl") if row.get("file") == "steps.jsonl"]


@pytest.mark.slow
def test_a_resume_that_is_killed_is_followed_by_one_that_loses_nothing(runs, tried):
    assert all(check_kill(runs, one) for one in tried("kill", [22, 27]))  # files are being cut


@pytest.mark.slow
def test_a_resume_that_is_killed_at_any_file_operation_is_followed_by_one_that_loses_nothing(runs, tried):
    killed = [check_kill(runs, one) for one in tried("kill", range(1, 80))]
    print(f"\n{sum(killed)} of {len(killed)} resumes were killed")
    assert sum(killed) >= 40
    assert not killed[-1]  # it came to its end: all of them were tried
