"""What `scalerl train` starts beside the run."""

import importlib
import shlex

import pytest
from growing import Growing

from scalerl.cli.main import main
from scalerl.cli.train import _close, run_training
from scalerl.errors import InputError, WriteError
from scalerl.record.folder import RunFolder
from scalerl.record.reader import RunRecord
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
    importlib.import_module("scalerl.rl.train")  # imported below, it would keep the patched function
    monkeypatch.setattr(named, "find_model", refuse)
    recipe = load_recipe("demo", [f"placement.kind={placement}"])
    with pytest.raises(InputError, match="as asked"):
        run_training(recipe, RunFolder.claim(tmp_path / "run"))
    assert bool(started) == starts


def test_a_page_that_cannot_be_written_is_written_elsewhere_by_what_the_error_says(tmp_path, capsys):
    run = tmp_path / "a run"
    Growing(run, 12)
    (run / "report.html").mkdir()
    with pytest.raises(WriteError, match=r"report\.html: Is a directory; ") as caught:
        _close(RunRecord.read(run), as_json=False)
    assert "0." in capsys.readouterr().out  # what the run has reached is printed all the same
    command = str(caught.value).partition("; scalerl ")[2]
    words = shlex.split(command.partition(" FILE ")[0])
    assert main([*words, str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
