"""Output of the commands: warnings, JSON, and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalerl.tty import console_for


def print_warnings(warnings: Iterable[object]) -> None:
    """Print warnings on standard error, each once."""
    for warning in dict.fromkeys(map(str, warnings)):
        print(f"warning: {warning}", file=sys.stderr)


def print_json(answer: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print one JSON object on standard output."""
    from scalerl.jsonl import dumps

    print(dumps(answer, indent=indent))


def print_table(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None) -> None:
    """Print a table: with a header, or else with a label in the first column.

    It is coloured on a terminal, and plain in a pipe.
    """
    console = console_for(sys.stdout)
    if console is None:
        whole = [*([header] if header else []), *rows]
        widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
        for row in whole:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    bold = "bold cyan"
    table = Table(*(header or ()), box=None, show_header=bool(header), pad_edge=False, header_style=bold)
    for first, *rest in rows:
        table.add_row(Text(first, style="" if header else bold), *map(Text, rest))
    console.print(table)
