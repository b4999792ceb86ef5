"""The order of a log: which row came after which, where the run was restarted, which value of a step counts.

    in       rows in the order of the file, and the cells of every metric
    arrival  the order in which the rows were logged: that of the file, unless the times or the steps
             contradict it (several files, a table sorted newest first)
    restart  training goes back and repeats steps: all that was logged before for these and later steps is
             superseded, of every metric
    out      for every metric its values by step, each step once, and what was left out and why

Only metrics of training prove a restart: an evaluator beside the run logs in any order, and repeatedly.
Shapes: R rows, V values of a metric, N those that count, W values of the one that proves a restart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from scalerl.ingest.vocabularies import is_of_training, timed_set
from scalerl.record.left_out import INFINITE, NAN, NO_STEP, NOT_A_NUMBER, REPEATED, SUPERSEDED
from scalerl.record.metric import is_of_evaluation

_KEPT = ""
REASONS = (_KEPT, NAN, INFINITE, NOT_A_NUMBER, NO_STEP, REPEATED, SUPERSEDED)
"""The reasons, by their codes."""
_MOST_RESTARTS = 200
"""Most restarts of a log; each takes a pass over all metrics."""
_NO_ROWS = np.zeros(0, dtype=np.intp)
_MOST_WINDOWS = 20_000
"""Most places where steps repeat that are examined; in the log of one process a restart is one place."""
_LEAST_STEPS = 2
"""Least repeated steps of a restart: a single one is a row that was logged twice."""
_LEAST_SHARE = 0.5
"""Share of the earlier values of the repeated steps that a restart must repeat."""
_LEAST_REGULAR = 3
"""Steps repeated at one interval, up to a new highest one, that suffice if fewer rows are logged."""
_LEAST_PROGRESS = 0.1
"""Share of the superseded steps that a branch which is still below the highest must have covered; otherwise
the run was restarted by mistake."""
_SHUFFLED = 0.25
"""Share of rows earlier than the one before them beyond which a file is not in the order of time."""
_NEWEST_FIRST = 3
"""Falls of the step per rise beyond which a file without times has its newest row first."""


@dataclass(frozen=True)
class LogRows:
    """The rows of one log, in the order of its files."""

    step_R: np.ndarray
    time_R: np.ndarray
    """Unix seconds; NaN where they were not logged."""
    line_R: np.ndarray
    """The line of each row in its file; 0 where not known."""
    streams: Sequence[int] = (0,)
    """The first row of every file: one process wrote each in order, and several may have run at one time."""


@dataclass(frozen=True)
class Cells:
    """All that was logged for one metric."""

    row_V: np.ndarray
    value_V: np.ndarray
    """NaN and infinities included."""
    text_V: np.ndarray
    """Positions of the values that were not numbers at all."""

    def of(self, is_in_V: np.ndarray) -> Self:
        """Return only some of the values."""
        is_text_V = np.zeros(len(self.row_V), dtype=bool)
        is_text_V[self.text_V] = True
        return type(self)(self.row_V[is_in_V], self.value_V[is_in_V], np.flatnonzero(is_text_V[is_in_V]))


def by_set(cells: Mapping[str, Cells]) -> Mapping[str, Cells]:
    """Add the set's name to metrics that several evaluation sets log under one name, by their rows.

    Values in rows without the seconds of a set, as in formats with one row per value, stay as they are.
    """
    rows = {timed_set(name): one.row_V for name, one in cells.items() if timed_set(name)}
    if len(rows) < 2:
        return cells
    sets = list(rows)
    set_R = np.full(1 + max(int(one.row_V.max(initial=0)) for one in cells.values()), -1)
    for n, row_V in enumerate(rows.values()):
        set_R[row_V] = n
    found: dict[str, Cells] = {}
    for name, one in cells.items():
        start, rest = name[:5], name[5:]
        set_V = set_R[one.row_V] if start in ("eval_", "eval/") else np.full(len(one.row_V), -1)
        for n in np.unique(set_V).tolist():
            has_set = n < 0 or rest.startswith(f"{sets[n]}_")
            found[name if has_set else f"{start}{sets[n]}_{rest}"] = one.of(set_V == n)
    return found


@dataclass(frozen=True)
class Uncounted:
    """Values of one metric that do not count, by step; `reason_V` holds indices into `REASONS`."""

    step_V: np.ndarray
    line_V: np.ndarray
    reason_V: np.ndarray


@dataclass(frozen=True)
class Series:
    """The values of one metric that count, in the order of their steps, each step once."""

    step_N: np.ndarray
    """Whole numbers, ascending, as floats."""
    value_N: np.ndarray
    time_N: np.ndarray
    """Unix seconds; NaN where they were not logged."""

    def __len__(self) -> int:
        return len(self.step_N)

    def at(self, step: float) -> float:
        """Return the last value at or before a step; NaN where there is none."""
        n = int(np.searchsorted(self.step_N, step, side="right"))
        return float(self.value_N[n - 1]) if n else math.nan


@dataclass(frozen=True)
class Restart:
    """A place where a run starts to repeat steps that it had already logged."""

    first: int
    """The first row, by arrival, that may be superseded."""
    place: int
    """The row, by arrival, with which the later branch starts."""
    step: float
    """The first repeated step."""
    highest: float
    """The highest step before the restart."""
    line: int

    def supersedes(self, step_V: np.ndarray, place_V: np.ndarray) -> np.ndarray:
        """Return which values belong to the abandoned branch."""
        return (place_V >= self.first) & (place_V < self.place) & (step_V >= self.step)

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        is_one = math.isclose(self.step, self.highest)
        steps = f"step {self.step:.0f}" if is_one else f"steps {self.step:.0f} to {self.highest:.0f}"
        return f"at step {self.step:.0f}{where}: what was logged before for {steps} is superseded"


def _superseded(restarts: Sequence[Restart], step_V: np.ndarray, place_V: np.ndarray) -> np.ndarray:
    """Return which values belong to abandoned branches."""
    is_over_V = np.zeros(len(step_V), dtype=bool)
    for restart in restarts:
        is_over_V |= restart.supersedes(step_V, place_V)
    return is_over_V


def arrange(
    rows: LogRows, cells: Mapping[str, Cells]
) -> tuple[dict[str, Series], dict[str, Uncounted], Sequence[Restart], bool]:
    """Put the values of all metrics in order; return by name those that count, and those that do not.

    Also returns the restarts in the order of arrival, and whether there were too many places to examine all.
    """
    is_step_R = is_step(rows.step_R)
    place_R, groups = _arrival(rows)
    # The metric with the most values has seen every restart.
    trained = (one.row_V for name, one in cells.items() if is_of_training(name))
    restarts, is_cut = _restarts(rows, place_R, groups, max(trained, key=len, default=_NO_ROWS))
    made = [one.row_V[np.isfinite(one.value_V)] for name, one in cells.items() if is_of_evaluation(name)]
    if restarts and any(map(len, made)):
        row_E = np.unique(np.concatenate(made))
        step_E, place_E = rows.step_R[row_E], place_R[row_E]
        is_over_E = np.zeros(len(row_E), dtype=bool)
        for n, restart in enumerate(restarts):
            is_over_E |= restart.supersedes(step_E, place_E)
            if is_over_E.all():  # keep the restarts before the one that leaves no evaluation
                restarts = restarts[:n]
                break
    is_over_R = _superseded(restarts, rows.step_R, place_R)  # once for all metrics: there may be 50,000
    values: dict[str, Series] = {}
    omitted: dict[str, Uncounted] = {}
    for name, one in cells.items():
        step_V, place_V = rows.step_R[one.row_V], place_R[one.row_V]
        reason_V = _reasons(one, step_V, place_V, is_step_R[one.row_V], is_over_R[one.row_V])
        order_V = np.argsort(step_V, kind="stable")
        is_kept_V = reason_V[order_V] == code_of(_KEPT)
        kept_V, left_V = order_V[is_kept_V], order_V[~is_kept_V]
        if len(kept_V):
            values[name] = Series(step_V[kept_V], one.value_V[kept_V], rows.time_R[one.row_V[kept_V]])
        if len(left_V):
            omitted[name] = Uncounted(step_V[left_V], rows.line_R[one.row_V[left_V]], reason_V[left_V])
    return values, omitted, restarts, is_cut


def superseded_rows(step_R: np.ndarray, line_R: np.ndarray, is_training_R: np.ndarray) -> np.ndarray:
    """Return which rows of a table of training and evaluations a restart supersedes, (R,)."""
    rows = LogRows(step_R, np.full(len(step_R), math.nan), line_R)
    place_R, groups = _arrival(rows)
    row_V = np.flatnonzero(is_training_R)
    restarts, _ = _restarts(rows, place_R, groups, row_V)
    step_P = step_R[np.argsort(place_R)]
    trained_N = np.unique(step_R[row_V])
    found = [_from_evaluation(restart, step_P, trained_N) for restart in restarts]
    return _superseded(found, step_R, place_R)


def _from_first_row(restart: Restart, step_P: np.ndarray, place_W: np.ndarray) -> Restart:
    """Start a restart with all rows of its step, as a loop may evaluate in its own row before it trains."""
    n = int(np.searchsorted(place_W, restart.place))
    after = int(place_W[n - 1]) + 1 if n else 0
    others = np.flatnonzero(step_P[after : restart.place] != restart.step)
    return replace(restart, place=after + (int(others[-1]) + 1 if len(others) else 0))


def _from_evaluation(restart: Restart, step_P: np.ndarray, trained_N: np.ndarray) -> Restart:
    """Start a restart one row earlier if that row holds both training and evaluation of the step before."""
    before = step_P[restart.place - 1]
    n = int(np.searchsorted(trained_N, restart.step))
    if before < restart.step and (not n or before > trained_N[n - 1]):
        return replace(restart, place=restart.place - 1, step=float(before))
    return restart


def is_step(step_R: np.ndarray) -> np.ndarray:
    """Return which numbers can be steps: whole, 0 or more, up to 2**53, beyond which float64 has gaps."""
    return (step_R >= 0) & (step_R <= 2**53) & (step_R == np.floor(step_R))


def code_of(reason: str) -> int:
    """Return the code of a reason in `Uncounted.reason_V`."""
    return REASONS.index(reason)


def _reasons(
    cells: Cells, step_V: np.ndarray, place_V: np.ndarray, is_step_V: np.ndarray, is_over_V: np.ndarray
) -> np.ndarray:
    """Return why each value of a metric is left out, as codes; 0 for those that count."""
    reason_V = np.zeros(len(step_V), dtype=np.uint8)
    reason_V[np.isnan(cells.value_V)] = code_of(NAN)
    reason_V[np.isinf(cells.value_V)] = code_of(INFINITE)
    reason_V[cells.text_V] = code_of(NOT_A_NUMBER)
    # In this order, as the last reason stays: NaN of an abandoned branch says nothing about the run.
    reason_V[is_over_V] = code_of(SUPERSEDED)
    reason_V[~is_step_V] = code_of(NO_STEP)
    if (np.diff(step_V) > 0).all():  # most are
        return reason_V
    kept_V = np.flatnonzero(reason_V == code_of(_KEPT))
    order_V = kept_V[np.lexsort((place_V[kept_V], step_V[kept_V]))]
    reason_V[order_V[:-1][np.diff(step_V[order_V]) == 0]] = code_of(REPEATED)  # the last one counts
    return reason_V


def _arrival(rows: LogRows) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the place of every row in the order of arrival, and the bounds of each ordered group.

    Without times the order of rows in different files is not known.
    """
    n, time_R = len(rows.step_R), rows.time_R
    is_timed = n > 0 and not np.isnan(time_R).any()
    if is_timed and (len(rows.streams) > 1 or np.sum(np.diff(time_R) < 0) > _SHUFFLED * n):
        place_R = np.empty(n, dtype=np.intp)
        # Several files, or a shuffled table: only the times show what came first.
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


