import math
import os
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from hostile_logs import alarm, damaged, everything, read_hostile
from hypothesis import given, settings, strategies as st
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from read_logs import read_logs

from scalerl import InputError, load_run
from scalerl.ingest.formats.databases import MLFLOW as FORMAT
from scalerl.ingest.formats.recognise import recognise

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of MLflow

TIME = 1_700_000_000_500
PARAMS = {"actor/lr": 0.0001, "n": 8, "flag": True, "model": "Qwen/Qwen3-4B"}
VALUES = {
    "train/reward": [0.0, 0.25, 0.5],
    "loss": [1.0, math.nan, -math.inf],
    "eval/accuracy": [0.2, 0.3, 0.4],
}


def log(client, experiment, name, values=VALUES):
    run = client.create_run(experiment, run_name=name).info.run_id
    metrics = [Metric(key, v, TIME + 1000 * s, s) for key in values for s, v in enumerate(values[key])]
    client.log_batch(run, metrics=metrics, params=[Param(key, str(value)) for key, value in PARAMS.items()])
    return run


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A database that MLflow's own library made."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client = MlflowClient(tracking_uri=f"sqlite:///{path}")
    experiment = client.create_experiment("exp")
    for name in ("first: run's #1", "plain", "deleted"):
        run = log(client, experiment, name)
    client.delete_run(run)
    gone = client.create_experiment("gone")
    log(client, gone, "of a deleted experiment")
    client.delete_experiment(gone)
    return path


@pytest.fixture
def store(logged, tmp_path):
    return Path(shutil.copy(logged, tmp_path / "mlflow.db"))


def change(path, *statements):
    with closing(sqlite3.connect(path)) as sql, sql:
        for statement in statements:
            sql.execute(statement)


def test_runs_of_the_library(store, tmp_path):
    before = store.read_bytes()
    for path in (store, tmp_path):
        assert recognise(path) is FORMAT
        first, plain = read_logs(FORMAT, path, everything)
        assert [first.name, plain.name] == ["first: run's #1", "plain"]
    reward = plain.metrics["train/reward"]
    assert reward.step_N.tolist() == [0, 1, 2]
    assert reward.value_N.tolist() == [0, 0.25, 0.5]
    assert reward.time_N.tolist() == [1700000000.5, 1700000001.5, 1700000002.5]
    assert plain.metrics["loss"].value_N.tolist() == [1]
    assert sorted(plain.omitted["loss"].step_V.tolist()) == [1, 2]  # NaN and infinite, as they were logged
    assert plain.config == {"actor.lr": 0.0001, "n": 8, "flag": True, "model": "Qwen/Qwen3-4B"}
    assert store.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["mlflow.db"]
    assert [one.pass_rate for one in load_run(store, run="plain").evals] == VALUES["eval/accuracy"]


