import json
import os
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing
from importlib.util import find_spec

import pytest
from hostile_logs import damaged, everything, read_hostile
from hypothesis import given, settings, strategies as st
from read_logs import read_logs

from scalerl import InputError
from scalerl.ingest.formats.databases import TRACKIO as FORMAT
from scalerl.ingest.load import read_source

# The tables of trackio 0.43, whose package is too large for the tests; run_id is not in those before 0.24.
METRICS = (
    "id INTEGER PRIMARY KEY AUTOINCREMENT, {id} timestamp TEXT NOT NULL, run_name TEXT NOT NULL, "
    "step INTEGER NOT NULL, metrics TEXT NOT NULL, log_id TEXT, space_id TEXT"
)
CONFIGS = (
    "id INTEGER PRIMARY KEY AUTOINCREMENT, {id} run_name TEXT NOT NULL, config TEXT NOT NULL, "
    "created_at TEXT NOT NULL"
)
TIME = "2023-11-14T22:13:2{}.500000+00:00"
RUNS = {
    "id1": ("a", [{"reward": 0.1 * n, "loss": "NaN" if n == 1 else n, "deep": {"x": n}} for n in range(3)]),
    "id2": ("a", [{"reward": 0.5}]),
    "id3": ("b", [{"reward": 0.75, "text": "x"}]),
}


def write(path, with_ids=True, cell=lambda row: json.dumps(row).encode(), runs=RUNS):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    kind = "run_id TEXT NOT NULL," if with_ids else ""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE metrics ({METRICS.format(id=kind)})")
        database.execute(f"CREATE TABLE configs ({CONFIGS.format(id=kind)})")
        columns, marks = ("run_id, ", "?, ") if with_ids else ("", "")
        for step in range(9):  # the runs at one time
            for key, (name, rows) in runs.items():
                if step < len(rows):
                    ids = [key] if with_ids else []
                    database.execute(
                        f"INSERT INTO metrics ({columns}timestamp, run_name, step, metrics) "
                        f"VALUES ({marks}?, ?, ?, ?)",
                        [*ids, TIME.format(step), name, step, cell(rows[step])],
                    )
        database.execute(
            f"INSERT INTO configs ({columns}run_name, config, created_at) VALUES ({marks}?, ?, ?)",
            [
                *(["id3"] if with_ids else []),
                "b",
                cell({"lr": 2, "_Username": "u", "model": {"name": "q"}}),
                "",
            ],
        )
    return path


def test_steps_of_the_hugging_face_trainer(tmp_path):
    rows = [{"eval/reward": 0.1, "train/global_step": 0}]  # it gives trackio no step, which counts calls
    for step in (10, 20, 30):
        rows.append({"train/reward": step / 100, "train/step_time": 9.0, "train/global_step": step})
        rows += [{"eval/reward": step / 100, "train/global_step": step}] if step != 30 else []
    (log,) = read_logs(FORMAT, write(tmp_path / "p.db", runs={"id3": ("b", rows)}), everything)
    assert log.metrics["train/step_time"].step_N.tolist() == [10, 20, 30]
    assert log.metrics["eval/reward"].step_N.tolist() == [0, 10, 20]
    assert log.notes == ("the step is 'train/global_step', and not trackio's count of calls",)


def test_runs_of_a_project(tmp_path):
    path = write(tmp_path / "project.db")
    before = path.read_bytes()
    for given_path in (path, tmp_path):
        assert FORMAT.recognises(given_path)
        logs = read_logs(FORMAT, given_path, everything)
        assert [log.name for log in logs] == ["a", "a", "b"]
    assert logs[0].metrics["reward"].value_N.tolist() == [0, 0.1, 0.2]
    assert logs[0].metrics["reward"].time_N.tolist() == [1.7e9 + n + 0.5 for n in range(3)]
    assert logs[0].metrics["loss"].step_N.tolist() == [0, 2]
    assert logs[0].metrics["deep/x"].value_N.tolist() == [0, 1, 2]
    assert logs[1].metrics["reward"].value_N.tolist() == [0.5]
    assert logs[2].config == {"lr": 2, "model.name": "q"}
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["project.db"]


def test_cells_of_text_and_runs_without_ids(tmp_path):
    logs = read_logs(FORMAT, write(tmp_path / "project.db", with_ids=False, cell=json.dumps), everything)
    assert [log.name for log in logs] == ["a", "b"]
    assert logs[1].config == {"lr": 2, "model.name": "q"}


def test_several_projects(tmp_path):
    write(tmp_path / "p.db")
    write(tmp_path / "q.db", with_ids=False)
    (tmp_path / "other.db").write_bytes(b"SQLite format 3\0")
    (tmp_path / "link.db").symlink_to(tmp_path / "p.db")
    names = [log.name for log in read_logs(FORMAT, tmp_path, everything)]
    assert names == ["p/a", "p/a", "p/b", "q/a", "q/b"]