class _Witness:
    """The values of a training metric in the order of arrival, in which restarts are looked for."""

    def __init__(self, rows: LogRows, row_W: np.ndarray, place_W: np.ndarray, first: int) -> None:
        self.first, self.place_W = first, place_W
        self.step_W, self.time_W, self.line_W = rows.step_R[row_W], rows.time_R[row_W], rows.line_R[row_W]
        order_W = np.argsort(self.step_W, kind="stable")  # within a step by arrival
        self.is_again_W = np.zeros(len(order_W), dtype=bool)
        """Whether the step occurred before."""
        self.is_again_W[order_W[1:][np.diff(self.step_W[order_W]) == 0]] = True
        self.earlier_W = np.sort(self.step_W[~self.is_again_W])
        self.latest_W = np.fmax.accumulate(self.time_W)

    def restarts(self, most: int) -> tuple[list[Restart], bool]:
        """Return the restarts, and whether there were too many places to examine all.

        A window reaches from a repeated step, below the highest so far, to where that highest step is passed;
        the lowest step in it may be a restart. Windows do not overlap: each restart takes linear time.
        """
        found: list[Restart] = []
        base = windows = 0
        while True:
            high_W = np.maximum.accumulate(self.step_W[base:])
            falls_W = base + np.flatnonzero(self.is_again_W[base:] & (self.step_W[base:] < high_W))
            after, accepted = -1, None
            while accepted is None:
                n = int(np.searchsorted(falls_W, after))
                if n == len(falls_W):
                    return found, False
                if windows == _MOST_WINDOWS or len(found) == most:
                    return found, True
                windows += 1
                highest = float(high_W[falls_W[n] - base])
                after = base + int(np.searchsorted(high_W, highest, side="right"))
                window_W = falls_W[n : np.searchsorted(falls_W, after)]
                lowest = int(window_W[np.argmin(self.step_W[window_W])])
                accepted = self._restart_at(lowest, after, highest)
            found.append(accepted)
            # The branch that starts here may be abandoned in turn, so the search continues from its start.
            base = int(np.searchsorted(self.place_W, accepted.place))

    def _restart_at(self, at: int, after: int, highest: float) -> Restart | None:
        """Return the restart that starts with a value, or None; it needs later times and repeated steps."""
        # A row older than those before it was delivered late, and repeats nothing.
        if at and self.time_W[at] < self.latest_W[at - 1]:
            return None
        step, step_W, is_again_W = self.step_W[at], self.step_W[at:after], self.is_again_W[at:after]
        until = min(highest, step_W.max())
        is_within_W = (step_W >= step) & (step_W <= until)
        again_N = np.unique(step_W[is_within_W & is_again_W])
        low, high = np.searchsorted(self.earlier_W, step), np.searchsorted(self.earlier_W, until, "right")
        before = int(high - low) - int(np.sum(is_within_W & ~is_again_W))
        is_open = after == len(self.step_W)
        if len(again_N) < _LEAST_STEPS or (is_open and until - step < _LEAST_PROGRESS * (highest - step)):
            return None
        # Repeated at one interval up to beyond the highest step before: fewer rows are logged than before.
        gap_N = np.diff(np.concatenate([again_N, self.step_W[after : after + 1]]))
        is_regular = not is_open and len(again_N) >= _LEAST_REGULAR and (gap_N == gap_N[0]).all()
        if len(again_N) <= _LEAST_SHARE * before and not is_regular:
            return None
        place, line = int(self.place_W[at]), int(self.line_W[at])
        return Restart(self.first, place, float(step), float(highest), line)


def _restarts(
    rows: LogRows, place_R: np.ndarray, groups: Sequence[tuple[int, int]], row_W: np.ndarray
) -> tuple[list[Restart], bool]:
    """Return the restarts that a metric with values in `row_W` shows, in the order of arrival.

    Also returns whether there were too many places to examine all.
    """
    row_W = row_W[is_step(rows.step_R[row_W])]
    found: list[Restart] = []
    if len(np.unique(rows.step_R[row_W])) == len(row_W):
        return found, False  # no step repeats: rows sorted in any way
    row_W = row_W[np.argsort(place_R[row_W], kind="stable")]
    place_W, step_P = place_R[row_W], rows.step_R[np.argsort(place_R)]
    for start, stop in groups:
        within = slice(*np.searchsorted(place_W, [start, stop]))
        witness = _Witness(rows, row_W[within], place_W[within], start)
        more, is_cut = witness.restarts(_MOST_RESTARTS - len(found))
        found += [_from_first_row(restart, step_P, place_W) for restart in more]
        if is_cut:
            return found, True
    return found, False
