"""The curve of a run in a terminal: evaluations, the fitted median and its band, the target, the end.

Curves are drawn in Braille, two by four dots per character, or in ASCII if the terminal lacks such
characters. Every layer has a sign of its own, so that no two differ only by colour.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalerl.numbers import plain
from scalerl.view.facts.standing import Standing

if TYPE_CHECKING:
    from rich.text import Text

_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character, by column and row of its dots."""
_MARGIN = 6
"""Characters left of the plot, for the pass rates."""


@dataclass(frozen=True)
class Signs:
    """The character of every layer."""

    evaluation: str
    band: str
    target: str
    ceiling: str
    prediction: str
    curve: str
    """Empty if the curve is drawn in Braille."""


UNICODE = Signs("●", "░", "╌", "┄", "│", "")
ASCII = Signs("o", ":", "-", "=", "|", "*")
_BANDS = (UNICODE.band, ASCII.band)


@functools.lru_cache(maxsize=2)  # a view is redrawn as time passes, with the same run in the same size
def plot(run: Standing, width: int, height: int, signs: Signs = UNICODE) -> list[Text]:
    """Draw the plot with its axes in `width` x `height` characters; return a text for every row."""
    columns, rows = max(width - _MARGIN, 10), max(height - 1, 4)
    canvas = _Canvas(columns, rows, max(run.end, run.compute) or 1.0, _limits(run))
    fit = run.fit if run.fit is not None and run.fit.misfit is None else None
    band = fit.band(canvas.most * (np.arange(columns) + 0.5) / columns) if fit else None
    if band is not None:
        for column, (low, high) in enumerate(zip(band[1].tolist(), band[2].tolist(), strict=True)):
            canvas.fill(column, low, high, signs.band, "blue dim")
    if run.asked.target is not None:
        canvas.level(run.asked.target, signs.target, "yellow")
    if fit and fit.identified:
        canvas.level(fit.median.A, signs.ceiling, "green")
    if band is not None:
        # The curve is computed in the middle of every column, and drawn at two dots per column.
        dots_D = (np.arange(2 * columns) + 0.5) / 2 - 0.5
        for dot, rate in enumerate(np.interp(dots_D, np.arange(columns), band[0]).tolist()):
            if signs.curve:
                canvas.put(dot // 2, canvas.row(rate), signs.curve, "blue")
            else:
                canvas.dot(dot, rate, "blue")
    if run.forecast is not None:
        low, high = run.forecast.prediction
        canvas.fill(columns - 1, low, high, signs.prediction, "blue")
    for compute, rate in zip(run.points.compute_N.tolist(), run.points.pass_rate_N.tolist(), strict=True):
        canvas.put(canvas.column(compute), canvas.row(rate), signs.evaluation, "bold")
    return _framed(canvas, run)


def key(run: Standing, width: int, signs: Signs = UNICODE) -> list[Text]:
    """Return the legend of the layers in the plot, in lines of at most `width` characters."""
    from rich.text import Text

    entries = [(signs.evaluation, "evaluation", "bold")]
    if run.fit is not None and run.fit.misfit is None:
        entries += [(signs.curve or "⠒⠤", "median", "blue"), (signs.band, "interval", "blue")]
        entries.append((signs.prediction, "forecast", "blue"))
        if run.fit.identified:
            entries.append((signs.ceiling * 2, "ceiling A", "green"))
    if run.asked.target is not None:
        entries.append((signs.target * 2, "target", "yellow"))
    lines: list[Text] = []
    for sign, name, style in entries:
        entry = Text().append(sign, style).append(f" {name}", "dim")
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append(entry)
        else:
            lines.append(Text(" " * _MARGIN).append(entry))
    return lines


def _limits(run: Standing) -> tuple[float, float]:
    """Return the pass rates at the lower and the upper edge, a little beyond everything drawn."""
    shown = run.points.pass_rate_N.tolist()
    if run.fit is not None:
        shown += run.fit.forecast(run.end).prediction
    if run.asked.target is not None:
        shown.append(run.asked.target)
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    pad = max(0.06 * (high - low), 0.01)
    return max(low - pad, 0.0), min(high + pad, 1.0)


class _Canvas:
    """Characters and their styles, by row (from the top) and column."""

    def __init__(self, columns: int, rows: int, most: float, limits: tuple[float, float]) -> None:
        self.columns, self.rows, self.most, (self.low, self.high) = columns, rows, most, limits
        self.cells = [[(" ", "")] * columns for _ in range(rows)]

    def column(self, compute: float) -> int:
        """Return the column of a compute."""
        return min(int(compute / self.most * self.columns), self.columns - 1)

    def row(self, rate: float, per_row: int = 1) -> int:
        """Return the row of a pass rate, in units of 1 / `per_row`; beyond the canvas if the rate is."""
        return math.floor((self.high - rate) / (self.high - self.low) * (self.rows * per_row - 1e-9))

    def put(self, column: int, row: int, sign: str, style: str) -> None:
        """Overwrite a character."""
        if 0 <= row < self.rows:
            self.cells[row][column] = (sign, style)

    def fill(self, column: int, low: float, high: float, sign: str, style: str) -> None:
        """Fill a column from one pass rate to another."""
        for row in range(max(self.row(high), 0), min(self.row(low), self.rows - 1) + 1):
            self.put(column, row, sign, style)

    def level(self, rate: float, sign: str, style: str) -> None:
        """Draw a horizontal line through cells that are empty or have a band."""
        row = self.row(rate)
        for column in range(self.columns):
            if 0 <= row < self.rows and self.cells[row][column][0] in (" ", *_BANDS):
                self.put(column, row, sign, style)

    def dot(self, dot: int, rate: float, style: str) -> None:
        """Add a dot to a Braille character."""
        fine = self.row(rate, 4)
        column, row = dot // 2, fine // 4
        if not 0 <= row < self.rows:
            return
        before = self.cells[row][column][0]
        bits = ord(before) - 0x2800 if 0x2800 <= ord(before) < 0x2900 else 0
        self.put(column, row, chr(0x2800 + (bits | _DOTS[dot % 2][fine % 4])), style)


def _framed(canvas: _Canvas, run: Standing) -> list[Text]:
    from rich.text import Text

    labels = _labels(canvas)
    lines = []
    for number, cells in enumerate(canvas.cells):
        line = Text(f"{labels.get(number, ''):>{_MARGIN - 1}} ", style="dim")
        for sign, style in cells:
            line.append(sign, style=style or "not dim")
        lines.append(line)
    unit = run.unit
    middle, end = plain(canvas.most / 2 / unit.size), f"{plain(canvas.most / unit.size)} {unit.name}"
    start, room = f"{'0':<{canvas.columns // 2}}{middle}", canvas.columns - len(end)
    foot = f"{start if len(start) < room else '0':<{room}}{end}"
    return [*lines, Text(" " * _MARGIN + foot, style="dim")]


def _labels(canvas: _Canvas) -> dict[int, str]:
    """Return labels of round pass rates by row, as many as there is room for."""
    most = max(canvas.rows // 3, 2)
    for step in _STEPS:
        first, last = math.ceil(canvas.low / step), int(canvas.high / step)
        if last - first < most:
            rates = [step * n for n in range(first, last + 1)]
            return {min(canvas.row(rate), canvas.rows - 1): f"{rate:.2f}" for rate in rates}
    return {}
