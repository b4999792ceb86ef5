"""Logs that say much in few bytes are refused in a line that names the limit; honest large ones are read."""

import csv
import json
import os
import shutil
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from event_files import START, event, record
from hostile_logs import alarm

from scalerl import limits
from scalerl.cli.main import main
from scalerl.ingest.formats.table import read_table
from scalerl.ingest.load import read_source
from scalerl.ingest.options import ReadOptions

MB = 2**20


def refused(capsys, *arguments):
    """The line with which a command ends, and that it took little memory to get there."""
    tracemalloc.start()
    with alarm(120):
        assert main([str(argument) for argument in arguments]) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert peak < 150 * MB
    return err


def written(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def ingest(path):
    return ("ingest", path, "-o", path.parent / "run")


WIDE = {"n" * 20_000: {str(n): 0 for n in range(10_000)}}
"""80 kB of which the names would be 200 MB."""


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", json.dumps({"step": 1} | WIDE), "characters in the names of one row"),
        ("x.jsonl", json.dumps({"step": 1, "data": WIDE}), "characters in the names of one row"),
        (
            "trainer_state.json",
            json.dumps({"log_history": [{"step": 1}], "x": [{}] * 3_000_000}),
            "of memory",
        ),
        ("x.jsonl", '{"step": 1, "a": 1}\n{"step": 2, "x": [' + "{}," * 2_600_000 + "0]}\n", "of memory"),
        ("x.jsonl", '{"step": 1, "a": ' + '{"b": ' * 200 + "1" + "}" * 200 + "}\n", "101 levels of nesting"),
        ("x.csv", '"Step","' + " - ".join(["a"] * 20_000) + '"\n1,0.5\n', "characters in a name"),
        ("x.csv", '"Step"' + ',"r - eval/acc"' * 14_000 + "\n1,0.5\n", "14,000 runs, and the limit is 1,000"),
        ("x.csv", '"Step"' + ',"r - m"' * 21_000 + "\n1,0.5\n", "21,001 columns, and the limit is 20,000"),
    ],
)
def test_small_files_that_hold_much_are_refused_in_a_line_that_names_the_limit(
    tmp_path, capsys, name, text, message
):
    error = refused(capsys, *ingest(written(tmp_path / name, text)))
    assert message in error
    assert "the limit is" in error
    assert str(tmp_path / name) in error


def test_a_line_of_a_csv_costs_no_more_than_its_own_cells(tmp_path):
    head = ",".join(f'"r{n} - eval/acc"' for n in range(900))
    path = written(tmp_path / "x.csv", f'"Step",{head}\n' + "".join(f"{n},0.5\n" for n in range(40_000)))
    with alarm(60):  # with every line filled up to all columns it took a minute, and 36 million cells
        (first, *_) = read_source(path, ReadOptions(run="r0")).runs
    assert len(first.evals) == 40_000


def test_a_chart_of_500_columns_is_read(tmp_path):
    path = tmp_path / "x.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Step", *(f"r{n} - eval/acc" for n in range(500))])
        writer.writerows([step, *["0.5"] * 500] for step in range(20))
    runs = read_source(path).runs
    assert len(runs) == 500
    assert all(len(run.evals) == 20 for run in runs)


def test_names_without_end_are_left_out_and_that_is_said(tmp_path, capsys):
    rows = [{"step": n, "eval/acc": 0.1 * n, "eval/" + "n" * 2000: 0.5} for n in range(1, 9)]
    path = written(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(word) for word in ingest(path)]) == 0
    assert "8 values left out, of names with more than 1,000 characters" in capsys.readouterr().err


def test_a_text_that_a_dictionary_of_parquet_repeats(tmp_path, capsys):
    arrow = pytest.importorskip("pyarrow")
    parquet = import_module("pyarrow.parquet")
    n, path = 4000, tmp_path / "x.parquet"
    names = arrow.DictionaryArray.from_arrays(arrow.array([0] * n, arrow.int32()), ["x" * 300_000])
    table = arrow.table({"step": range(n), "eval/acc": [0.5] * n, "run_id": names})
    parquet.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    (run,) = read_source(path).runs
    assert tracemalloc.get_traced_memory()[1] < 100 * MB  # of 1.2 GB of text
    tracemalloc.stop()
    assert len(run.evals) == n


