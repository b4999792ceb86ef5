"""What a trainer has logged, whatever the file: numbers by the name of their metric, each at a step.

The readers of formats build it; `scalerl.ingest.vocabularies` has the meaning of the names.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.errors import InputError, counted, printable
from scalerl.ingest.logs.order import Cells, LogRows, Restart, Series, Uncounted, arrange, by_set, code_of
from scalerl.record.left_out import NO_STEP, SUPERSEDED
from scalerl.record.metric import is_of_evaluation

MOST_NAMES = 5000
"""Most names of metrics that are kept, to be listed where a wanted one is missing."""
_LAST_LINE = 2**32 - 1
_SHOWN_RESTARTS = 3
_OF_LINES = frozenset(("jsonl", "verl", "mlflow", "wandb-csv", "console"))
"""Formats whose rows are lines of a text, in which a user can look them up."""
_WORDS = {"nan": math.nan, "infinity": math.inf, "-infinity": -math.inf, "inf": math.inf, "-inf": -math.inf}
"""How trackers write values for which JSON has no number."""


@dataclass(frozen=True)
class Log:
    """One run as it was logged."""

    source: str
    """The file or folder, for messages."""
    format: str
    name: str
    metrics: Mapping[str, Series]
    """The wanted metrics."""
    names: tuple[str, ...]
    """All metrics that have numbers, up to `MOST_NAMES`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's configuration, keys joined by dots."""
    notes: tuple[str, ...] = ()
    """Sentences on what was skipped or repaired."""
    omitted: Mapping[str, Uncounted] = field(default_factory=dict)
    """Values that do not count, by metric, with the reasons."""
    trainer: str = ""
    """Name of the trainer, if the form of its rows shows it."""
    hint: str = ""
    """The setting that switches evaluations on, for a log without any."""

    def counted_from_1(self) -> "Log":
        """Return the log of a trainer that counts from 0: a step is the number of updates after it here."""
        return replace(
            self,
            metrics={n: replace(one, step_N=one.step_N + 1) for n, one in self.metrics.items()},
            omitted={n: replace(one, step_V=one.step_V + 1) for n, one in self.omitted.items()},
            notes=(*self.notes, "its trainer counts steps from 0: step 9 of the log is step 10 here"),
        )

    def time_series(self) -> Series:
        """Return every step with a time, of any metric; the value is when the step was reached, if known.

        An evaluation may end long after its step: among rows of training its time does not show when the step
        was reached. Without rows of training, a step was reached before any later one.
        """
        of_training = [one for name, one in self.metrics.items() if not is_of_evaluation(name)]
        trained = _times_of(of_training)
        whole = _times_of(self.metrics.values())
        if not len(trained):
            # A step was reached no later than any later one: the least time from there on.
            return replace(whole, value_N=np.minimum.accumulate(whole.value_N[::-1])[::-1])
        step_N = whole.step_N
        is_told_N = np.isin(step_N, trained.step_N) | (step_N < trained.step_N[0])
        is_told_N |= step_N > trained.step_N[-1]
        value_N = whole.value_N.copy()
        value_N[np.isin(step_N, trained.step_N)] = trained.value_N
        return Series(step_N[is_told_N], value_N[is_told_N], value_N[is_told_N])


def _times_of(metrics: Iterable[Series]) -> Series:
    """Return every step that has a time in any of these series; the value is the earliest."""
    timed = [series for series in metrics if not np.isnan(series.time_N).all()]
    step_V = np.concatenate([np.zeros(0), *(series.step_N for series in timed)])
    time_V = np.concatenate([np.zeros(0), *(series.time_N for series in timed)])
    has_time_V = ~np.isnan(time_V)
    step_N, place_V = np.unique(step_V[has_time_V], return_inverse=True)
    time_N = np.full(len(step_N), np.inf)
    np.minimum.at(time_N, place_V, time_V[has_time_V])
    return Series(step_N, time_N, time_N)


