"""Event files of TensorBoard, as trainers write them through any library; reading needs no library."""

import functools
import itertools
import math
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalerl import limits
from scalerl.errors import InputError, counted
from scalerl.ingest.formats import protobuf
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import first_bytes, folders_below, name_of
from scalerl.ingest.logs.log import Log, LogBuilder, Room
from scalerl.jsonl import flat, parse_json

_MAGIC = b"brain.Event:"
"""Content of the first record of every file, followed by a version."""
_CONFIGS = {"args/text_summary": "", "model_config/text_summary": "model_config."}
"""Texts that the Hugging Face trainers log, both JSON, with the prefix for their keys."""
_FLOATS = {1: "<f", 2: "<d"}
"""Layout of a number of a TensorProto, by its dtype: TensorFlow makes float32 of every scalar, torch float32
or float64."""
_FLOAT_FIELDS = (4, 5, 6)
"""Field numbers of a TensorProto's tensor_content, float_val and double_val."""


def recognises(path: Path) -> bool:
    """Return whether this is an event file, or a folder with some."""
    if path.is_dir():
        return any(_is_event_file(file) for _, files in folders_below(path) for file in files)
    start = first_bytes(path, 64)
    is_named = path.is_file() and _is_event_file(path)
    return is_named or (_MAGIC in start and _masked_crc(start[:8]) == int.from_bytes(start[8:12], "little"))


def read(path: Path, wanted: Wanted) -> list[Log | Unread]:
    """Read every folder with event files as a run; several files in one folder are its restarts."""
    if not path.is_dir():
        return [_read_run([path], str(path), name_of(path.absolute().parent), wanted, Room(str(path)))]
    found = {
        folder: events
        for folder, files in folders_below(path)
        if (events := [file for file in files if _is_event_file(file)])
    }
    missing = f"{path}: no event files in it (events.out.tfevents.*; symbolic links are left out)"
    room = Room(str(path))

    def read_one(folder: Path, name: str) -> list[Log]:
        log = _read_run(found[folder], str(folder), name, wanted, room)
        # A writer puts its hyperparameters into a folder below its run's, which does not make that a run.
        is_run = bool(log.metrics) or found.keys().isdisjoint(folder.parents)
        return [log] if is_run else []

    return each_run(path, ((one, name_of(one, path)) for one in found), read_one, missing, room)


FORMAT = Format("tensorboard", "TensorBoard event files, or a folder of them", recognises, read)


def _is_event_file(path: Path) -> bool:
    return "tfevents" in path.name


def _read_run(files: Sequence[Path], source: str, name: str, wanted: Wanted, room: Room) -> Log:
    builder = LogBuilder(source, "tensorboard", name, wanted, room)
    reader = _Reader(builder, lambda tag: len(tag) <= limits.NAME.most and wanted(tag), source)
    damaged = [file for file in sorted(files, key=_start) if not reader.read(file)]
    if len(damaged) == len(files):
        raise InputError(f"{damaged[0]}: not an event file, or damaged from its first record on")
    builder.notes += [f"{file}: damaged from its first record on; left out" for file in damaged]
    return builder.build()


def _start(path: Path) -> tuple[float, str]:
    """Return the time of the first event, to sort files by: their names have only whole seconds."""
    for data, _ in _records(path, []):
        try:
            return _event(data)[1], path.name
        except ValueError:
            break
    return math.inf, path.name