def test_plain_texts_of_parquet_are_bounded_once_they_are_no_longer_compressed(tmp_path, capsys, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(limits, "TEXT", replace(limits.TEXT, most=10**6))
    path = tmp_path / "x.parquet"
    table = arrow.table({"step": range(40), "eval/acc": [0.5] * 40, "run_id": ["x" * 100_000] * 40})
    import_module("pyarrow.parquet").write_table(table, path, compression="zstd", use_dictionary=False)
    error = refused(capsys, *ingest(path))
    assert "column 'run_id'" in error
    assert "bytes of decoded text in one column, and the limit is 1,000,000" in error


def test_rows_of_parquet_are_bounded_before_they_are_read(tmp_path, capsys):
    arrow, path = pytest.importorskip("pyarrow"), tmp_path / "x.parquet"
    nothing = arrow.nulls(1_000_001, arrow.float64())
    table = arrow.table({"step": nothing, "train/reward": nothing})
    import_module("pyarrow.parquet").write_table(table, path, compression="zstd")
    assert path.stat().st_size < 100_000
    assert "1,000,001 rows, and the limit is 1,000,000" in refused(capsys, *ingest(path))


def test_rows_of_trackio_that_have_more_bytes_than_their_file(tmp_path, capsys):
    """The pages of a long text may lead round in a circle, and a row be as large as it says all the same."""
    path = tmp_path / "project.db"
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, metrics)")
        text = '{"a": "' + "x" * 9_000_000 + '"}'
        base.execute("INSERT INTO metrics VALUES (1, '', 'r', 1, ?)", (text,))
        base.execute("INSERT INTO metrics VALUES (2, '', 'r', 2, ?)", (text,))
        base.commit()
        size = base.execute("PRAGMA page_size").fetchone()[0]
    data = bytearray(path.read_bytes())
    for start in range(3 * size, 40 * size, size):  # each page of them leads to itself
        if data[start + 8 : start + 12] == b"xxxx":
            data[start : start + 4] = (start // size + 1).to_bytes(4, "big")
    path.write_bytes(data[: 60 * size])
    error = refused(capsys, *ingest(path))
    assert "project.db" in error


def test_event_files_of_a_million_empty_values(tmp_path, capsys):
    def field(number, data):
        length, size = b"", len(data)
        while size >= 0x80:
            length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    path = tmp_path / "events.out.tfevents.1"
    written(path, START + record(b"\x10\x01" + field(5, b"\n\x00" * 1_000_000)))
    assert "200,001 values in one row, and the limit is 200,000" in refused(capsys, *ingest(path))


@pytest.mark.skipif(not Path("/proc/kmsg").exists(), reason="needs Linux")
@pytest.mark.parametrize("place", ["/proc/kmsg", "/proc/self/environ", "link"])
@pytest.mark.parametrize("command", ["ingest", "fit", "report", "study"])
def test_files_of_the_kernel_are_refused_before_they_are_read(tmp_path, capsys, place, command):
    """To read /proc/kmsg waits for ever; its size is 0, and it is said to be a regular file."""
    if place == "link":
        place = tmp_path / "link"
        place.symlink_to("/proc/kmsg")
    more = {"ingest": ["-o", tmp_path / "run"], "study": ["--dry-run"]}
    assert f"{place}: a kernel file (proc)" in refused(capsys, command, place, *more.get(command, ()))


def test_a_pipe_that_nothing_writes_to_is_not_waited_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("scalerl.files._PIPE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe, to which nothing was written" in refused(capsys, "fit", tmp_path / "pipe")


@pytest.mark.parametrize(
    "text", ["x = " + "[" * 20_000, "a" + ".a" * 20_000 + " = 1", "a" + ".a" * 900 + " = 1"]
)
@pytest.mark.parametrize("command", ["study", "train"])
def test_deep_toml(tmp_path, capsys, command, text):
    path = written(tmp_path / "x.toml", text)
    more = ["--dry-run"] if command == "study" else []
    error = refused(capsys, command, path, *more)
    assert "more than 100 levels of nesting, which is the limit" in error
    if command == "train":
        override = text.replace("x = ", "seed=").replace(" ", "")
        assert "limit" in refused(capsys, command, "demo", "--set", override)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [-1e308, 1e308])
def test_values_at_the_ends_of_the_floats_are_drawn(tmp_path, capsys, value):
    run = tmp_path / "run"
    run.mkdir()
    written(run / "config.json", '{"schema": 1}')
    evals = [{"step": n, "pass_rate": 0.3 + 0.02 * n, "entropy": value} for n in range(12)]
    steps = [
        {"step": n, "reward_mean": 0.5, "entropy": 1.0 if n % 3 else value, "loss": value} for n in range(12)
    ]
    for name, rows in {"evals.jsonl": evals, "steps.jsonl": steps}.items():
        written(run / name, "".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(run)]) == 0
    shutil.copytree(run, tmp_path / "again")
    assert main(["report", str(run), str(tmp_path / "again"), "-o", str(tmp_path / "page.html")]) == 0
    assert (run / "report.html").stat().st_size > 1000


