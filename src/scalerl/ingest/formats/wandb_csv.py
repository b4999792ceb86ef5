"""The CSV that W&B's web page exports for a chart: one column of steps, and the metrics of every run.

"Step","RUN - METRIC","RUN - METRIC__MIN","RUN - METRIC__MAX", ...
"""

import csv
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from scalerl import limits
from scalerl.errors import InputError, brief
from scalerl.ingest.formats.format import Format, Wanted
from scalerl.ingest.formats.lines import csv_rows, head
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.logs.log import Log, LogBuilder, Room, finite_cell
from scalerl.jsonl import check_not_utf16

_NAME = "wandb-csv"
_MIN, _MAX = "__MIN", "__MAX"
_BETWEEN = " - "
_MOST_SPLITS = 8  # splits of a name into run and metric that are tried
_SPECIAL = ("_step", "_timestamp")
_STEPS = re.compile(
    r"(?!.*(?:env|environment|agent|time)[/_ ]?step)(?:.*[/_ ])?(?:step|iter|iteration|update)s?", re.I
)
_TIMES = re.compile(r"relative time.*|wall time|_timestamp|_runtime|created.*", re.I)
_EXPECTED = (
    "expected a chart exported with 'Step', or a trainer's step such as train/global_step, as its x axis"
)


def recognises(path: Path) -> bool:
    """Return whether a file's first line has the columns of such an export."""
    text = head(path).partition(b"\n")[0]
    try:
        names = next(csv.reader([text.decode().rstrip("\r")]), [])
    except (UnicodeDecodeError, csv.Error):
        return False
    if len(names) < 2 or _BETWEEN in names[0] or not all(_BETWEEN in name for name in names[1:]):
        return False
    known = set(names)
    ranges = any(name + _MIN in known and name + _MAX in known for name in names)
    return ranges or any(pattern.fullmatch(names[0]) for pattern in (_STEPS, _TIMES))


def read(path: Path, wanted: Wanted) -> Sequence[Log]:
    """Read every run of the chart."""
    with path.open("rb") as file:
        check_not_utf16(file.read(2), str(path))
        file.seek(0)
        try:
            return _read(csv_rows(file, str(path)), path, wanted)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not a text in UTF-8; {_EXPECTED}") from error


FORMAT = Format(_NAME, "CSV exported from a chart of Weights & Biases", recognises, read)


class _ChartRun:
    """The columns of one run, and its log so far."""

    def __init__(self, path: Path, name: str, wanted: Wanted, room: Room) -> None:
        self.builder = LogBuilder(str(path), _NAME, name, wanted, room)
        self.columns: dict[str, int] = {}
        """Columns of the metrics, by name."""
        self.ranged: set[str] = set()
        """The metrics with a range: their least and largest value are in the two columns that follow."""
        self.special: dict[str, int] = {}
        """Columns of step and time, if there are any; W&B logs both as metrics."""
        self._averaged = self._rounded = 0

    def start(self) -> int:
        """Return the first column of its metrics."""
        return min(self.columns.values(), default=sys.maxsize)

    def has(self, metric: str) -> bool:
        """Return whether it has a column of this metric already."""
        return metric in self.special or metric in self.columns

    def add(self, cells: Sequence[str], step: float, line: int) -> None:
        """Add the run's part of a row; the step is NaN if the x axis is not that of steps."""
        values: dict[str, float | str] = {}
        for metric, place in self.columns.items():
            text = cells[place] if place < len(cells) else ""  # a line may be shorter than the header
            if not text:
                continue
            number = finite_cell(text)
            values[metric] = text if math.isnan(number) else number
            if metric in self.ranged and (ends := cells[place + 1 : place + 3]) != [text, text]:
                self._averaged += any(end not in ("", text) for end in ends)
        if not values:
            return
        if math.isnan(step):
            # With time on the x axis a row has only W&B's own step, if the chart has that as a metric.
            step = self._cell(cells, "_step")
        is_known = not math.isnan(step)
        self._rounded += is_known and step != round(step)
        time = unix_seconds(self._cell(cells, "_timestamp"))
        self.builder.add(round(step) if is_known else step, time, values, line)

    def _cell(self, cells: Sequence[str], name: str) -> float:
        """Return the number in a special column, or without such a column that of the x axis."""
        place = self.special.get(name, 0)
        return finite_cell(cells[place]) if place < len(cells) else math.nan

    def build(self, step: str) -> Log:
        """Return the log of the run; `step` describes the column of steps."""
        notes = self.builder.notes
        calls = "W&B's Step, which counts calls of log where the trainer gives no step, as of TRL"
        notes.append(f"the step is {calls if step == 'Step' else step}")
        if self._averaged:
            notes.append(f"{self._averaged} values are means of several that differ, as charts have them")
        if self._rounded:
            notes.append(f"{self._rounded} steps are no whole numbers and were rounded")
        return self.builder.build()


