"""Where a run can be written, which is found out before anything is started."""

import os
import subprocess
import sys

import pytest

from scalerl.errors import InputError
from scalerl.record.folder import check_unused

WHY = r": nothing can be written there \(.+\)$"


def test_a_place_that_takes_a_run_is_left_as_it_was(tmp_path):
    check_unused(tmp_path / "runs" / "new")
    (tmp_path / "empty").mkdir()
    check_unused(tmp_path / "empty")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize("place", ["file/run", "file/deep/run", "closed/run", "closed"])
def test_a_place_that_takes_none_is_told_and_left_as_it_was(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o555)
    if place.startswith("closed") and os.geteuid() == 0:
        pytest.skip("the superuser may write everywhere")
    with pytest.raises(InputError, match=WHY):
        check_unused(tmp_path / place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["closed", "file"]


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_the_command_says_so_before_it_looks_for_a_model(tmp_path, place):
    (tmp_path / "file").touch()
    recipe = ["demo", "--set", "model=nowhere"]
    command = [sys.executable, "-m", "scalerl", "train", *recipe, "-o", place]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"scalerl: {place}: nothing can be written there (")
    assert done.stderr.count("\n") == 1
