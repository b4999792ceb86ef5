"""Tables with named columns, CSV or JSONL: any trainer's log of compute against pass rate."""

import codecs
import io
import itertools
import math
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.curve.points import (
    LABELS,
    NOISE_FIELDS,
    ONE_SAMPLE,
    Further,
    Points,
    noise_of,
    warn_of_mixture,
    with_doubts,
)
from scalerl.errors import InputError, brief, counted, listed, nearest
from scalerl.files import as_path
from scalerl.ingest.formats.json_rows import json_rows
from scalerl.ingest.formats.lines import csv_rows, text_lines
from scalerl.ingest.formats.numbers import Numbers
from scalerl.ingest.logs.log import as_number, finite_cell
from scalerl.ingest.logs.order import superseded_rows
from scalerl.ingest.vocabularies import ANY, wildcard
from scalerl.jsonl import check_not_utf16, iter_jsonl, read_bytes
from scalerl.record.evaluation import AXES, in_dollars
from scalerl.record.left_out import INFINITE, NAN, NONE, SUPERSEDED, LeftOut, Omitted, shown_step
from scalerl.record.metric import Metric, is_named_for_correctness, is_share_of_right, kind_of, scaled_by
from scalerl.record.reader import RunRecord

_EMPTY = frozenset(("", "na", "n/a", "null", "none"))
"""How spreadsheets, R and databases write a missing value."""
_COUNTERS = ("device_seconds", "flops", "tokens")
_CLOCKS = ("step", "steps", "time", "hours", "compute")
"""Words for compute that users may give where a table has another column of it."""
_STEP = "step"
_LOOK = 2**20
"""Bytes that are examined to recognise the kind of a table."""
_FIRST_ROWS = 20
"""Rows of a JSONL that are searched for the names of its columns."""
# gpu_hours for the axis `dollars`, the counters for an evals.jsonl
_HELPFUL = ("gpu_hours", _STEP, *NOISE_FIELDS, *_COUNTERS)
_EXPECTED = "expected a CSV or JSONL with named columns"


