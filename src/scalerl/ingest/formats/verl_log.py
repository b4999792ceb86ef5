"""What verl's file logger writes: JSONL, a row per step. Its console is read by the format `console`."""

import math
from pathlib import Path

from scalerl.errors import InputError, brief
from scalerl.ingest.formats.format import Format, Wanted
from scalerl.ingest.formats.lines import head_rows, lines, name_of
from scalerl.ingest.formats.rows import time_of
from scalerl.ingest.logs.log import Log, LogBuilder, finite
from scalerl.jsonl import flat, parse_lines


def recognises(path: Path) -> bool:
    """Whether this is one, by its first rows."""
    rows = head_rows(path, most=3)
    return bool(rows) and all(_is_row(row) for row in rows)


def read(path: Path, wanted: Wanted) -> list[Log]:
    """Read one run. The file logger writes no times, unless users add them.

    Raises:
        InputError: a line is no row of it, or there are none.
    """
    builder = LogBuilder(str(path), "verl", name_of(path), wanted)
    is_empty = True
    for number, row in parse_lines(lines(path), str(path), builder.notes):
        if not _is_row(row):
            raise InputError(
                f'{path}, line {number}: {brief(row)}; expected a row as {{"step": 1, "data": {{...}}}}'
            )
        _, time = time_of(row)
        cells = flat(row["data"], separator="/", where=f"{path}, line {number}")
        builder.add(finite(row["step"]), time, cells, line=number)
        is_empty = False
    if is_empty:
        raise InputError(f'{path}: no row of verl\'s in it; expected some as {{"step": 1, "data": {{...}}}}')
    return [builder.build()]


FORMAT = Format("verl", "verl's file logger", recognises, read)


def _is_row(row: dict) -> bool:
    return isinstance(row.get("data"), dict) and not math.isnan(finite(row.get("step")))
