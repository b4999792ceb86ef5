"""The order of a log: which row came after which, where the run was restarted, which value of a step counts.

    in       rows in the order of the file, and the cells of every metric
    arrival  the order in which the rows were logged: that of the file, unless the times or the steps speak
             against it (several files, a table sorted newest first)
    restart  the training goes back and repeats what it had logged: everything that was logged before for
             these steps and later ones is superseded, of every metric
    out      of every metric its values by step, each step once, and what was left out and why

Evaluations prove no restart: an evaluator that runs beside the training logs them in any order.
Shapes: R rows, V values of one metric, W values of all metrics that prove a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scalerl.record.left_out import INFINITE, NAN, NO_STEP, NOT_A_NUMBER, REPEATED, SUPERSEDED

_KEPT = ""
_REASONS = (_KEPT, NAN, INFINITE, NOT_A_NUMBER, NO_STEP, REPEATED, SUPERSEDED)
_CODES = {reason: code for code, reason in enumerate(_REASONS)}
_MOST_RESTARTS = 200
"""Of a log; every one takes a look at all metrics."""
_WITNESSES = 8
"""Metrics, those with the most values, in which restarts are looked for."""
_MOST_WINDOWS = 20_000
"""Places at which steps come again that are looked at; in logs of one process a restart is one."""
_LEAST_STEPS = 2
"""Steps that come again in a restart: a single one is a row that was logged twice."""
_LEAST_SHARE = 0.5
"""Of what had been logged for the steps that come again, more than this comes again."""
_SHUFFLED = 0.25
"""Share of rows that are earlier than the one before them from which on a file is in no order of time."""
_NEWEST_FIRST = 3
"""Falls of the step per rise from which on a file without times has its newest row first."""


@dataclass(frozen=True)
class Rows:
    """The rows of one log, in the order of its files."""

    step_R: np.ndarray
    time_R: np.ndarray
    """Unix seconds; NaN where they were not logged."""
    line_R: np.ndarray
    """Their number in the file; 0 where that is not known."""
    streams: Sequence[int] = (0,)
    """The first row of every file: a process wrote each in order, and several may have run at one time."""


@dataclass(frozen=True)
class Cells:
    """All that was logged for one metric."""

    row_V: np.ndarray
    value_V: np.ndarray
    """NaN and infinities included."""
    text_V: np.ndarray
    """Positions of the values that were no number at all."""


@dataclass(frozen=True)
class Omitted:
    """Values of one metric that do not count, by step; `reason` as in `scalerl.record.left_out`."""

    step_V: np.ndarray
    line_V: np.ndarray
    reason_V: np.ndarray


@dataclass(frozen=True)
class Values:
    """Values of one metric that count, by step, each step once."""

    step_V: np.ndarray
    value_V: np.ndarray
    time_V: np.ndarray


@dataclass(frozen=True)
class Restart:
    """A place from which on a run logs again what it had logged."""

    first: int
    """The first row, by arrival, of what may be superseded."""
    place: int
    """The row, by arrival, with which the later branch begins."""
    step: float
    """The first step that came again."""
    highest: float
    """The highest step before."""
    line: int
    again: Mapping[str, float] = field(default_factory=dict)
    """Of a metric the first step that came again, where that is another: two processes log at two steps."""

    def supersedes(self, name: str, step_V: np.ndarray, place_V: np.ndarray) -> np.ndarray:
        """Which values of a metric belong to the branch that was given up."""
        is_before_V = (place_V >= self.first) & (place_V < self.place)
        return is_before_V & (step_V >= self.again.get(name, self.step))


@dataclass(frozen=True)
class Arranged:
    """What a log comes to."""

    values: dict[str, Values]
    """Of the metrics that have any."""
    omitted: dict[str, Omitted]
    restarts: Sequence[Restart]


def arrange(rows: Rows, cells: Mapping[str, Cells], is_evaluation: Callable[[str], bool]) -> Arranged:
    """Put the values of all metrics in order.

    Args:
        rows: of the log.
        cells: of every metric, by name.
        is_evaluation: whether a metric of this name is one of evaluations.
    """
    is_step_R = _is_step(rows.step_R)
    place_R, groups = _arrival(rows)
    witnesses = {name: one for name, one in cells.items() if not is_evaluation(name)}
    restarts = _restarts(rows, place_R, groups, is_step_R, witnesses)
    values: dict[str, Values] = {}
    omitted: dict[str, Omitted] = {}
    for name, one in cells.items():
        reason_V = _reasons(name, one, rows, place_R, is_step_R, restarts)
        step_V, is_kept_V = rows.step_R[one.row_V], reason_V == _CODES[_KEPT]
        order_V = np.argsort(step_V, kind="stable")
        kept_V, left_V = order_V[is_kept_V[order_V]], order_V[~is_kept_V[order_V]]
        if len(kept_V):
            values[name] = Values(step_V[kept_V], one.value_V[kept_V], rows.time_R[one.row_V[kept_V]])
        if len(left_V):
            omitted[name] = Omitted(step_V[left_V], rows.line_R[one.row_V[left_V]], reason_V[left_V])
    return Arranged(values, omitted, restarts)


def superseded_rows(step_R: np.ndarray, line_R: np.ndarray) -> np.ndarray:
    """Which rows of one table of training and evaluations a restart went over, (R,)."""
    rows = Rows(step_R, np.full(len(step_R), math.nan), line_R)
    place_R, groups = _arrival(rows)
    cells = {"": Cells(np.arange(len(step_R)), np.zeros(len(step_R)), np.zeros(0, dtype=np.intp))}
    is_over_R = np.zeros(len(step_R), dtype=bool)
    for restart in _restarts(rows, place_R, groups, _is_step(step_R), cells):
        is_over_R |= restart.supersedes("", step_R, place_R)
    return is_over_R


def _is_step(step_R: np.ndarray) -> np.ndarray:
    return (step_R >= 0) & (step_R <= 2**53) & (step_R == np.floor(step_R))


def reason_of(code: int) -> str:
    """The reason that a member of `Omitted.reason_V` stands for."""
    return _REASONS[code]


def _reasons(
    name: str,
    cells: Cells,
    rows: Rows,
    place_R: np.ndarray,
    is_step_R: np.ndarray,
    restarts: Sequence[Restart],
) -> np.ndarray:
    """Why every value of a metric is left out, as codes; 0 of those that count."""
    step_V, place_V, value_V = rows.step_R[cells.row_V], place_R[cells.row_V], cells.value_V
    reason_V = np.zeros(len(step_V), dtype=np.uint8)
    reason_V[np.isnan(value_V)] = _CODES[NAN]
    reason_V[np.isinf(value_V)] = _CODES[INFINITE]
    reason_V[cells.text_V] = _CODES[NOT_A_NUMBER]
    for restart in restarts:
        reason_V[restart.supersedes(name, step_V, place_V)] = _CODES[SUPERSEDED]
    reason_V[~is_step_R[cells.row_V]] = _CODES[NO_STEP]
    if (np.diff(step_V) > 0).all():  # most are
        return reason_V
    kept_V = np.flatnonzero(reason_V == _CODES[_KEPT])
    order_V = kept_V[np.lexsort((place_V[kept_V], step_V[kept_V]))]
    reason_V[order_V[:-1][np.diff(step_V[order_V]) == 0]] = _CODES[REPEATED]  # the last one counts
    return reason_V


def _arrival(rows: Rows) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Of every row its place in the order of arrival; and from where to where this order is one.

    Without times nothing is known of the order of rows in different files.
    """
    n, time_R = len(rows.step_R), rows.time_R
    is_timed = n > 0 and not np.isnan(time_R).any()
    if is_timed and (len(rows.streams) > 1 or np.sum(np.diff(time_R) < 0) > _SHUFFLED * n):
        place_R = np.empty(n, dtype=np.intp)
        place_R[np.argsort(time_R, kind="stable")] = np.arange(n)
        return place_R, [(0, n)]
    place_R = np.arange(n)
    groups = list(zip(rows.streams, (*rows.streams[1:], n), strict=True))
    for start, stop in groups:
        change_R = np.diff(rows.step_R[start:stop])
        is_falling = np.sum(change_R < 0) > _NEWEST_FIRST * np.sum(change_R > 0)
        if is_falling and not (is_timed and time_R[stop - 1] > time_R[start]):
            place_R[start:stop] = place_R[start:stop][::-1]
    return place_R, groups


