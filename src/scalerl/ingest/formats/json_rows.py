"""Rows of a table that is one JSON value rather than JSON Lines."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from scalerl.errors import InputError, listed
from scalerl.ingest.formats.results import step_named_in
from scalerl.ingest.formats.rows import STEPS
from scalerl.jsonl import flat, object_of, parse_json, why_not_json
from scalerl.record.evaluation import AXES

_EXPECTED = "expected an array of objects, or an object with such an array, columns, or objects by step"
_CLOCKS = frozenset((*STEPS, *AXES))
"""Rows within an object need one of these, as the prompts of a single evaluation are rows, too."""


def json_rows(data: bytes, source: str, warnings: list[str]) -> Iterator[tuple[int, dict[str, Any]]] | None:
    """Return the rows of a JSON array or object with their numbers, which errors call lines.

    Return None if it is neither but may be JSON Lines. `warnings` gets the names of an object without rows.

    Raises:
        InputError: it holds no rows.
    """
    is_array = re.match(rb"\s*\[\s*[{\[\]]", data) is not None
    first, _, rest = data.strip().partition(b"\n")
    if not is_array and (not first.startswith(b"{") or (rest and object_of(first))):
        return None
    try:
        found = parse_json(data, source)
    except json.JSONDecodeError as error:
        if not is_array:  # JSON Lines whose first line is damaged
            return None
        raise InputError(f"{source}: not JSON ({why_not_json(error)})") from error
    rows = found if is_array else _rows_of(found, warnings, source)
    if rows is None and not rest:  # JSON Lines of a single row
        return None
    if not rows or not all(isinstance(row, dict) for row in rows):
        what = "array" if is_array else f"object ({listed(list(found), most=6)})"
        raise InputError(f"{source}: a JSON {what} without rows; {_EXPECTED}")
    return enumerate(rows, start=1)


def _has_clock(row: Any) -> bool:
    return isinstance(row, dict) and not _CLOCKS.isdisjoint(row)


def _rows_of(found: Mapping[str, Any], warnings: list[str], source: str) -> list[dict[str, Any]] | None:
    lists = {name: cells for name, cells in found.items() if isinstance(cells, list) and cells}
    rows = {name: cells for name, cells in lists.items() if all(map(_has_clock, cells))}
    if len(rows) > 1:
        raise InputError(f"{source}: rows under {listed(list(rows))}: write those that are meant to a file")
    if rows:
        return next(iter(rows.values()))
    if len(lists) > 1 and len({len(cells) for cells in lists.values()}) == 1:
        return [dict(zip(lists, cells, strict=True)) for cells in zip(*lists.values(), strict=True)]
    named = [name for name, row in found.items() if isinstance(row, dict)]
    steps = {name: int(name) if name.isdecimal() else step_named_in(name) for name in named}
    by_step = [{"step": step, **flat(found[name])} for name, step in steps.items() if step is not None]
    without = [name for name in found if steps.get(name) is None]
    if by_step and without:
        warnings.append(f"{source}: left out, as no step is in its name: {listed(without)}")
    return by_step or None
