"""Rows in a terminal: a label and a text, or cells below a header."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from scalerl.tty import console_for

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {"GO,": "green", "NO-GO,": "red", "open:": "bold yellow"}
"""Colours of texts by their first word: verdicts, and alarms that are not over."""


def print_table(
    rows: Sequence[Sequence[str]],
    header: Sequence[str] | None = None,
    title: str = "",
    file: TextIO | None = None,
) -> None:
    """Print a table to `file` (default: standard output), with a header or with labels in the first column.

    It is coloured on a terminal, and plain in a pipe, where it is indented below a title.
    """
    stream = sys.stdout if file is None else file
    console = console_for(stream)
    if console is not None:
        from rich.text import Text

        if title:
            console.print(Text(title, style="bold"))
        console.print(rich_table(rows, header))
        return
    whole = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    if title:
        print(title, file=stream)
    for row in whole:
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(f"{'  ' * bool(title)}{cells}".rstrip(), file=stream)


def rich_table(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None) -> Table:
    """Return the rows as a rich table, with `Text` cells, so that brackets of intervals are not markup."""
    from rich.table import Table
    from rich.text import Text

    bold = "bold cyan"
    table = Table(*(header or ()), box=None, show_header=bool(header), pad_edge=False, header_style=bold)
    for first, *rest in rows:
        texts = (Text(text, style="" if header else _colour(text), overflow="fold") for text in rest)
        table.add_row(Text(first, style="" if header else bold), *texts)
    return table


def _colour(text: str) -> str:
    if text.endswith((": inside", ": outside")):
        return "green" if text.endswith(": inside") else "red"
    return _COLOURS.get(text.partition(" ")[0], "")
