"""Tasks in one line: `task = "code:problems.jsonl"` stands for a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TABLES: dict[str, Callable[[str], dict[str, Any]]] = {
    "code": lambda rest: {"kind": "code", "path": rest},
}


def table_of(task: str) -> dict[str, Any]:
    """Return the table that a task in one line stands for; any other text is a kind.

    code:PATH     programming problems of a data set
    """
    start, _, rest = task.partition(":")
    if rest and start in _TABLES:
        return _TABLES[start](rest)
    return {"kind": task}
