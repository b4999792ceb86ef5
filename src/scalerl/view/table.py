"""Tables as data: every cell holds the text for people and the numbers behind it.

One definition serves Markdown, LaTeX, CSV, the page and the terminal (`scalerl.view.formats`), so that none
of them can say something else than the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scalerl.curve.quantiles import Interval
from scalerl.forecast.comparison import Difference
from scalerl.jsonl import flat
from scalerl.view.numbers import DASH, Unit, interval, plain, rate, rate_interval, signed

Raw = str | float | int | None
"""What stands in a CSV: None and NaN are empty there."""
Mark = Literal["", "base", "moved", "open"]
"""How a row stands out: the base, an arm that moves something, one of which nothing can be said."""


@dataclass(frozen=True)
class Estimate:
    """Median and interval of a quantity; of a recipe, over its seeds, their variance included."""

    median: float
    interval: Interval


@dataclass(frozen=True)
class TableColumn:
    """A column: its heading, and the names of the numbers behind each of its cells."""

    header: str
    keys: tuple[str, ...]
    prose: bool = False
    """Words, which wrap and stand at the left; numbers do not."""


@dataclass(frozen=True)
class Cell:
    """One cell: its text, what stands smaller beside it (in lines), and the raw values, one for each key."""

    text: str
    raw: tuple[Raw, ...]
    beside: str = ""

    @property
    def whole(self) -> str:
        """The text and what stands beside it, in one line; words beside words are in brackets."""
        beside = self.beside.replace(":\n", ": ").replace("\n", ", ")
        return f"{self.text} {beside if beside.startswith(('[', '±')) else beside and f'({beside})'}".rstrip()


@dataclass(frozen=True)
class Row:
    """One row, and how it stands out."""

    cells: tuple[Cell, ...]
    mark: Mark = ""


@dataclass(frozen=True)
class Table:
    """A table. `name` is a word for labels and files, `note` what a reader needs to read it."""

    name: str
    title: str
    columns: tuple[TableColumn, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def __post_init__(self) -> None:
        widths = [len(column.keys) for column in self.columns]
        for row in self.rows:
            assert [len(cell.raw) for cell in row.cells] == widths, (self.name, row)

    @property
    def keys(self) -> list[str]:
        """The names of all raw values of a row."""
        return [key for column in self.columns for key in column.keys]

    def raw_rows(self) -> list[list[Raw]]:
        """The raw values of every row, in the order of `keys`."""
        return [[value for cell in row.cells for value in cell.raw] for row in self.rows]

    def only(self, keys: Sequence[str]) -> Table:
        """The columns whose first key is named, in this order of theirs."""
        kept = [place for place, column in enumerate(self.columns) if column.keys[0] in keys]
        rows = tuple(Row(tuple(row.cells[place] for place in kept), row.mark) for row in self.rows)
        return Table(self.name, self.title, tuple(self.columns[p] for p in kept), rows, self.note)


def spread_keys(name: str) -> tuple[str, str, str]:
    """The names of a value and of the ends of its interval."""
    return name, f"{name}_low", f"{name}_high"


def words(text: str) -> Cell:
    """A cell of words, which stand in the CSV as they are."""
    return Cell(text or DASH, (text,))


def number(value: float | None, text: str | None = None) -> Cell:
    """A cell with a number, shown as `text` or as it is."""
    return Cell(str(value) if text is None else text, (value,))


def rate_cell(found: Estimate | None, without: str = DASH) -> Cell:
    """A pass rate or ceiling with its interval; `without` says why there is none."""
    if found is None:
        return Cell(without, (None, None, None))
    return Cell(rate(found.median), (found.median, *found.interval), rate_interval(found.interval))


def amount_cell(found: Estimate | None, unit: Unit | None = None) -> Cell:
    """An amount with its interval, shown in `unit`; infinite is `never`, as amounts are computes then."""
    if found is None:
        return Cell(DASH, (None, None, None))
    size = unit.size if unit else 1.0
    shown = "never" if found.median == math.inf else plain(found.median / size)
    beside = interval(found.interval, lambda end: plain(end / size))
    return Cell(shown, (found.median, *found.interval), beside)


def difference_cell(found: Difference | None, without: str = DASH) -> Cell:
    """A difference `+0.042 [+0.031, +0.053]` or a ratio `×0.68 [0.61, 0.76]`."""
    if found is None:
        return Cell(without, (None, None, None))
    raw = (found.median, *found.interval)
    if found.kind == "difference":
        return Cell(signed(found.median), raw, interval(found.interval, signed))
    if found.median in (0.0, math.inf):  # one of the two ends below the target
        return Cell("never reaches it" if found.median else "the other never reaches it", raw)
    return Cell(f"×{plain(found.median)}", raw, interval(found.interval, plain))


def changes_in_words(changes: Mapping[str, Any]) -> str:
    """Changes of a recipe as `loss.kind = dapo, decode_slots = 3`; empty without any."""
    return ", ".join(f"{key} = {value}" for key, value in flat(changes).items())
