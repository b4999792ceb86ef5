"""The inputs of `attack.py`: every format with odd rows, damaged bytes, floods and bombs; and files that
are none."""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import attack_bombs
from attack_formats import PASS_RATE, SECONDS, WRITERS, Row, is_float, run_folder


@dataclass(frozen=True)
class Input:
    """One attack: `write` puts it into an empty folder and returns the source to read."""

    format: str
    name: str
    write: Callable[[Path], Path | str]
    command: str = "ingest"
    evaluations: Callable[[], int] | None = None
    """Returns the number of evaluations it holds, including duplicates and values that are not finite. None
    if that is unknown, as for a damaged input."""
    must_read: bool = False
    """Whether a refusal is also a fault."""


def rows(last: int = 25, **more: object) -> list[Row]:
    return [
        {"step": n, PASS_RATE: 0.3 + 0.3 * n / (n + 8), SECONDS: 90.5, **more} for n in range(1, last + 1)
    ]


def odd(value: object) -> list[Row]:
    """Return the rows of a sound log, with `value` as the pass rate after 60 % of them."""
    return [row | ({PASS_RATE: value} if n >= 15 else {}) for n, row in enumerate(rows())]


def at_steps(steps: Sequence[object]) -> list[Row]:
    return [row | {"step": step} for row, step in zip(rows(len(steps)), steps, strict=True)]


def columns(n: int, last: int = 3, name: str = "val-core/{}/acc/mean@4") -> list[Row]:
    return [row | {name.format(i): 0.5 for i in range(n)} for row in rows(last)]


def shuffled() -> list[Row]:
    found = rows()
    random.Random(0).shuffle(found)
    return found


def many_runs(n: int, last: int = 1) -> list[Row]:
    return [row | {"run": f"r{i}"} for i in range(n) for row in rows(last)]


_NESTED = {"a": 0.5}
for _ in range(300):
    _NESTED = {"a": _NESTED, "b": 0.5}

ROWS: dict[str, tuple[Callable[[], list[Row]], bool]] = {
    # True: a refusal is a fault.
    "sound": (rows, True),
    "long": (lambda: rows(5000), True),
    "shuffled": (shuffled, False),
    "descending": (lambda: rows()[::-1], False),
    "restarted": (lambda: rows() + rows()[10:], False),
    "step-twice": (lambda: at_steps([*range(1, 13), *range(12, 25)]), False),
    "nan": (lambda: odd(math.nan), False),
    "infinite": (lambda: odd(-math.inf), False),
    "negative": (lambda: odd(-1e308), False),
    "large": (lambda: odd(1e308), False),
    "whole-number": (lambda: odd(10**300), False),
    "text": (lambda: odd("x" * 100_000), False),
    "negative-steps": (lambda: at_steps(range(-12, 13)), False),
    "broken-steps": (lambda: at_steps([n / 4 for n in range(25)]), False),
    "large-steps": (lambda: at_steps([10**n for n in range(25)]), False),
    "far-steps": (lambda: at_steps([2**62 + n for n in range(25)]), False),
    "columns": (lambda: columns(2000), False),
    "more-columns": (lambda: columns(40_000), False),
    "other-columns": (lambda: columns(40_000, name="other/{}"), False),
    "long-name": (lambda: [row | {"eval/" + "n" * 200_000: 0.5} for row in rows()], False),
    "name-of-separators": (lambda: [row | {" - /effective/ - " * 15_000: 0.5} for row in rows()], False),
    "nested": (lambda: [row | {"deep": _NESTED} for row in rows()], False),
    "wide-below-long": (
        lambda: [row | {"n" * 100_000: {str(n): 0 for n in range(40_000)}} for row in rows(3)],
        False,
    ),
    "runs": (lambda: many_runs(800, 3), False),
    "more-runs": (lambda: many_runs(30_000), False),
}
_NESTED_ROWS = {"nested", "wide-below-long"}
_WITHOUT: dict[str, set[str]] = {
    # Names in MLflow are file names, table cells are numbers or text, and console steps are digits.
    "mlflow": _NESTED_ROWS
    | {"long-name", "name-of-separators", "more-columns", "other-columns", "more-runs", "text"},
    "verl-console": _NESTED_ROWS | {"negative-steps", "broken-steps", "large-steps", "far-steps"},
    **dict.fromkeys(("mlflow-db", "parquet", "tensorboard", "table-csv", "wandb-csv"), _NESTED_ROWS),
}
_OF_RUNS = {"jsonl", "mlflow", "mlflow-db", "trackio", "parquet", "wandb-csv"}
"""Formats that can hold several runs."""
_OWN = {"table-csv": "fit", "table-jsonl": "fit", "run-folder": "fit"}
"""Formats that a command other than ingest reads."""


def held(format: str, found: Sequence[Row]) -> int:
    """Return the number of evaluations that a log of these rows holds."""
    if format == "tensorboard":  # its writers skip values that are not floats
        found = [row for row in found if is_float(row[PASS_RATE])]
    elif format == "verl-console":  # it holds numbers as printed, but no text
        found = [r for r in found if not isinstance(r[PASS_RATE], str) and len(str(r[PASS_RATE])) <= 50]
    elif format == "wandb-csv":  # one line per step
        return len({(row["step"], row.get("run")) for row in found})
    return len(found)


