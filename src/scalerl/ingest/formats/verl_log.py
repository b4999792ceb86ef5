"""What verl logs without a tracker: JSONL of its file logger, or the lines of its console."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

from scalerl import limits
from scalerl.errors import InputError, brief
from scalerl.ingest.formats.format import Format, Wanted
from scalerl.ingest.formats.lines import head, head_rows, json_rows, lines, name_of
from scalerl.ingest.formats.rows import time_of
from scalerl.ingest.logs.log import Log, LogBuilder, finite
from scalerl.jsonl import flat

_HEAD = 2**24
"""Bytes of a console log in which its first step is looked for: models and engines say much before that."""
_ROW = re.compile(rb"(?:^|[\s)\]])step:(\d{1,15}) - (?=\S+:)")
"""Where a row begins in a line: after nothing, or after what Ray puts before the lines of its workers."""
# Ray colours what it puts before the lines of its workers, also in files.
_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_NOT_FINITE = ("nan", "inf", "+inf", "-inf")
_CELL = re.compile(
    r"(?P<name>\S.{0,500}?):\s{0,9}(?:[\w.]{1,40}\()?(?P<number>[-+]?[\d.]{1,50}(?:[eE][-+]?\d{1,9})?"
    r"|nan|[-+]?inf)\)?"
    r"(?:\s{0,9}\[repeated .{0,200}\])?\s{0,9}"
)
"""A metric: a number as it is, or as NumPy 2 shows its own; and a note of Ray's after the last one."""


def recognises(path: Path) -> bool:
    """Whether this is one of the two, by its first rows."""
    if rows := head_rows(path, most=3):
        return all(_is_row(row) for row in rows)
    return any(_rows_of_line(line) for line in io.BytesIO(head(path, _HEAD)) if b"step:" in line)


def read(path: Path, wanted: Wanted) -> list[Log]:
    """Read one run. Neither the console nor the file logger writes times, unless users add them."""
    builder = LogBuilder(str(path), "verl", name_of(path), wanted)
    if head_rows(path, most=1):
        _read_json(path, builder)
    elif not _read_console(path, builder):
        raise InputError(
            f"{path}: no line of verl's in it; expected some as 'step:1 - actor/entropy:0.3 - ...'"
        )
    return [builder.build()]


FORMAT = Format("verl", "verl's file logger or its console log", recognises, read)


def _is_row(row: dict) -> bool:
    return isinstance(row.get("data"), dict) and not math.isnan(finite(row.get("step")))


def _read_json(path: Path, builder: LogBuilder) -> None:
    for number, row in json_rows(path, builder.notes):
        if not _is_row(row):
            raise InputError(
                f'{path}, line {number}: {brief(row)}; expected a row as {{"step": 1, "data": {{...}}}}'
            )
        _, time = time_of(row)
        cells = flat(row["data"], separator="/", where=f"{path}, line {number}")
        builder.add(finite(row["step"]), time, cells, line=number)


def _read_console(path: Path, builder: LogBuilder) -> bool:
    """Read the rows of a console log; return whether there were any."""
    found = False
    for number, line, ended in lines(path):
        if b"step:" not in line:
            continue
        rows = _rows_of_line(line)
        if rows and not (ended and len(line) <= limits.ROW.most):
            rows.pop()
            found = True
            builder.notes.append(f"{path}: the last row is unfinished (a crash while writing); left out")
        for step, text in rows:
            found = True
            builder.add(step, math.nan, dict(_cells(text, f"{path}, line {number}")), line=number)
    return found


def _rows_of_line(line: bytes) -> list[tuple[float, bytes]]:
    """Return steps and cells of the rows in a line; a progress bar may stand before one, up to a \\r."""
    parts = _COLOUR.sub(b"", line).split(b"\r")
    return [(float(match[1]), part[match.end() :]) for part in parts if (match := _ROW.search(part))]


def _cells(text: bytes, where: str) -> Iterator[tuple[str, float]]:
    # Counted before the split: a line of 16 MB of separators would become millions of texts.
    limits.KEYS.check(text.count(b" - ") + 1, where)
    for cell in text.decode(errors="replace").split(" - "):
        # The expression tries every colon as the end of the name, so that what is no metric costs it most.
        match = _CELL.fullmatch(cell) if len(cell) < 1000 else None
        number = match["number"] if match else ""
        # The expression also matches 1.2.3, a version in a line of text.
        is_plain = number.count(".") < 2 and number.strip("+-.")[:1].isdecimal()
        if match and (is_plain or number in _NOT_FINITE):
            yield match["name"], float(number)
