"""Ten thousand damaged or odd logs of every format: each is a sound run, or refused in one line; none hangs.

python -m pytest -m slow tests/ingest/formats/test_fuzz.py
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from event_files import START, event, record as checked
from hostile_logs import alarm, damaged
from hypothesis import given, settings, strategies as st
from wandb_files import framed, header, history

from scalerl import ScalerlError
from scalerl.ingest.formats.table import read_table
from scalerl.ingest.load import FoundRuns, read_source
from scalerl.jsonl import dumps
from scalerl.record.reader import RunRecord

EXAMPLES = 10_000
SECONDS = 30
"""What no example may take."""

NAMES = st.sampled_from(
    [
        *("step", "data", "_step", "_timestamp", "time", "timestamp", "run_id", "run_name", "global_step"),
        *("critic/score/mean", "val-core/a/acc/mean@4", "timing_s/step", "perf/total_num_tokens", "reward"),
        *("eval_reward", "num_tokens", "eval", "train/reward", "completions/clipped_ratio", "pass_rate"),
    ]
) | st.text(max_size=5)
NUMBERS = st.one_of(
    st.integers(0, 50), st.floats(0, 1), st.floats(), st.integers(), st.just(10**400), st.just(1.7e9)
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(NAMES, NUMBERS | VALUES, max_size=8), max_size=6)


def rows(last=6):
    return [{"step": n, "val-core/a/acc/mean@4": 0.1 * n, "timing_s/step": 9.5} for n in range(last)]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass(frozen=True)
class Fuzzed:
    """A format: what is drawn, and how it is put into a folder; the path is what is to be read."""

    drawn: st.SearchStrategy[Any]
    put: Callable[[Path, Any], Path]
    read: Callable[[Path], Any] = read_source


def file(name):
    def put(folder, data):
        (folder / name).write_bytes(data)
        return folder / name

    return put


def put_mlflow(folder, drawn):
    meta, *metrics = drawn
    (folder / "metrics").mkdir(exist_ok=True)
    (folder / "params").mkdir(exist_ok=True)
    (folder / "meta.yaml").write_bytes(meta)
    for name, data in zip(("reward", "eval_reward"), metrics, strict=False):
        (folder / "metrics" / name).write_bytes(data)
    (folder / "params" / "lr").write_bytes(metrics[-1])
    return folder


def put_results(folder, drawn):
    for step, data in zip((5, 10), drawn, strict=True):
        (folder / f"step_{step}.json").write_bytes(data)
    return folder


TRACKIO = "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id, timestamp, run_name, step, metrics)"


def put_trackio(folder, drawn):
    path = folder / "project.db"
    if isinstance(drawn, bytes):
        path.write_bytes(drawn)
        return path
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        database.execute(TRACKIO)
        database.execute("CREATE TABLE configs (run_id, config)")
        for run, step, row in [*(("a", n, row) for n, row in enumerate(rows())), *drawn]:
            cells = (run, "2026-01-01T00:00:00", run, step, json.dumps(row))
            database.execute(
                "INSERT INTO metrics (run_id, timestamp, run_name, step, metrics) VALUES (?, ?, ?, ?, ?)",
                cells,
            )
            database.execute("INSERT INTO configs VALUES (?, ?)", (run, json.dumps(row)))
    return path


def sound_trackio(folder):
    return put_trackio(folder, []).read_bytes()


def sound_parquet(folder):
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows()), folder / "x.parquet", compression="none")
    return (folder / "x.parquet").read_bytes()


WANDB = [header(lr=0.5), *(history(n, {"reward": 0.1 * n, "a": {"b": 1}}) for n in range(6))]
WANDB_ODD = ROWS.map(
    lambda found: [header(), *(history(n, dict(row.items())) for n, row in enumerate(found))]
)
WANDB_CSV = b'"Step","r - reward","r - reward__MIN","r - reward__MAX","s - reward"\n' + b"".join(
    b'"%d","0.%d","0.1","0.9",""\n' % (n, n) for n in range(6)
)
EVENTS = [one[12:-4] for one in (START, *(event("train/reward", n, 0.1 * n) for n in range(6)))]
STATE = {"log_history": [{"step": n, "reward": 0.1 * n, "eval_reward": 0.1} for n in range(6)]}
CONSOLE = b"".join(
    b"(Task pid=1) step:%d - critic/score/mean:0.%d - timing_s/step:np.float64(9.5)\r\n" % (n, n)
    for n in range(6)
)
RESULTS = {
    "results": {"gsm8k": {"alias": "gsm8k", "exact_match,none": 0.5}},
    "n-samples": {"gsm8k": {"original": 9, "effective": 9}},
    "config": {"model": "hf", "model_args": "pretrained=out/checkpoint-5,dtype=auto"},
    "config_general": {"model_config": {"model_name": "out/checkpoint-5"}},
    "config_tasks": {"gsm8k": {"effective_num_docs": 9}},
    "model_name": "out/checkpoint-5",
    "date": 1.7e9,
}
META = b"lifecycle_stage: active\nrun_id: b56\nrun_name: 'a'\n"
METRIC = b"".join(b"17000000%02d000 0.%d %d\n" % (n, n, n) for n in range(6))
VERL = [{"step": row["step"], "data": row} for row in rows()]
TABLE = b"gpu_hours,pass_rate,step\n" + b"".join(b"%d,0.%d,%d\n" % (n, n, n) for n in range(1, 8))
ODD = st.one_of(ROWS.map(jsonl), ROWS.map(lambda found: jsonl([*rows(), *found, *rows()])))


def fuzzed(folder):
    """All formats, by name; `folder` is one to make sound files in."""
    cells = st.tuples(st.text(max_size=3) | st.sampled_from("ab"), NUMBERS | st.text(max_size=4), VALUES)
    sqlite_cells = cells.filter(lambda cell: not isinstance(cell[1], int) or abs(cell[1]) < 2**63)
    sqlite_cells = sqlite_cells.filter(lambda cell: cell[0].isprintable() and str(cell[1]).isprintable())
    csv_row = st.lists(NUMBERS.map(str) | st.text(max_size=3), max_size=5).map(",".join)
    csv_rows = st.lists(csv_row, max_size=4).map(
        lambda found: WANDB_CSV + "\n".join(["50,0.5", *found]).encode("utf-8", "surrogatepass")
    )
    verl = st.tuples(NUMBERS, VALUES).map(lambda row: {"step": row[0], "data": row[1]})
    odd_results = st.tuples(st.sampled_from([*RESULTS]), VALUES).map(lambda one: {**RESULTS, one[0]: one[1]})
    without = st.sampled_from([*RESULTS]).map(lambda key: {k: v for k, v in RESULTS.items() if k != key})
    own = VALUES.map(lambda found: {"accuracy": 0.5, "more": found})
    results = st.one_of(
        damaged(json.dumps(RESULTS).encode()),
        st.one_of(odd_results, without, own).map(lambda found: json.dumps(found).encode()),
    )
    return {
        "wandb": Fuzzed(
            st.one_of(
                damaged(framed(WANDB)),
                st.lists(st.one_of(*map(damaged, WANDB)), max_size=6).map(framed),
                WANDB_ODD.map(framed),
            ),
            file("run-a.wandb"),
        ),
        "wandb-csv": Fuzzed(st.one_of(damaged(WANDB_CSV), csv_rows), file("x.csv")),
        "tensorboard": Fuzzed(
            st.one_of(
                damaged(b"".join(map(checked, EVENTS))),
                st.lists(st.one_of(*map(damaged, EVENTS)), max_size=6).map(
                    lambda found: b"".join(map(checked, [EVENTS[0], *found]))
                ),
            ),
            file("events.out.tfevents.1"),
        ),
        "trainer-state": Fuzzed(
            st.one_of(
                damaged(json.dumps(STATE).encode()),
                ROWS.map(lambda found: json.dumps({"log_history": found}).encode()),
                VALUES.map(lambda found: json.dumps({**STATE, "global_step": found}).encode()),
            ),
            file("trainer_state.json"),
        ),
        "results": Fuzzed(st.tuples(results, results), put_results),
        "table-json": Fuzzed(
            st.one_of(
                damaged(
                    json.dumps({"gpu_hours": [1, 2, 3], "pass_rate": [0.1, 0.2, 0.3]}, indent=1).encode()
                ),
                VALUES.map(lambda found: json.dumps(found, indent=1).encode()),
                ROWS.map(lambda found: json.dumps({"a": [*found, *rows()]}).encode()),
            ),
            file("x.json"),
            read_table,
        ),
        "mlflow": Fuzzed(st.tuples(damaged(META), damaged(METRIC), damaged(METRIC)), put_mlflow),
        "trackio": Fuzzed(
            st.one_of(damaged(sound_trackio(folder)), st.lists(sqlite_cells, max_size=5)), put_trackio
        ),
        "verl": Fuzzed(
            st.one_of(
                damaged(jsonl(VERL)), st.lists(verl, max_size=5).map(lambda found: jsonl(VERL + found))
            ),
            file("x.jsonl"),
        ),
        "verl-console": Fuzzed(damaged(CONSOLE), file("x.log")),
        "parquet": Fuzzed(damaged(sound_parquet(folder)), file("x.parquet")),
        "jsonl": Fuzzed(st.one_of(damaged(jsonl(rows())), ODD), file("x.jsonl")),
        "table-csv": Fuzzed(damaged(TABLE), file("x.csv"), read_table),
        "table-jsonl": Fuzzed(
            st.one_of(ODD, damaged(jsonl([{"gpu_hours": n, "pass_rate": n / 9} for n in range(9)]))),
            file("x.jsonl"),
            read_table,
        ),
    }


FORMATS = (
    *("wandb", "wandb-csv", "tensorboard", "trainer-state", "mlflow", "trackio", "verl", "verl-console"),
    *("parquet", "jsonl", "table-csv", "table-jsonl", "results", "table-json"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand(tmp_path, name):
    one = fuzzed(tmp_path)[name]
    counts = {"read": 0, "refused": 0}
    folder = tmp_path / "folder"
    folder.mkdir()

    @settings(max_examples=EXAMPLES)
    @given(one.drawn)
    def every(drawn):
        path = one.put(folder, drawn)
        before = sorted(tmp_path.rglob("*"))
        with alarm(SECONDS):
            counts[outcome(one.read, path)] += 1
        assert sorted(tmp_path.rglob("*")) == before

    every()
    print(f"{name}: {counts}")
    assert sum(counts.values()) >= EXAMPLES
    assert min(counts.values()) > 0


def outcome(read, path):
    """What became of a log: `read` into runs that can be written and read again, or `refused`."""
    found, refusal = None, ""
    try:
        found = read(path)
    except ScalerlError as error:
        refusal = str(error)
    if found is None:
        assert str(path) in refusal
        assert "\n" not in refusal
        return "refused"
    for run in found.runs if isinstance(found, FoundRuns) else ():
        text = "".join(dumps(asdict(point)) + "\n" for point in run.evals)
        assert len(RunRecord.parse_evals(text.encode(), "evals").evals) == len(run.evals)
        for row in run.steps():
            assert 0 <= row["step"] <= 2**53
        assert json.loads(dumps(run.config))["name"].isprintable()
    return "read"
