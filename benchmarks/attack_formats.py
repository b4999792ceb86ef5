"""Rows as logs of every format, written by its own rules and by none of the package's writers.

A row is a dict with `step` and metrics by name; `run` names its run where there are several.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from scalerl.ingest.formats.tensorboard import _masked_crc

Row = dict[str, Any]
PASS_RATE, SECONDS = "val-core/a/acc/mean@4", "timing_s/step"
_BLOCK = 32 * 1024
_LAID_OUT = ("step", "run")


def metrics(row: Row) -> Row:
    """Return a row without its step and run."""
    return {name: value for name, value in row.items() if name not in _LAID_OUT}


def lines(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def jsonl(folder: Path, rows: Sequence[Row]) -> Path:
    named = [{("run_id" if key == "run" else key): value for key, value in row.items()} for row in rows]
    return lines(folder / "log.jsonl", named)


def prime_rl(folder: Path, rows: Sequence[Row]) -> Path:
    """Write a folder with a file per process; the evaluations are in the orchestrator's."""
    for name in ("trainer", "orchestrator"):
        (folder / "run" / name).mkdir(parents=True)
    lines(folder / "run" / "trainer" / "metrics.jsonl", ({"step": r["step"], "loss/mean": 0.1} for r in rows))
    lines(folder / "run" / "orchestrator" / "metrics.jsonl", rows)
    return folder / "run"


def verl(folder: Path, rows: Sequence[Row]) -> Path:
    return lines(folder / "verl.jsonl", ({"step": row["step"], "data": metrics(row)} for row in rows))


def console(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "verl.log"
    with path.open("w") as file:
        for row in rows:
            cells = " - ".join(f"{name}:{value}" for name, value in metrics(row).items())
            file.write(f"(TaskRunner pid=7) step:{row['step']} - {cells}\n")
    return path


def trainer_state(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": len(rows), "log_history": list(rows)}))
    return path


def runs_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("run", "r")), []).append(row)
    return found


def mlflow(folder: Path, rows: Sequence[Row]) -> Path:
    """Write one folder per run; a metric's name is the path of its file."""
    for number, (name, part) in enumerate(runs_of(rows).items()):
        run = folder / "mlruns" / "0" / f"r{number}"
        (run / "metrics").mkdir(parents=True)
        run.joinpath("meta.yaml").write_text(f"run_id: r{number}\nrun_name: {name}\n")
        texts: dict[str, list[str]] = {}
        for n, row in enumerate(part):
            for metric, value in metrics(row).items():
                texts.setdefault(metric, []).append(f"{1_700_000_000_000 + n} {value} {row['step']}\n")
        for metric, found in texts.items():
            file = run / "metrics" / metric
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(found))
    folder.joinpath("mlruns", "0", "meta.yaml").write_text("name: x\n")
    return folder / "mlruns"


def trackio(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "project.db"
    with closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, metrics)")
        base.executemany(
            "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?)",
            [
                ("2026-01-01T00:00:00", row.get("run", "r"), _sqlite(row["step"]), json.dumps(metrics(row)))
                for row in rows
            ],
        )
        base.commit()
    return path


def mlflow_db(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "mlflow.db"
    with closing(sqlite3.connect(path)) as base:
        base.executescript(_MLFLOW_TABLES)
        for row in rows:
            run = row.get("run", "r")
            base.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, 1, 'active', 0)", (run, run))
            for n, (metric, value) in enumerate(metrics(row).items()):
                is_nan = isinstance(value, float) and math.isnan(value)
                step = _sqlite(row["step"])
                cells = (metric, 0 if is_nan else _sqlite(value), 1_700_000_000_000 + n, run, step, is_nan)
                base.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", cells)
                base.execute("INSERT OR IGNORE INTO latest_metrics VALUES (?, ?)", (metric, run))
        base.commit()
    return path


_MLFLOW_TABLES = """
CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name, lifecycle_stage);
INSERT INTO experiments VALUES (1, 'x', 'active');
CREATE TABLE runs (run_uuid PRIMARY KEY, name, experiment_id, lifecycle_stage, start_time);
CREATE TABLE tags (key, value, run_uuid, PRIMARY KEY (key, run_uuid));
CREATE TABLE params (key, value, run_uuid);
CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan);
CREATE INDEX of_metrics ON metrics (key, timestamp, step);
CREATE TABLE latest_metrics (key, run_uuid, PRIMARY KEY (key, run_uuid));
"""


def _sqlite(step: Any) -> Any:
    return float(step) if isinstance(step, int) and abs(step) >= 2**63 else step


def parquet(folder: Path, rows: Sequence[Row]) -> Path:
    arrow, writer = import_module("pyarrow"), import_module("pyarrow.parquet")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {("run_id" if name == "run" else name): [row.get(name) for row in rows] for name in names}
    made = {}
    for name, cells in columns.items():
        is_number = all(cell is None or isinstance(cell, int | float) for cell in cells)
        made[name] = (
            [None if cell is None else float(cell) for cell in cells] if is_number else list(map(str, cells))
        )
    writer.write_table(arrow.table(made), folder / "log.parquet")
    return folder / "log.parquet"


