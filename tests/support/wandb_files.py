"""Files of W&B's made of its own messages, and what was read of one."""

import io
import json
import struct
import zlib
from typing import Any

from hostile_logs import everything
from read_logs import read_logs
from wandb.proto import wandb_internal_pb2

from scalerl.ingest.formats.wandb_offline import FORMAT

pb: Any = wandb_internal_pb2  # its messages are made when it is imported
MAGIC = b":W&B\xe1\xbe\x00"
BLOCK = 32768


def read_one(path, wanted=everything):
    (log,) = read_logs(FORMAT, path, wanted)
    return log


def values(log, name):
    return dict(zip(log.metrics[name].step_N.tolist(), log.metrics[name].value_N.tolist(), strict=True))


def is_whole(path):
    """Whether the record of the exit has been written."""
    data = path.read_bytes()
    at, record, last = len(MAGIC), b"", pb.Record()
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4) and at <= len(data):
            last.ParseFromString(record)
            record = b""
            if last.HasField("exit"):
                return True
    return False


def framed(records):
    """Records as W&B writes them."""
    out = io.BytesIO()
    out.write(MAGIC)
    place = len(MAGIC)
    for record in records:
        first = True
        while True:
            room = BLOCK - place % BLOCK
            if room < 7:
                out.write(bytes(room))
                place, room = place + room, BLOCK
            part, record = record[: room - 7], record[room - 7 :]
            kind = (1 if not record else 2) if first else (4 if not record else 3)
            crc = zlib.crc32(bytes([kind]) + part)
            out.write(struct.pack("<IHB", crc, len(part), kind) + part)
            place += 7 + len(part)
            first = False
            if not record:
                break
    return out.getvalue()


def history(n, row, **more):
    """A record of a row, as W&B makes it."""
    record = pb.Record(num=n + 3)
    for key, value in {**row, "_step": n, "_timestamp": 1.7e9 + n, "_runtime": n / 10, **more}.items():
        item = record.history.item.add()
        item.nested_key.append(key)
        item.value_json = value if isinstance(value, str) else json.dumps(value)
    record.history.step.num = n
    return record.SerializeToString()


def header(run_id="made", **more):
    run = pb.Record(num=2)
    run.run.run_id, run.run.start_time.seconds = run_id, 1_700_000_000
    for key, value in more.items():
        run.run.config.update.add(key=key, value_json=json.dumps(value))
    return run.SerializeToString()


def written(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(records))
    return path


def keep_wandb_home(patch, home):
    """W&B is offline, keeps its settings in `home`, and reaches nothing outside."""
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        patch.setenv(f"WANDB_{name}_DIR", str(home))
    patch.setenv("WANDB_MODE", "offline")
    patch.setenv("WANDB_ERROR_REPORTING", "false")
