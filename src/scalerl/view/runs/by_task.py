"""The table of a run's tasks and downstream suites: a line each, from the record."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from scalerl.curve.points import Points
from scalerl.errors import CannotAnswerError, InputError
from scalerl.record.downstream import SuiteResult, last_of_each
from scalerl.record.prompts import of_task, successes_of, whole_rows
from scalerl.record.reader import PASS_RATE_OF, RunRecord
from scalerl.view.numbers import DASH, percent
from scalerl.view.table import Cell, Estimate, Row, Table, TableColumn, number, rate_cell, spread_keys, words

_MOST = 20
"""Tasks and suites that are fitted, as each fit takes a part of a second."""


def task_table(run: RunRecord, axis: str, level: float = 0.95) -> Table | None:
    """Return a line for each task of a mixture and each downstream suite; None where there are none.

    Args:
        run: the record of the run as a whole.
        axis: the compute axis of the fits.
        level: of the ceilings' intervals.
    """
    found = [*_tasks(run), *last_of_each(run.downstream()).values()]
    if not found or run.task:
        return None
    columns = (
        TableColumn("task or suite", ("name",), prose=True),
        TableColumn("prompts", ("prompts",)),
        TableColumn("samples", ("samples",)),
        TableColumn("at step", ("step",)),
        TableColumn("pass@1", spread_keys("pass_rate")),
        TableColumn("pass@k", spread_keys("pass_at_k")),
        TableColumn("ceiling A", spread_keys("A")),
    )
    rows = tuple(_row(run, one, axis, level, is_fitted=i < _MOST) for i, one in enumerate(found))
    note = (
        "The last evaluation of each, with 95 % intervals over prompts such as these; k is the number of "
        f"samples. Ceiling: of a curve of its own, with the {percent(level)} interval, where identified. "
        f"`scalerl fit RUN --y {PASS_RATE_OF}NAME` prints it."
    )
    if len(found) > _MOST:
        note += f" Only the first {_MOST} are fitted here."
    return Table("tasks", "Pass rate by task and suite", columns, rows, note)


def _tasks(run: RunRecord) -> Iterator[SuiteResult]:
    """Yield the tasks of a mixture at the last evaluation whose prompts are on record."""
    newest = deque(whole_rows(run, 0) if run.tasks else (), maxlen=1)
    for last, name in itertools.product(newest, run.tasks):
        if len(correct_P := successes_of(last, name)):
            yield SuiteResult.of(name, last["step"], correct_P, last["n"])


def _row(run: RunRecord, found: SuiteResult, axis: str, level: float, is_fitted: bool) -> Row:
    ceiling = _ceiling(run, found.suite, axis, level) if is_fitted else Cell(DASH, (None, None, None))
    return Row(
        (
            words(found.suite),
            number(found.n_prompts),
            number(found.n_samples),
            number(found.step),
            rate_cell(Estimate(found.pass_rate, found.pass_rate_interval)),
            rate_cell(Estimate(found.pass_at_k, found.pass_at_k_interval)),
            ceiling,
        )
    )


def _ceiling(run: RunRecord, name: str, axis: str, level: float) -> Cell:
    from scalerl.curve import fit

    try:
        found = fit(Points.from_record(of_task(run, name), axis), level=level)
    except CannotAnswerError:
        return rate_cell(None, "too few evaluations")
    except InputError:  # a line of the record that is damaged: the page is of all the rest
        return rate_cell(None)
    if not found.identified:
        return rate_cell(None, "not identified")
    return rate_cell(Estimate(found.median.A, found.intervals.A))
