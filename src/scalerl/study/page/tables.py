"""The tables of a study, made from its verdict alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from scalerl.forecast.comparison import Pair
from scalerl.forecast.rivals import RIVALS
from scalerl.forecast.sides import all_described
from scalerl.numbers import (
    DASH,
    Unit,
    as_float,
    as_mapping,
    chance_text,
    percent,
    plain,
    rate,
    rate_interval,
    signed,
    unit_for,
)
from scalerl.study.verdict.answers import budget_text, measured_table
from scalerl.study.verdict.arm_fits import ArmSummary, FittedRun
from scalerl.study.verdict.forecast_scores import ForecastScore
from scalerl.study.verdict.verdict import BY_CURVES, StudyVerdict
from scalerl.view.facts.notices import question_cell
from scalerl.view.runs.tables import frozen_table
from scalerl.view.table import Cell, Cells, Mark, Table, amount_cell, changes_in_words, rate_cell, row

_OUTCOMES = ("finished", "failed", "stopped", "under way", "not started")


def mark_of(kind: str) -> Mark:
    """Return the mark of an arm's row and answer, by its verdict."""
    marks: dict[str, Mark] = {"the base": "base", "not significant": "", "never acted": ""}
    return marks.get(kind, "open" if kind in ("inconclusive", "not compared") else "moved")


def study_tables(verdict: StudyVerdict) -> list[Table]:
    """Return all tables that have rows, in the order of the page."""
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
    """Return one row per arm: its curve over its seeds, and its differences from the base."""
    level = percent(verdict.comparison.level) if verdict.comparison else "95 %"
    note = (
        f"Medians with {level} intervals over the seeds of an arm, the variance between seeds included. "
        "Measured: the mean difference over seeds that both have, without a curve, its variance moderated by "
        "those of the other arms. p is corrected (Holm): over the arms of what was measured, over three "
        "questions about every arm of the curves; beside it, how many seeds of each side would detect "
        "the observed difference (power .8)."
    )
    rows = [_arm_cells(verdict, arm) for arm in verdict.arms]
    marks: list[Mark] = [mark_of(verdict.kind(arm.name)) for arm in verdict.arms]
    return Table.of("verdict", "Verdicts", rows, note, ("arm", "verdict"), marks)


def _arm_cells(verdict: StudyVerdict, arm: ArmSummary) -> Cells:
    unit, target = unit_for(verdict.axis, verdict.budget), verdict.study.plan.get("target")
    found, pair, kind = arm.quantities, verdict.pairs.get(arm.name), verdict.kind(arm.name)
    # An arm whose change never acted has no difference, not one of 0.
    measured = None if kind == "never acted" else verdict.measured.get(arm.name)
    without = "base" if kind == "the base" else DASH
    differences = pair.differences if pair else {}
    A, own, at = differences.get("A"), differences.get("compute_to_own"), budget_text(verdict)
    ceiling = rate_cell(found.get("A"), DASH if all_described(arm.fits) else "withheld")
    cells: dict[str, Cell | str] = {
        "arm": arm.name,
        "verdict": Cell(kind, verdict.not_compared.get(arm.name, "") or _reason(pair, kind)),
        f"measured at {at}, against base": question_cell(
            measured and measured.difference, measured and measured.claim, without
        ),
        "ceiling A, against base": question_cell(A, pair and pair.ceiling, "withheld" if pair else without),
        "efficiency: compute to 3/4 of own gain, against base": question_cell(
            own, pair and pair.efficiency, without
        ),
        "ceiling A": _of_runs(ceiling, arm, arm.identified, "identified"),
        # If not all runs have reached the budget, the pass rate there is extrapolated.
        f"pass rate at {at}": _of_runs(
            rate_cell(found.get("pass_rate")), arm, arm.reached(verdict.budget), "there"
        ),
        "seeds": f"{arm.stability.outcomes.get('finished', 0)}/{len(arm.runs)}",
    }
    if target is not None:
        cells[f"{unit.name} to {rate(target)}"] = amount_cell(found.get("compute_to_target"), unit)
    cells["exponent B"] = amount_cell(found.get("B"))
    return cells | {f"C_mid ({unit.name})": amount_cell(found.get("C_mid"), unit)}


def _reason(pair: Pair | None, kind: str) -> str:
    """Return the pass rate seen for a verdict by curves; else the reason shared by all claims on a pair."""
    if pair and kind in BY_CURVES:
        return question_cell(pair.differences.get("pass_rate_seen"), pair.seen).whole
    whys = {claim.why for claim in pair.claims.values()} if pair else set()
    return whys.pop() if len(whys) == 1 else ""


def _of_runs(cell: Cell, arm: ArmSummary, runs: int, what: str) -> Cell:
    """Return the cell, with the number of runs for which it holds beside it if those are not all."""
    fitted = len(arm.fits)
    beside = f"{cell.beside}\n{runs} of {fitted} {what}".lstrip() if runs < fitted else cell.beside
    return Cell(cell.text, beside)


def stability_table(verdict: StudyVerdict) -> Table:
    """Return one row per arm: failures and alarms, and how often they occurred."""
    prose = ("arm", "runs with an alarm", "why runs failed")
    rows = []
    for arm in verdict.arms:
        found = arm.stability
        alarms = ", ".join(f"{kind.replace('_', ' ')} {n}" for kind, n in found.alarms.items())
        counts = (*(found.outcomes.get(outcome, 0) for outcome in _OUTCOMES), found.retried)
        causes = "; ".join(found.causes)
        rows.append(row(arm.name, *map(str, counts), percent(found.truncated), alarms or "none", causes))
    note = (
        "Retried: attempts that failed, of runs that were tried again. Truncated: mean share of completions "
        "over the evaluations of all runs; 10 to 15 % went with runs that broke in the paper."
    )
    headers = (prose[0], *_OUTCOMES, "retried", "truncated", *prose[1:])
    return Table("stability", "Stability", headers, tuple(rows), note, prose)


