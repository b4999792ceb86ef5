"""What `scalerl train` starts beside the run."""

import pytest

from scalerl.cli.train import run_training
from scalerl.errors import InputError
from scalerl.record.folder import RunFolder
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.model import named
from scalerl.rl.workers import processes


@pytest.mark.parametrize(
    ("placement", "gpus", "starts"),
    [("inline", "1x80", False), ("inline", "", True), ("inline", "2x80", True), ("local", "1x80", True)],
)
def test_a_run_in_one_process_starts_no_process_to_fork_from(placement, gpus, starts, tmp_path, monkeypatch):
    """Without a GPU, or with another one for it, evaluations have a process of their own."""
    started = []

    def refuse(*_):
        raise InputError("as asked")

    monkeypatch.setenv("SCALERL_GPUS", gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(processes, "start_fork_server", lambda *modules: started.append(modules))
    monkeypatch.setattr(named, "find_model", refuse)
    recipe = load_recipe("demo", [f"placement.kind={placement}"])
    with pytest.raises(InputError, match="as asked"):
        run_training(recipe, RunFolder.claim(tmp_path / "run"))
    assert bool(started) == starts
