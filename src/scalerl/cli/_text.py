"""What the commands print: warnings, JSON, and tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scalerl.tty import console_for


def print_warnings(warnings: Iterable[str]) -> None:
    """Warnings on standard error, each once."""
    for warning in dict.fromkeys(warnings):
        print(f"warning: {warning}", file=sys.stderr)


def print_json(answer: Mapping[str, Any], indent: int | None = 2) -> None:
    """One JSON object on standard output."""
    from scalerl.jsonl import dumps

    print(dumps(answer, indent=indent))


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """A table of two columns: coloured where a person looks on, plain text in a pipe."""
    width = max(len(label) for label, _ in rows)
    console = console_for(sys.stdout)
    if console is None:
        for label, text in rows:
            print(f"{label:<{width}}  {text}".rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for label, text in rows:
        table.add_row(Text(label, style="bold cyan"), Text(text))
    console.print(table)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table with a header: aligned where a person looks on, and in a pipe."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    console = console_for(sys.stdout)
    if console is None:
        for row in (header, *rows):
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=None, pad_edge=False, header_style="bold cyan")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