class _Table:
    """The rows with a pass rate: the cells of the useful columns, by name, and their lines."""

    def __init__(self, source: str, names: Collection[str], x: str | None, y: str | None) -> None:
        """Choose the columns of compute `x` and of pass rates `y` among `names`, where they are None.

        Raises:
            InputError: several columns could be the pass rates, or one is given for both.
        """
        if y is None:
            known = [] if "pass_rate" in names else ANY.matches("pass_rate", names)
            if len(known) > 1:
                raise InputError(f"{source}: {listed(known)} could be the pass rates: choose one with --y")
            y = known[0] if known else "pass_rate"
        if x is None:
            there = [axis for axis in AXES if axis in names or (axis == "steps" and _STEP in names)]
            # A run's counters are objects in every row, from which the hours are computed.
            x = "gpu_hours" if "device_seconds" in names or not there else there[0]
        elif x == _STEP and _STEP in names and "steps" not in names:
            x = "steps"
        y = _meant(y, names, source)
        if x == y:
            raise InputError(f"{source}: '{x}' cannot be both the compute (--x) and the pass rate (--y)")
        self.source, self.x, self.y = source, x, y
        self.columns = tuple(names)
        """All names in the order of the file, including those of columns without a use."""
        self.cells: dict[str, list[Any]] = {name: [] for name in (x, y, *_HELPFUL, *LABELS)}
        self.lines: list[int] = []
        self._all_steps, self._all_lines, self._numbers = array("d"), array("q"), Numbers()

    def add(self, line: int, row: Mapping[str, Any]) -> None:
        """Add one row; if it has no pass rate, only its step, line and numbers."""
        # Restarts are detected from rows of training, which have no pass rate, but steps.
        self._all_steps.append(finite_cell(row.get(_STEP)))
        self._all_lines.append(line)
        self._numbers.add(row)
        if _is_empty(row.get(self.y)):
            return
        self.lines.append(line)
        limits.EVALUATIONS.check(len(self.lines), self.source)
        for name, cells in self.cells.items():
            cells.append(row.get(name))

    @property
    def step_R(self) -> np.ndarray:
        """The steps of all rows of the file, NaN without one."""
        step_R = np.frombuffer(self._all_steps)
        # Of two columns of that name one was read, and nothing shows whether it is the right one.
        return step_R if self.columns.count(_STEP) == 1 else np.full(len(step_R), math.nan)

    @property
    def line_R(self) -> np.ndarray:
        """The lines of all rows of the file."""
        return np.frombuffer(self._all_lines, dtype=np.int64)

    def numbers(self, column: str, rows: Sequence[int]) -> np.ndarray:
        """Return the numbers of a column in the given rows.

        Raises:
            InputError: there is no such column, or two; or a cell (its line is named) is not a number.
        """
        self.require(column)
        cells = self.cells[column]
        number_N = np.array([finite_cell(cells[row]) for row in rows], dtype=float)
        if (wrong_N := np.flatnonzero(np.isnan(number_N))).size:
            row = rows[wrong_N[0]]
            where, cell = f"{self.source}, line {self.lines[row]}, column '{column}'", cells[row]
            if _is_empty(cell):
                raise InputError(f"{where}: empty, expected a number")
            what = f"expected a finite number{_instead(cell)}, found {brief(cell)}"
            if isinstance(cell, str) and re.fullmatch(r"[^;\t]*\d[;\t].*", cell.strip()):
                what += "; columns must be separated by commas, decimals by a point"
            raise InputError(f"{where}: {what}")
        return number_N

    def require(self, column: str) -> None:
        """Raise an InputError that lists the columns, unless exactly one is named `column`."""
        count = self.columns.count(column)
        if count == 1:
            return
        if count > 1:
            raise InputError(f"{self.source}: {count} columns are named '{column}'; rename all but one")
        axes = [name for name in AXES if name in self.columns]
        near = axes[0] if axes and column in _CLOCKS else nearest(column, self.columns)
        right = filter(is_share_of_right, self.columns)
        if column == self.y and (not near or column == "pass_rate"):
            # By its letters alone it could be the rate of anything, as format_rate.
            likely = min(right, key=lambda name: kind_of(name) == "training reward", default=None)
            near = likely or (near if near and "pass" in near.lower() else None)
        hint = f"did you mean '{near}'? " if near else ""
        if self.columns and not any(math.isnan(finite_cell(name)) for name in self.columns):
            hint = "the first line holds the names of the columns, and here it holds numbers; "
        names = listed([name[:60] for name in self.columns], most=20)
        wanted = "the pass rate with --y" if column == self.y else "the compute with --x"
        how = f"; name {wanted}" if column != "dollars" else "; --price needs a column 'gpu_hours'"
        how = "" if "numbers" in hint else how
        raise InputError(f"{self.source}: no column '{column}'; {hint}columns: {names}{how}")

    def compute(self, rows: Sequence[int], price: float | None) -> np.ndarray:
        """Return the compute of rows; raises as `numbers`."""
        compute_N = self.numbers(self._clock, rows)
        return in_dollars(compute_N, price) if self._is_priced else compute_N

    def further(self, price: float | None) -> Further | None:
        """Return the numeric columns that have no meaning here, for all rows; None if there are none."""
        columns = self._numbers.columns()
        compute_R = columns.get(self._clock)
        values = {name: value_R for name, value_R in columns.items() if name not in self.cells}
        if compute_R is None or not values:
            return None
        compute_R = in_dollars(compute_R, price) if self._is_priced else compute_R
        step_R = columns.get(_STEP, np.full(len(compute_R), math.nan))
        order_R = np.argsort(compute_R, kind="stable")[: int(np.isfinite(compute_R).sum())]
        sorted_R = {name: value_R[order_R] for name, value_R in values.items()}
        return Further(compute_R[order_R], step_R[order_R], sorted_R)

    @property
    def _clock(self) -> str:
        """The column that compute is derived from."""
        made_from = {"dollars": "gpu_hours", "steps": _STEP}.get(self.x, self.x)
        return made_from if self.x not in self.columns and made_from in self.columns else self.x

    @property
    def _is_priced(self) -> bool:
        return self.x == "dollars" and self._clock != self.x

    def optional(self, column: str, rows: Sequence[int]) -> np.ndarray | None:
        """Return the numbers of an optional column if it exists and is complete; else None."""
        if column not in self.columns or any(_is_empty(self.cells[column][row]) for row in rows):
            return None
        return self.numbers(column, rows)

    def has_counters(self, column: str) -> bool:
        """Return whether the cells of a column are objects of counters, as in evals.jsonl."""
        return any(isinstance(cell, dict) for cell in self.cells[column])