class Room:
    """The limits that all logs of one source share."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns = self._values = 0

    def add_column(self) -> None:
        """Count one more metric; raise an InputError if there are too many."""
        self._columns += 1
        limits.COLUMNS.check(self._columns, self._source)

    def add_values(self, n: int) -> None:
        """Count `n` more values; raise an InputError if there are too many."""
        self._values += n
        limits.VALUES.check(self._values, self._source)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Release what a run has used inside the block if it cannot be read."""
        # Otherwise one run too large for the shared limits would leave nothing to those after it.
        before = self._columns, self._values
        try:
            yield
        except (InputError, OSError):
            self._columns, self._values = before
            raise


class LogBuilder:
    """Builds a log row by row, in the order of the file; what is not wanted costs no memory.

    `build` decides which values count, once all rows are known (`scalerl.ingest.logs.order`). Logs of one
    source share one `room`.
    """

    def __init__(
        self, source: str, format: str, name: str, wanted: Callable[[str], bool], room: Room | None = None
    ) -> None:
        self._source, self._format, self._wanted = source, format, wanted
        self._room = room or Room(source)
        self._long_names = 0
        self._columns: dict[str, _Column] = {}
        # Arrays, not lists: 8 bytes a number, where a list of floats takes 32.
        self._steps, self._times, self._lines = array("d"), array("d"), array("I")
        self._streams = [0]
        self.name = name
        self.names: dict[str, bool] = {}
        """The metrics that have numbers, up to `MOST_NAMES`, each with whether it is kept."""
        self.config: dict[str, Any] = {}
        self.notes: list[str] = []

    def begin_file(self) -> None:
        """Start another file, which may have been written at the same time as those before."""
        if len(self._steps) > self._streams[-1]:
            self._streams.append(len(self._steps))

    def add(self, step: float, time: float, values: Mapping[str, Any], line: int = 0) -> None:
        """Add one row: its step, its Unix seconds (NaN if not known), and metrics by name.

        A non-number is counted as such if the metric is wanted; None is a cell without a value.
        `line` is the row's number in the file, if it has one; it is kept only for formats of lines.
        """
        row, kept = -1, 0
        for name, value in values.items():
            is_kept = self.names.get(name)
            if is_kept is False or value is None:  # it is known to have numbers and not to be wanted
                continue
            # `type(...) is float` first, as this runs for every cell of logs of hundreds of MB.
            number = value if type(value) is float else as_number(value)
            if number is None and not (isinstance(value, bool) or (isinstance(value, str) and value.strip())):
                continue  # such as a list; text and booleans stand where a number should
            if is_kept is None and not self._keeps(name, number):
                continue
            # A row takes a place only with its first kept value: most rows hold nothing that is wanted.
            if row < 0:
                row = len(self._steps)
                self._steps.append(step)
                self._times.append(time)
                self._lines.append(min(max(line, 0), _LAST_LINE))
            column = self._columns.get(name)
            if column is None:
                self._room.add_column()
                column = self._columns[name] = _Column()
            if number is None:
                column.texts.append(len(column.rows))
                number = math.nan
            column.rows.append(row)
            column.numbers.append(number)
            kept += 1
        self._room.add_values(kept)

    def _keeps(self, name: str, number: float | None) -> bool:
        """Return whether to keep a value of a metric without a finite number so far; with one it is named."""
        if len(name) > limits.NAME.most:
            self._long_names += 1
            return False
        is_wanted = name in self._columns or self._wanted(name)
        has_number = number is not None and math.isfinite(number)
        # Beyond the limit a wanted metric is still named, as its values are kept.
        if has_number and (is_wanted or len(self.names) < MOST_NAMES):
            self.names[name] = is_wanted
        return is_wanted

    @property
    def n_rows(self) -> int:
        """The number of rows so far that hold a kept value."""
        return len(self._steps)

    def steps(self) -> np.ndarray:
        """Return a copy of the steps of the rows so far, (R,)."""
        return np.array(self._steps)

    def cells(self) -> dict[str, Cells]:
        """Return what was kept so far, by metric."""
        return {name: column.cells() for name, column in self._columns.items()}

    def build(self, step_R: np.ndarray | None = None, unwanted: Set[str] = frozenset()) -> Log:
        """Return the log of all rows so far.

        Args:
            step_R: the steps of the rows, if these replace the ones that were given.
            unwanted: metrics whose values are left out; their names are still listed.
        """
        logged = {name: one for name, one in self.cells().items() if name not in unwanted}
        cells = by_set(logged)
        names = [name for name in self.names if name in cells or name not in logged]
        names += [name for name in cells if name not in logged]
        step_R = np.frombuffer(self._steps) if step_R is None else step_R
        line_R = np.frombuffer(self._lines, dtype=np.uintc) * np.uintc(self._format in _OF_LINES)
        rows = LogRows(step_R, np.frombuffer(self._times), line_R, self._streams)
        values, omitted, restarts, is_cut = arrange(rows, cells)
        notes = [*self.notes, *_notes(omitted, restarts, is_cut)]
        if self._long_names:
            what = f"of names with more than {limits.NAME.most:,} characters"
            notes.append(f"{counted(self._long_names, 'value')} left out, {what}")
        return Log(
            self._source,
            self._format,
            self.name,
            values,
            tuple(names),
            self.config,
            tuple(notes),
            omitted,
        )


