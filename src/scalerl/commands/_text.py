"""What the commands share: numbers in, tables of two columns out."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence


def number(text: str) -> float:
    """An argument that is a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """An argument that is a list of numbers, by commas."""
    return tuple(number(part) for part in text.split(","))


def span(interval: tuple[float, float], spec: str = ".3f") -> str:
    """An interval as `[low, high]`."""
    return f"[{interval[0]:{spec}}, {interval[1]:{spec}}]"


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """A table of two columns: coloured where a person looks on, plain text in a pipe."""
    width = max(len(label) for label, _ in rows)
    if not sys.stdout.isatty():
        for label, text in rows:
            print(f"{label:<{width}}  {text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for label, text in rows:
        table.add_row(Text(label, style="bold cyan"), Text(text))
    Console().print(table)
