"""Tables as data: the text of every cell, and smaller text beside it.

One definition serves Markdown, LaTeX, the page and the terminal (`scalerl.view.formats`), so that they cannot
differ.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from scalerl.forecast.comparison import Difference
from scalerl.jsonl import flat
from scalerl.numbers import DASH, Unit, interval, plain, plus_minus, rate, rate_interval, signed
from scalerl.quantiles import Interval

Mark = Literal["", "base", "moved", "open"]
"""The mark of a row: the base, an arm with a difference, or an open question."""


@dataclass(frozen=True)
class Estimate:
    """Median and interval of a quantity; for a recipe over its seeds, including their variance."""

    median: float
    interval: Interval


@dataclass(frozen=True)
class Cell:
    """One cell: its text, and lines of smaller text beside it."""

    text: str
    beside: str = ""

    @property
    def whole(self) -> str:
        """The text and the text beside it in one line; unless an interval or ±, the latter is in brackets."""
        beside = self.beside.replace(":\n", ": ").replace("\n", ", ")
        return f"{self.text} {beside if beside.startswith(('[', '±')) else beside and f'({beside})'}".rstrip()


@dataclass(frozen=True)
class Row:
    """One row and its mark."""

    cells: tuple[Cell, ...]
    mark: Mark = ""


Cells = Mapping[str, Cell | str]
"""The cells of a row by their headings; a string is a cell without text beside it, an empty one a dash."""


@dataclass(frozen=True)
class Table:
    """A table; `name` is a word for labels and files, `note` explains the table to readers."""

    name: str
    title: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    prose: tuple[str, ...] = ()
    """Headings of columns of words, which wrap and are left-aligned, unlike numbers."""

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        rows: Sequence[Cells],
        note: str = "",
        prose: tuple[str, ...] = (),
        marks: Sequence[Mark] = (),
    ) -> Self:
        """Return a table of rows, each with a mark; the keys of the first row are the headings."""
        made = tuple(row(*one.values(), mark=marks[n] if marks else "") for n, one in enumerate(rows))
        return cls(name, title, tuple(rows[0]) if rows else (), made, note, prose)

    @property
    def is_empty(self) -> bool:
        """Whether it has columns of numbers that contain only dashes."""
        places = [place for place, header in enumerate(self.headers) if header not in self.prose]
        numbers = {row.cells[place].whole for row in self.rows for place in places}
        return bool(places) and numbers <= {DASH}

    def __post_init__(self) -> None:
        assert all(len(row.cells) == len(self.headers) for row in self.rows), self.name


def row(*cells: Cell | str, mark: Mark = "") -> Row:
    """Make a row of a table from cells or strings; an empty string becomes a dash."""
    return Row(tuple(one if isinstance(one, Cell) else Cell(one or DASH) for one in cells), mark)


def rate_cell(found: Estimate | None, without: str = DASH) -> Cell:
    """Return a pass rate or ceiling with its interval; `without` says why there is none."""
    return Cell(rate(found.median), rate_interval(found.interval)) if found else Cell(without)


def amount_cell(found: Estimate | None, unit: Unit | None = None) -> Cell:
    """Return an amount with its interval in `unit`; an infinite amount is a target never reached."""
    if found is None:
        return Cell(DASH)
    size = unit.size if unit else 1.0
    if found.interval[0] == math.inf:
        return Cell("never reaches it")
    shown = "reached by under half" if found.median == math.inf else plain(found.median / size)
    return Cell(shown, interval(found.interval, lambda end: _or_never(end / size)))


def seeds_cell(
    found: Sequence[tuple[float, Interval]], show: Callable[[float], str], size: float = 1.0, star: str = ""
) -> Cell:
    """Return the median of one run with its interval, or mean and sd of several runs, in units of `size`."""
    if not found:
        return Cell(DASH)
    median_N = np.array([median for median, _ in found]) / size
    mean = float(median_N.mean())
    if len(found) == 1:
        return Cell(f"{show(mean)}{star}", interval(found[0][1], lambda end: show(end / size)))
    sd = float(median_N.std(ddof=1))
    return Cell(f"{show(mean)} ± {show(sd)}{star}" if show is rate else plus_minus(mean, sd, show))


def difference_cell(found: Difference | None, without: str = DASH) -> Cell:
    """Return a difference `+0.042 [+0.031, +0.053]` or a ratio `×0.68 [0.61, 0.76]`."""
    if found is None:
        return Cell(without)
    if found.kind == "difference":
        return Cell(signed(found.median), interval(found.interval, signed))
    if found.median in (0.0, math.inf):  # one of the two stays below the target
        return Cell("never reaches it" if found.median else "the other never reaches it")
    if found.interval == (0.0, math.inf):
        return Cell("either may never reach it")
    return Cell(f"×{plain(found.median)}", interval(found.interval, _or_never))


def _or_never(end: float) -> str:
    return "never" if end == math.inf else plain(end)


def changes_in_words(changes: Mapping[str, Any]) -> str:
    """Return changes to a recipe as `loss.kind = dapo, decode_slots = 3`; empty without any."""
    return ", ".join(f"{key} = {value}" for key, value in flat(changes).items())
