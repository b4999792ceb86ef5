"""Tables with named columns, CSV or JSONL: any trainer's log of compute against pass rate."""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve.points import NOISE_FIELDS, ONE_SAMPLE, Points, noise_of, warn_of_repeats
from scalerl.errors import InputError, brief, counted
from scalerl.ingest.lines import allow_long_cells
from scalerl.ingest.log import as_number
from scalerl.ingest.order import superseded_rows
from scalerl.jsonl import check_not_utf16, parse_jsonl, read_bytes
from scalerl.left_out import INFINITE, NAN, NONE, SUPERSEDED, VALUELESS, LeftOut, Omitted, ending_of
from scalerl.record import AXES, RunRecord, in_dollars

_COUNTERS = ("device_seconds", "flops", "tokens")
_STEP = "step"
_HELPFUL = ("gpu_hours", _STEP, *NOISE_FIELDS, *_COUNTERS)
_EXPECTED = "expected a CSV or JSONL with named columns"


@dataclass(frozen=True)
class Table:
    """The cells of the columns that are wanted, by name, and the line that every row comes from."""

    source: str
    columns: tuple[str, ...]
    """All names, of the columns that are not wanted too, in the order of the file."""
    cells: Mapping[str, Sequence[Any]]
    lines: Sequence[int]
    warnings: tuple[str, ...] = ()

    def numbers(self, column: str, rows: Sequence[int]) -> np.ndarray:
        """The numbers of a column in the rows given.

        Raises:
            InputError: there is no such column, or two; or a cell is no number, and it names the line.
        """
        self.require(column)
        cells = [self.cells[column][row] for row in rows]
        if bool not in set(map(type, cells)):  # which float() takes for 0 or 1
            try:
                numbers = np.array(list(map(_float, cells)), dtype=float)
            except (TypeError, ValueError, OverflowError):
                numbers = np.array([math.nan])
            if np.isfinite(numbers).all():
                return numbers
        return np.array([self._number(column, row) for row in rows], dtype=float)

    def require(self, column: str) -> None:
        """Raise an InputError that names the columns there are, unless `column` is exactly one of them."""
        count = self.columns.count(column)
        if count == 1:
            return
        if count > 1:
            raise InputError(f"{self.source}: {count} columns are named '{column}'; rename all but one")
        near = difflib.get_close_matches(column, self.columns, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        if self.columns and all(map(_is_number, self.columns)):
            hint = "the first line holds the names of the columns, and here it holds numbers; "
        raise InputError(f"{self.source}: no column '{column}'; {hint}columns: {_listed(self.columns)}")

    def has_counters(self, column: str) -> bool:
        """Whether the cells of a column are objects of counters, as in evals.jsonl."""
        return any(isinstance(cell, dict) for cell in self.cells.get(column, ()))

    def has_numbers(self, column: str) -> bool:
        """Whether there is such a column, of plain cells."""
        return column in self.columns and not self.has_counters(column)

    def filled(self, column: str) -> list[int]:
        """The rows whose cell is neither missing, null nor blank."""
        self.require(column)
        return [row for row, cell in enumerate(self.cells[column]) if not _is_empty(cell)]

    def _number(self, column: str, row: int) -> float:
        """One number, or the error that says what would be right."""
        cell = self.cells[column][row]
        where = f"{self.source}, line {self.lines[row]}, column '{column}'"
        if _is_empty(cell):
            raise InputError(f"{where}: empty, expected a number")
        try:
            number = math.nan if isinstance(cell, bool) else _float(cell)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise InputError(f"{where}: expected a finite number{_instead(cell)}, found {brief(cell)}")
        return number


def read_table(
    path: str | Path, x: str = "gpu_hours", y: str = "pass_rate", price: float | None = None
) -> Points:
    """Points from a CSV or JSONL file with a header; columns `x` (compute) and `y` (pass rate).

    Rows without a value of `y` (most steps of a trainer) are passed over. The columns `step`, and
    `mean_p_1mp`, `n_prompts`, `n_samples` (the noise of an evaluation) are used where they are. A JSONL
    file in the form of a run's evals.jsonl has its axes made from the counters.

    Args:
        path: the file, or a pipe.
        x: name of the compute column; for `dollars` with a `price`, made from `gpu_hours`.
        y: name of the column of pass rates, shares in [0, 1].
        price: dollars per GPU-hour.

    Raises:
        InputError: the file, a column or a cell is missing or wrong; it names the line.
    """
    return parse_table(read_bytes(Path(path)), str(path), x, y, price)


def parse_table(
    data: bytes, source: str, x: str = "gpu_hours", y: str = "pass_rate", price: float | None = None
) -> Points:
    """`read_table` of the bytes of a file; `source` names it in errors."""
    if x == y:
        raise InputError(f"{source}: '{x}' cannot be both the compute (--x) and the pass rate (--y)")
    table = _read(data, source, (x, y, *_HELPFUL))
    if (
        y == "pass_rate"
        and x in AXES
        and not table.has_numbers(x)
        and any(map(table.has_counters, _COUNTERS))
    ):
        return Points.from_record(RunRecord.parse_evals(data, source), x, price)
    rows, left_out = _counting(table, x, y, price)
    noise_sd_N, samples_N, warnings = _noise(table, rows)
    without = len(table.lines) - len(rows) - len(left_out)
    if without:
        warnings = (f"{source}: {counted(without, 'row')} left out, without a '{y}'", *warnings)
    points = Points(
        _compute(table, x, price, rows),
        table.numbers(y, rows),
        noise_sd_N,
        samples_N,
        _optional(table, _STEP, rows),
        source,
        x,
        np.array([table.lines[row] for row in rows], dtype=int),
        (*left_out.sentences(), *table.warnings, *warnings),
        left_out,
    )
    return warn_of_repeats(points)


def _counting(table: Table, x: str, y: str, price: float | None) -> tuple[list[int], LeftOut]:
    """The rows whose evaluation counts, and the evaluations that do not: no numbers, or before a restart."""
    filled = table.filled(y)
    numbers = {row: number for row in filled if (number := as_number(table.cells[y][row])) is not None}
    reasons = {row: INFINITE if math.isinf(n) else NAN for row, n in numbers.items() if not math.isfinite(n)}
    steps = _steps(table)
    if len(filled) < len(table.lines) and steps is not None:  # it has rows of training, too
        over_R = superseded_rows(steps, np.array(table.lines))
        reasons |= {row: SUPERSEDED for row in filled if over_R[row]}
    kept = [row for row in filled if row not in reasons]
    if not reasons or not kept:
        return filled, NONE  # of which the first is refused, with its line
    found = {row: Omitted(reason, _step_of(steps, row), table.lines[row]) for row, reason in reasons.items()}
    without = [row for row in found if found[row].reason in VALUELESS]
    compute_W, last = _compute(table, x, price, without), _compute(table, x, price, kept).max()
    newest = [found[without[n]] for n in np.argsort(compute_W, kind="stable") if compute_W[n] > last]
    ending = ending_of([o.reason for o in newest], [o.step for o in newest], len(kept) + len(without), y)
    return kept, LeftOut.of([found[row] for row in sorted(found)], y, ending)


def _steps(table: Table) -> np.ndarray | None:
    """The step of every row, NaN where it has none; None without a column of them."""
    if table.columns.count(_STEP) != 1:
        return None
    cells = [None if _is_empty(cell) else cell for cell in table.cells[_STEP]]
    return np.array([_float(cell) if _is_number(str(cell)) else math.nan for cell in cells], dtype=float)


def _step_of(steps: np.ndarray | None, row: int) -> int | None:
    return int(steps[row]) if steps is not None and math.isfinite(steps[row]) else None


def _compute(table: Table, x: str, price: float | None, rows: Sequence[int]) -> np.ndarray:
    if x == "dollars" and x not in table.columns and "gpu_hours" in table.columns:
        return in_dollars(table.numbers("gpu_hours", rows), price)
    if x == "steps" and x not in table.columns and _STEP in table.columns:
        x = _STEP
    return table.numbers(x, rows)


def _optional(table: Table, column: str, rows: Sequence[int]) -> np.ndarray | None:
    """A helpful column, if it is there and complete."""
    if column not in table.columns or any(_is_empty(table.cells[column][row]) for row in rows):
        return None
    return table.numbers(column, rows)


def _noise(table: Table, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Per row the sampling noise sqrt(mean p(1-p) / (n k)) and n k, NaN where unknown; and warnings."""
    spread_N, prompts_N, samples_N = (_optional(table, name, rows) for name in NOISE_FIELDS)
    single = (f"{table.source}: {ONE_SAMPLE}",) if samples_N is not None and (samples_N == 1).any() else ()
    return *noise_of(spread_N, prompts_N, samples_N, like_N=np.empty(len(rows))), single


def _read(data: bytes, source: str, wanted: Sequence[str]) -> Table:
    check_not_utf16(data, source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not a text file in UTF-8; {_EXPECTED}") from error
    if not text.strip():
        raise InputError(f"{source}: the file is empty; {_EXPECTED}")
    if "\x00" in text:
        raise InputError(f"{source}: a binary file; {_EXPECTED}")
    if re.match(r"\s*\[\s*[{\[\]]", text):
        raise InputError(f"{source}: one JSON array; expected JSONL, one object per line (jq -c '.[]')")
    if text.lstrip().startswith("{"):
        return _read_json(data, source, wanted)
    return _read_csv(text, source)


def _read_json(data: bytes, source: str, wanted: Sequence[str]) -> Table:
    warnings: list[str] = []
    numbered = parse_jsonl(data, source, warnings)
    columns = dict.fromkeys(itertools.chain.from_iterable(row for _, row in numbered))
    cells = {name: [row.get(name) for _, row in numbered] for name in wanted if name in columns}
    return Table(source, tuple(columns), cells, [line for line, _ in numbered], tuple(warnings))


def _read_csv(text: str, source: str) -> Table:
    header = next(line for line in text.splitlines() if line.strip())
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows, lines = [], []
    allow_long_cells()
    try:
        filled = (cells for cells in reader if "".join(cells).strip())
        columns = tuple(name.strip() for name in next(filled, []))
        for cells in filled:
            if len(cells) > len(columns):
                raise InputError(_too_many(source, reader.line_num, cells, columns))
            if len(cells) < len(columns):
                cells += [""] * (len(columns) - len(cells))
            rows.append(cells)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise InputError(f"{source}, line {reader.line_num}: {error}") from error
    transposed: Iterator[Sequence[str]] = zip(*rows, strict=True) if rows else iter([[]] * len(columns))
    return Table(source, columns, dict(zip(columns, transposed, strict=True)), lines)


def _too_many(source: str, line: int, cells: Sequence[str], columns: Sequence[str]) -> str:
    return f"{source}, line {line}: {len(cells)} cells for {len(columns)} columns"


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _float(cell: Any) -> float:
    """A number as files have it: Python's own 1_000 is none."""
    if isinstance(cell, str) and "_" in cell:
        raise ValueError("an underscore")
    return float(cell)


def _is_number(text: str) -> bool:
    try:
        _float(text)
    except ValueError:
        return False
    return True


def _instead(cell: Any) -> str:
    """What to write instead, for numbers as people and spreadsheets format them."""
    if not isinstance(cell, str):
        return ""
    text = cell.strip()
    if re.fullmatch(r"[-+]?\d+(_\d+)+(\.\d*)?", text):
        return f" without separators, {text.replace('_', '')}"
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        return f" without separators, {text.replace(',', '')}"
    if text.endswith("%") and _is_number(text[:-1]):
        return f", a share and not percent, {float(text[:-1]) / 100:g}"
    if re.fullmatch(r"[-+]?\d*,\d+", text):
        return f" with a decimal point, {text.replace(',', '.')}"
    return ""


def _listed(names: Sequence[str], most: int = 20) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name[:60] for name in names[:most]) + more