class _Reader:
    """Adds the scalars of a run's files to its log."""

    def __init__(self, builder: LogBuilder, keeps: Wanted, source: str) -> None:
        self._builder, self._keeps, self._source = builder, keeps, source
        self._plugins: dict[str, str] = {}  # given only with a tag's first value

    def read(self, path: Path) -> bool:
        """Read a file; return whether it has any record, or is empty, as when a run has just started."""
        records = bad = 0
        notes: list[str] = []
        self._builder.begin_file()
        for data, check in _records(path, notes):
            records += 1
            try:
                step, time, values = _event(data)
                scalars = {}
                limits.KEYS.check(len(values), path)
                for value in values:
                    tag, number = self._value(value)
                    if number is not None:
                        scalars[tag] = number
                # In plain Python the checksum costs 0.15 us a byte, 5 of the 25 us that a scalar takes. It is
                # skipped for what is not kept: images and histograms are most of a file's bytes.
                if any(map(self._keeps, scalars)) and _masked_crc(data) != check:
                    raise ValueError("the checksum is another")
            except ValueError:
                bad += 1
                continue
            self._builder.add(step, time, scalars, line=records)
        if not records:
            return path.stat().st_size == 0
        self._builder.notes += notes
        if bad:
            self._builder.notes.append(f"{path}: {bad} of {records} records are damaged; left out")
        return True

    def _value(self, data: memoryview) -> tuple[str, float | None]:
        """Parse the tag of a Summary.Value and its number (None without one); a text may be the config."""
        tag, number, tensor, plugin = "", None, None, ""
        for field, kind, value in protobuf.fields(data):
            if isinstance(value, int):
                continue
            if field == 1:
                tag = bytes(value).decode()
            elif field == 2 and kind == protobuf.FIXED32:
                (number,) = struct.unpack("<f", value)
            elif field == 8:
                tensor = value
            elif field == 9:
                # SummaryMetadata.plugin_data.plugin_name
                plugin = bytes(protobuf.part(protobuf.part(value, 1), 1)).decode()
        if tensor is None:
            return tag, number
        if plugin:
            limits.COLUMNS.check(len(self._plugins), self._source)
            self._plugins[tag] = plugin
        if tag in _CONFIGS:
            self._add_config(tag, tensor)
        elif self._plugins.get(tag, "scalars") == "scalars":
            return tag, _number(tensor)
        return tag, None

    def _add_config(self, tag: str, tensor: memoryview) -> None:
        text = bytes(next(protobuf.parts(tensor, 8), b"null"))
        try:
            if isinstance(found := parse_json(text, self._source), dict):
                self._builder.config.update(flat(found, _CONFIGS[tag], where=self._source))
        except ValueError:  # text under this name from another program
            return
        except InputError as error:
            self._builder.notes.append(f"the config '{tag}' is left out: {error}")


def _records(path: Path, notes: list[str]) -> Iterator[tuple[bytes, int]]:
    """Yield the data of a file's records and their checksums, up to a tear or damage, which is noted.

    A record is its length as a uint64, the checksum of the length, the data, and the checksum of the data.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        at = large = 0
        while at < size:
            start = file.read(12)
            if len(start) == 12 and _masked_crc(start[:8]) != int.from_bytes(start[8:], "little"):
                notes.append(f"{path}: damaged from byte {at} on, of {size}; the rest is left out")
                break
            length = int.from_bytes(start[:8], "little") if len(start) == 12 else size
            if at + 16 + length > size:
                notes.append(f"{path}: the last record is unfinished (a crash while writing); left out")
                break
            at += 16 + length
            if length > limits.ROW.most:  # larger ones hold images or graphs
                file.seek(at)
                large += 1
                continue
            data, end = file.read(length), file.read(4)
            if len(data) < length or len(end) < 4:  # the file was cut meanwhile
                break
            yield data, int.from_bytes(end, "little")
    if large:  # a scalar may be in one, beside an image
        what = f"{counted(large, 'record')} of more than {limits.ROW.most:,} bytes"
        notes.append(f"{path}: {what} passed over, with whatever metrics are in them")


def _event(data: bytes) -> tuple[float, float, list[memoryview]]:
    """Parse the step of an Event, its Unix seconds (NaN if missing), and the values of its summary."""
    step, time = 0, math.nan
    values: list[memoryview] = []
    for field, kind, value in protobuf.fields(data):
        if field == 1 and kind == protobuf.FIXED64 and isinstance(value, memoryview):
            (time,) = struct.unpack("<d", value)
        elif field == 2 and isinstance(value, int):
            step = protobuf.signed(value)
        elif field == 5 and isinstance(value, memoryview):
            # One more than allowed, so that it is rejected; ten million would take 2 GB.
            values += itertools.islice(protobuf.parts(value, 1), limits.KEYS.most + 1 - len(values))
    return float(step), time if math.isfinite(time) else math.nan, values


def _number(tensor: memoryview) -> float | None:
    """Parse the only number of a TensorProto of floats; None if it has none, several, or another type."""
    dtype, found = 0, b""
    for field, _, value in protobuf.fields(tensor):
        if isinstance(value, int):
            dtype = value if field == 1 else dtype
        elif field == 2 and any(protobuf.integer(dim, 1) != 1 for dim in protobuf.parts(value, 2)):
            return None  # a TensorShapeProto of several numbers
        elif field in _FLOAT_FIELDS and len(found) <= 8:  # anything longer is no number, however much follows
            found += value[:16]
    layout = _FLOATS.get(dtype)
    if layout is None or struct.calcsize(layout) != len(found):
        return None
    return float(struct.unpack(layout, found)[0])


def _masked_crc(data: bytes) -> int:
    """Compute the CRC-32C of some bytes, rotated and offset as in TFRecord."""
    table = _table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _table() -> list[int]:
    """Compute the table of CRC-32C: Castagnoli's polynomial with its bits reversed."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table
