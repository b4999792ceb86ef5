"""Small files that hold much: what each format can say in few bytes; and deep or wide TOML."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

from attack_formats import (
    EVENT_START,
    WANDB_RUN,
    event_record,
    field,
    framed,
)

Bomb = tuple[str, str, Callable[[Path], Path], str]


Made = Callable[[], bytes | str]
"""Makes a file's content when it is written: all at once would take a GB."""


def put(name: str, made: Made) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        data = made()
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return folder / name

    return write


def _wandb(name: str, records: Callable[[], Iterable[bytes]]) -> Bomb:
    return "wandb", name, put("run-r.wandb", lambda: framed([WANDB_RUN, *records()])), "ingest"


def _item(name: bytes, text: bytes) -> bytes:
    return field(1, field(2, name) + field(16, text))


def _wandb_bombs() -> Iterator[Bomb]:
    yield _wandb("empty-items", lambda: [field(2, b"\n\x00" * 1_500_000)])
    yield _wandb("items", lambda: [field(2, _item(b"a", b"1") * 300_000)])
    yield _wandb("lists", lambda: [field(2, _item(b"a", b"[" + b"[]," * 1_000_000 + b"0]"))])
    yield _wandb("tables", lambda: [field(2, _item(b"a", b"{" + b'"":{},' * 500_000 + b'"":0}'))])
    yield _wandb("config", lambda: [field(5, field(1, field(2, b"a") * 700_000 + field(16, b"1")))])
    long = b"n" * 200_000
    yield _wandb("long-keys", lambda: (field(2, _item(long + b"%d" % n, b"1")) for n in range(20)))
    yield _wandb("parts", lambda: [field(2, field(1, field(2, b"ab") * 700_000 + field(16, b"1")))])
    keys = (_item(b"val-core/%d/acc/mean@4" % n, b"1") for n in range(60_000))
    yield _wandb("keys", lambda: [field(2, b"".join(keys))])
    wide = b"{" + b",".join(b'"%d":0' % n for n in range(60_000)) + b"}"
    yield _wandb("wide-below-long", lambda: [field(2, field(1, field(1, b"n" * 100_000) + field(16, wide)))])
    media = (_item(b"m%d._type" % n, b'"x"') + _item(b"k%d" % n, b"1") for n in range(30_000))
    yield _wandb("media", lambda: [field(2, b"".join(media))])


def _event(values: bytes) -> bytes:
    return event_record(b"\x09" + struct.pack("<d", 1.7e9) + b"\x10\x01" + field(5, values))


def _tensorboard(name: str, records: Callable[[], Iterable[bytes]]) -> Bomb:
    return (
        *("tensorboard", name),
        put("events.out.tfevents.1", lambda: b"".join([EVENT_START, *records()])),
        "ingest",
    )


def _tensor(content: bytes) -> list[bytes]:
    return [_event(field(1, field(1, b"train/reward") + field(8, content)))]


def _tensorboard_bombs() -> Iterator[Bomb]:
    yield _tensorboard("empty-values", lambda: [_event(b"\n\x00" * 1_500_000)])
    yield _tensorboard("packed", lambda: _tensor(b"\x08\x03" + field(7, b"\x01" * 3_000_000)))
    yield _tensorboard("unpacked", lambda: _tensor(b"\x08\x03" + b"\x38\x01" * 1_500_000))
    yield _tensorboard("doubles", lambda: _tensor(b"\x08\x02" + field(6, bytes(3_200_000))))
    yield _tensorboard("dimensions", lambda: _tensor(b"\x08\x03" + field(2, b"\x12\x00" * 1_500_000)))
    tags = (field(1, b"t" * 100_000 + b"%d" % n) + b"\x15\0\0\0\0" for n in range(20))
    yield _tensorboard("long-tags", lambda: (_event(field(1, one)) for one in tags))
    text = b'{"a":[' + b"[]," * 700_000 + b"0]}"
    tag = field(1, b"args/text_summary")
    yield _tensorboard("config", lambda: [_event(field(1, tag + field(8, field(8, text))))])


def _trackio(name: str, fill: Callable[[sqlite3.Connection], object], schema: str = "") -> Bomb:
    def write(folder: Path) -> Path:
        with closing(sqlite3.connect(folder / "project.db")) as base:
            base.execute(
                schema or "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, metrics)"
            )
            fill(base)
            base.commit()
        return folder / "project.db"

    return "trackio", name, write, "ingest"


def _row(base: sqlite3.Connection, text: str, step: int = 1) -> None:
    base.execute(
        "INSERT INTO metrics (timestamp, run_name, step, metrics) VALUES ('', 'r', ?, ?)", (step, text)
    )