def test_the_file_store_and_the_database_give_the_same(store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    log(client, client.create_experiment("exp"), "plain")
    one, other = load_run(tmp_path / "mlruns"), load_run(store, run="plain")
    assert repr(one.evals) == repr(other.evals)
    assert one.config["trainer_config"] == other.config["trainer_config"]
    assert one.config["taken"] == other.config["taken"]


def test_only_what_is_wanted(store):
    found = read_logs(FORMAT, store, lambda name: name == "train/reward")[0]
    assert list(found.metrics) == ["train/reward"]
    assert sorted(found.names) == ["eval/accuracy", "loss", "train/reward"]


def test_names_of_runs(store):
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    same = log(client, client.get_experiment_by_name("exp").experiment_id, "plain")
    names = [one.name for one in read_logs(FORMAT, store, everything)]
    assert names[0] == "first: run's #1"
    assert names[2] == f"plain {same}"
    assert load_run(store, run=names[2]).evals
    log(client, client.create_experiment("other"), "plain")
    names = [one.name for one in read_logs(FORMAT, store, everything)]
    assert names == ["exp/first: run's #1", names[1], f"exp/plain {same}", "other/plain"]
    change(
        store, "UPDATE runs SET name = NULL", "UPDATE tags SET value = 'tag' WHERE value = 'first: run''s #1'"
    )
    names = [one.name for one in read_logs(FORMAT, store, everything)]
    assert names[0] == "exp/tag"


def test_a_run_that_was_resumed_has_its_later_values(store):
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    run = client.create_run(
        client.get_experiment_by_name("exp").experiment_id, run_name="resumed"
    ).info.run_id
    for again, steps in enumerate((range(8), range(4, 12))):
        for step in steps:
            metrics = {"train/reward": 0.1 * again, "eval/accuracy": 0.2 + 0.1 * again}
            now = TIME + 100_000 * again + 1000 * step
            client.log_batch(run, metrics=[Metric(key, value, now, step) for key, value in metrics.items()])
    found = load_run(store, run="resumed")
    assert [one.step for one in found.evals] == list(range(12))
    assert [one.pass_rate for one in found.evals] == pytest.approx([0.2] * 4 + [0.3] * 8)
    assert any("restarted" in warning for warning in found.warnings)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_server_that_writes_is_waited_for_and_not_kept_waiting(store, mode):
    """In both ways in which SQLite commits; what was committed before a read is in it."""
    change(store, f"PRAGMA journal_mode = {mode}")
    with closing(sqlite3.connect(store)) as sql:
        (run,) = sql.execute("SELECT run_uuid FROM runs WHERE name = 'plain'").fetchone()
    stop, written, errors = threading.Event(), [2], []

    def write():
        try:
            with closing(sqlite3.connect(store, timeout=5)) as sql:
                while not stop.is_set():
                    step = written[-1] + 1
                    row = ("eval/accuracy", 0.5, TIME + 1000 * step, run, step, False)
                    with sql:
                        sql.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", row)
                    written.append(step)
                    time.sleep(0.01)
        except sqlite3.Error as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            before = written[-1]
            steps = [one.step for one in load_run(store, run="plain").evals]
            assert steps == list(range(len(steps)))
            assert before < len(steps)
    finally:
        stop.set()
        writer.join()
    assert not errors
    assert written[-1] > 2


def test_errors(store, tmp_path):
    with pytest.raises(InputError, match=r"no SQLite files of MLflow in it, mlflow\.db"):
        read_logs(FORMAT, (tmp_path / "empty").mkdir() or tmp_path / "empty", everything)
    change(store, "DROP TABLE latest_metrics")
    assert recognise(store) is None
    with pytest.raises(InputError, match="lacks the tables of MLflow's") as error:
        read_logs(FORMAT, store, everything)
    assert str(error.value).startswith(f"{store}: ")
    change(store, "CREATE VIEW latest_metrics AS SELECT * FROM metrics")  # a view may never end
    assert recognise(store) is None


def test_a_pipe_beside_it_is_not_waited_for(store, tmp_path):
    os.mkfifo(tmp_path / "mlflow.db-journal")
    with alarm(20):
        assert len(read_logs(FORMAT, store, everything)) == 2


ODD = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)


@settings(max_examples=30)
@given(
    cells=st.lists(
        st.tuples(st.sampled_from(["key", "value", "timestamp", "step", "is_nan"]), ODD), max_size=5
    )
)
def test_cells_of_any_kind(logged, tmp_path, cells):
    path = Path(shutil.copy(logged, tmp_path / "mlflow.db"))
    with closing(sqlite3.connect(path)) as sql, sql:
        for table in ("metrics", "latest_metrics"):
            rows = sql.execute(
                f"SELECT key, value, timestamp, run_uuid, step, is_nan FROM {table}"
            ).fetchall()
            sql.execute(f"DROP TABLE {table}")
            sql.execute(f"CREATE TABLE {table} (key, value, timestamp, run_uuid, step, is_nan)")
            sql.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?, ?)", rows)
            for n, (column, value) in enumerate(cells):
                sql.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, n + 1))
    read_hostile(FORMAT, path)


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_files(logged, tmp_path, data):
    path = tmp_path / "mlflow.db"
    path.write_bytes(data.draw(damaged(logged.read_bytes())))
    read_hostile(FORMAT, path)