def test_evaluations_that_are_nan_in_a_console_log_are_counted(tmp_path, capsys):
    lines = (f"step:{n} - val-core/a/acc/mean@4:{'nan' if n > 8 else 0.1 * n}\n" for n in range(1, 13))
    path = written(tmp_path / "verl.log", "".join(lines))
    assert main([str(word) for word in ingest(path)]) == 0
    assert (
        "the last 4 of 12 evaluations of 'val-core/a/acc/mean@4' (33 %) are NaN (steps 9 to 12)"
        in capsys.readouterr().err
    )


def test_a_run_of_more_runs_than_are_read_at_once_is_read_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limits, "RUNS", replace(limits.RUNS, most=3))
    rows = ({"run_id": f"r{r}", "step": s, "eval/reward": 0.5} for r in range(5) for s in range(4))
    path = written(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert "5 runs, and the limit is 3: choose one (--run)" in refused(capsys, *ingest(path))
    (run,) = read_source(path, ReadOptions(run="r3")).runs
    assert len(run.evals) == 4
    folder = tmp_path / "mlruns" / "0"
    for n in range(5):
        (folder / f"r{n}" / "metrics").mkdir(parents=True)
        stage = "deleted" if n > 2 else "active"
        written(folder / f"r{n}" / "meta.yaml", f"run_id: r{n}\nrun_name: r{n}\nlifecycle_stage: {stage}\n")
        written(folder / f"r{n}" / "metrics" / "eval_reward", "1700000000000 0.5 1\n")
    written(folder / "meta.yaml", "name: x\n")
    assert len(read_source(tmp_path / "mlruns").runs) == 3
    monkeypatch.setattr(limits, "FOUND", replace(limits.FOUND, most=4))
    assert "runs in one file or folder, and the limit is 4: split it" in refused(capsys, *ingest(path))


def test_runs_beyond_the_limit_of_evaluations_are_left_out_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "EVALUATIONS", replace(limits.EVALUATIONS, most=100))
    rows = ({"run_id": f"r{r}", "step": s, "eval/acc": 0.5} for r in range(4) for s in range(1, 31))
    found = read_source(written(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert [run.name for run in found.runs] == ["r0", "r1", "r2"]
    assert [one.run for one in found.unread] == ["r3"]
    assert "120 evaluations, and the limit is 100: read fewer runs at once" in found.unread[0].reason


def test_a_run_with_too_many_values_leaves_their_room_to_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "VALUES", replace(limits.VALUES, most=100))
    for name, n in (("a", 30), ("b", 90), ("c", 30)):
        events = [event("eval/reward", s, 0.5) for s in range(n)]
        (tmp_path / name).mkdir()
        written(tmp_path / name / "events.out.tfevents.1", b"".join([START, *events]))
    found = read_source(tmp_path)
    assert [run.name for run in found.runs] == ["a", "c"]
    assert [one.run for one in found.unread] == ["b"]


def test_columns_without_a_number_count_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limits, "COLUMNS", replace(limits.COLUMNS, most=50))
    for value in (float("nan"), "text"):
        rows = [{"step": s} | {f"val-core/{s}-{n}/acc/mean@4": value for n in range(20)} for s in range(3)]
        path = written(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        assert "51 metrics that could be of use" in refused(capsys, *ingest(path))


def test_blank_rows_of_a_csv_are_rows_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROW", replace(limits.ROW, most=1000))
    rows = "".join(f"{n},0.{n}\n" for n in range(1, 10))
    blank = " \n" * 2000
    path = written(tmp_path / "x.csv", f"{blank}gpu_hours,pass_rate\n{blank}{rows}{blank}")
    assert len(read_table(path)) == 9
    path = written(tmp_path / "y.csv", f'{blank}"Step","r - eval/acc"\n{blank}{rows}')
    (run,) = read_source(path, ReadOptions(format="wandb-csv")).runs
    assert len(run.evals) == 9
