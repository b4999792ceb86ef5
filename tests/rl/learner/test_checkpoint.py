"""A learner's tensors on disk, written by one process."""

import shutil

import pytest
import torch

from scalerl.rl.learner import checkpoint


def test_tensors_are_written_with_the_sums_of_their_files_and_read_back(tmp_path):
    sums = checkpoint.write({"a": torch.arange(3.0)}, tmp_path / "learner")
    assert {path.name for path in (tmp_path / "learner").iterdir()} == {*sums, ".metadata"}
    state = {"a": torch.zeros(3)}
    checkpoint.load(state, tmp_path / "learner", None)
    assert state["a"].tolist() == [0.0, 1.0, 2.0]


def test_a_folder_that_was_removed_stays_removed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError):
        checkpoint.write({"a": torch.arange(3.0)}, run / "learner")
    assert not run.exists()
