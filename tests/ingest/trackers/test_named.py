import sys
import threading
from pathlib import Path

import pytest

from scalerl import InputError, load_run
from scalerl.ingest.trackers import named
from scalerl.ingest.trackers.named import tracker_of


def test_names_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracker_of("wandb:team/rl/run") == tracker_of(Path("wandb:team/rl/run")) == "wandb"
    assert tracker_of("mlflow:exp/run") == "mlflow"
    for other in ("wandb", "runs/wandb:x", "./wandb:x", "trackio:x", "wandb-x", "C:/mlflow", "-"):
        assert tracker_of(other) == ""


def test_a_file_of_such_a_name_goes_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("mlflow:log").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "eval/accuracy": 0.6}\n')
    assert [one.pass_rate for one in load_run("mlflow:log").evals] == [0.5, 0.6]
    with pytest.raises(InputError, match=r"no server is given; set MLFLOW_TRACKING_URI"):
        load_run("mlflow:other")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wandb:", "names no run of W&B; expected wandb:ENTITY/PROJECT/RUN"),
        ("wandb:team", "names no run of W&B"),
        ("wandb:team/rl?group=", "names no run of W&B"),
        ("wandb:team/rl?tag=x", "names no run of W&B"),
        ("wandb:team/rl/run?group=x", "names no run of W&B"),
        ("mlflow:", "names no run; expected mlflow:RUN_ID"),
        ("mlflow:http://host:5000", "names no run"),
        ("mlflow:http://host:5000/", "names no run"),
        ("mlflow:http://host:5000/#/models/x", "not the page of a run or an experiment"),
    ],
)
def test_what_names_no_run(name, said):
    with pytest.raises(InputError) as error:
        load_run(name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_password_is_not_kept():
    with pytest.raises(InputError, match="set MLFLOW_TRACKING_USERNAME") as error:
        load_run("mlflow:http://me:secret@host/exp/run")
    assert "secret" not in str(error.value)


def test_a_format_is_of_files():
    with pytest.raises(InputError, match="--format: only for a file or a folder"):
        load_run("wandb:team/rl/run", format="wandb")


@pytest.mark.parametrize(("tracker", "name"), [("wandb", "wandb:a/b/c"), ("mlflow", "mlflow:a/b")])
def test_a_client_that_is_not_installed(monkeypatch, tracker, name):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(InputError, match=rf"pip install 'scalerl\[{tracker}\]'"):
        load_run(name)


def test_a_server_that_never_answers_is_given_up():
    released = threading.Event()

    def never(answered):
        answered()
        released.wait(60)

    with pytest.raises(InputError, match=r"wandb:a/b/c: no answer within 0\.1 s"):
        named._within(0.1, never, "wandb:a/b/c")
    released.set()


def test_what_a_client_raises_is_one_line():
    def fails(answered):
        answered()
        raise KeyError("project\nand a second line")

    with pytest.raises(InputError, match=r"^mlflow:a/b: KeyError: .*project") as error:
        named._within(10, fails, "mlflow:a/b")
    assert "\n" not in str(error.value)
