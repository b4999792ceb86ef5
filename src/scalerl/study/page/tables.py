"""The tables of a study, from its verdict alone: numbers as they are, and the text that shows them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl.forecast.baselines import RIVALS
from scalerl.forecast.comparison import Claim, Difference, Pair
from scalerl.study.verdict.answers import budget_text
from scalerl.study.verdict.arm_fits import ArmSummary, FittedRun
from scalerl.study.verdict.forecast_scores import ForecastScore
from scalerl.study.verdict.measured import measured_table
from scalerl.study.verdict.verdict import WORDS, Kind, StudyVerdict
from scalerl.view.facts.notices import claim_text
from scalerl.view.numbers import (
    DASH,
    Unit,
    as_float,
    as_mapping,
    percent,
    plain,
    rate,
    rate_interval,
    signed,
    unit_for,
)
from scalerl.view.runs.tables import frozen_table
from scalerl.view.table import (
    Cell,
    Mark,
    Row,
    Table,
    TableColumn,
    amount_cell,
    changes_in_words,
    difference_cell,
    number,
    rate_cell,
    spread_keys,
    words,
)

_OUTCOMES = ("finished", "failed", "stopped", "under way", "not started")
_CLAIMS = ("verdict", "p", "p_adjusted", "seeds", "why")
_MARKS: dict[Kind, Mark] = {
    **{"base": "base", "noise": "", "never acted": "", "inconclusive": "open", "not compared": "open"},
    **dict.fromkeys(("both", "ceiling", "efficiency", "measured", "seen"), "moved"),
}


def study_tables(verdict: StudyVerdict) -> list[Table]:
    """All tables that have a row, in the order of the page."""
    made = (
        verdict_table(verdict),
        measured_table(verdict),
        scores_table(verdict.scores),
        forecasts_table(verdict),
        stability_table(verdict),
        decisions_table(verdict),
        runs_table(verdict),
        changes_table(verdict),
    )
    return [table for table in made if table.rows]


def verdict_table(verdict: StudyVerdict) -> Table:
    """One row per arm: its curve over its seeds, and what it differs in from the base."""
    unit = unit_for(verdict.axis, verdict.budget)
    target = verdict.study.plan.get("target")
    measured = (*spread_keys("measured_difference"), *(f"measured_{name}" for name in _CLAIMS))
    columns = [
        TableColumn("arm", ("arm",), prose=True),
        TableColumn("verdict", ("verdict",), prose=True),
        TableColumn(f"measured at {budget_text(verdict)}, against base", measured),
        TableColumn("ceiling A, against base", (*spread_keys("A_difference"), *_claim_keys("ceiling"))),
        TableColumn(
            "efficiency: compute to 3/4 of own gain, against base",
            (*spread_keys("compute_to_own_ratio"), *_claim_keys("efficiency")),
        ),
        TableColumn("seeds", ("seeds_finished", "seeds_planned")),
        TableColumn("ceiling A", (*spread_keys("A"), "fitted", "identified")),
        TableColumn(f"pass rate at {budget_text(verdict)}", (*spread_keys("pass_rate_at_budget"), "reached")),
    ]
    if target is not None:
        columns.append(TableColumn(f"{unit.name} to {rate(target)}", spread_keys("compute_to_target")))
    columns += [
        TableColumn("exponent B", spread_keys("B")),
        TableColumn(f"C_mid ({unit.name})", spread_keys("C_mid")),
    ]
    rows = tuple(_arm_row(verdict, arm, unit, target is not None) for arm in verdict.arms)
    level = percent(verdict.comparison.level) if verdict.comparison else "95 %"
    note = (
        f"Medians with {level} intervals over the seeds of an arm, the variance between seeds included. "
        "Measured: the mean difference over seeds that both have, without a curve, its variance moderated by "
        "those of the other arms. p is corrected (Holm): over the arms of what was measured, over three "
        "questions about every arm of the curves; beside it, how many seeds of each side would tell the "
        "difference observed (power .8)."
    )
    return Table("verdict", "Verdicts", tuple(columns), rows, note)


def _arm_row(verdict: StudyVerdict, arm: ArmSummary, unit: Unit, target: bool) -> Row:
    found, pair = arm.quantities, verdict.pairs.get(arm.name)
    finished = arm.stability.outcomes.get("finished", 0)
    kind = verdict.kind(arm.name)
    ceiling = rate_cell(found.get("A"), "withheld" if any(fit.misfit for fit in arm.fits) else DASH)
    # Where not all runs came to the budget, the pass rate there is extrapolated.
    reached = arm.reached(verdict.budget)
    measured = verdict.measured.get(arm.name)
    without = "base" if kind == "base" else DASH
    cells = [
        words(arm.name),
        Cell(WORDS[kind], (WORDS[kind],), verdict.not_compared.get(arm.name, "") or _reason(pair)),
        _question_cell(measured and measured.difference, measured and measured.claim, without),
        _question_cell(
            pair and pair.differences.get("A"), pair and pair.ceiling, "withheld" if pair else without
        ),
        _question_cell(pair and pair.differences.get("compute_to_own"), pair and pair.efficiency, without),
        Cell(f"{finished}/{len(arm.runs)}", (finished, len(arm.runs))),
        _of_runs(ceiling, arm, arm.identified, "identified", (len(arm.fits), arm.identified)),
        _of_runs(rate_cell(found.get("pass_rate")), arm, reached, "there", (reached,)),
        *([amount_cell(found.get("compute_to_target"), unit)] if target else []),
        amount_cell(found.get("B")),
        amount_cell(found.get("C_mid"), unit),
    ]
    return Row(tuple(cells), _MARKS[kind])


def _claim_keys(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{key}" for key in _CLAIMS)


def _question_cell(difference: Difference | None, claim: Claim | None, without: str) -> Cell:
    """The answer to one question: the difference with its interval, and the claim below it."""
    cell = difference_cell(difference, without)
    raw = (getattr(claim, name) for name in _CLAIMS) if claim else (None,) * len(_CLAIMS)
    said = claim_text(claim) if claim and difference else ""
    return Cell(cell.text, (*cell.raw, *raw), "\n".join(filter(None, [cell.beside, said])))


def _reason(pair: Pair | None) -> str:
    """Why no question about a pair has an answer, where that is one reason."""
    whys = {claim.why for claim in pair.claims.values()} if pair else set()
    return whys.pop() if len(whys) == 1 else ""


def _of_runs(cell: Cell, arm: ArmSummary, runs: int, what: str, raw: tuple[int, ...]) -> Cell:
    """The cell, and beside it of how many runs it holds where those are not all; `raw` are more numbers."""
    fitted = len(arm.fits)
    beside = f"{cell.beside}\n{runs} of {fitted} {what}".lstrip() if runs < fitted else cell.beside
    return Cell(cell.text, (*cell.raw, *raw), beside)


def stability_table(verdict: StudyVerdict) -> Table:
    """One row per arm: what went wrong, and how often."""
    columns = (
        TableColumn("arm", ("arm",), prose=True),
        *(TableColumn(outcome, (outcome.replace(" ", "_"),)) for outcome in _OUTCOMES),
        TableColumn("retried", ("retried",)),
        TableColumn("truncated", ("truncated",)),
        TableColumn("runs with an alarm", ("alarms",), prose=True),
        TableColumn("why runs failed", ("causes",), prose=True),
    )
    rows = []
    for arm in verdict.arms:
        found = arm.stability
        alarms = ", ".join(f"{kind.replace('_', ' ')} {n}" for kind, n in found.alarms.items())
        cells = (
            words(arm.name),
            *(number(found.outcomes.get(outcome, 0)) for outcome in _OUTCOMES),
            number(found.retried),
            number(found.truncated, percent(found.truncated)),
            Cell(alarms or "none", (json.dumps(dict(found.alarms)),)),
            words("; ".join(found.causes)),
        )
        rows.append(Row(cells))
    note = (
        "Retried: attempts that failed, of runs that were tried again. Truncated: mean share of completions "
        "over the evaluations of all runs; 10 to 15 % went with runs that broke in the paper."
    )
    return Table("stability", "Stability", columns, tuple(rows), note)


def scores_table(scores: Sequence[ForecastScore]) -> Table:
    """Forecasts by the share of their target's compute at which they were frozen."""
    rivals = [name for name in RIVALS if any(name in score.rivals_rms for score in scores)]
    columns = (
        TableColumn("made at", ("share",)),
        TableColumn("judged", ("forecasts",)),
        TableColumn("open", ("open",)),
        TableColumn("coverage", ("coverage",)),
        TableColumn("mean width", ("width",)),
        TableColumn("interval score", ("score",)),
        TableColumn("rms error", ("rms",)),
        TableColumn("bias", ("bias",)),
        *(TableColumn(f"rms: {name}", (f"rms_{re.sub('[^a-z]+', '_', name)}",)) for name in rivals),
    )
    rows = []
    for score in scores:
        cells = (
            number(score.share, percent(score.share)),
            number(score.forecasts),
            number(score.open),
            number(score.coverage, percent(score.coverage)),
            *map(_fine, (score.width, score.score, score.rms)),
            number(score.bias, signed(score.bias)),
            *(_fine(score.rivals_rms.get(name)) for name in rivals),
        )
        rows.append(Row(cells))
    note = (
        "Every forecast was on the disk before its outcome. Open: forecasts without one, as their runs "
        "failed, were stopped or are under way. Coverage: share of intervals that held what was measured. "
        "Interval score: width, plus 40 times (at 95 %) the distance by which an outcome was missed; lower "
        "is better. The rivals saw the same evaluations, and are pooled where they answered."
    )
    return Table("forecast_scores", "Frozen forecasts, by share of the compute", columns, tuple(rows), note)