def wandb_csv(folder: Path, rows: Sequence[Row]) -> Path:
    """Write the chart of all metrics: one line per step, in order of first appearance."""
    names = dict.fromkeys((str(row.get("run", "r")), name) for row in rows for name in metrics(row))
    by_step: dict[Any, dict[tuple[str, str], Any]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(
            {(str(row.get("run", "r")), name): value for name, value in metrics(row).items()}
        )
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["Step", *(f"{run} - {name}" for run, name in names)])
    writer.writerows([step, *(cells.get(name, "") for name in names)] for step, cells in by_step.items())
    folder.joinpath("export.csv").write_text(out.getvalue())
    return folder / "export.csv"


def field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def framed(records: Iterable[bytes]) -> bytes:
    """Return records framed in the chunks and blocks of a .wandb file."""
    out = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        is_first = True
        while record or is_first:
            room = _BLOCK - len(out) % _BLOCK
            if room < 7:
                out += bytes(room)
                room = _BLOCK
            part, record = record[: room - 7], record[room - 7 :]
            kind = (2 if record else 1) if is_first else (3 if record else 4)
            out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            is_first = False
    return bytes(out)


WANDB_RUN = field(17, field(1, b"r") + field(17, b"\x08\x80\xf0\xd3\xaa\x06"))


def wandb_row(row: Row) -> bytes:
    cells = metrics(row) | {"_step": row["step"], "_timestamp": 1_700_000_000.5}
    items = (field(2, name.encode()) + field(16, json.dumps(value).encode()) for name, value in cells.items())
    return b"\x08\x07" + field(2, b"".join(field(1, item) for item in items))


def wandb(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "run-r.wandb"
    path.write_bytes(framed([WANDB_RUN, *map(wandb_row, rows)]))
    return path


def event_record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checks = (struct.pack("<I", _masked_crc(part)) for part in (length, data))
    return length + next(checks) + data + next(checks)


def is_float(value: object) -> bool:
    """Return whether TensorBoard's writers accept a value as a scalar."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 3e38)


def event(row: Row) -> bytes:
    """Return the event of a row; like the writers, skip values that are not floats."""
    values = b""
    for name, value in metrics(row).items():
        if is_float(value) and not abs(value) >= 3e38:
            values += field(1, field(1, name.encode()) + b"\x15" + struct.pack("<f", value))
        elif is_float(value):
            wide = b"\x08\x02" + field(4, struct.pack("<d", value))  # a tensor of float64
            values += field(1, field(1, name.encode()) + field(8, wide))
    step = int(row["step"]) if math.isfinite(row["step"]) else 0
    return b"\x09" + struct.pack("<d", 1.7e9 + step % 2**31) + b"\x10" + varint(step) + field(5, values)


EVENT_START = event_record(b"\x09" + struct.pack("<d", 1.7e9) + field(3, b"brain.Event:2"))


def tensorboard(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "events.out.tfevents.1"
    path.write_bytes(EVENT_START + b"".join(event_record(event(row)) for row in rows))
    return path


def table_csv(folder: Path, rows: Sequence[Row]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([_NAMES_OF_TABLES.get(name, name) for name in names])
    writer.writerows([row.get(name, "") for name in names] for row in rows)
    folder.joinpath("table.csv").write_text(out.getvalue())
    return folder / "table.csv"


def table_jsonl(folder: Path, rows: Sequence[Row]) -> Path:
    renamed = ({_NAMES_OF_TABLES.get(name, name): value for name, value in row.items()} for row in rows)
    return lines(folder / "table.jsonl", renamed)


_NAMES_OF_TABLES = {PASS_RATE: "pass_rate", "step": "gpu_hours"}


def run_folder(folder: Path, rows: Sequence[Row]) -> Path:
    run = folder / "run"
    run.mkdir()
    run.joinpath("config.json").write_text('{"schema": 1, "name": "run"}')
    evals = [
        {("pass_rate" if key == PASS_RATE else key): value for key, value in row.items()} for row in rows
    ]
    lines(run / "evals.jsonl", evals)
    lines(run / "steps.jsonl", ({"step": row["step"], "reward_mean": 0.5} for row in rows))
    return run


WRITERS: dict[str, Callable[[Path, Sequence[Row]], Path]] = {
    **{
        "jsonl": jsonl,
        "prime-rl": prime_rl,
        "verl": verl,
        "verl-console": console,
        "trainer-state": trainer_state,
    },
    **{
        "mlflow": mlflow,
        "mlflow-db": mlflow_db,
        "trackio": trackio,
        "parquet": parquet,
        "wandb-csv": wandb_csv,
        "wandb": wandb,
    },
    **{"tensorboard": tensorboard, "table-csv": table_csv, "table-jsonl": table_jsonl},
    "run-folder": run_folder,
}
