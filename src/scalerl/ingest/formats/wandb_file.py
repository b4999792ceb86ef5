"""The parts of a `.wandb` file, a log in blocks as LevelDB's, and the rows in its messages.

file    7 bytes (":W&B", a magic number, a version), then blocks; the first holds these bytes too
block   32 KiB: chunks, and fewer than 7 bytes of padding
chunk   CRC-32 of kind and data (4 bytes), length (2), kind (1: a whole record, its first, a middle, its
        last part), data
record  one message: fields with a number and a value each, whose numbers are those of W&B's
        wandb_internal.proto; a key is one text, or several where values are nested, and values are JSON
"""

import math
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.errors import InputError, brief, counted
from scalerl.ingest.formats.protobuf import fields, integer, part
from scalerl.ingest.logs.log import MOST_NAMES, LogBuilder, finite
from scalerl.jsonl import flat, parse_json

MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK = 32 * 1024
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_SEEDS = {kind: zlib.crc32(bytes([kind])) for kind in (_FULL, _FIRST, _MIDDLE, _LAST)}
# Fields of a Record; of a RunRecord; of items of config, history and summary; of these; and of telemetry.
_HISTORY, _SUMMARY, _CONFIG, _TELEMETRY, _RUN = 2, 3, 5, 11, 17
_RUN_ID, _RUN_CONFIG, _DISPLAY_NAME, _START_TIME = 1, 4, 8, 17
_KEY, _NESTED_KEY, _VALUE = 1, 2, 16
_ITEM, _STEP, _REMOVED = 1, 2, 2
_FEATURE, _SET_STEP = 3, 61

_PEEK = 200  # records within which a file names its run, which the second one does
_DOT = re.compile(r"\.")
_OF_ROW = ("_step", "_timestamp", "_runtime")  # these are not metrics
_NUMERIC = frozenset(b"-0123456789")

_MARK = b"\x82\x01"
"""The tag of a value in an item."""


@dataclass
class Trouble:
    """Counts of the faults of a file that could still be read."""

    large: int = 0
    """Records with more bytes than `ROW` allows."""
    damaged: int = 0
    """Places with a wrong checksum, or with a malformed record."""
    torn: bool = False
    """Whether the file ends within a record."""

    def notes(self, name: str) -> Iterator[str]:
        """Yield the counts as sentences."""
        if self.damaged:
            places = "1 damaged place was" if self.damaged == 1 else f"{self.damaged} damaged places were"
            yield f"{name}: {places} passed over; rows are missing there"
        if self.large:
            yield f"{name}: {counted(self.large, 'row')} of more than {limits.ROW.most:,} bytes left out"
        if self.torn:
            yield f"{name} ends within a record (the run was killed, or still writes): read up to there"


def records(path: Path, trouble: Trouble) -> Iterator[bytes]:
    """Yield the records of a file whose checksums hold; faults are counted in `trouble`."""
    parts: list[bytes] = []
    size = 0
    for kind, data in _chunks(path, trouble):
        if parts and kind in (_FULL, _FIRST):  # its end never came
            trouble.damaged += 1
            parts.clear()
        if kind == _FULL:
            yield data
        elif kind == _FIRST or (parts and kind in (_MIDDLE, _LAST)):
            size = len(data) + (size if parts else 0)
            if size <= limits.ROW.most:
                parts.append(data)
            if kind == _LAST and size <= limits.ROW.most:
                yield b"".join(parts)
            elif kind == _LAST:
                trouble.large += 1
            if kind == _LAST:
                parts.clear()
        else:
            parts.clear()
    trouble.torn |= bool(parts)


def _chunks(path: Path, trouble: Trouble) -> Iterator[tuple[int, bytes]]:
    """Yield kind and data of every chunk; kind 0 where some may be missing."""
    with path.open("rb") as file:
        _check_header(file.read(len(MAGIC)), path)
        # Blocks are counted from the start of the file, its 7 bytes included.
        file.seek(0)
        start, is_last = len(MAGIC), False
        while not is_last:
            block = file.read(_BLOCK)
            is_last = len(block) < _BLOCK
            yield from _of_block(block, start, trouble)
            start = 0