def _read(rows: Iterator[tuple[int, list[str]]], path: Path, wanted: Wanted) -> list[Log]:
    names = [name.strip() for name in next(rows, (0, []))[1]]
    if not names:
        raise InputError(f"{path}: the file is empty; {_EXPECTED}")
    limits.NAME.check(max(map(len, names)), path)
    runs = _runs(names, path, wanted)
    if not runs:
        raise InputError(f"{path}: no column is called 'RUN - METRIC'; {_EXPECTED}")
    is_step = _STEPS.fullmatch(names[0]) is not None
    runs = [run for run in runs if is_step or "_step" in run.special]
    if not runs:
        what, how = "a time", ""
        if not _TIMES.fullmatch(names[0]):
            what = "no step of a trainer"
            how = f"; to fit it on that axis: scalerl fit - --x '{names[0]}' --y COLUMN < FILE"
        raise InputError(f"{path}: the x axis is '{names[0]}', {what}; {_EXPECTED}{how}")
    # A line may be shorter than the header: runs that start beyond its end are skipped.
    by_start = sorted(runs, key=_ChartRun.start)
    starts = [run.start() for run in by_start]
    for line, cells in rows:
        step = finite_cell(cells[0]) if is_step else math.nan
        if is_step and not 0 <= step <= 2**53:
            what = f"expected a step in '{names[0]}', found {brief(cells[0])}"
            raise InputError(f"{path}, line {line}: {what}")
        for run in by_start[: bisect_left(starts, len(cells))]:
            run.add(cells, step, line)
    return [run.build(names[0] if is_step else "that of the columns 'RUN - _step'") for run in runs]


def _runs(names: Sequence[str], path: Path, wanted: Wanted) -> list[_ChartRun]:
    """Return the runs with their columns; a name that has its metrics twice is that of two runs."""
    runs: dict[str, _ChartRun] = {}
    numbers: dict[tuple[str, str], int] = {}
    room, known = Room(str(path)), set(names)
    for place, name in enumerate(names):
        base = name.removesuffix(_MIN) if name.endswith(_MIN) else name.removesuffix(_MAX)
        # A metric's own name may end in __MIN: it is a range only beside the metric without the suffix.
        if place == 0 or _BETWEEN not in name or (base != name and base in known):
            continue
        title, metric = _split(name, wanted)
        number = numbers.get((title, metric), 1)  # of the last run with these names
        key = title if number == 1 else f"{title} ({number})"
        while key in runs and runs[key].has(metric):
            number += 1
            key = f"{title} ({number})"
        numbers[title, metric] = number
        run = runs.get(key) or runs.setdefault(key, _ChartRun(path, key, wanted, room))
        if metric in _SPECIAL:
            run.special[metric] = place
        else:
            run.columns[metric] = place
            # W&B writes the range right after the metric; columns that a user moved do not count as one.
            if names[place + 1 : place + 3] == [name + _MIN, name + _MAX]:
                run.ranged.add(metric)
    return [run for run in runs.values() if run.columns]


def _split(name: str, wanted: Wanted) -> tuple[str, str]:
    """Split a name into run and metric at its last separator, unless another gives a wanted metric."""
    splits, end = [], len(name)
    while len(splits) < _MOST_SPLITS and (end := name.rfind(_BETWEEN, 0, end)) >= 0:
        splits.append((name[:end], name[end + len(_BETWEEN) :]))
    return next((split for split in splits if wanted(split[1])), splits[0])