def forecasts_table(verdict: StudyVerdict) -> Table:
    """One row per frozen forecast."""
    columns = (
        TableColumn("arm", ("arm",), prose=True),
        TableColumn("seed", ("seed",)),
        TableColumn("made at compute", ("compute",)),
    )
    found = []
    for one in verdict.forecasts:
        made = one.forecast
        spent = plain(made.compute / unit_for(made.axis, made.target_compute).size)
        cells = words(one.arm), number(one.seed), number(made.compute, spent)
        found.append((cells, made, one.outcome))
    return frozen_table("Every frozen forecast", columns, found)


def decisions_table(verdict: StudyVerdict) -> Table:
    """What the study decided while it ran."""
    unit = unit_for(verdict.axis, verdict.budget)
    columns = (
        TableColumn("arm", ("arm",), prose=True),
        TableColumn("decision", ("decision",), prose=True),
        TableColumn("why", ("budget", "probability", "value", "tried"), prose=True),
        TableColumn(f"saved ({unit.name})", ("saved",)),
    )
    rows = tuple(_decision_row(row, unit) for row in verdict.study.decisions)
    note = "A stopped arm keeps its runs up to that budget, and is judged by them."
    return Table("decisions", "Decisions during the study", columns, rows, note)


def _decision_row(row: Mapping[str, Any], unit: Unit) -> Row:
    budget, probability, saved = (as_float(row.get(key)) for key in ("budget", "probability", "saved"))
    value, tried = as_float(row.get("value")), as_mapping(row.get("tried"))
    gains = as_mapping(row.get("gains"))
    if row["decision"] == "learning rate":
        listed = ", ".join(f"{key}: {rate(result)}" for key, result in tried.items())
        text = f"{value:g}" + (f" of {len(tried)} tried ({listed})" if tried else "")
    elif row["decision"] == "combined":
        listed = ", ".join(f"{arm} {signed(as_float(gain))}" for arm, gain in gains.items())
        text = f"pass rate at the budget, less that of the base: {listed}"
    else:
        known = "not told" if math.isnan(probability) else f"{probability:.3f}"
        text = f"at {unit.show(budget)}: probability that its ceiling is below that of the best arm {known}"
    cells = (
        words(row["arm"]),
        words(row["decision"]),
        Cell(text, (budget, probability, value, json.dumps(tried or gains))),
        number(saved, plain(saved / unit.size)),
    )
    return Row(cells, "open" if row["decision"] == "stopped" else "")


