import shutil
from pathlib import Path

import pytest
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings
from mlflow import MlflowClient
from read_logs import read_logs

from scalerl import InputError
from scalerl.ingest.formats.format import Unread
from scalerl.ingest.formats.mlflow import FORMAT

META = "lifecycle_stage: active\nrun_id: b560751296cf45f9960d4896c1e15153\nrun_name: 'a: b'\n"
REWARD = "1700000000500 0.0 0\n1700000001500 0.25 1\n1700000002500 0.5 2\n"
RUNS = {"b56": "first: run's #1", "c57": "plain", "d58": "deleted"}
"""Folders and names of runs."""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A store that MLflow's own library wrote, its folders renamed to what tests can tell."""
    root = tmp_path_factory.mktemp("mlflow") / "mlruns"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(tracking_uri=root.as_uri())
        experiment = client.create_experiment("exp")
        for folder, name in RUNS.items():
            run = client.create_run(experiment, run_name=name).info.run_id
            for step in range(3):
                time = 1700000000500 + 1000 * step
                client.log_metric(run, "train/reward", 0.25 * step, time, step)
                client.log_metric(run, "loss", [1.0, float("nan"), -1e-5][step], time, step)
            for key, value in {"actor/lr": 0.0001, "n": 8, "flag": True, "model": "Qwen/Qwen3-4B"}.items():
                client.log_param(run, key, value)
            if name == "deleted":
                client.delete_run(run)
            (root / experiment / run).rename(root / experiment / folder)
    (root / experiment).rename(root / "55")
    return root


@pytest.fixture
def store(logged, tmp_path):
    return Path(shutil.copytree(logged, tmp_path / "mlruns"))


def test_store_experiment_and_run(store):
    for path in (store, store / "55"):
        assert FORMAT.recognises(path)
        logs = read_logs(FORMAT, path, everything)
        assert [log.name for log in logs] == ["first: run's #1", "plain"]
    assert FORMAT.recognises(store / "55" / "d58")
    (log,) = read_logs(FORMAT, store / "55" / "d58", everything)  # which was asked for
    reward = log.metrics["train/reward"]
    assert reward.step_N.tolist() == [0, 1, 2]
    assert reward.value_N.tolist() == [0, 0.25, 0.5]
    assert reward.time_N.tolist() == [1700000000.5, 1700000001.5, 1700000002.5]
    assert log.metrics["loss"].value_N.tolist() == [1, -1e-5]
    assert log.config == {"actor.lr": 0.0001, "n": 8, "flag": True, "model": "Qwen/Qwen3-4B"}
    assert log.notes == ()


def test_only_what_is_wanted(store):
    log = read_logs(FORMAT, store, lambda name: name == "loss")[0]
    assert list(log.metrics) == ["loss"]
    assert sorted(log.names) == ["loss", "train/reward"]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1700000000500 0.5\n", [0]),
        ("1700000000500 0.5 3 data abc\n", [3]),
        ("1700000000500 0.5 -3\n1700000000500 0.5 3\n", [3]),
        ("\n1700000000500 0.5 3\n\n", [3]),
        ("1700000000500 0.5 3\r\n", [3]),
    ],
)
def test_forms_of_lines(store, text, steps):
    write(store / "55" / "b56" / "metrics" / "train" / "reward", text)
    assert read_logs(FORMAT, store, everything)[0].metrics["train/reward"].step_N.tolist() == steps


@pytest.mark.parametrize("end", ["170000000", "1700000003500 0.75 1", "1700000003500 0.7x"])
def test_an_unfinished_end(store, end):
    write(store / "55" / "b56" / "metrics" / "train" / "reward", REWARD + end)
    log = read_logs(FORMAT, store, everything)[0]
    assert log.metrics["train/reward"].step_N.tolist() == [0, 1, 2]
    assert "a crash while writing" in log.notes[0]


@pytest.mark.parametrize("line", ["x 0.5 1", "1700000000500 half 1", "1700000000500 0.5 1.5", "1 2 3 4", "1"])
def test_errors(store, line):
    path = write(store / "55" / "b56" / "metrics" / "loss", f"1700000000500 0.5 0\n{line}\n")
    with pytest.raises(InputError, match="expected a time in milliseconds, a value and a step") as error:
        read_logs(FORMAT, path.parents[1], everything)
    assert str(error.value).startswith(f"{path}, line 2: '{line}'")
    (unread,) = [one for one in FORMAT.read(store, everything) if isinstance(one, Unread)]
    assert (unread.run, unread.reason) == ("b56", str(error.value))


def test_names_where_meta_has_none(store):
    run = store / "55" / "b56"
    write(run / "meta.yaml", "run_id: abc\n")
    assert read_logs(FORMAT, run, everything)[0].name == "first: run's #1"
    (run / "tags" / "mlflow.runName").unlink()
    assert read_logs(FORMAT, run, everything)[0].name == "abc"
    write(run / "meta.yaml", "")
    assert read_logs(FORMAT, run, everything)[0].name == "b56"
    write(run / "meta.yaml", 'run_name: "double"\n')
    assert read_logs(FORMAT, run, everything)[0].name == "double"


def test_what_is_not_recognised(tmp_path, store):
    assert not FORMAT.recognises(tmp_path)  # mlruns/ is one below
    assert not FORMAT.recognises(store / "0")
    assert not FORMAT.recognises(store / "55" / "meta.yaml")
    assert not FORMAT.recognises(tmp_path / "missing")
    with pytest.raises(InputError, match="no runs of MLflow"):
        read_logs(FORMAT, store / "0", everything)
    (store / "0" / "link").symlink_to(store / "55" / "b56")
    (store / "0" / "loop").symlink_to(store)
    assert not FORMAT.recognises(store / "0")


def test_links_are_not_followed(store, tmp_path):
    write(tmp_path / "secret", "1700000000500 0.5 0\n")
    (store / "55" / "b56" / "metrics" / "linked").symlink_to(tmp_path / "secret")
    (store / "55" / "b56" / "params" / "linked").symlink_to(tmp_path / "secret")
    log = read_logs(FORMAT, store, everything)[0]
    assert "linked" not in log.names
    assert "linked" not in log.config


@settings(max_examples=200)
@given(reward=damaged(REWARD.encode()), meta=damaged(META.encode()), param=damaged(b"-1.5e3"))
def test_damaged_files(tmp_path, reward, meta, param):
    write(tmp_path / "metrics" / "r", reward)
    write(tmp_path / "meta.yaml", meta)
    write(tmp_path / "params" / "p", param)
    read_hostile(FORMAT, tmp_path)