def test_rows_without_a_step_and_names_longer_than_the_rows(tmp_path):
    """A file holds the name once a row, though it is asked for as the run and as its name."""
    name, n = "grpo-qwen2.5-7b-math-lr1e-6-kl0.001-bs512-group16-clip0.2-0.28-seed0-2026-01-01", 3000
    path = tmp_path / "project.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE metrics (timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT)")
        rows = [("", name, s if s % 1000 else None, '{"eval/acc": 0.5}') for s in range(1, n + 1)]
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    (run,) = read_source(path).runs
    assert len(run.evals) == n - 3
    assert run.config["left_out"]["reasons"] == {"no step": 3}


def test_rows_that_are_not_in_the_file_yet(tmp_path):
    path = write(tmp_path / "project.db")
    with closing(sqlite3.connect(path)) as database:  # of a run that goes on
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(
            "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES ('id3', '', 'b', 1, ?)",
            ['{"reward": 1}'],
        )
        database.commit()
        assert (tmp_path / "project.db-wal").stat().st_size > 0
        assert read_logs(FORMAT, path, everything)[2].metrics["reward"].value_N.tolist() == [0.75, 1]


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_of_the_library(tmp_path):
    code = (
        "import trackio\n"
        "trackio.init(project='my proj', name='a', config={'lr': 0.5, 'model': {'name': 'q'}})\n"
        "for n in range(3):\n"
        "    trackio.log({'reward': 0.1 * n, 'loss': float('nan') if n == 1 else n}, step=5 * n)\n"
        "trackio.finish()\n"
        "trackio.init(project='my proj', name='b')\n"
        "trackio.log({'reward': 1})\n"
        "trackio.finish()\n"
    )
    env = os.environ | {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=120)
    assert FORMAT.recognises(tmp_path)
    logs = read_logs(FORMAT, tmp_path, everything)
    assert [log.name for log in logs] == ["a", "b"]
    assert logs[0].metrics["reward"].step_N.tolist() == [0, 5, 10]
    assert logs[0].metrics["loss"].value_N.tolist() == [0, 2]
    assert (logs[0].metrics["loss"].time_N > 1.7e9).all()
    assert logs[0].config == {"lr": 0.5, "model.name": "q"}


def test_errors(tmp_path):
    path = tmp_path / "x.db"
    with pytest.raises(InputError, match="no SQLite files of trackio in it"):
        read_logs(FORMAT, tmp_path, everything)
    path.write_text("no database")
    with pytest.raises(InputError, match="not an SQLite file"):
        read_logs(FORMAT, path, everything)
    path.write_bytes(b"SQLite format 3\0" + bytes(200))
    assert not FORMAT.recognises(path)
    with pytest.raises(InputError, match="SQLite cannot read it"):
        read_logs(FORMAT, path, everything)
    path.unlink()
    with closing(sqlite3.connect(path)) as database, database:  # MLflow's, say
        database.execute("CREATE TABLE metrics (key TEXT, value REAL, step INTEGER, run_uuid TEXT)")
    assert not FORMAT.recognises(path)
    with pytest.raises(InputError, match="lacks the tables of trackio's"):
        read_logs(FORMAT, path, everything)
    for bad in ("[1]", "{", b"\xff", None, 5):
        write(path, cell=lambda row, bad=bad: bad if bad is not None else "null")
        with pytest.raises(InputError, match="a row of trackio is not"):
            read_logs(FORMAT, path, everything)


@pytest.mark.parametrize("cell", [2**28, 0.5, None])
def test_cells_that_are_numbers_are_refused_and_take_no_memory(tmp_path, cell):
    path = write(tmp_path / "p.db")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE metrics")
        database.execute("CREATE TABLE metrics (run_id, timestamp, run_name, step, metrics)")  # of any type
        database.execute("INSERT INTO metrics VALUES ('id1', '', 'a', 0, ?)", [cell])
    tracemalloc.start()
    with pytest.raises(InputError, match=f"is a {type(cell).__name__}, expected JSON text"):
        read_logs(FORMAT, path, everything)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_view_is_no_table(tmp_path):
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "CREATE VIEW metrics AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT i AS step, i AS run_name, i AS timestamp, '{}' AS metrics FROM n"
        )
    assert not FORMAT.recognises(path)


def test_steps_that_are_none(tmp_path):
    path = write(tmp_path / "project.db")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE metrics SET step = 'x' WHERE step = 1")
    assert read_logs(FORMAT, path, everything)[0].metrics["reward"].step_N.tolist() == [0, 2]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write(tmp_path_factory.mktemp("trackio") / "project.db").read_bytes()


@settings(max_examples=200)
@given(data=st.data())
def test_damaged_files(tmp_path, sound, data):
    path = tmp_path / "project.db"
    path.write_bytes(data.draw(damaged(sound)))
    read_hostile(FORMAT, path)