@dataclass(frozen=True)
class _Witness:
    """The values of training in the order of arrival, of some metrics."""

    names: Sequence[str]
    metric_W: np.ndarray
    step_W: np.ndarray
    place_W: np.ndarray
    row_W: np.ndarray
    is_again_W: np.ndarray
    """Whether the metric had this step before."""

    def within(self, start: int, stop: int) -> _Witness:
        """Those between two places; what was before the first of them is not known to it."""
        low, high = np.searchsorted(self.place_W, [start, stop])
        columns = (self.metric_W, self.step_W, self.place_W, self.row_W)
        return _witness(self.names, *(column[low:high] for column in columns))


def _witness(
    names: Sequence[str], metric_W: np.ndarray, step_W: np.ndarray, place_W: np.ndarray, row_W: np.ndarray
) -> _Witness:
    """The same in the order of arrival, with what comes again."""
    by_place_W = np.argsort(place_W, kind="stable")
    metric_W, step_W = metric_W[by_place_W], step_W[by_place_W]
    order_W = np.lexsort((step_W, metric_W))  # stable: of one metric and step by arrival
    is_again_W = np.zeros(len(order_W), dtype=bool)
    same_W = (np.diff(metric_W[order_W]) == 0) & (np.diff(step_W[order_W]) == 0)
    is_again_W[order_W[1:][same_W]] = True
    return _Witness(names, metric_W, step_W, place_W[by_place_W], row_W[by_place_W], is_again_W)


