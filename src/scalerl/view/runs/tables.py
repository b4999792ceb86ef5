"""The tables of several runs: their curves, their frozen forecasts, the comparison, and their health."""

import math
from collections.abc import Iterable, Mapping, Sequence
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
    Estimate,
    Row,
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
    """All tables that have something to say, in the order of the page."""
    made = (
        curves_table(view),
        task_table(view),
        comparison_table(view, view.comparison) if view.comparison is not None else None,
        forecasts_table(view) if any(run.record and run.record.forecasts for run in view.runs) else None,
        health_table(view),
    )
    return [table for table in made if table is not None]


def curves_table(view: RunsView) -> Table:
    """One row per run: its curve, what is forecast at the budget, and the verdict on the target."""
    headers = ["run", "evaluations", "last pass rate", "ceiling A", "efficiency B"]
    headers.append(f"C_mid ({view.unit.name})")
    note = (
        f"Posterior medians with {percent(view.level)} intervals. A averages the families of curves, B and "
        "C_mid are for the log-logistic curve."
    )
    if view.end > 0:
        headers += [f"forecast at {view.unit.show(view.end)}, one evaluation", "another seed"]
        note += (
            f" The forecast is the median of the mean curve at {view.where} with the interval of one "
            "evaluation there, its noise included; another seed: that of the mean curve of a rerun of the "
            "recipe."
        )
    asked = f"reaches {rate(view.target)}?"
    if view.budget is not None and view.target is not None:
        headers.append(asked)
    headers.append("ceiling identified")
    rows = tuple(_curve_row(view, run) for run in view.runs)
    prose = ("run", asked, "ceiling identified")
    return Table("curves", "Curves and forecasts", tuple(headers), rows, note, prose)


def _curve_row(view: RunsView, run: ShownRun) -> Row:
    fit, fitted = run.fit, run.used
    last = float(fitted.pass_rate_N[fitted.compute_N.argmax()]) if len(fitted) else math.nan
    found: dict[str, Estimate] = {}
    if fit is not None:
        names = ("B", "C_mid") if fit.misfit else ("A", "B", "C_mid")
        found = {n: Estimate(getattr(fit.median, n), getattr(fit.intervals, n)) for n in names}
    cells: list[Cell | str] = [
        run.name,
        f"{len(run.points):,}"
        if len(fitted) == len(run.points)
        else f"{len(fitted):,} of {len(run.points):,}",
        rate(last),
        rate_cell(found.get("A"), "withheld" if fit is not None else DASH),
        amount_cell(found.get("B")),
        amount_cell(found.get("C_mid"), view.unit),
    ]
    if view.end > 0:
        forecast = fit.forecast(view.end) if fit is not None else None
        cells.append(rate_cell(forecast and Estimate(forecast.median, forecast.prediction)))
        cells.append(rate_interval(forecast and forecast.rerun))
    if view.budget is not None and view.target is not None:
        cells.append(_verdict_cell(fit, view.target, view.budget) if fit is not None else "")
    if fit is None:
        cells.append(Cell("no fit", run.reason))
    else:
        why_not = misfit_in_words(fit.lack_of_fit)
        cells.append(Cell(why_not or ("yes" if fit.identified else "no"), fit.why))
    return row(*cells, mark="" if fit is not None and fit.identified else "open")


def _verdict_cell(fit: Fit, target: float, budget: float) -> Cell:
    chance = fit.chance(target, budget)
    beside = f"chance {chance_text(chance.probability)}"
    if chance.verdict_rerun != chance.verdict:
        beside += f"; another seed: {chance.verdict_rerun}, {chance_text(chance.probability_rerun)}"
    return Cell(chance.verdict, beside)


def comparison_table(view: RunsView, found: Comparison) -> Table:
    """One row per recipe against the base."""
    measured = [pair.measured_at for pair in found.pairs if pair.measured_at is not None]
    headers = [
        f"against {found.base}",
        *(f"pass rate measured at {view.unit.show(at)}, difference" for at in measured[:1]),
        "pass rate at the compute seen, difference",
        "ceiling A, difference",
        "efficiency: compute to 3/4 of own gain, ratio",
    ]
    asked = []
    if found.budget is not None:
        headers.append(f"pass rate at {view.unit.show(found.budget)}, difference")
        asked.append("pass_rate")
    if found.target is not None:
        headers.append(f"compute to {rate(found.target)}, ratio")
        asked.append("compute_to_target")
    claimed = ("measured",) * bool(measured) + ("pass_rate_seen", "A", "compute_to_own")
    rows = tuple(_pair_row(view, found, pair, claimed, asked) for pair in found.pairs)
    title, note = f"Compared with {found.base}", _how_to_compare(view, found, bool(measured))
    prose = tuple(headers[: 5 if measured else 4])
    return Table("comparison", title, (*headers, "curves cross"), rows, note, prose)


def _how_to_compare(view: RunsView, found: Comparison, measured: bool) -> str:
    """Return a note on the columns of the comparison, and which way they go."""
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


