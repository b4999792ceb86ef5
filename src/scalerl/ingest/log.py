"""What a trainer has logged, whatever the file: numbers by the name of their metric, each at a step.

Formats (`scalerl.ingest.sources`) make it; what the names mean is told by `scalerl.ingest.vocabulary`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scalerl import limits
from scalerl.errors import counted, printable

MOST_NAMES = 5000
"""Names of metrics that are kept, to be shown where a wanted one is missing."""
_AT_ONCE = 2**16  # times that are sorted at once
_MOST_RESTARTS = 1000  # of a log; more of them are no restarts, and every one takes a look at all metrics


@dataclass(frozen=True)
class Series:
    """One metric: its values in the order of their steps, each step once."""

    step_N: np.ndarray
    """Whole numbers, rising, as floats."""
    value_N: np.ndarray
    time_N: np.ndarray
    """Unix seconds; NaN where they were not logged."""

    def __len__(self) -> int:
        return len(self.step_N)

    def at(self, step: float) -> float:
        """The last value at or before a step; NaN where there is none."""
        n = int(np.searchsorted(self.step_N, step, side="right"))
        return float(self.value_N[n - 1]) if n else math.nan


@dataclass(frozen=True)
class Log:
    """One run as it was logged."""

    source: str
    """The file or folder, for messages."""
    format: str
    name: str
    metrics: Mapping[str, Series]
    """Those that were wanted."""
    names: tuple[str, ...]
    """All metrics that have numbers, up to `MOST_NAMES`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the trainer says of itself, keys joined by dots."""
    notes: tuple[str, ...] = ()
    """What had to be passed over or mended, in sentences."""
    not_finite: Mapping[str, int] = field(default_factory=dict)
    """How often a metric was logged as NaN or infinite; that is passed over."""

    def time_series(self) -> Series:
        """Every step that has a time, of any metric: the value is the earliest."""
        steps, times, waiting = [np.zeros(0)], [np.zeros(0)], 0
        for series in self.metrics.values():
            has_time_N = ~np.isnan(series.time_N)
            steps.append(series.step_N[has_time_N])
            times.append(series.time_N[has_time_N])
            waiting += len(steps[-1])
            # Once they are as many again: to sort all steps for every metric took minutes for 50,000 of them.
            if waiting > max(_AT_ONCE, len(steps[0])):
                (steps, times), waiting = _earliest(steps, times), 0
        (step_N,), (time_N,) = _earliest(steps, times)
        return Series(step_N, time_N, time_N)


class Room:
    """How much all logs of one source may hold together."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns = self._values = 0

    def add_column(self) -> None:
        """One more metric; raise an InputError if they are too many."""
        self._columns += 1
        limits.COLUMNS.check(self._columns, self._source)

    def add_values(self, n: int) -> None:
        """So many more values; raise an InputError if they are too many."""
        self._values += n
        if self._values > limits.VALUES.most:
            limits.VALUES.check(self._values, self._source)