def _restarts(
    rows: Rows,
    place_R: np.ndarray,
    groups: Sequence[tuple[int, int]],
    is_step_R: np.ndarray,
    cells: Mapping[str, Cells],
) -> list[Restart]:
    """All restarts, in the order of arrival."""
    names = sorted(cells, key=lambda name: -len(cells[name].row_V))[:_WITNESSES]
    rows_of = [cells[name].row_V[is_step_R[cells[name].row_V]] for name in names]
    if not any(len(np.unique(rows.step_R[row_V])) < len(row_V) for row_V in rows_of):
        return []  # no step comes again: evaluations in any order, rows sorted in any way
    row_W = np.concatenate(rows_of)
    metric_W = np.repeat(np.arange(len(names)), [len(row_V) for row_V in rows_of])
    all_W = _witness(names, metric_W, rows.step_R[row_W], place_R[row_W], row_W)
    found: list[Restart] = []
    for start, stop in groups:
        seen = all_W if len(groups) == 1 else all_W.within(start, stop)
        found += _of_group(seen, rows, start, _MOST_RESTARTS - len(found))
    return found


def _of_group(seen: _Witness, rows: Rows, first: int, most: int) -> list[Restart]:
    """The restarts in rows whose order is known.

    A window reaches from a step that comes again, below the highest so far, to where that is passed; the
    lowest one in it may be a restart. Windows do not overlap, so that this takes linear time.
    """
    found: list[Restart] = []
    earlier_W = np.sort(seen.step_W[~seen.is_again_W])
    latest_W = np.fmax.accumulate(rows.time_R[seen.row_W]) if len(seen.row_W) else np.zeros(0)
    base = windows = 0
    while base < len(seen.step_W) and len(found) < most:
        high_W = np.maximum.accumulate(seen.step_W[base:])
        falls_W = base + np.flatnonzero(seen.is_again_W[base:] & (seen.step_W[base:] < high_W))
        after, accepted = -1, None
        while (n := int(np.searchsorted(falls_W, after))) < len(falls_W) and windows < _MOST_WINDOWS:
            windows += 1
            highest = float(high_W[falls_W[n] - base])
            after = base + int(np.searchsorted(high_W, highest, side="right"))
            window_W = falls_W[n : np.searchsorted(falls_W, after)]
            lowest = int(window_W[np.argmin(seen.step_W[window_W])])
            if accepted := _restart_at(lowest, after, highest, seen, earlier_W, latest_W, rows, first):
                found.append(accepted)
                base = lowest
                break
        if accepted is None:
            break
    return found


def _restart_at(
    at: int,
    after: int,
    highest: float,
    seen: _Witness,
    earlier_W: np.ndarray,
    latest_W: np.ndarray,
    rows: Rows,
    first: int,
) -> Restart | None:
    """The restart that begins with a value, if it is one: time goes on, and what was logged comes again."""
    time = rows.time_R[seen.row_W[at]]
    if at and time < latest_W[at - 1]:
        return None
    step, step_W, is_again_W = seen.step_W[at], seen.step_W[at:after], seen.is_again_W[at:after]
    until = min(highest, step_W.max())
    is_within_W = (step_W >= step) & (step_W <= until)
    metric_W = seen.metric_W[at:after][is_within_W & is_again_W]
    again_W = step_W[is_within_W & is_again_W]
    low, high = np.searchsorted(earlier_W, step), np.searchsorted(earlier_W, until, side="right")
    before = int(high - low) - int(np.sum(is_within_W & ~is_again_W))
    pairs = len(np.unique(np.stack([metric_W, again_W]), axis=1).T)
    if len(np.unique(again_W)) < _LEAST_STEPS or pairs <= _LEAST_SHARE * before:
        return None
    metrics: list[int] = np.unique(metric_W).tolist()
    again = {seen.names[metric]: float(again_W[metric_W == metric].min()) for metric in metrics}
    line = int(rows.line_R[seen.row_W[at]])
    return Restart(first, int(seen.place_W[at]), float(step), float(highest), line, again)


def steps_of(restart: Restart) -> str:
    """What a restart went over, in words."""
    where = f" (line {restart.line})" if restart.line else ""
    from_step = f"after step {restart.step - 1:.0f}" if restart.step >= 1 else "from its first step on"
    last = "" if math.isclose(restart.step, restart.highest) else f" to {restart.highest:.0f}"
    return f"{from_step}{where}: of steps {restart.step:.0f}{last}"
