"""Import of large logs of other trainers: rows a second, MB a second, and the most memory a process held.

    python benchmarks/ingest.py [--gb 0.1] [--formats jsonl wandb tensorboard csv]

Every log is of one run of verl's metrics, 60 in a row, an evaluation every tenth row; it is written into a
folder that is removed, and imported by `scalerl ingest` in a process of its own, whose seconds on a processor
count, start and writing of the run included. The checksums of event files are made in plain Python: to write
one, which is not timed, takes as long as its import.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

PASS_RATE = "val-core/math/acc/mean@16"
NAMES = (
    *("actor/entropy", "actor/pg_loss", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "actor/kl_loss"),
    *("critic/score/mean", "critic/rewards/mean", "timing_s/step", "perf/total_num_tokens"),
    *("response_length/mean", "response_length/clip_ratio", "perf/time_per_step"),
    *(f"{part}/{what}" for part in ("critic/score", "critic/advantages") for what in ("max", "min")),
    *(f"{part}/{what}" for part in ("critic/returns", "prompt_length") for what in ("mean", "max", "min")),
    *(f"timing_s/{part}" for part in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "save")),
    *(f"timing_per_token_ms/{part}" for part in ("gen", "ref", "adv", "update_actor")),
    *(f"perf/{what}" for what in ("throughput", "mfu/actor", "cpu_memory_used_gb", "max_memory_gb")),
    *(f"rollout/host_{n}/queue" for n in range(22)),
)
KINDS = 997
"""Number of distinct rows, which repeat with other steps."""
_BLOCK = 32 * 1024


def bodies() -> list[dict[str, float]]:
    """Return the distinct rows, without steps."""
    draw = random.Random(0)
    rows = []
    for n in range(KINDS):
        row = {name: draw.random() for name in NAMES}
        row |= {"timing_s/step": 90 + draw.random(), "perf/total_num_tokens": 1e6}
        rows.append(row | ({PASS_RATE: 0.3 + 0.3 * draw.random()} if n % 10 == 0 else {}))
    return rows


def jsonl(path: Path, size: float) -> int:
    """Write a log as verl's file logger does; return its number of rows."""
    texts = [json.dumps(row).encode() for row in bodies()]
    with path.open("wb") as file:
        for n in itertools.count():
            if file.tell() >= size:
                return n
            file.write(b'{"step": %d, "data": %b}\n' % (n, texts[n % KINDS]))
    raise AssertionError


def csv(path: Path, size: float) -> int:
    """Write a chart exported from W&B: mean, least and largest value of every third metric."""
    names = [PASS_RATE, *NAMES[::3][:19]]
    cells = [[repr(row.get(name, "")).strip("'") for name in names] for row in bodies()]
    texts = [",".join(f'"{cell}","{cell}","{cell}"' for cell in row).encode() for row in cells]
    with path.open("wb") as file:
        columns = (f'"r - {name}","r - {name}__MIN","r - {name}__MAX"' for name in names)
        file.write(f'"Step",{",".join(columns)}\n'.encode())
        for n in itertools.count():
            if file.tell() >= size:
                return n
            file.write(b'"%d",%b\n' % (n, texts[n % KINDS]))
    raise AssertionError


def delimited(number: int, data: bytes) -> bytes:
    """Return a length-delimited field of a message."""
    length, size = b"", len(data)
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    tag = number << 3 | 2
    tags = bytes([tag]) if tag < 0x80 else bytes([tag & 0x7F | 0x80, tag >> 7])
    return tags + length + bytes([size]) + data


def wandb_records() -> Iterator[bytes]:
    """Yield messages as W&B's library writes them: the run, then its rows."""
    yield delimited(17, delimited(1, b"large") + delimited(17, b"\x08\x80\xf0\xd3\xaa\x06"))
    texts = []
    for row in bodies():
        cells = {**row, "_step": 10_000_000, "_timestamp": 1_700_000_000.5}
        items = (delimited(2, k.encode()) + delimited(16, json.dumps(v).encode()) for k, v in cells.items())
        texts.append(b"\x08\x07" + delimited(2, b"".join(delimited(1, item) for item in items)))
    parts = [text.split(b"10000000") for text in texts]
    for n in itertools.count(10_000_000):
        yield (b"%d" % n).join(parts[n % KINDS])