def of_rows() -> Iterator[Input]:
    for format, write in WRITERS.items():
        for name, (made, must_read) in ROWS.items():
            if name in _WITHOUT.get(format, ()) or ("runs" in name and format not in _OF_RUNS):
                continue

            def put(folder: Path, write=write, made=made) -> Path:  # noqa: ANN001
                return write(folder, made())

            def holds(format=format, made=made) -> int:  # noqa: ANN001
                return held(format, made())

            yield Input(format, name, put, _OWN.get(format, "ingest"), holds, must_read)


def flipped(data: bytes, seed: int) -> bytes:
    draw, found = random.Random(seed), bytearray(data)
    for _ in range(1 + len(data) // 2000):
        found[draw.randrange(len(found))] = draw.randrange(256)
    return bytes(found)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut-{part}": lambda data, part=part: data[: len(data) * part // 100] for part in (1, 40, 70, 99)},
    **{f"flipped-{seed}": lambda data, seed=seed: flipped(data, seed) for seed in range(6)},
    "utf-16": lambda data: data.decode("latin-1").encode("utf-16"),
    "byte-order-mark": lambda data: b"\xef\xbb\xbf" + data,
    "zeros": lambda data: data + bytes(3_000_000),
    "newlines": lambda data: data + b"\n" * 3_000_000,
    "returns": lambda data: data + b"\r" * 3_000_000,
    "blanks": lambda data: b" " * 3_000_000 + data,
    "brackets": lambda data: data + b"[" * 3_000_000,
    "lists": lambda data: data + b'{"step": 30, "x": [' + b"[]," * 1_000_000 + b"0]}\n",
    "tables": lambda data: data + b'{"step": 30, "x": [' + b'{"":{}},' * 400_000 + b"0]}\n",
    "quote": lambda data: data + b'"' + b"x,\n" * 1_000_000,
    "commas": lambda data: data + b"," * 3_000_000 + b"\n",
    "digits": lambda data: data + b'{"step": ' + b"9" * 3_000_000 + b"}\n",
}


def damaged() -> Iterator[Input]:
    for format, write in WRITERS.items():
        for name, damage in DAMAGE.items():

            def put(folder: Path, write=write, damage=damage) -> Path:  # noqa: ANN001
                path = write(folder, rows())
                for file in [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]:
                    file.write_bytes(damage(file.read_bytes()))
                return path

            yield Input(format, name, put, _OWN.get(format, "ingest"))


def no_files() -> Iterator[Input]:
    """Yield pipes, sockets, devices and kernel files, by name and behind a link."""

    def pipe(folder: Path) -> Path:
        os.mkfifo(folder / "pipe")
        return folder / "pipe"

    def its_socket(folder: Path) -> Path:
        with socket.socket(socket.AF_UNIX) as server:
            here = Path.cwd()
            os.chdir(folder)  # the path of a socket must be short
            server.bind("socket")
            os.chdir(here)
        return folder / "socket"

    def link(folder: Path, to: str) -> Path:
        (folder / "link").symlink_to(to)
        return folder / "link"

    kernel = (
        "/proc/kmsg",
        "/proc/kcore",
        "/proc/self/mem",
        "/proc/self/environ",
        "/sys/kernel/uevent_seqnum",
    )
    for command in ("ingest", "fit", "report"):
        yield Input("no-file", f"pipe-{command}", pipe, command)
        yield Input("no-file", f"socket-{command}", its_socket, command)
        for place in ("/dev/zero", "/dev/tty", *kernel):
            if Path(place).exists():
                yield Input("no-file", f"{place}-{command}", lambda _, place=place: place, command)
        yield Input("no-file", f"link-{command}", lambda folder: link(folder, "/proc/kmsg"), command)
    for command in ("study", "train"):
        yield Input("no-file", f"pipe-{command}", pipe, command)
        yield Input("no-file", f"kmsg-{command}", lambda _: "/proc/kmsg", command)


def reports() -> Iterator[Input]:
    """Yield run folders with extreme values, reported alone and beside a sound run."""
    values = (-1e308, 1e308, -1e-308, 5e-324, -5, 1.5, 2**53)
    for name in (PASS_RATE, "reward_mean", "time", "samples", "mean_p_1mp", "truncated", "entropy"):
        for value in values:

            def put(folder: Path, name=name, value=value) -> Path:  # noqa: ANN001
                found = [row | {"samples": 64.0 * row["step"]} for row in rows()]
                found[12] |= {name: value}
                path = run_folder(folder, found)
                steps = path / "steps.jsonl"
                text = steps.read_text().replace(
                    '"step": 7, "reward_mean": 0.5', f'"step": 7, "reward_mean": {value!r}'
                )
                steps.write_text(
                    text.replace('"step": 9,', f'"step": 9, "entropy": {value!r}, "loss": {value!r},')
                )
                return path

            for command in ("report", "overlay"):
                yield Input("report", f"{command}-{name.partition('/')[0]}={value:g}", put, command)


def corpus() -> list[Input]:
    """Return all inputs, in a fixed order."""
    bombs = (Input(*bomb) for bomb in attack_bombs.bombs())
    return [*of_rows(), *damaged(), *no_files(), *reports(), *bombs]
