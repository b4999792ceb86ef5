"""The rows in a `.wandb` file, from its messages.

The fields that are read are named by their numbers in W&B's wandb_internal.proto. A key is one text, or
several where values are nested; values are JSON.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.ingest.formats.protobuf import fields, integer, part
from scalerl.ingest.formats.wandb_file import Trouble, records
from scalerl.ingest.logs.log import MOST_NAMES, LogColumn, as_number, long_names
from scalerl.ingest.logs.order import Cells
from scalerl.jsonl import flat, parse_json

# Of a Record; of a RunRecord; of items of config, history and summary; of these; and of telemetry.
_HISTORY, _SUMMARY, _CONFIG, _TELEMETRY, _RUN = 2, 3, 5, 11, 17
_RUN_ID, _RUN_CONFIG, _DISPLAY_NAME, _START_TIME = 1, 4, 8, 17
_KEY, _NESTED_KEY, _VALUE = 1, 2, 16
_ITEM, _STEP, _REMOVED = 1, 2, 2
_FEATURE, _SET_STEP = 3, 61

_PEEK = 200  # records within which a file says which run it is of; it is the second one
_METRIC, _ROW_STEP, _TIMESTAMP, _RUNTIME, _MEDIA, _SKIPPED = range(6)  # what a key stands for
_KINDS = {"_step": _ROW_STEP, "_timestamp": _TIMESTAMP, "_runtime": _RUNTIME}
_DOT = re.compile(r"\.")
_NUMERIC = frozenset(b"-0123456789")
_BRACE = ord("{")

# How nearly all records of history and summary begin, and nearly all of their items: the lengths of one byte
# each, key and value. A regular expression finds them several times as fast as `fields` does.
# What it looks at from any one byte is bounded by those lengths, so that none takes the square of its size.
_PLAIN_RECORD = re.compile(rb"\x08[\x80-\xff]{0,9}[\x00-\x7f]([\x12\x1a])([\x80-\xff]{0,9}[\x00-\x7f])")
_PLAIN_ITEM = re.compile(
    rb"\n([\x00-\x7f])([\n\x12][\x00-\x7f][^\x82]{0,125}+)\x82\x01([\x00-\x7f])([^\n\x12]{1,127}+)"
)

_PLAIN_STEP = re.compile(rb"(?:\x12[\x00-\x7f](?:\x08([\x80-\xff]{0,9}[\x00-\x7f]))?)?")


@dataclass(slots=True)
class Key:
    """A name, as rows have it, and its values."""

    name: str
    kind: int
    is_kept: bool
    column: LogColumn = field(default_factory=LogColumn)


_TEXT = float("nan")
"""Stands for a value that is no number; told from a NaN by its identity."""
Found = list[tuple[Key, float]]


@dataclass
class WandbRows:
    """The rows of one file, as far as they hold something to keep."""

    keep: Callable[[str], bool]
    config: dict[str, Any]
    path: Path
    names: dict[str, None]
    """Of all metrics that have numbers; this one and the config are filled further by every file of a run."""
    start: float = math.nan
    """Unix seconds."""
    name: str = ""
    has_own_steps: bool = False
    """Whether the trainer has given W&B the numbers of its steps, which else counts the calls."""
    step: array[float] = field(default_factory=lambda: array("d"))
    time: array[float] = field(default_factory=lambda: array("d"))
    _last: float = -1.0
    _is_history: bool = False
    long_names: int = 0
    """Values that were left out, as their names are too long."""
    _kept: int = 0
    _values: int = 0
    _configured: int = 0
    _summary: dict[str, tuple[Key, float]] = field(default_factory=dict)
    _summary_at: tuple[float, float] = (math.nan, math.nan)
    """Step and Unix seconds."""
    _keys: dict[str, Key] = field(default_factory=dict)
    _raw: dict[bytes, Key] = field(default_factory=dict)
    """The same by their bytes."""

    def columns(self) -> dict[str, Cells]:
        """What was kept, by name."""
        return {key.name: key.column.cells() for key in self._keys.values() if key.column.rows}

    def read(self, notes: list[str]) -> None:
        """All records of the file.

        Raises:
            InputError: it is none of W&B's, or holds more than the limits allow.
        """
        path, trouble = self.path, Trouble()
        for record in records(path, trouble):
            try:
                self._take(record)
            except (ValueError, RecursionError):  # its checksum holds, but it is not what it should be
                trouble.damaged += 1
        notes += trouble.notes(path.name)
        notes += [f"{path.name}: {note}" for note in long_names(self.long_names)]
        if self._summary and not self._is_history:
            notes.append(f"{path.name} has no history, only a summary: one value of each metric")
            self._add(*self._summary_at, list(self._summary.values()))

    def _take(self, record: bytes) -> None:
        plain = _PLAIN_RECORD.match(record)
        if plain is not None and plain.end() + _size(plain[2]) == len(record):
            self._take_values(plain[1] == b"\x12", record[plain.end() :])
            return
        for number, _, value in fields(record):
            if isinstance(value, int):
                continue
            if number in (_HISTORY, _SUMMARY):
                self._take_values(number == _HISTORY, bytes(value))
            elif number == _RUN:
                self.name = str(part(value, _DISPLAY_NAME), "utf-8") or self.name
                self.start = _seconds(part(value, _START_TIME)) if math.isnan(self.start) else self.start
                self._configure(part(value, _RUN_CONFIG))
            elif number == _CONFIG:
                self._configure(value)
            elif number == _TELEMETRY:
                self.has_own_steps |= integer(part(value, _FEATURE), _SET_STEP) > 0

    def _take_values(self, is_history: bool, body: bytes) -> None:
        if is_history:
            self._is_history = True
            self._add(*self._row(body))
        elif not self._is_history:  # it repeats the history
            step, time, found = self._row(body)
            before = self._summary_at
            self._summary_at = (
                before[0] if math.isnan(step) else step,
                before[1] if math.isnan(time) else time,
            )
            self._summary |= {key.name: (key, value) for key, value in found}
            limits.KEYS.check(len(self._summary), self.path)

    def _add(self, step: float, time: float, found: Found) -> None:
        if not (0 <= step <= 2**53 and step.is_integer()):
            step = self._last + 1
        self._last = step
        row, is_kept = len(self.step), False
        for key, value in found:
            if key.is_kept:
                is_kept, column = True, key.column
                if value is _TEXT:
                    column.texts.append(len(column.rows))
                column.rows.append(row)
                column.numbers.append(value)
            elif len(self.names) < MOST_NAMES:
                self.names[key.name] = None
                key.kind = _SKIPPED  # one number of it is enough to know
        if is_kept:
            self.step.append(step)
            self.time.append(time)
            self._values += len(found)
            limits.VALUES.check(self._values, self.path)

    def _row(self, body: bytes) -> tuple[float, float, Found]:
        """Step, Unix seconds (NaN where they are missing) and numbers of one message."""
        covered, items, raw = 0, [], self._raw
        limits.KEYS.check(body.count(b"\x82\x01"), self.path)  # which is in every item
        for size, name, _, text in _PLAIN_ITEM.findall(body):
            length = size[0]
            if length != len(name) + len(text) + 3:
                covered = -1
                break
            covered += length + 2
            key = raw.get(name) or self._key_of(name)
            if key.kind != _SKIPPED:
                items.append((key, text))
        tail = _PLAIN_STEP.fullmatch(body, covered) if covered >= 0 else None
        if tail is None:  # some item is not plain
            return self._numbers(*self._items_by_field(body))
        return self._numbers(float(_size(tail[1])) if tail[1] else math.nan, items)

    def _numbers(self, step: float, items: Iterable[tuple[Key, bytes]]) -> tuple[float, float, Found]:
        """Keys and values as numbers, those apart that are of the row itself."""
        time = runtime = math.nan
        found: Found = []
        media: list[str] = []
        for key, text in items:
            kind = key.kind
            if text[0] not in _NUMERIC:
                if kind == _MEDIA:
                    media.append(key.name.removesuffix("_type"))
                elif kind == _METRIC and text[0] == _BRACE:
                    found += self._nested(key.name, text)
                elif kind == _METRIC and key.is_kept:
                    found += [(key, number) for number in _worded(text)]
                continue
            number = float(text)
            if number - number != 0.0:  # infinite, or NaN
                found += [(key, number)] * (kind == _METRIC and key.is_kept)
                continue
            if kind == _METRIC:
                found.append((key, number))
            elif kind == _ROW_STEP:
                step = number
            elif kind == _TIMESTAMP:
                time = number
            elif kind == _RUNTIME:
                runtime = number
        if media:
            found = list(_without(found, set(media)))
        return step, self.start + runtime if math.isnan(time) else time, found

    def _items_by_field(self, body: bytes) -> tuple[float, Iterable[tuple[Key, bytes]]]:
        """The step of any message, where it is beside the items (NaN otherwise), and keys and values."""
        step, items, n = math.nan, [], 0
        for number, _, value in fields(body):
            if isinstance(value, int):
                continue
            if number == _STEP:
                step = float(integer(value, 1))
            elif number == _ITEM:
                n += 1
                limits.KEYS.check(n, self.path)
                names, text = _item(value)
                key = self._key(".".join(names))
                if text and key.kind != _SKIPPED:
                    items.append((key, text))
        return step, items

    def _key_of(self, raw: bytes) -> Key:
        """The key of an item, by its bytes."""
        # Not more of them than a length of one byte has room for.
        name = ".".join(str(value, "utf-8") for _, _, value in fields(raw) if not isinstance(value, int))
        key = self._key(name)
        if name in self._keys:
            self._raw[raw] = key
        return key

    def _key(self, name: str) -> Key:
        key = self._keys.get(name)
        if key is None and len(name) > limits.NAME.most:
            self.long_names += 1
            return Key("", _SKIPPED, False)
        if key is None:
            key = Key(name, _KINDS.get(name, _METRIC), self.keep(name))
            if name.endswith("._type"):
                key.kind = _MEDIA
            elif name.startswith("_wandb"):
                key.kind = _SKIPPED
            self._kept += key.is_kept
            limits.COLUMNS.check(self._kept, self.path)
            if key.is_kept or len(self._keys) < 2 * MOST_NAMES:
                self._keys[name] = key
        return key

    def _configure(self, message: memoryview) -> None:
        """What a message adds to the config, and takes from it."""
        for number, _, value in fields(message):
            if number not in (_ITEM, _REMOVED) or isinstance(value, int):
                continue
            self._configured += 1
            limits.KEYS.check(self._configured, self.path)
            names, text = _item(value)
            place = self.config
            for name in names[:-1]:
                inner = place.get(name)
                place = inner if isinstance(inner, dict) else place.setdefault(name, {})
                if not isinstance(place, dict):
                    raise ValueError(f"'{name}' has no parts")
            if names and number == _ITEM:
                place[names[-1]] = parse_json(text, str(self.path))
            elif names:
                place.pop(names[-1], None)

    def _nested(self, name: str, text: bytes) -> Iterator[tuple[Key, float]]:
        """Numbers of a table of values, which older versions log in one piece."""
        found = flat(parse_json(text, str(self.path)), f"{name}.", where=str(self.path))
        media = {place.removesuffix("_type") for place in found if place.endswith("._type")}
        for place, number in found.items():
            if number is None or isinstance(number, list) or _is_below(place, media):
                continue
            key, value = self._key(place), as_number(number)
            if value is not None and math.isfinite(value):
                yield key, value
            elif key.is_kept and number != "":
                yield key, _TEXT if value is None else value


def _worded(text: bytes) -> Iterator[float]:
    """The value of a text of JSON that is no number; none of what is no value either, as null and lists."""
    if text[:1] in b'"NItf' and text != b'""':
        number = as_number(text.decode(errors="replace").strip('"'))
        yield _TEXT if number is None else number


def _is_below(name: str, media: Set[str]) -> bool:
    """Whether a name begins with one of some, which all end with a dot."""
    return bool(media) and any(name[: dot.end()] in media for dot in _DOT.finditer(name))


def _without(found: Found, media: Set[str]) -> Iterator[tuple[Key, float]]:
    """What is no part of media, whose sizes are numbers too."""
    for key, number in found:
        if _is_below(key.name, media):
            key.kind = _SKIPPED
        else:
            yield key, number


def identify(path: Path) -> tuple[str, str, float]:
    """Id and name of a file's run, and its start in Unix seconds; the file's name and NaN where that is lost.

    Raises:
        InputError: it is no file of W&B's.
    """
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
    """The parts of a key, and the value as JSON."""
    names, text = [], b""
    for number, _, value in fields(message):
        if number in (_KEY, _NESTED_KEY) and not isinstance(value, int):
            if len(names) == limits.DEPTH.most:
                raise ValueError("a key has too many parts")  # as damage is: no library writes it
            names.append(str(value, "utf-8"))
        elif number == _VALUE and not isinstance(value, int):
            text = bytes(value)
    return names, text


def _seconds(timestamp: memoryview) -> float:
    """Unix seconds; NaN where there are none."""
    return integer(timestamp, 1) + integer(timestamp, 2) / 1e9 if len(timestamp) else math.nan


def _size(varint: bytes) -> int:
    """A whole number of seven bits a byte, the lowest first."""
    return sum((byte & 127) << 7 * place for place, byte in enumerate(varint))