def _pair_row(
    view: RunsView, found: Comparison, pair: Pair, claimed: tuple[str, ...], asked: list[str]
) -> Row:
    differences, crossing = pair.differences, pair.crossing
    cells = [Cell(pair.recipe, found.counted(pair))]
    for name in claimed:
        difference, claim = differences.get(name), pair.claims.get(name)
        if claim is None:  # too few seeds in common
            cells.append(Cell(DASH))
            continue
        alone = difference_cell(difference and replace(difference, interval=difference.runs_only)).beside
        more = [f"these runs: {alone}" if alone and name != "measured" else ""]
        if name == "pass_rate_seen":
            more.append(f"at {view.unit.show(pair.compute_seen)}")
        if claim.verdict == "not significant" and claim.p is not None and claim.p <= 1 - found.level:
            # Why the interval excludes no difference.
            more.append(f"p {p_value(claim.p)} alone, and corrected")
        cells.append(question_cell(difference, claim, "withheld", *more, claim.why))
    cells += [difference_cell(differences.get(name)) for name in asked]
    claims = pair.claims.values()
    is_open = any(claim.verdict == "inconclusive" for claim in claims)
    mark = "moved" if any(map(is_made, claims)) else "open" if is_open else ""
    return row(*cells, chance_text(crossing.probability if crossing else math.nan), mark=mark)


def forecasts_table(view: RunsView) -> Table:
    """One row per forecast that was frozen while a run went on."""
    found = []
    for run in view.runs:
        for forecast in frozen_forecasts(run.record) if run.record is not None else ():
            found.append(((run.name,), forecast, run.outcome(forecast)))
    return frozen_table("Frozen forecasts, and what came of them", ("run",), found)


def frozen_table(
    title: str,
    headers: tuple[str, ...],
    forecasts: Iterable[tuple[tuple[str, ...], FrozenForecast, Outcome]],
) -> Table:
    """Forecasts as they were frozen, beside what was measured.

    `headers` say of which run a forecast is, and each forecast comes with its texts below these.
    """
    prose = (headers[0], "for", "outcome")
    headers += ("made at step", "compute spent", "for", "forecast, one evaluation", "measured", "outcome")
    headers += ("another seed", "ceiling A then", "B then", "C_mid then")
    rows = []
    for about, forecast, outcome in forecasts:
        step, target = forecast.made_at_step, forecast.target_compute
        rows.append(
            row(
                *about,
                f"{step:.0f}" if step >= 0 else "",
                percent(forecast.share),
                unit_for(forecast.axis, target).show(target),
                rate_cell(Estimate(forecast.median, forecast.prediction)),
                rate(outcome.measured.pass_rate if outcome.measured else None),
                Cell(outcome.word, misfit_in_words(forecast.fit.get("lack_of_fit"))),
                rate_interval(forecast.rerun),
                *_then(forecast),
                mark="open" if outcome.inside is False else "",
            )
        )
    note = (
        "As they were written while the run went on; nothing in them was fitted again. The interval is for "
        "one evaluation at the target compute, its noise included. Measured is the evaluation nearest the "
        f"target, within {percent(REACHED)} of it, or {percent(2 * REACHED)} once the run is past it. Then: "
        "by the fit behind it."
    )
    return Table("forecasts", title, headers, tuple(rows), note, prose)


def _then(forecast: FrozenForecast) -> list[Cell]:
    """The curve behind a forecast; older ones stored neither medians nor all intervals."""
    medians, intervals = (as_mapping(forecast.fit.get(name)) for name in ("median", "intervals"))
    unit = unit_for(forecast.axis, forecast.target_compute)
    A, B, C_mid = (
        Estimate(as_float(medians.get(name)), pair(intervals.get(name))) for name in ("A", "B", "C_mid")
    )
    ceiling = rate_cell(None if forecast.fit.get("lack_of_fit") else A, "withheld")
    mid = amount_cell(C_mid, unit)
    named = f"{mid.beside} {unit.name}" if mid.beside != DASH else DASH
    return [ceiling, amount_cell(B), replace(mid, beside=named)]


def health_table(view: RunsView) -> Table:
    """One row per run: alarms, and the health figures of its last evaluation that has them."""
    rows = []
    for run in view.runs:
        is_open = run.record is not None and any(alarm.is_alarm for alarm in run.record.alarms)
        figures = (last_measured(run, name) for name, _ in _HEALTH)
        rows.append(row(run.name, *figures, health_text(run.record), mark="open" if is_open else ""))
    note = "Figures of the last evaluation that has them; a dash is what a run did not log."
    if not all(run.record is not None and run.record.health_is_watched for run in view.runs):
        note += f" {NOT_CHECKED.capitalize()}: {WHO_CHECKS}."
    headers = ("run", *(label for _, label in _HEALTH), "alarms and warnings")
    return Table("health", "Health", headers, tuple(rows), note, (headers[0], headers[-1]))


def latex(fits: Mapping[str, Fit | Sequence[Fit]] | Sequence[Fit] | Fit, at: float | None = None) -> str:
    """Return a small booktabs table for a paper: recipes with A, B, C_mid and the pass rate at `at`.

    One run has its posterior medians and credible intervals, several (seeds) the mean of the medians and
    their standard deviation. A ceiling that the runs do not identify has a star. There is none where no
    saturating curve describes one of the runs.

    Args:
        fits: a fit, the fits of the seeds of a recipe, or a dict from the names of recipes to either; all on
            one axis.
        at: a compute in the unit of the axis, as the budget.

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
