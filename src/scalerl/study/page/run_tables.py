"""The table of a study's runs, one by one."""

from __future__ import annotations

import math

from scalerl.study.verdict.verdict import FittedRun, StudyVerdict
from scalerl.view.numbers import DASH, Unit, plain, rate, unit_for
from scalerl.view.table import Cell, Column, Row, Table, count, interval_cell, share, words


def runs_table(verdict: StudyVerdict) -> Table:
    """One row per run."""
    unit = unit_for(verdict.axis, verdict.budget)
    columns = (
        Column("arm", ("arm",), prose=True),
        Column("seed", ("seed",)),
        Column("outcome", ("outcome",), prose=True),
        Column("attempts", ("attempts",)),
        Column("last pass rate", ("last_pass_rate",)),
        Column(f"compute ({unit.name})", ("axis", "compute")),
        Column("fit", ("A", "A_low", "A_high", "B", "C_mid", "identified", "why"), prose=True),
        Column("cause", ("cause",), prose=True),
    )
    rows = tuple(
        Row(_run_cells(verdict, run, unit), "open" if run.run.outcome == "failed" else "")
        for arm in verdict.arms
        for run in arm.runs
    )
    return Table("runs", "Runs", columns, rows)


def _run_cells(verdict: StudyVerdict, fitted: FittedRun, unit: Unit) -> tuple[Cell, ...]:
    run = fitted.run
    evals = run.record.evals if run.record else ()
    last = evals[-1].pass_rate if evals else math.nan
    spent = spent_compute(verdict, fitted)
    return (
        words(run.plan.arm),
        count(run.plan.seed),
        words(run.outcome),
        count(len(run.attempts)),
        share(last, rate(last)),
        Cell(plain(spent / unit.size), (verdict.axis, spent)),
        _fit_cell(fitted, unit),
        words(run.cause),
    )


def spent_compute(verdict: StudyVerdict, fitted: FittedRun) -> float:
    """Compute of the run's last evaluation, on the axis of the study; NaN where it was not logged."""
    if fitted.fit is not None:
        return float(fitted.fit.points.compute_N[-1])
    record = fitted.run.record
    if record is None or not record.evals or verdict.axis not in record.logged_axes():
        return math.nan
    return float(record.compute(verdict.axis)[-1])


def _fit_cell(fitted: FittedRun, unit: Unit) -> Cell:
    fit = fitted.fit
    if fit is None:
        return Cell(fitted.why or DASH, (None, None, None, None, None, None, fitted.why))
    A = math.nan if fit.ceiling is None else fit.ceiling
    ends = (math.nan, math.nan) if fit.misfit else fit.intervals.A
    raw = (A, *ends, fit.median.B, fit.median.C_mid, int(fit.identified), "" if fit.identified else fit.why)
    shape = f"B {plain(fit.median.B)}, C_mid {plain(fit.median.C_mid / unit.size)}"
    if fit.misfit:
        return Cell(f"A withheld: {fit.why}", raw)
    text = f"A {rate(A)} {interval_cell(fit.intervals.A).text}, {shape}"
    return Cell(text, raw, "" if fit.identified else "not identified")
