"""Tables with named columns, CSV or JSONL: any trainer's log of compute against pass rate."""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve.points import Points
from scalerl.errors import InputError
from scalerl.record import AXES, RunRecord, read_jsonl

_COUNTERS = ("device_seconds", "flops", "tokens")
_STEP = "step"
_NOISE = ("mean_p_1mp", "n_prompts", "n_samples")


@dataclass(frozen=True)
class Table:
    """Rows of named cells with the line of the file that each came from."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    lines: tuple[int, ...]
    warnings: tuple[str, ...] = ()

    def numbers(self, column: str, rows: Sequence[int]) -> np.ndarray:
        """The numbers of a column in the rows given.

        Raises:
            InputError: there is no such column, or a cell is no number; it names the line.
        """
        self.require(column)
        return np.array([self._number(column, row) for row in rows], dtype=float)

    def require(self, column: str) -> None:
        """Raise an InputError that names the columns there are, unless `column` is one of them."""
        if column in self.columns:
            return
        near = difflib.get_close_matches(column, self.columns, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise InputError(f"{self.path}: no column '{column}'; {hint}columns: {', '.join(self.columns)}")

    def has_counters(self, column: str) -> bool:
        """Whether the cells of a column are objects of counters, as in evals.jsonl."""
        return any(isinstance(row.get(column), dict) for row in self.rows)

    def has_numbers(self, column: str) -> bool:
        """Whether there is such a column, of plain cells."""
        return column in self.columns and not self.has_counters(column)

    def is_empty(self, column: str, row: int) -> bool:
        """Whether the cell is missing, null or blank."""
        value = self.rows[row].get(column)
        return value is None or (isinstance(value, str) and not value.strip())

    def _number(self, column: str, row: int) -> float:
        value = self.rows[row].get(column)
        where = f"{self.path}, line {self.lines[row]}, column '{column}'"
        if self.is_empty(column, row):
            raise InputError(f"{where}: empty, expected a number")
        try:
            number = math.nan if isinstance(value, bool | list | dict) else float(value)  # pyright: ignore
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{where}: expected a finite number, found {value!r}")
        return number


def read_table(
    path: str | Path, x: str = "gpu_hours", y: str = "pass_rate", price: float | None = None
) -> Points:
    """Points from a CSV or JSONL file with a header; columns `x` (compute) and `y` (pass rate).

    Rows without a value of `y` (most steps of a trainer) are passed over. The columns `step`, and
    `mean_p_1mp`, `n_prompts`, `n_samples` (the noise of an evaluation) are used where they are. A JSONL
    file in the form of a run's evals.jsonl has its axes made from the counters.

    Args:
        path: the file.
        x: name of the compute column; for `dollars` with a `price`, made from `gpu_hours`.
        y: name of the column of pass rates, shares in [0, 1].
        price: dollars per GPU-hour.

    Raises:
        InputError: the file, a column or a cell is missing or wrong; it names the line.
    """
    table = _read(Path(path))
    if (
        y == "pass_rate"
        and x in AXES
        and not table.has_numbers(x)
        and any(map(table.has_counters, _COUNTERS))
    ):
        return Points.from_record(RunRecord.read_evals(path), x, price)
    table.require(y)
    rows = [row for row in range(len(table.rows)) if not table.is_empty(y, row)]
    warnings = table.warnings
    if len(rows) < len(table.rows):
        warnings += (f"{path}: {len(table.rows) - len(rows)} rows have no '{y}' and were left out",)
    pass_rate_N = table.numbers(y, rows)
    points = Points(
        _compute(table, x, price, rows),
        pass_rate_N,
        _noise_sd(table, rows),
        _optional(table, _STEP, rows),
        str(path),
        x,
        np.array([table.lines[row] for row in rows]),
    )
    return replace(points, warnings=warnings)


def _compute(table: Table, x: str, price: float | None, rows: Sequence[int]) -> np.ndarray:
    if x == "dollars" and x not in table.columns and "gpu_hours" in table.columns:
        if price is None:
            raise InputError("the axis 'dollars' needs a price per GPU-hour")
        return table.numbers("gpu_hours", rows) * price
    if x == "steps" and x not in table.columns and _STEP in table.columns:
        x = _STEP
    return table.numbers(x, rows)


def _optional(table: Table, column: str, rows: Sequence[int]) -> np.ndarray | None:
    """A helpful column, if it is there and complete."""
    if column not in table.columns or any(table.is_empty(column, row) for row in rows):
        return None
    return table.numbers(column, rows)


def _noise_sd(table: Table, rows: Sequence[int]) -> np.ndarray:
    """Sampling noise sqrt(mean p(1-p) / (n k)) of every row, NaN where the columns do not say."""
    columns = [_optional(table, name, rows) for name in _NOISE]
    if any(column is None for column in columns):
        return np.full(len(rows), np.nan)
    spread_N, prompts_N, samples_N = (np.asarray(column) for column in columns)
    total_N = prompts_N * samples_N
    known_N = total_N > 0
    return np.where(known_N, np.sqrt(np.maximum(spread_N, 0) / np.where(known_N, total_N, 1)), np.nan)


def _read(path: Path) -> Table:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if not data.strip():
        raise InputError(f"{path}: the file is empty; expected a CSV or JSONL with named columns")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file in UTF-8; expected a CSV or JSONL") from error
    if "\x00" in text:
        raise InputError(f"{path}: a binary file; expected a CSV or JSONL with named columns")
    return _read_json(path) if text.lstrip().startswith("{") else _read_csv(path, text)


def _read_json(path: Path) -> Table:
    warnings: list[str] = []
    numbered = read_jsonl(path, warnings)
    columns = dict.fromkeys(key for _, row in numbered for key in row)
    return Table(
        path,
        tuple(columns),
        tuple(row for _, row in numbered),
        tuple(number for number, _ in numbered),
        tuple(warnings),
    )


def _read_csv(path: Path, text: str) -> Table:
    header = text.splitlines()[0]
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, lines = [], []
    try:
        columns = tuple(name.strip() for name in next(reader))
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(columns):
                raise InputError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells for {len(columns)} columns"
                )
            rows.append(dict(zip(columns, cells, strict=False)))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error
    return Table(path, columns, tuple(rows), tuple(lines))