class LogBuilder:
    """Gathers a log row by row, in the order of the file; what is not wanted costs no memory.

    Of several logs of one source all are given one `room`.
    """

    def __init__(
        self,
        source: str,
        format: str,
        name: str,
        wanted: Callable[[str], bool],
        room: Room | None = None,
    ) -> None:
        self._source, self._format, self._name, self._wanted = source, format, name, wanted
        self._room = room or Room(source)
        self._long_names = 0
        self._names: dict[str, bool] = {}
        self._columns: dict[str, tuple[array[float], array[float], array[float]]] = {}
        self._replaced = self._given_up = self._restarts = 0
        self._not_finite: dict[str, int] = {}
        self.config: dict[str, Any] = {}
        self.notes: list[str] = []

    def add(self, step: float, time: float, values: Mapping[str, Any], is_row: bool = True) -> None:
        """One row: its step, its Unix seconds (NaN where they are not known), and metrics by name.

        What is no finite number is passed over. A metric that comes again at a step it had been beyond was
        logged by a run that was restarted: the later one wins, and what it goes over is forgotten, also of
        metrics that come less often. Not so where `is_row` is false: the file holds one metric after another.
        """
        kept = 0
        for name, value in values.items():
            is_kept = self._names.get(name)
            if is_kept is False:  # that it has numbers is known
                continue
            number = finite(value)
            if number != number:
                if isinstance(value, float) and len(self._not_finite) < MOST_NAMES:
                    self._not_finite[name] = self._not_finite.get(name, 0) + 1
                continue
            if not (is_kept or self._is_wanted(name)):
                continue
            steps, times, numbers = self._columns.get(name) or self._columns.setdefault(name, _empty())
            if steps and steps[-1] >= step:
                self._go_back(name, step, time, is_row)
            steps.append(step)
            times.append(time)
            numbers.append(number)
            kept += 1
        self._room.add_values(kept)

    def _go_back(self, name: str, step: float, time: float, is_row: bool) -> None:
        """Forget what a metric has from a step on, and what other metrics have after it of the same branch.

        An evaluation of the branch that was given up would else stay until the next one comes. But a metric
        that goes back need not mean that the run did: evaluations that run beside the training end in any
        order, and processes that log into several files are each at a step of their own. So only a metric
        that loses several values takes others with it: those that lose fewer, and never what was logged
        later.
        """
        columns = self._columns[name]
        keep = len(columns[0])
        while keep and columns[0][keep - 1] >= step:
            keep -= 1
            self._replaced += columns[0][keep] > step
        lost = len(columns[0]) - keep
        for column in columns:
            del column[keep:]
        if not is_row or lost < 2 or self._restarts == _MOST_RESTARTS:
            return
        self._restarts += 1
        for other in self._columns.values():
            keep = len(other[0])
            while keep and other[0][keep - 1] > step and not other[1][keep - 1] > time:
                keep -= 1
            if 0 < len(other[0]) - keep < lost:
                self._given_up += len(other[0]) - keep
                for column in other:
                    del column[keep:]

    def extend(self, name: str, step_N: np.ndarray, time_N: np.ndarray, value_N: np.ndarray) -> None:
        """Many rows of one metric: what `add` does of each, and faster where the steps rise."""
        before = self._columns[name][0][-1] if name in self._columns else -math.inf
        if np.isfinite(value_N).all() and (np.diff(step_N, prepend=before) > 0).all():
            if len(step_N) and self._is_wanted(name):
                self._room.add_values(len(step_N))
                columns = self._columns.setdefault(name, _empty())
                for column, added_N in zip(columns, (step_N, time_N, value_N), strict=True):
                    column.frombytes(np.asarray(added_N, dtype=float).tobytes())
            return
        for step, time, value in zip(step_N.tolist(), time_N.tolist(), value_N.tolist(), strict=True):
            self.add(step, time, {name: value}, is_row=False)

    def build(self) -> Log:
        """The log of all rows so far."""
        metrics = {
            name: Series(*map(np.frombuffer, (steps, numbers, times)))
            for name, (steps, times, numbers) in self._columns.items()
        }
        notes = list(self.notes)
        if self._replaced:
            more = f", {self._given_up} later ones of other metrics left out" if self._given_up else ""
            notes.append(
                f"the run was restarted from an earlier step: of steps that come twice the later ones count "
                f"({counted(self._replaced, 'value')} replaced{more})"
            )
        if self._long_names:
            left_out = f"{counted(self._long_names, 'value')} left out"
            notes.append(f"{left_out}, of names with more than {limits.NAME.most:,} characters")
        names, not_finite = tuple(self._names), self._not_finite
        return Log(
            self._source, self._format, self._name, metrics, names, self.config, tuple(notes), not_finite
        )

    def _is_wanted(self, name: str) -> bool:
        known = self._names.get(name)
        if known is None:
            if len(name) > limits.NAME.most:
                self._long_names += 1
                return False
            known = self._wanted(name)
            if known:
                self._room.add_column()
            if known or len(self._names) < MOST_NAMES:
                self._names[name] = known
        return known


def presentable(log: Log) -> Log:
    """The log as a run folder can hold it: names that can be shown, and steps that are counts.

    Values at other steps are left out, which a note says.
    """
    metrics, left_out = {}, 0
    for name, series in log.metrics.items():
        step_N = series.step_N
        is_step_N = (step_N >= 0) & (step_N <= 2**53) & (step_N % 1 == 0)
        if not is_step_N.all():
            left_out += int((~is_step_N).sum())
            series = Series(step_N[is_step_N], series.value_N[is_step_N], series.time_N[is_step_N])
        if len(series):
            metrics[printable(name)] = series
    notes = log.notes
    if left_out:
        notes += (f"{counted(left_out, 'value')} left out: a step is a whole number of 0 or more",)
    return replace(
        log,
        name=printable(log.name),
        metrics=metrics,
        names=tuple(map(printable, log.names)),
        notes=tuple(map(printable, notes)),
    )


def _earliest(steps: list[np.ndarray], times: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every step once with its earliest time, as one array each."""
    step_N, place_N = np.unique(np.concatenate(steps), return_inverse=True)
    time_N = np.full(len(step_N), np.inf)
    np.minimum.at(time_N, place_N, np.concatenate(times))
    return [step_N], [time_N]


def _empty() -> tuple[array[float], array[float], array[float]]:
    return array("d"), array("d"), array("d")


def finite(value: Any) -> float:
    """A number as a float; NaN for everything else, infinities and numbers as text included."""
    if type(value) is float:  # most are
        return value if math.isfinite(value) else math.nan
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names for a message: the first ones, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