def read_table(
    path: str | Path,
    x: str | None = None,
    y: str | None = None,
    price: float | None = None,
    max_reward: float = 1.0,
    min_reward: float = 0.0,
) -> Points:
    """Read points from a CSV or JSONL file with named columns, `x` (compute) and `y` (pass rate).

    Rows without a value of `y` (most steps of a trainer) are skipped. The columns `step`, and `mean_p_1mp`,
    `n_prompts`, `n_samples` (the noise of an evaluation) are used if they exist. A JSON array of objects, or
    an object with rows, is read as JSONL, its rows counted as lines. For a JSONL file in the form of a run's
    evals.jsonl the axes are computed from the counters.

    Args:
        path: the file, or a pipe.
        x: name of the compute column; `dollars` with a `price` is computed from `gpu_hours`. By default
            `gpu_hours`, else the first of `record.AXES` that exists.
        y: name of the column of pass rates, shares in [0, 1]; by default `pass_rate`, else the only column
            with a known name of pass rates, such as `eval_acc`.
        price: dollars per GPU-hour.
        max_reward: the value of `y` if every answer is correct: `y` is divided by it, percentages by 100.
        min_reward: the value of `y` if every answer is wrong.

    Raises:
        InputError: the file, a column or a cell is missing or wrong; the message names the line.
    """
    return parse_table(read_bytes(as_path(path)), str(path), x, y, price, max_reward, min_reward)


def parse_table(
    data: bytes,
    source: str,
    x: str | None = None,
    y: str | None = None,
    price: float | None = None,
    max_reward: float = 1.0,
    min_reward: float = 0.0,
) -> Points:
    """Read a table as `read_table` does, from the bytes of a file; `source` names it in errors."""
    warnings: list[str] = []
    table = _read(data, source, x, y, warnings)
    if (
        # An evals.jsonl; a table whose own column `tokens` holds plain numbers is read as it is.
        table.y == "pass_rate"
        and table.x in AXES
        and (table.x not in table.columns or table.has_counters(table.x))
        and any(map(table.has_counters, _COUNTERS))
    ):
        return Points.from_record(RunRecord.parse_evals(data, source), table.x, price)
    table.require(table.y)
    rows, left_out = _counting(table, price)
    spread_N, prompts_N, samples_N = (table.optional(name, rows) for name in NOISE_FIELDS)
    noise_sd_N, total_N = noise_of(spread_N, prompts_N, samples_N, like_N=np.empty(len(rows)))
    doubts = [f"{source}: {ONE_SAMPLE}"] if samples_N is not None and (samples_N == 1).any() else []
    if without := len(table.step_R) - len(table.lines):
        doubts.insert(0, f"{source}: {counted(without, 'row')} left out, without a '{table.y}'")
    rate_N, scaling = table.numbers(table.y, rows), ()
    if (min_reward, max_reward) != (0.0, 1.0):
        if is_named_for_correctness(table.y) and rate_N.min() >= 0 and rate_N.max() <= 1:
            raise InputError(
                f"{source}: '{table.y}' is a share that lies in [0, 1] as it is: leave out --percent, "
                "--max-reward and --min-reward"
            )
        rate_N = (rate_N - min_reward) / (max_reward - min_reward)
        scaling = (f"{source}: {scaled_by(table.y, min_reward, max_reward)}",)
    counts = {"n_prompts": prompts_N, "n_samples": samples_N}
    known = {name: int(count_N[-1]) for name, count_N in counts.items() if count_N is not None}
    points = Points(
        table.compute(rows, price),
        rate_N,
        noise_sd_N,
        total_N,
        table.optional(_STEP, rows),
        source,
        table.x,
        np.array([table.lines[row] for row in rows], dtype=int),
        (*left_out.sentences(), *warnings, *scaling, *doubts),
        left_out,
        replace(Metric.of_column(table.y), **known),
        further=table.further(price),
    )
    label_of = {name: [table.cells[name][row] for row in rows] for name in LABELS if name in table.columns}
    return with_doubts(warn_of_mixture(points, label_of))


def _counting(table: _Table, price: float | None) -> tuple[list[int], LeftOut]:
    """Return the rows whose evaluations count, and those that are not numbers or are superseded."""
    filled = range(len(table.lines))
    numbers = {row: number for row in filled if (number := as_number(table.cells[table.y][row])) is not None}
    reasons = {row: INFINITE if math.isinf(n) else NAN for row, n in numbers.items() if not math.isfinite(n)}
    place_N = np.searchsorted(table.line_R, table.lines)
    steps = table.step_R[place_N]
    is_training_R = np.ones(len(table.line_R), dtype=bool)
    is_training_R[[place_N[row] for row in filled if reasons.get(row) != NAN]] = False
    if is_training_R.any():
        over_R = superseded_rows(table.step_R, table.line_R, is_training_R)
        reasons |= {row: SUPERSEDED for row in filled if over_R[place_N[row]]}
    kept = [row for row in filled if row not in reasons]
    if not reasons or not kept:
        return list(filled), NONE  # the first of which is rejected later, with its line
    rows = sorted(reasons)
    found = [Omitted(reasons[row], shown_step(steps[row]), table.lines[row]) for row in rows]
    try:
        at_W, at_N = table.compute(rows, price), table.compute(kept, price)
    except InputError:
        # In a run that diverged the compute may be NaN, too; a row that counts is rejected later.
        line_N = np.array(table.lines, dtype=float)
        at_W, at_N = line_N[rows], line_N[kept]
    return kept, LeftOut.of_log(found, at_W, at_N, table.y)