def wandb(path: Path, size: float) -> int:
    """Write a run's .wandb file, in blocks and chunks."""
    with path.open("wb") as file:
        file.write(b":W&B\xe1\xbe\x00")
        at = 7
        for n, record in enumerate(wandb_records()):
            if at >= size:
                return n - 1
            is_first = True
            while record or is_first:
                room = _BLOCK - at % _BLOCK
                if room <= 7:
                    at += file.write(bytes(room))
                    room = _BLOCK
                part, record = record[: room - 7], record[room - 7 :]
                kind = (2 if record else 1) if is_first else (3 if record else 4)
                crc = zlib.crc32(part, zlib.crc32(bytes([kind])))
                at += file.write(struct.pack("<IHB", crc, len(part), kind) + part)
                is_first = False
    raise AssertionError


def tensorboard(path: Path, size: float) -> int:
    """Write an event file with one event per scalar."""
    from scalerl.ingest.formats.tensorboard import _masked_crc

    length_crc: dict[int, bytes] = {}
    values = bodies()
    with path.open("wb") as file:
        start = b"\x09" + struct.pack("<d", 1.7e9) + delimited(3, b"brain.Event:2")
        for n in itertools.count():
            if file.tell() >= size:
                return n
            step = delimited(2, b"")[:0] + b"\x10" + bytes([n & 127 | 128, n >> 7 & 127 | 128, n >> 14])
            for name, value in values[n % KINDS].items():
                body = delimited(1, name.encode()) + b"\x15" + struct.pack("<f", value)
                data = b"\x09" + struct.pack("<d", 1.7e9 + n) + step + delimited(5, delimited(1, body))
                data, start = (start, b"") if start else (data, b"")
                if len(data) not in length_crc:
                    length = struct.pack("<Q", len(data))
                    length_crc[len(data)] = length + struct.pack("<I", _masked_crc(length))
                file.write(length_crc[len(data)] + data + struct.pack("<I", _masked_crc(data)))
    raise AssertionError


WRITERS: dict[str, tuple[str, Callable[[Path, float], int]]] = {
    "jsonl": ("log.jsonl", jsonl),
    "wandb": ("run-large.wandb", wandb),
    "tensorboard": ("events.out.tfevents.1", tensorboard),
    "csv": ("export.csv", csv),
}


def imported(source: Path, run: Path) -> tuple[float, float, int]:
    """Return CPU seconds and peak memory in MiB of an import, and the number of evaluations it found."""
    command = [sys.executable, "-m", "scalerl", "ingest", str(source), "-o", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    if process.returncode:
        raise SystemExit(process.returncode)
    return seconds, usage.ru_maxrss / 1024, json.loads(output)["runs"][0]["evaluations"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=0.1, help="size of every log (0.1)")
    parser.add_argument("--formats", nargs="+", choices=WRITERS, default=list(WRITERS))
    args = parser.parse_args()
    print(f"{'format':<12}{'MB':>8}{'rows':>10}{'CPU s':>8}{'rows/s':>9}{'MB/s':>7}{'peak MiB':>10}")
    for name in args.formats:
        with tempfile.TemporaryDirectory() as folder:
            file, write = WRITERS[name]
            source = Path(folder) / "source" / file
            source.parent.mkdir()
            rows = write(source, args.gb * 1e9)
            size = source.stat().st_size / 1e6
            seconds, peak, evaluations = imported(source, Path(folder) / "run")
            expected = math.ceil(rows / KINDS) * 100
            assert 0 < evaluations <= expected, (evaluations, expected)
            print(
                f"{name:<12}{size:>8.0f}{rows:>10}{seconds:>8.1f}{rows / seconds:>9.0f}"
                f"{size / seconds:>7.1f}{peak:>10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
