"""What the commands share: numbers in, tables of two columns out."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence

from scalerl.tty import console_for


def number(text: str) -> float:
    """An argument that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
    return value


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return value


def compute(text: str) -> float:
    """An argument that is an amount of compute, 0 or more."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"compute is a number of 0 or more, found {text!r}")
    return value


def computes(text: str) -> tuple[float, ...]:
    """An argument that is a list of amounts of compute, by commas."""
    return tuple(compute(part) for part in text.split(","))


def share(text: str) -> float:
    """An argument that is a pass rate or another share in [0, 1]."""
    value = number(text)
    if not 0 <= value <= 1:
        percent = ", and this looks like percent" if 1 < value <= 100 else ""
        raise argparse.ArgumentTypeError(f"expected a share in [0, 1], found {text!r}{percent}")
    return value


def level(text: str) -> float:
    """An argument that is the level of intervals, between 0 and 1."""
    value = share(text)
    if value in (0.0, 1.0):
        raise argparse.ArgumentTypeError(f"the level of the intervals is between 0 and 1, found {text!r}")
    return value


def print_warnings(warnings: Iterable[str]) -> None:
    """Warnings on standard error, each once."""
    for warning in dict.fromkeys(warnings):
        print(f"warning: {warning}", file=sys.stderr)


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
