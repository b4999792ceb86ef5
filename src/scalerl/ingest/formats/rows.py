"""Rows of metrics: which cell is the step, which the time, and which run the row belongs to."""

import math
import re
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.curve.points import LABELS, alternating
from scalerl.errors import InputError, counted, listed
from scalerl.ingest.formats.format import Wanted
from scalerl.ingest.logs.log import Log, LogBuilder, Room, finite
from scalerl.jsonl import flat
from scalerl.record.metric import is_named_for_correctness

_OF_PARTS = ("train/global_step", "eval/global_step")
"""One count under two names, as OpenRLHF logs it (openrlhf/utils/logging_utils.py)."""
STEPS = ("step", "training_step", "global_step", *_OF_PARTS, "iteration", "global_step/max_steps", "_step")
"""Names of the step, the most specific first: a tracker's own count of calls comes last. open-instruct's
steps are `training_step`, and its `global_step` counts completions."""
_OF_ALL = re.compile(r"(\d{1,15})/\d{1,15}")
"""A step out of all steps, 20/1000, as ms-swift writes it to logging.jsonl (swift/trainers/patcher.py)."""
TIMES = ("time", "_timestamp", "timestamp", "wall_time")
RUNS = ("run_id", "run", "run_name")
"""Names of the run, in tables that hold several."""
_LABELS = dict.fromkeys(name for name in LABELS if name not in RUNS).keys()
_LONGEST_LABEL = 40
_MOST_LINES = 1000
"""Most skipped rows whose lines are kept."""
_LONGEST_TIME = 64
"""Most characters of an ISO 8601 time; finding that a text of 500 kB is none takes 1 ms in every row."""


class RowReader:
    """Adds rows to the logs of their runs."""

    def __init__(self, source: str, format: str, name: str, wanted: Wanted) -> None:
        self._source, room = source, Room(source)
        self._make = lambda run: LogBuilder(source, format, run or name, wanted, room)
        self._builders: dict[str, LogBuilder] = {}
        self._step: str | None = None
        self._passed, self._lines = 0, list[str]()
        self._labelled = 0
        self._labels: dict[tuple[str, str], tuple[array[float], list[str]]] = {}
        """By run and metric: the steps of rows with cells that distinguish data sets or seeds, and these."""
        self.notes: list[str] = []

    def begin_file(self) -> None:
        """Start another file, which may have been written at the same time as those before."""
        for builder in self._builders.values():
            builder.begin_file()

    def add(self, row: Mapping[str, Any], line: int = 0) -> None:
        """Add one row, nested or flat, with its number in the file; one without a step is skipped."""
        row = flat(row, separator="/", where=self._source)
        if isinstance(row.get("metric"), str) and "value" in row:  # one metric per row, as in melted tables
            row[row.pop("metric")] = row.pop("value")
        if self._step is None:  # of the first row that has one: two counters in one log do not mix
            self._step = next((name for name in STEPS if not math.isnan(step_in(row.get(name)))), None)
        names = _OF_PARTS if self._step in _OF_PARTS else (self._step,)
        found = [step_in(row.pop(name, None)) for name in names if name is not None]
        step = next((step for step in found if not math.isnan(step)), math.nan)
        if math.isnan(step):
            self._passed += 1
            if line and len(self._lines) < self._passed <= _MOST_LINES:
                self._lines.append(f"{line}")
            return
        named, time = time_of(row)
        row.pop(named, None)
        run = next((row[name] for name in RUNS if isinstance(row.get(name), str)), "")
        builder = self._builders.get(run)
        if builder is None:
            limits.FOUND.check(len(self._builders) + 1, self._source)
            # The id distinguishes runs whose names repeat; the name is what people know a run by.
            title = next((row[name] for name in reversed(RUNS) if isinstance(row.get(name), str)), "")
            builder = self._builders[run] = self._make(title)
        builder.add(step, time, row, line)
        if not _LABELS.isdisjoint(row):
            self._add_labels(run, step, row)

    def _add_labels(self, run: str, step: float, row: Mapping[str, Any]) -> None:
        """Keep the data set or seed that the shares of correct answers in a row belong to."""
        cells = {name: row[name] for name in _LABELS if isinstance(row.get(name), str | int)}
        label = ", ".join(f"{name} {str(cell)[:_LONGEST_LABEL]}" for name, cell in cells.items())
        for name in filter(is_named_for_correctness, row if label else ()):
            if self._labelled < limits.EVALUATIONS.most:
                steps, labels = self._labels.setdefault((run, name), (array("d"), []))
                steps.append(step)
                labels.append(label)
                self._labelled += 1

    @property
    def has_steps(self) -> bool:
        """Whether any row had a step."""
        return self._step is not None

    def build(self) -> list[Log]:
        """Return the logs of all runs, in the order of their first rows.

        Raises:
            InputError: no row has a step.
        """
        if not self.has_steps:
            names = ", ".join(STEPS)
            raise InputError(f"{self._source}: no row has a step, a number called {names}")
        for builder in self._builders.values():
            builder.notes += self.notes
            if self._passed:
                which = f" (lines {listed(self._lines)})" if self._lines else ""
                what = f"{counted(self._passed, 'row')} passed over, without a '{self._step}'{which}"
                builder.notes.append(what)
        for (run, name), (steps, labels) in self._labels.items():
            if values := alternating(np.array(steps), labels):
                self._builders[run].notes.append(
                    f"rows of '{name}' of {listed(values, most=4)} count as evaluations of one run on one "
                    "data set, the last of a step: if they are not, keep the rows of one"
                )
        return [builder.build() for builder in self._builders.values()]


def step_in(cell: Any) -> float:
    """Return the step in a cell, a number or the first of `20/1000`; NaN for anything else."""
    found = _OF_ALL.fullmatch(cell) if isinstance(cell, str) else None
    return float(found[1]) if found else finite(cell)


def time_of(row: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name of the first cell of a row that is a time, and its Unix seconds; NaN without any."""
    times = ((name, unix_seconds(row.get(name))) for name in TIMES)
    return next((one for one in times if not math.isnan(one[1])), ("", math.nan))


def unix_seconds(value: Any) -> float:
    """Parse a time as trackers write it: Unix seconds, also in ms, us or ns, or ISO 8601.

    NaN for anything else, also for a small number, which is a duration or the time since a start.
    """
    if isinstance(value, str):
        if len(value) > _LONGEST_TIME:
            return math.nan
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return math.nan
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    number = finite(value)
    if not 1e9 <= number < 1e20:  # from 2001 on
        return math.nan
    # 1e11 s is the year 5138: anything larger is in ms, us or ns.
    while number >= 1e11:
        number /= 1e3
    return number