class _Column:
    """What was logged for one metric: the row of every value, the value, and which are texts."""

    __slots__ = ("numbers", "rows", "texts")

    def __init__(self) -> None:
        self.rows, self.numbers, self.texts = array("I"), array("d"), array("I")

    def cells(self) -> Cells:
        """Return the same as arrays."""
        row_V = np.frombuffer(self.rows, dtype=np.uintc).astype(np.intp)
        text_V = np.frombuffer(self.texts, dtype=np.uintc).astype(np.intp)
        return Cells(row_V, np.frombuffer(self.numbers), text_V)


def _notes(omitted: Mapping[str, Uncounted], restarts: Sequence[Restart], is_cut: bool) -> list[str]:
    """Describe what was put in order, in sentences; a metric's evaluations are reported by its reader."""
    superseded, without_step = (
        sum(int(np.sum(one.reason_V == code_of(reason))) for one in omitted.values())
        for reason in (SUPERSEDED, NO_STEP)
    )
    notes = []
    if restarts:
        shown = "; ".join(map(str, restarts[:_SHOWN_RESTARTS]))
        more = len(restarts) - _SHOWN_RESTARTS
        shown += f"; and {counted(more, 'time')} more" * (more > 0)
        notes.append(f"the run was restarted {shown} ({counted(superseded, 'value')} of all metrics)")
    if is_cut:
        notes.append(
            f"the steps of training go back too often: after {counted(len(restarts), 'restart')} no more "
            "are looked for; are these several runs in one log?"
        )
    if without_step:
        notes.append(
            f"{counted(without_step, 'value')} left out, whose step is not a whole number of 0 or more"
        )
    return notes


def presentable(log: Log) -> Log:
    """Escape the names of a log so that a run folder can hold them."""
    return replace(
        log,
        name=printable(log.name),
        metrics={printable(name): series for name, series in log.metrics.items()},
        omitted={printable(name): omitted for name, omitted in log.omitted.items()},
        names=tuple(map(printable, log.names)),
        notes=tuple(map(printable, log.notes)),
    )


def finite(value: Any) -> float:
    """Convert a number to a float; NaN for anything else, including infinities and numbers as text."""
    if type(value) is float:  # most are
        return value if math.isfinite(value) else math.nan
    number = None if isinstance(value, str) else as_number(value)
    return number if number is not None and math.isfinite(number) else math.nan


def finite_cell(cell: Any) -> float:
    """Parse the finite number of a cell, also from text; NaN otherwise, as for booleans and 1_000."""
    if isinstance(cell, bool) or (isinstance(cell, str) and "_" in cell):
        return math.nan
    try:
        number = float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


_LONGEST_WORD = 100  # characters; of "-Infinity" and the spaces around it


def as_number(value: Any) -> float | None:
    """Convert a number to a float, NaN and infinities also from their names; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        # A long text is not a number: half a megabyte that named the run of every row took 6 s here.
        return _WORDS.get(value.strip().lower()) if len(value) < _LONGEST_WORD else None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