def _read(data: bytes, source: str, x: str | None, y: str | None, warnings: list[str]) -> _Table:
    """Read the rows with a pass rate; only the useful columns are held in memory."""
    check_not_utf16(data, source)
    data = data.removeprefix(codecs.BOM_UTF8)
    start = data[:_LOOK]
    if not start.strip() and not data.strip():
        raise InputError(f"{source}: the file is empty; {_EXPECTED}")
    try:
        if b"\0" in data:
            data.decode()  # a file that is not UTF-8 either is reported as that
            raise InputError(f"{source}: a binary file; {_EXPECTED}")
        if (rows := json_rows(data, source, warnings)) is not None:
            return _read_rows(rows, source, x, y)
        if start.lstrip().startswith(b"{"):
            return _read_rows(iter_jsonl(data, source, warnings), source, x, y)
        return _read_csv(data, source, x, y)
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not a text file in UTF-8; {_EXPECTED}") from error


def _read_rows(
    rows: Iterator[tuple[int, dict[str, Any]]], source: str, x: str | None, y: str | None
) -> _Table:
    first = list(itertools.islice(rows, _FIRST_ROWS))
    columns = dict.fromkeys(name for _, row in first for name in row)
    table = _Table(source, columns, x, y)
    for line, row in itertools.chain(first, rows):
        columns |= dict.fromkeys(row)
        limits.TABLE_COLUMNS.check(len(columns), f"{source}, line {line}")
        table.add(line, row)
    table.columns = tuple(columns)
    return table


def _read_csv(data: bytes, source: str, x: str | None, y: str | None) -> _Table:
    header = next(filter(str.strip, text_lines(io.BytesIO(data))), "")
    if not header:  # it has only Unicode white space
        raise InputError(f"{source}: the file is empty; {_EXPECTED}")
    rows = csv_rows(io.BytesIO(data), source, delimiter=max(",;\t", key=header.count), strict=True)
    columns = [name.strip() for name in next(rows, (0, []))[1]]
    table = _Table(source, columns, x, y)
    places = {name: place for place, name in reversed([*enumerate(columns)])}
    for line, cells in rows:
        # A line may be shorter than the header.
        table.add(line, {name: cells[place] if place < len(cells) else "" for name, place in places.items()})
    return table


def _meant(y: str, names: Collection[str], source: str) -> str:
    """Return the column that `y` means: a name, a pattern, or the first that exists of a comma list.

    Raises:
        InputError: several columns match a pattern.
    """
    for one in [y, *y.split(",")]:
        pattern = re.compile(wildcard(one))
        like = [name for name in names if name == one or ("*" in one and pattern.fullmatch(name))]
        if len(like) > 1 and "*" in one:
            raise InputError(f"{source}: {listed(like)} are like '{one}': choose one with --y")
        if like:
            return like[0]
    return y


def _is_empty(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and cell.strip().casefold() in _EMPTY)


def _instead(cell: Any) -> str:
    """Suggest how to write a number that people, spreadsheets or data frames format differently."""
    if isinstance(cell, dict):
        return ", and one object a row (of pandas: to_json(orient='records', lines=True))"
    if not isinstance(cell, str):
        return ""
    text = cell.strip()
    if re.fullmatch(r"[-+]?\d+(_\d+)+(\.\d*)?", text):
        return f" without separators, {text.replace('_', '')}"
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        return f" without separators, {text.replace(',', '')}"
    if text.endswith("%") and not math.isnan(finite_cell(text[:-1])):
        return f", a share and not percent, {float(text[:-1]) / 100:g}"
    if re.fullmatch(r"[-+]?\d*,\d+", text):
        return f" with a decimal point, {text.replace(',', '.')}"
    if re.match(r"\d{4}-\d\d-\d\d", text):
        return ", such as the hours since the run started"
    return ""