def _of_block(block: bytes, start: int, trouble: Trouble) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks of one block. A bad chunk's length is still used: the next checksum tests it."""
    is_good, is_last, unpack, crc32 = True, len(block) < _BLOCK, _CHUNK.unpack_from, zlib.crc32
    while start + _CHUNK.size <= len(block):
        crc, size, kind = unpack(block, start)
        start += _CHUNK.size
        data = block[start : start + size]
        start += size
        if kind in _SEEDS and crc32(data, _SEEDS[kind]) == crc and len(data) == size:
            is_good = True
            yield kind, data
            continue
        if is_last and start > len(block):
            trouble.torn = True
        else:
            # A series of bad chunks is one damaged place, however many chunks a wrong length makes of it.
            trouble.damaged += is_good
        is_good = False
        # What follows may end a record whose start was lost: `records` must not join across the gap.
        yield 0, b""
    trouble.torn |= is_last and start < len(block)


def _check_header(head: bytes, path: Path) -> None:
    """Raise an InputError unless a file starts as those of W&B do."""
    expected = "expected a run-ID.wandb as W&B writes it"
    if not head:
        raise InputError(f"{path}: the file is empty (nothing was logged, or not yet); {expected}")
    if len(head) < len(MAGIC) and MAGIC.startswith(head):
        raise InputError(f"{path}: the file ends after {len(head)} bytes; {expected}")
    if head[:4] != MAGIC[:4]:
        raise InputError(f"{path}: not a file of W&B, it begins with {brief(head)}; {expected}")
    if head != MAGIC:
        raise InputError(f"{path}: unknown version {brief(head[4:])} of W&B's format; {expected}")


