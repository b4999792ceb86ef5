"""The tables of several runs: their curves, their frozen forecasts, the comparison, and their health."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scalerl.curve.answers import check_compute
from scalerl.curve.result import Fit
from scalerl.errors import InputError, listed
from scalerl.forecast.comparison import Comparison, Pair
from scalerl.forecast.sides import all_described
from scalerl.numbers import (
    DASH,
    as_float,
    as_mapping,
    chance_text,
    p_value,
    pair,
    percent,
    plain,
    rate,
    rate_interval,
    unit_for,
)
from scalerl.view.facts.frozen import REACHED, FrozenForecast, Outcome, frozen_forecasts
from scalerl.view.facts.notices import (
    NOT_CHECKED,
    WHO_CHECKS,
    health_text,
    is_made,
    misfit_in_words,
    question_cell,
)
from scalerl.view.facts.shown import ShownRun
from scalerl.view.formats import latex_document
from scalerl.view.plotting import fitted_recipes
from scalerl.view.runs.details import task_table
from scalerl.view.runs.gathered import RunsView, last_measured
from scalerl.view.table import (
    Cell,
    Cells,
    Estimate,
    Mark,
    Table,
    amount_cell,
    difference_cell,
    rate_cell,
    row,
    seeds_cell,
)

_HEALTH = (
    ("truncated", "truncated"),
    ("failed", "verification failed"),
    ("entropy", "entropy (nats per token)"),
    ("mean_length", "mean length (tokens)"),
)


def runs_tables(view: RunsView) -> list[Table]:
    """Return all tables that are not empty, in the order of the page."""
    made = (
        curves_table(view),
        task_table(view),
        comparison_table(view, view.comparison) if view.comparison is not None else None,
        forecasts_table(view) if any(run.record and run.record.forecasts for run in view.runs) else None,
        health_table(view),
    )
    return [table for table in made if table is not None]


def curves_table(view: RunsView) -> Table:
    """Return one row per run: its curve, its forecast at the budget, and the verdict on the target."""
    note = (
        f"Posterior medians with {percent(view.level)} intervals. A averages the families of curves, B and "
        "C_mid are for the log-logistic curve."
    )
    if view.end > 0:
        note += (
            f" The forecast is the median of the mean curve at {view.where} with the interval of one "
            "evaluation there, its noise included; another seed: that of the mean curve of a rerun of the "
            "recipe."
        )
    rows = [_curve_cells(view, run) for run in view.runs]
    marks: list[Mark] = ["" if run.fit is not None and run.fit.identified else "open" for run in view.runs]
    prose = ("run", f"reaches {rate(view.target)}?", "ceiling identified")
    return Table.of("curves", "Curves and forecasts", rows, note, prose, marks)


def _curve_cells(view: RunsView, run: ShownRun) -> Cells:
    fit, fitted = run.fit, run.used
    last = float(fitted.pass_rate_N[fitted.compute_N.argmax()]) if len(fitted) else math.nan
    found: dict[str, Estimate] = {}
    if fit is not None:
        names = ("B", "C_mid") if fit.misfit else ("A", "B", "C_mid")
        found = {n: Estimate(getattr(fit.median, n), getattr(fit.intervals, n)) for n in names}
    of = f" of {len(run.points):,}" if len(fitted) < len(run.points) else ""
    cells: dict[str, Cell | str] = {
        "run": run.name,
        "evaluations": f"{len(fitted):,}{of}",
        "last pass rate": rate(last),
        "ceiling A": rate_cell(found.get("A"), "withheld" if fit is not None else DASH),
        "efficiency B": amount_cell(found.get("B")),
        f"C_mid ({view.unit.name})": amount_cell(found.get("C_mid"), view.unit),
    }
    if view.end > 0:
        forecast = fit.forecast(view.end) if fit is not None else None
        ahead = rate_cell(forecast and Estimate(forecast.median, forecast.prediction))
        cells[f"forecast at {view.unit.show(view.end)}, one evaluation"] = ahead
        cells["another seed"] = rate_interval(forecast and forecast.rerun)
    if view.budget is not None and view.target is not None:
        verdict = _verdict_cell(fit, view.target, view.budget) if fit is not None else ""
        cells[f"reaches {rate(view.target)}?"] = verdict
    if fit is None:
        return cells | {"ceiling identified": Cell("no fit", run.reason)}
    why_not = misfit_in_words(fit.lack_of_fit)
    return cells | {"ceiling identified": Cell(why_not or ("yes" if fit.identified else "no"), fit.why)}


def _verdict_cell(fit: Fit, target: float, budget: float) -> Cell:
    chance = fit.chance(target, budget)
    beside = f"chance {chance_text(chance.probability)}"
    if chance.verdict_rerun != chance.verdict:
        beside += f"; another seed: {chance.verdict_rerun}, {chance_text(chance.probability_rerun)}"
    return Cell(chance.verdict, beside)


def comparison_table(view: RunsView, found: Comparison) -> Table:
    """Return one row per recipe, compared with the base."""
    measured = [pair.measured_at for pair in found.pairs if pair.measured_at is not None]
    claimed = (
        {"measured": f"pass rate measured at {view.unit.show(measured[0])}, difference"} if measured else {}
    )
    claimed |= {
        "pass_rate_seen": "pass rate at the compute seen, difference",
        "A": "ceiling A, difference",
        "compute_to_own": "efficiency: compute to 3/4 of own gain, ratio",
    }
    asked = {}
    if found.budget is not None:
        asked["pass_rate"] = f"pass rate at {view.unit.show(found.budget)}, difference"
    if found.target is not None:
        asked["compute_to_target"] = f"compute to {rate(found.target)}, ratio"
    rows = [_pair_cells(view, found, pair, claimed, asked) for pair in found.pairs]
    title, note = f"Compared with {found.base}", _how_to_compare(view, found, bool(measured))
    prose = (f"against {found.base}", *claimed.values())
    return Table.of("comparison", title, rows, note, prose, [_mark(pair) for pair in found.pairs])


def _mark(pair: Pair) -> Mark:
    if any(map(is_made, pair.claims.values())):
        return "moved"
    return "open" if any(claim.verdict == "inconclusive" for claim in pair.claims.values()) else ""


def _how_to_compare(view: RunsView, found: Comparison, measured: bool) -> str:
    """Return a note on the columns of the comparison and their direction."""
    ends = {pair.crossing.within for pair in found.pairs if pair.crossing is not None}
    sought = "from the first evaluation to well beyond the last"
    if len(ends) == 1:
        first, last = ends.pop()
        sought = f"between {view.unit.show(first)} and {view.unit.show(last)}"
    more = " Measured: the mean over common seeds, without a curve; its p is corrected by itself." * measured
    return (
        f"Difference: the recipe less {found.base}; ratio: its compute over that of {found.base} (×2: twice "
        f"the compute); own gain: from R_0 to its A. Intervals, {percent(found.level)} each, include seed "
        "variance, except 'these runs'. p is corrected (Holm) over three questions about every recipe, "
        f"{3 * len(found.pairs)} in all, and intervals are not. Seeds: how many of each would detect "
        "the difference observed, at power .8. The compute seen is the largest that all runs of both sides "
        f"reached; the rest is extrapolated. Curves cross: the probability that the lead changes {sought}."
        f"{more}"
    )


def _pair_cells(
    view: RunsView, found: Comparison, pair: Pair, claimed: Mapping[str, str], asked: Mapping[str, str]
) -> Cells:
    """Return the cells of a pair; `claimed` and `asked` map questions and quantities to headings."""
    differences, crossing = pair.differences, pair.crossing
    cells = {f"against {found.base}": Cell(pair.recipe, found.counted(pair))}
    for name, heading in claimed.items():
        difference, claim = differences.get(name), pair.claims.get(name)
        if claim is None:  # too few seeds in common
            cells[heading] = Cell(DASH)
            continue
        alone = difference_cell(difference and replace(difference, interval=difference.runs_only)).beside
        more = [f"these runs: {alone}" if alone and name != "measured" else ""]
        if name == "pass_rate_seen":
            more.append(f"at {view.unit.show(pair.compute_seen)}")
        if claim.verdict == "not significant" and claim.p is not None and claim.p <= 1 - found.level:
            # Explains an interval that excludes 0 beside a claim that is not significant after correction.
            more.append(f"p {p_value(claim.p)} alone, and corrected")
        cells[heading] = question_cell(difference, claim, "withheld", *more, claim.why)
    cells |= {heading: difference_cell(differences.get(name)) for name, heading in asked.items()}
    return cells | {"curves cross": chance_text(crossing.probability if crossing else math.nan)}


def forecasts_table(view: RunsView) -> Table:
    """Return one row per forecast that was frozen during a run."""
    found = []
    for run in view.runs:
        for forecast in frozen_forecasts(run.record) if run.record is not None else ():
            found.append(({"run": run.name}, forecast, run.outcome(forecast)))
    return frozen_table("Frozen forecasts, and what came of them", found)


def frozen_table(title: str, forecasts: Sequence[tuple[Mapping[str, str], FrozenForecast, Outcome]]) -> Table:
    """Return frozen forecasts with their outcomes, each with the given cells that name its run."""
    rows = []
    for about, forecast, outcome in forecasts:
        step, target = forecast.made_at_step, forecast.target_compute
        cells = {
            "made at step": f"{step:.0f}" if step >= 0 else "",
            "compute spent": percent(forecast.share),
            "for": unit_for(forecast.axis, target).show(target),
            "forecast, one evaluation": rate_cell(Estimate(forecast.median, forecast.prediction)),
            "measured": rate(outcome.measured.pass_rate if outcome.measured else None),
            "outcome": Cell(outcome.word, misfit_in_words(forecast.fit.get("lack_of_fit"))),
            "another seed": rate_interval(forecast.rerun),
        }
        rows.append({**about, **cells, **_then(forecast)})
    note = (
        "As they were written while the run went on; nothing in them was fitted again. The interval is for "
        "one evaluation at the target compute, its noise included. Measured is the evaluation nearest the "
        f"target, within {percent(REACHED)} of it, or {percent(2 * REACHED)} once the run is past it. Then: "
        "by the fit behind it."
    )
    marks: list[Mark] = ["open" if outcome.inside is False else "" for _, _, outcome in forecasts]
    return Table.of("forecasts", title, rows, note, ("run", "arm", "for", "outcome"), marks)


def _then(forecast: FrozenForecast) -> Cells:
    """Return the curve behind a forecast; older forecasts lack medians and some intervals."""
    medians, intervals = (as_mapping(forecast.fit.get(name)) for name in ("median", "intervals"))
    unit = unit_for(forecast.axis, forecast.target_compute)
    A, B, C_mid = (
        Estimate(as_float(medians.get(name)), pair(intervals.get(name))) for name in ("A", "B", "C_mid")
    )
    ceiling = rate_cell(None if forecast.fit.get("lack_of_fit") else A, "withheld")
    mid = amount_cell(C_mid, unit)
    named = f"{mid.beside} {unit.name}" if mid.beside != DASH else DASH
    return {"ceiling A then": ceiling, "B then": amount_cell(B), "C_mid then": replace(mid, beside=named)}


def health_table(view: RunsView) -> Table:
    """Return one row per run: alarms, and health figures of its last evaluation that has them."""
    rows, marks = [], list[Mark]()
    for run in view.runs:
        figures = {label: last_measured(run, name) for name, label in _HEALTH}
        rows.append({"run": run.name, **figures, "alarms and warnings": health_text(run.record)})
        is_open = run.record is not None and any(alarm.is_alarm for alarm in run.record.alarms)
        marks.append("open" if is_open else "")
    note = "Figures of the last evaluation that has them; a dash is what a run did not log."
    if not all(run.record is not None and run.record.health_is_watched for run in view.runs):
        note += f" {NOT_CHECKED.capitalize()}: {WHO_CHECKS}."
    return Table.of("health", "Health", rows, note, ("run", "alarms and warnings"), marks)


def latex(fits: Mapping[str, Fit | Sequence[Fit]] | Sequence[Fit] | Fit, at: float | None = None) -> str:
    """Return a small booktabs table for a paper: recipes with A, B, C_mid and the pass rate at `at`.

    One run has its posterior medians and credible intervals; several runs (seeds) have the mean of the
    medians and their standard deviation. A ceiling that the runs do not identify has a star. It is left out
    if no saturating curve describes one of the runs.

    Args:
        fits: a fit, the fits of the seeds of a recipe, or a dict from the names of recipes to either; all on
            one axis.
        at: a compute in the unit of the axis, such as the budget.

    Raises:
        InputError: `at` is negative or not finite, nothing is given, a run is given twice, or fits are on
            different axes or have intervals of different levels.
    """
    if at is not None:
        check_compute(at, "at")
    recipes = fitted_recipes(fits if isinstance(fits, Mapping) else {"run": fits})
    every = [fit for own in recipes.values() for fit in own]
    if len(levels := sorted({fit.intervals.level for fit in every})) > 1:
        found = listed([f"{level:g}" for level in levels])
        raise InputError(f"all fits need intervals of one level, found {found}: fit them with one level=...")
    unit = unit_for(every[0].axis, max(at or 0.0, *(fit.median.C_mid for fit in every)))
    headers = ["recipe", "A", "B", f"C_mid ({unit.name})", *([] if at is None else [f"at {unit.show(at)}"])]
    rows = []
    for name, own in recipes.items():
        sound = own if all_described(own) else []
        star = "" if all(fit.identified for fit in sound) else "*"
        made = [] if at is None else [fit.forecast(at) for fit in own]
        cells = [
            Cell(f"{name} ({len(own)} seeds)" if len(own) > 1 else name),
            seeds_cell([(fit.median.A, fit.intervals.A) for fit in sound], rate, star=star),
            seeds_cell([(fit.median.B, fit.intervals.B) for fit in own], plain),
            seeds_cell([(fit.median.C_mid, fit.intervals.C_mid) for fit in own], plain, unit.size),
            seeds_cell([(one.median, one.interval) for one in made], rate),
        ]
        rows.append(row(*cells[: len(headers)]))
    note = (
        f"Median and {percent(every[0].intervals.level)} interval, or mean and standard deviation over seeds."
    )
    note += " *: not identified." if any("*" in one.cells[1].text for one in rows) else ""
    return latex_document([Table("curves", "Fitted curves", tuple(headers), tuple(rows), note, ("recipe",))])