def scores_table(scores: Sequence[ForecastScore]) -> Table:
    """Return the scores of forecasts by the share of their target's compute at which they were frozen."""
    rivals = [name for name in RIVALS if any(name in score.rivals_rms for score in scores)]
    rows = [
        {
            "made at": percent(score.share),
            "judged": str(score.forecasts),
            "open": str(score.open),
            "coverage": percent(score.coverage),
            "mean width": rate(score.width),
            "interval score": rate(score.score),
            "rms error": rate(score.rms),
            "bias": signed(score.bias),
            **{f"rms: {name}": rate(score.rivals_rms.get(name)) for name in rivals},
        }
        for score in scores
    ]
    note = (
        "Every forecast was on the disk before its outcome. Open: forecasts without one, as their runs "
        "failed, were stopped or are under way. Coverage: share of intervals that held what was measured. "
        "Interval score: width, plus 40 times (at 95 %) the distance by which an outcome was missed; lower "
        "is better. The rivals saw the same evaluations, and are pooled where they answered."
    )
    return Table.of("forecast_scores", "Frozen forecasts, by share of the compute", rows, note)


def forecasts_table(verdict: StudyVerdict) -> Table:
    """Return one row per frozen forecast."""
    found = []
    for one in verdict.forecasts:
        made = one.forecast
        spent = plain(made.compute / unit_for(made.axis, made.target_compute).size)
        about = {"arm": one.arm, "seed": str(one.seed), "made at compute": spent}
        found.append((about, made, one.outcome))
    return frozen_table("Every frozen forecast", found)


def decisions_table(verdict: StudyVerdict) -> Table:
    """Return the table of decisions that the study made while it ran."""
    unit = unit_for(verdict.axis, verdict.budget)
    prose = ("arm", "decision", "why")
    rows = []
    for made in verdict.study.decisions:
        what, mark = made["decision"], "open" if made["decision"] == "stopped" else ""
        saved = plain(as_float(made.get("saved")) / unit.size)
        rows.append(row(made["arm"], what, _why_decided(made, unit), saved, mark=mark))
    note = "A stopped arm keeps its runs up to that budget, and is judged by them."
    headers = (*prose, f"saved ({unit.name})")
    return Table("decisions", "Decisions during the study", headers, tuple(rows), note, prose)


def _why_decided(made: Mapping[str, Any], unit: Unit) -> str:
    if made["decision"] == "learning rate":
        tried = as_mapping(made.get("tried"))
        listed = ", ".join(f"{key}: {rate(result)}" for key, result in tried.items())
        return f"{as_float(made.get('value')):g}" + (f" of {len(tried)} tried ({listed})" if tried else "")
    if made["decision"] == "combined":
        gains = as_mapping(made.get("gains")).items()
        listed = ", ".join(f"{arm} {signed(gain)}" for arm, gain in gains)
        return f"pass rate at the budget, less that of the base: {listed}"
    budget, probability = unit.show(made.get("budget")), as_float(made.get("probability"))
    known = "not known" if math.isnan(probability) else chance_text(probability)
    return f"at {budget}: probability that its ceiling is below that of the best arm {known}"


def runs_table(verdict: StudyVerdict) -> Table:
    """Return one row per run."""
    unit = unit_for(verdict.axis, verdict.budget)
    rows = []
    for fitted in (run for arm in verdict.arms for run in arm.runs):
        run = fitted.run
        counts = str(run.plan.seed), run.outcome, str(len(run.attempts)), rate(run.last_pass_rate)
        spent = plain(fitted.shown.compute / unit.size) if fitted.shown is not None else DASH
        mark = "open" if run.outcome == "failed" else ""
        rows.append(row(run.plan.arm, *counts, spent, _fit_cell(fitted, unit), run.cause, mark=mark))
    headers = ("arm", "seed", "outcome", "attempts", "last pass rate")
    headers += (f"compute ({unit.name})", "fit", "cause")
    return Table("runs", "Runs", headers, tuple(rows), prose=("arm", "outcome", "fit", "cause"))


def _fit_cell(fitted: FittedRun, unit: Unit) -> Cell | str:
    fit = fitted.fit
    if fit is None:
        return fitted.why
    if fit.misfit:
        return f"A withheld: {fit.why}"
    shape = f"B {plain(fit.median.B)}, C_mid {plain(fit.median.C_mid / unit.size)}"
    text = f"A {rate(fit.median.A)} {rate_interval(fit.intervals.A)}, {shape}"
    return Cell(text, "" if fit.identified else "not identified")


def changes_table(verdict: StudyVerdict) -> Table:
    """Return the table of each arm's changes to the base recipe."""
    headers = ("arm", "changes of the base")
    rows = tuple(row(arm.name, changes_in_words(arm.changes) or "none") for arm in verdict.study.arms)
    return Table("changes", "Arms", headers, rows, prose=headers)


def plan_rows(verdict: StudyVerdict) -> list[tuple[str, str]]:
    """Return the plan as rows (label, text)."""
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