def _chain_that_goes_round(folder: Path) -> Path:
    """Write a hundred rows whose overflow pages lead back to themselves."""
    _, _, write, _ = _trackio(
        "", lambda base: [_row(base, '{"a": "' + "x" * 20_000 + '"}', n) for n in range(100)]
    )
    path = write(folder)
    data = bytearray(path.read_bytes())
    size = struct.unpack(">H", data[16:18])[0]
    for page in range(2, len(data) // size):
        start = page * size
        if data[start] == 0 and data[start + 8 : start + 12] in (b"xxxx",):
            data[start : start + 4] = struct.pack(">I", page + 1)
    path.write_bytes(data)
    return path


def _trackio_bombs() -> Iterator[Bomb]:
    yield _trackio("lists", lambda base: _row(base, '{"a": [' + "[]," * 1_000_000 + "0]}"))
    yield _trackio("tables", lambda base: _row(base, "{" + '"a":{"b":0},' * 300_000 + '"c":0}'))
    wide = {"n" * 100_000: {str(n): 0 for n in range(40_000)}}
    yield _trackio("wide-below-long", lambda base: _row(base, json.dumps(wide)))
    yield _trackio("null", lambda base: base.execute("INSERT INTO metrics VALUES (1, 1, NULL, 1, NULL)"))
    yield _trackio("blob", lambda base: base.execute("INSERT INTO metrics VALUES (1, 1, x'ff', 1, x'ff')"))
    generated = (
        "CREATE TABLE metrics (id INTEGER PRIMARY KEY, timestamp, run_name, step, "
        "metrics AS (printf('{\"a\": \"%.*c\"}', 60000000, 'x')))"
    )
    fill = "INSERT INTO metrics (timestamp, run_name, step) VALUES ('', 'r', ?)"
    yield _trackio("generated", lambda base: base.executemany(fill, [(n,) for n in range(200)]), generated)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    columns = "i id, i timestamp, i run_name, i step, '{}' metrics"
    view = f"CREATE VIEW metrics AS {endless} SELECT {columns} FROM n"
    yield _trackio("view", lambda base: None, view)
    yield "trackio", "chain", _chain_that_goes_round, "ingest"


def _parquet(name: str, columns: Mapping[str, object], **options: object) -> Bomb:
    def write(folder: Path) -> Path:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        made = {key: value(arrow) if callable(value) else value for key, value in columns.items()}
        parquet.write_table(arrow.table(made), folder / "log.parquet", compression="zstd", **options)
        return folder / "log.parquet"

    return "parquet", name, write, "ingest"


def _parquet_bombs() -> Iterator[Bomb]:
    def cells(text: str, n: int) -> dict[str, object]:
        return {"step": range(n), "train/reward": lambda arrow: arrow.array([0.5] * n), text: None}

    def repeated(size: int, n: int) -> Callable:
        def make(arrow: Any) -> Any:
            if size * n < 2**28:
                return arrow.array(["x" * size] * n)
            return arrow.DictionaryArray.from_arrays(arrow.array([0] * n, arrow.int32()), ["x" * size])

        return make

    for name in ("run_id", "run_name", "timestamp"):
        for size in (5_000, 500_000):
            yield _parquet(f"{name}-{size}", cells(name, 20_000) | {name: repeated(size, 20_000)})
    plain = cells("run_id", 500) | {"run_id": repeated(400_000, 500)}
    yield _parquet("plain-text", plain, use_dictionary=False)
    ends = {"step": range(3_000_000), "train/reward": lambda arrow: arrow.array([0.5] * 3_000_000)}
    yield _parquet("rows", ends)
    yield _parquet(
        "nulls",
        dict.fromkeys(("step", "train/reward"), lambda arrow: arrow.nulls(30_000_000, arrow.float64())),
    )
    yield _parquet("columns", {"step": [1]} | {f"val-core/{n}/acc/mean@4": [0.5] for n in range(20_000)})


def _head(title: str, n: int) -> str:
    return ",".join(f'"{title}"'.format(i) for i in range(n))


def _csv_bombs() -> Iterator[Bomb]:
    for name, made in {
        "separators": lambda: '"Step","' + " - ".join(["a"] * 20_000) + '"\n1,0.5\n',
        "one-name": lambda: '"Step",' + _head("r - reward", 14_000) + "\n1,0.5\n",
        "runs": lambda: '"Step",' + _head("r{} - reward", 20_000) + "\n1" + ",0.5" * 20_000 + "\n2\n3\n",
        "metrics": lambda: '"Step",' + _head("r - m{}", 60_000) + "\n1" + ",0.5" * 60_000 + "\n",
        "short-lines": lambda: (
            '"Step",' + _head("r - val-core/{}/acc/mean@4", 19_000) + "\n" + "1\n" * 100_000
        ),
        "one-run-each": lambda: '"Step",' + _head("r{} - reward", 900) + "\n" + "1\n" * 100_000,
    }.items():
        yield "wandb-csv", name, put("x.csv", made), "ingest"
    for name, made in {
        "columns": lambda: f"gpu_hours,pass_rate,{_head('c{}', 200_000)}\n" + "1,0.5\n" * 50,
        "short-lines": lambda: f"gpu_hours,pass_rate,{_head('c{}', 19_000)}\n" + "1,0.5\n" * 100_000,
        "rows": lambda: "gpu_hours,pass_rate\n" + "".join(f"{n},.5\n" for n in range(400_000)),
        "other-rows": lambda: "gpu_hours,pass_rate\n" + "".join(f"{n},\n" for n in range(400_000)),
    }.items():
        yield "table-csv", name, put("x.csv", made), "fit"


def _json_bombs() -> Iterator[Bomb]:
    for format, name, start, end in (
        ("jsonl", "x.jsonl", '{"step": 1, "reward": 0.5}\n{"step": 2, "a": ', "}\n"),
        (
            "verl",
            "x.jsonl",
            '{"step": 1, "data": {"critic/score/mean": 0.5}}\n{"step": 2, "data": {"a": ',
            "}}\n",
        ),
        ("trainer-state", "trainer_state.json", '{"log_history": [{"step": 1, "a": ', "}]}"),
        ("table-jsonl", "x.jsonl", '{"gpu_hours": 1, "pass_rate": 0.5}\n{"gpu_hours": 2, "a": ', "}\n"),
    ):
        command = "fit" if format == "table-jsonl" else "ingest"
        for kind, made in _JSON.items():
            yield (
                format,
                kind,
                put(name, lambda made=made, start=start, end=end: start + made() + end),
                command,
            )


_JSON: dict[str, Callable[[], str]] = {
    "deep-names": lambda: "".join('{"%s": ' % ("k" * 600) for _ in range(900)) + "1" + "}" * 900,
    "deep-lists": lambda: "[" * 900 + "]" * 900,
    "deeper-lists": lambda: "[" * 100_000 + "]" * 100_000,
    "empty-tables": lambda: "[" + "{}," * 1_000_000 + "0]",
    "small-tables": lambda: "[" + '{"a":0},' * 400_000 + "0]",
    "wide-character": lambda: '"\U0001f600' + "x" * 10_000_000 + '"',
}


def _toml() -> Iterator[Bomb]:
    study = 'base = "demo"\nseeds = 2\n'
    for kind, made in _TOML.items():
        yield "study", kind, put("study.toml", lambda made=made: _bytes(study + made())), "study"
        yield "recipe", kind, put("recipe.toml", lambda made=made: _bytes(made())), "train"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


_TOML: dict[str, Callable[[], str]] = {
    "deep-lists": lambda: "x = " + "[" * 20_000 + "]" * 20_000,
    "deep-tables": lambda: "x = " + "{a=" * 3_000 + "1" + "}" * 3_000,
    "deep-keys": lambda: ".".join(["a"] * 20_000) + " = 1",
    "deep-headers": lambda: "[" + ".".join(["a"] * 20_000) + "]\nb = 1",
    "deep-changes": lambda: "[arm.x]\n" + ".".join(["a"] * 3_000) + " = 1",
    "deep-list-900": lambda: "[arm.x]\nloss.kind = " + "[" * 900 + "]" * 900,
    "deep-table-400": lambda: "[arm.x]\nloss.kind = " + "{a=" * 400 + "1" + "}" * 400,
    "many-keys": lambda: "\n".join(f"k{n} = 1" for n in range(60_000)),
    "many-arms": lambda: "\n".join(f"[arm.a{n}]\nloss.kind = 'dapo'" for n in range(3_000)),
    "long-text": lambda: f"name = '{'x' * 3_000_000}'",
    "digits": lambda: "x = " + "9" * 100_000,
    "large": lambda: "[arm.x]\noptimiser.lr = 1e999\nseed = 99999999999999999999",
    "zeros": lambda: "\0" * 100_000,
    "not-utf-8": lambda: "name = '\udcff'",
    "keys-again": lambda: "[[a]]\n" * 100_000,
    "quote": lambda: 'x = """' + "\n" * 1_000_000,
}


def bombs() -> Iterator[Bomb]:
    """Yield format, name, writer and command of every bomb."""
    yield from _wandb_bombs()
    yield from _tensorboard_bombs()
    yield from _trackio_bombs()
    yield from _parquet_bombs()
    yield from _csv_bombs()
    yield from _json_bombs()
    yield from _toml()