def runs_table(verdict: StudyVerdict) -> Table:
    """One row per run."""
    unit = unit_for(verdict.axis, verdict.budget)
    columns = (
        TableColumn("arm", ("arm",), prose=True),
        TableColumn("seed", ("seed",)),
        TableColumn("outcome", ("outcome",), prose=True),
        TableColumn("attempts", ("attempts",)),
        TableColumn("last pass rate", ("last_pass_rate",)),
        TableColumn(f"compute ({unit.name})", ("axis", "compute")),
        TableColumn("fit", ("A", "A_low", "A_high", "B", "C_mid", "identified", "why"), prose=True),
        TableColumn("cause", ("cause",), prose=True),
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
    spent = _spent_compute(verdict, fitted)
    return (
        words(run.plan.arm),
        number(run.plan.seed),
        words(run.outcome),
        number(len(run.attempts)),
        number(last, rate(last)),
        Cell(plain(spent / unit.size), (verdict.axis, spent)),
        _fit_cell(fitted, unit),
        words(run.cause),
    )


def _spent_compute(verdict: StudyVerdict, fitted: FittedRun) -> float:
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
    text = f"A {rate(A)} {rate_interval(fit.intervals.A)}, {shape}"
    return Cell(text, raw, "" if fit.identified else "not identified")


def changes_table(verdict: StudyVerdict) -> Table:
    """What every arm changes of the base recipe."""
    columns = (
        TableColumn("arm", ("arm",), prose=True),
        TableColumn("changes of the base", ("changes",), prose=True),
    )
    rows = []
    for arm in verdict.study.arms:
        changes = Cell(changes_in_words(arm.changes) or "none", (json.dumps(dict(arm.changes)),))
        rows.append(Row((words(arm.name), changes)))
    return Table("changes", "Arms", columns, tuple(rows))


def plan_rows(verdict: StudyVerdict) -> list[tuple[str, str]]:
    """What was planned, as (label, text)."""
    plan = verdict.study.plan
    unit = unit_for(verdict.axis, max(plan["budgets"]))
    seeds = sorted({run.plan.seed for run in verdict.study.runs})
    rows = [
        ("kind of arms", plan["kind"].replace("_", " ")),
        ("base", plan["base"]),
        ("seeds", ", ".join(map(str, seeds)) or DASH),
        ("runs", str(len(verdict.study.runs))),
        ("budgets", f"{', '.join(plain(budget / unit.size) for budget in plan['budgets'])} {unit.name}"),
        ("retries", str(plan["retries"])),
    ]
    if plan["target"] is not None:
        rows.append(("target", f"pass rate {rate(plan['target'])}"))
    if plan["price"] is not None:
        rows.append(("price", f"{plain(plan['price'])} dollars per GPU-hour"))
    return rows


def _fine(value: float | None) -> Cell:
    """Four decimals: errors of forecasts are small."""
    known = value is not None and math.isfinite(value)
    return Cell(f"{value:.4f}".removeprefix("0") if known else DASH, (value,))
