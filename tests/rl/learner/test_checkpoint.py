"""A learner's tensors on disk, written by one process."""

import resource
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


@pytest.mark.parametrize("n_bytes", [100, 1000, 4000, 8000])
def test_a_disk_that_takes_a_part_is_an_error_of_the_system(tmp_path, n_bytes):
    """Which PyTorch's writer raises or replaces by its own, as the part ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        with pytest.raises(OSError, match=r"too large|not written whole, as on a full disk: "):
            checkpoint.write({"a": torch.arange(2000.0)}, tmp_path / "learner")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_was_removed_stays_removed(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.rmtree(run)
    with pytest.raises(FileNotFoundError):
        checkpoint.write({"a": torch.arange(3.0)}, run / "learner")
    assert not run.exists()