class WandbReader:
    """Adds the rows of one file of a run to its log, and to the nested `config` that its files share."""

    def __init__(self, path: Path, start: float, builder: LogBuilder, config: dict[str, Any]) -> None:
        self.name = ""
        self.has_own_steps = False
        """Whether the trainer set the numbers of W&B's steps; otherwise W&B counts the calls."""
        self._path, self._start, self._builder, self._config = path, start, builder, config
        self._last_step = -1.0
        self._has_history = False
        self._configured = 0
        self._summary: dict[str, float | str] = {}
        self._names: dict[bytes, str] = {}
        """The names of metrics by the bytes of an item before its value; empty for what is no metric."""

    def read(self) -> None:
        """Read all records of the file; raise an InputError if it is not one of W&B's, or too large."""
        path, trouble = self._path, Trouble()
        for record in records(path, trouble):
            try:
                self._take(record)
            except (ValueError, RecursionError):  # its checksum holds, but it is malformed
                trouble.damaged += 1
        self._builder.notes += trouble.notes(path.name)
        if not (self._has_history or self._summary.keys() <= {*_OF_ROW}):
            self._builder.notes.append(
                f"{path.name} has no history, only a summary: one value of each metric"
            )
            self._add(self._summary)

    def _take(self, record: bytes) -> None:
        for number, _, value in fields(record):
            if isinstance(value, int):
                continue
            if number == _HISTORY:
                self._has_history = True
                self._add(self._row(value))
            elif number == _SUMMARY and not self._has_history:  # else it repeats the history
                self._summary |= self._row(value)
                limits.KEYS.check(len(self._summary), self._path)
            elif number == _RUN:
                self.name = str(part(value, _DISPLAY_NAME), "utf-8") or self.name
                self._start = _seconds(part(value, _START_TIME)) if math.isnan(self._start) else self._start
                self._configure(part(value, _RUN_CONFIG))
            elif number == _CONFIG:
                self._configure(value)
            elif number == _TELEMETRY:
                self.has_own_steps |= integer(part(value, _FEATURE), _SET_STEP) > 0

    def _add(self, row: dict[str, float | str]) -> None:
        """Add a row at its step, or one after the last if it has none."""
        step, time, runtime = (finite(row.pop(name, None)) for name in _OF_ROW)
        is_step = 0 <= step <= 2**53 and step.is_integer()
        self._last_step = step if is_step else self._last_step + 1
        self._builder.add(self._last_step, self._start + runtime if math.isnan(time) else time, row)

    def _row(self, body: memoryview) -> dict[str, float | str]:
        """Return the values of one message by name, including the step, without those of media."""
        step, items = math.nan, []
        for number, _, value in fields(body):
            if isinstance(value, int):
                continue
            if number == _STEP:
                step = float(integer(value, 1))
            elif number == _ITEM:
                limits.KEYS.check(len(items) + 1, self._path)
                items.append(self._named(bytes(value)))
        return self._values(items, step)

    def _named(self, item: bytes) -> tuple[str, bytes]:
        """Return the name of the metric of an item, and its value.

        Each key is parsed once: in a row with a hundred metrics nearly all of the time would go to keys.
        """
        before, _, after = item.partition(_MARK)
        name = self._names.get(before)
        if name is not None and after and after[0] == len(after) - 1:  # the length, in one byte
            return name, after[1:]
        keys, text = _item(memoryview(item))
        name = "" if keys and keys[0].startswith("_wandb") else ".".join(keys)  # reserved by W&B
        if text == after[1:] and len(self._names) < 2 * MOST_NAMES:
            self._names[before] = name
        return name, text

    def _values(self, items: Iterable[tuple[str, bytes]], step: float) -> dict[str, float | str]:
        """Convert values from JSON; `step` is that of the message, and an item `_step` takes precedence."""
        row: dict[str, Any] = {}
        nested, kept = False, self._builder.names
        for name, text in items:
            if not name or kept.get(name) is False or not text:  # no metric, known to be unwanted, or empty
                continue
            if text[0] in _NUMERIC:
                row[name] = float(text)
            elif text[0] == ord("{"):  # older versions log nested values in one piece
                row |= flat(parse_json(text, str(self._path)), f"{name}.", where=str(self._path))
                nested = True
            elif text[0] in b'"NItf' and text != b'""':  # null, a list and an empty text are no values
                row[name] = text.decode(errors="replace").strip('"')
        if not math.isnan(step) and math.isnan(finite(row.get("_step"))):
            row["_step"] = step
        media = {name.removesuffix("_type") for name in row if name.endswith("._type")}
        if media or nested:  # the sizes of media are numbers, too
            return {
                name: value
                for name, value in row.items()
                if not name.startswith("_wandb")
                and not any(name[: dot.end()] in media for dot in _DOT.finditer(name))
            }
        return row

    def _configure(self, message: memoryview) -> None:
        """Add to the config what a message adds, and remove from it what that removes."""
        for number, _, value in fields(message):
            if number not in (_ITEM, _REMOVED) or isinstance(value, int):
                continue
            self._configured += 1
            limits.KEYS.check(self._configured, self._path)
            names, text = _item(value)
            place = self._config
            for name in names[:-1]:
                inner = place.get(name)
                place = inner if isinstance(inner, dict) else place.setdefault(name, {})
                if not isinstance(place, dict):
                    raise ValueError(f"'{name}' has no parts")
            if names and number == _ITEM:
                place[names[-1]] = parse_json(text, str(self._path))
            elif names:
                place.pop(names[-1], None)


def identify(path: Path) -> tuple[str, str, float]:
    """Return id, name and start (Unix seconds) of a file's run; the file's name and NaN if they are lost."""
    for n, record in enumerate(records(path, Trouble())):
        try:
            run = part(record, _RUN)
            if run_id := str(part(run, _RUN_ID), "utf-8"):
                name = str(part(run, _DISPLAY_NAME), "utf-8") or run_id
                return run_id, name, _seconds(part(run, _START_TIME))
        except ValueError:
            continue
        if n == _PEEK:
            break
    name = path.stem.removeprefix("run-")
    return name, name, math.nan


def _item(message: memoryview) -> tuple[list[str], bytes]:
    """Parse an item into the parts of its key and its value, which is JSON."""
    names, text = [], b""
    for number, _, value in fields(message):
        if number in (_KEY, _NESTED_KEY) and not isinstance(value, int):
            if len(names) == limits.DEPTH.most:
                raise ValueError("a key has too many parts")  # like damage: no library writes it
            names.append(str(value, "utf-8"))
        elif number == _VALUE and not isinstance(value, int):
            text = bytes(value)
    return names, text


def _seconds(timestamp: memoryview) -> float:
    """Parse Unix seconds; NaN where there are none."""
    return integer(timestamp, 1) + integer(timestamp, 2) / 1e9 if len(timestamp) else math.nan
