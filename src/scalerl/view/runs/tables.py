"""The tables of several runs: their curves, their frozen forecasts, the comparison, and their health."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from scalerl.curve.result import Fit
from scalerl.forecast.comparison import Claim, Comparison, Difference, Pair
from scalerl.view.facts.frozen import REACHED, FrozenForecast, Outcome, frozen_forecasts, judge
from scalerl.view.facts.notices import NOT_CHECKED, WHO_CHECKS, health_text, misfit_in_words
from scalerl.view.numbers import (
    DASH,
    as_float,
    as_mapping,
    p_value,
    pair,
    percent,
    rate,
    rate_interval,
    unit_for,
)
from scalerl.view.runs.details import task_table
from scalerl.view.runs.gathered import RunsView, last_measured
from scalerl.view.runs.groups import OverlayRun
from scalerl.view.table import (
    Cell,
    Estimate,
    Row,
    Table,
    TableColumn,
    amount_cell,
    difference_cell,
    number,
    rate_cell,
    spread_keys,
    words,
)

_HEALTH = (
    ("truncated", "truncated"),
    ("failed", "verification failed"),
    ("entropy", "entropy (nats per token)"),
    ("mean_length", "mean length (tokens)"),
)


def runs_tables(view: RunsView) -> list[Table]:
    """All tables that have something to say, in the order of the page."""
    found = [curves_table(view)]
    alone = view.runs[0].record if len(view.runs) == 1 else None
    if alone is not None and (by_task := task_table(alone, view.axis, view.level)) is not None:
        found.append(by_task)
    if view.comparison is not None:
        found.append(comparison_table(view))
    if any(run.record is not None and run.record.forecasts for run in view.runs):
        found.append(forecasts_table(view))
    return [*found, health_table(view)]


def curves_table(view: RunsView) -> Table:
    """One row per run: its curve, what is forecast at the budget, and the verdict on the target."""
    columns = [
        TableColumn("run", ("run",), prose=True),
        TableColumn("evaluations", ("evaluations",)),
        TableColumn("last pass rate", ("last_pass_rate",)),
        TableColumn("ceiling A", spread_keys("A")),
        TableColumn("efficiency B", spread_keys("B")),
        TableColumn(f"C_mid ({view.unit.name})", spread_keys("C_mid")),
    ]
    note = (
        f"Posterior medians with {percent(view.level)} intervals. A averages the families of curves, B and "
        "C_mid are for the log-logistic curve."
    )
    if view.end > 0:
        columns += [
            TableColumn(f"forecast at {view.unit.show(view.end)}, one evaluation", spread_keys("forecast")),
            TableColumn("another seed", ("rerun_low", "rerun_high")),
        ]
        note += (
            f" The forecast is the median of the mean curve at {view.where} with the interval of one "
            "evaluation there, its noise included; another seed: that of the mean curve of a rerun of the "
            "recipe."
        )
    if view.budget is not None and view.target is not None:
        columns.append(TableColumn(f"reaches {rate(view.target)}?", ("verdict", "probability"), prose=True))
    columns.append(TableColumn("ceiling identified", ("identified", "why"), prose=True))
    rows = tuple(_curve_row(view, run) for run in view.runs)
    return Table("curves", "Curves and forecasts", tuple(columns), rows, note)


def _curve_row(view: RunsView, run: OverlayRun) -> Row:
    fit, rates_N = run.fit, run.points.pass_rate_N
    last = float(rates_N[run.points.compute_N.argmax()]) if len(rates_N) else math.nan
    found: dict[str, Estimate] = {}
    if fit is not None:
        names = ("B", "C_mid") if fit.misfit else ("A", "B", "C_mid")
        found = {n: Estimate(getattr(fit.median, n), getattr(fit.intervals, n)) for n in names}
    cells = [
        words(run.name),
        number(len(run.points), f"{len(run.points):,}"),
        number(last, rate(last)),
        rate_cell(found.get("A"), "withheld" if fit is not None else DASH),
        amount_cell(found.get("B")),
        amount_cell(found.get("C_mid"), view.unit),
    ]
    if view.end > 0:
        cells += _forecast_cells(fit, view.end)
    if view.budget is not None and view.target is not None:
        cells.append(_verdict_cell(fit, view.target, view.budget))
    cells.append(_identified_cell(run))
    return Row(tuple(cells), "" if fit is not None and fit.identified else "open")


def _forecast_cells(fit: Fit | None, budget: float) -> list[Cell]:
    if fit is None:
        return [rate_cell(None), Cell(DASH, (None, None))]
    forecast = fit.forecast(budget)
    median = rate_cell(Estimate(forecast.median, forecast.prediction))
    return [median, Cell(rate_interval(forecast.rerun), forecast.rerun)]


def _verdict_cell(fit: Fit | None, target: float, budget: float) -> Cell:
    if fit is None:
        return Cell(DASH, (None, None))
    chance = fit.chance(target, budget)
    beside = f"probability {rate(chance.probability)}"
    if chance.verdict_rerun != chance.verdict:
        beside += f"; another seed: {chance.verdict_rerun}, {rate(chance.probability_rerun)}"
    return Cell(chance.verdict, (chance.verdict, chance.probability), beside)


def _identified_cell(run: OverlayRun) -> Cell:
    fit = run.fit
    if fit is None:
        return Cell("no fit", ("no fit", run.reason), run.reason)
    word = misfit_in_words(fit.lack_of_fit) or ("yes" if fit.identified else "no")
    return Cell(word, (word, fit.why), fit.why)


def comparison_table(view: RunsView) -> Table:
    """One row per recipe against the base; asked of a view that has a comparison."""
    found = view.comparison
    assert found is not None
    columns = [
        TableColumn(f"against {found.base}", ("recipe", "runs"), prose=True),
        TableColumn("at the compute seen", _claim_keys("seen"), prose=True),
        TableColumn(
            "pass rate there, difference", ("compute_seen", *spread_keys("pass_rate_seen_difference"))
        ),
        TableColumn("ceiling", _claim_keys("ceiling"), prose=True),
        TableColumn("A, difference", spread_keys("A_difference")),
        TableColumn("efficiency", _claim_keys("efficiency"), prose=True),
        TableColumn("compute to 3/4 of own gain, ratio", spread_keys("compute_to_own_ratio")),
    ]
    asked = []
    if found.budget is not None:
        at = view.unit.show(found.budget)
        columns.append(TableColumn(f"pass rate at {at}, difference", spread_keys("pass_rate_difference")))
        asked.append("pass_rate")
    if found.target is not None:
        columns.append(
            TableColumn(f"compute to {rate(found.target)}, ratio", spread_keys("compute_to_target_ratio"))
        )
        asked.append("compute_to_target")
    columns.append(TableColumn("curves cross", ("crossing_probability",)))
    rows = tuple(_pair_row(view, found, pair, asked) for pair in found.pairs)
    title = f"Compared with {found.base}"
    return Table("comparison", title, tuple(columns), rows, _how_to_compare(view, found))


def _how_to_compare(view: RunsView, found: Comparison) -> str:
    """What the columns of the comparison mean, and which way they go."""
    ends = {pair.crossing.within for pair in found.pairs if pair.crossing is not None}
    sought = "from the first evaluation to well beyond the last"
    if len(ends) == 1:
        first, last = ends.pop()
        sought = f"between {view.unit.show(first)} and {view.unit.show(last)}"
    return (
        f"A difference is the recipe of the row minus {found.base}. A ratio is its compute over that of "
        f"{found.base}: ×2 takes twice the compute, ×0.5 half; own gain: of each recipe, from R_0 to its A. "
        f"Each interval holds with {percent(found.level)} by itself, and counts that seeds of one recipe "
        "differ, but for 'these runs'. p is corrected (Holm) over three questions about every recipe, "
        f"{3 * len(found.pairs)} in all, and the intervals are not: one that excludes no difference may "
        "stand beside 'not significant'. How many seeds of each would tell the difference observed is "
        f"at power .8. Curves cross: the probability that the lead changes {sought}. The compute seen is "
        "the largest that all runs of both sides have reached: the pass rates there are measured, and the "
        "rest is extrapolated. A of both sides is given one family of curves, or the families that either "
        "favours, as probable as that is, so that its difference is not that of the table above."
    )


def _pair_row(view: RunsView, found: Comparison, pair: Pair, asked: list[str]) -> Row:
    seen = _difference_cell(pair.differences["pass_rate_seen"], claim=pair.seen)
    at = f"{seen.beside}\nat {view.unit.show(pair.compute_seen)}"
    differences, crossing = pair.differences, pair.crossing
    probability = crossing.probability if crossing else math.nan
    cells = [
        Cell(pair.recipe, (pair.recipe, found.runs[pair.recipe]), found.counted(pair)),
        _claim_cell(pair.seen, found.level),
        replace(seen, raw=(pair.compute_seen, *seen.raw), beside=at),
        _claim_cell(pair.ceiling, found.level),
        _difference_cell(differences.get("A"), "withheld", pair.ceiling),
        _claim_cell(pair.efficiency, found.level),
        _difference_cell(differences.get("compute_to_own"), claim=pair.efficiency),
        *(_difference_cell(differences.get(name)) for name in asked),
        number(probability, percent(probability)),
    ]
    claims = {claim.verdict for claim in pair.claims.values()}
    moved = claims - {"inconclusive", "not significant"}
    return Row(tuple(cells), "moved" if moved else "open" if "inconclusive" in claims else "")


def _difference_cell(found: Difference | None, without: str = DASH, claim: Claim | None = None) -> Cell:
    """A difference of recipes, and the interval of these very runs below it; and if nothing is claimed."""
    cell = difference_cell(found, without)
    if found is None or not cell.beside:
        return cell
    alone = difference_cell(replace(found, interval=found.runs_only)).beside
    unclaimed = "inconclusive:\n" if claim is not None and claim.verdict == "inconclusive" else ""
    return replace(cell, beside=f"{unclaimed}{cell.beside}\nthese runs:\n{alone}")


def _claim_keys(name: str) -> tuple[str, str, str]:
    return f"{name}_verdict", f"{name}_p_adjusted", f"{name}_seeds"


def _claim_cell(claim: Claim, level: float) -> Cell:
    beside = claim.why
    if not beside:
        beside = f"p {p_value(claim.p_adjusted)}"
        if claim.verdict == "not significant":
            if claim.p is not None and claim.p <= 1 - level:
                beside += f" corrected, {p_value(claim.p)} alone"
            many = ">100" if claim.seeds is None else str(claim.seeds)
            beside += f"; {many} seeds would tell"
    return Cell(claim.verdict, (claim.verdict, claim.p_adjusted, claim.seeds), beside)


def forecasts_table(view: RunsView) -> Table:
    """One row per forecast that was frozen while a run went on."""
    found = []
    for run in view.runs:
        for forecast in frozen_forecasts(run.record) if run.record is not None else ():
            # Counters that a later copy of a run lacks leave a forecast without its outcome.
            logged = run.record is not None and forecast.axis in run.record.logged_axes()
            outcome = judge(run.record, forecast) if run.record and logged else Outcome(None, None, math.nan)
            found.append(((words(run.name),), forecast, outcome))
    columns = (TableColumn("run", ("run",), prose=True),)
    return frozen_table("Frozen forecasts, and what came of them", columns, found)


def frozen_table(
    title: str,
    columns: tuple[TableColumn, ...],
    forecasts: Iterable[tuple[tuple[Cell, ...], FrozenForecast, Outcome]],
) -> Table:
    """Forecasts as they were frozen, beside what was measured.

    `columns` say of which run a forecast is, and each forecast comes with its cells of these columns.
    """
    columns += (
        TableColumn("made at step", ("step",)),
        TableColumn("compute spent", ("share",)),
        TableColumn("for", ("axis", "target_compute"), prose=True),
        TableColumn("forecast, one evaluation", spread_keys("forecast")),
        TableColumn("measured", ("measured",)),
        TableColumn("outcome", ("outcome",), prose=True),
        TableColumn("another seed", ("rerun_low", "rerun_high")),
        TableColumn("ceiling A then", spread_keys("A")),
        TableColumn("B then", spread_keys("B")),
        TableColumn("C_mid then", spread_keys("C_mid")),
    )
    rows = []
    for cells, forecast, outcome in forecasts:
        step, target = forecast.made_at_step, forecast.target_compute
        measured = outcome.measured.pass_rate if outcome.measured else None
        cells += (
            number(step, f"{step:.0f}" if step >= 0 else DASH),
            number(forecast.share, percent(forecast.share)),
            Cell(unit_for(forecast.axis, target).show(target), (forecast.axis, target)),
            rate_cell(Estimate(forecast.median, forecast.prediction)),
            number(measured, rate(measured)),
            Cell(outcome.word, (outcome.word,), misfit_in_words(forecast.fit.get("lack_of_fit"))),
            Cell(rate_interval(forecast.rerun), forecast.rerun),
            *_then(forecast),
        )
        rows.append(Row(cells, "open" if outcome.inside is False else ""))
    note = (
        "As they were written while the run went on; nothing in them was fitted again. The interval is for "
        "one evaluation at the target compute, its noise included. Measured is the evaluation nearest the "
        f"target, within {percent(REACHED)} of it, or {percent(2 * REACHED)} once the run is past it. Then: "
        "by the fit behind it."
    )
    return Table("forecasts", title, columns, tuple(rows), note)


def _then(forecast: FrozenForecast) -> list[Cell]:
    """The curve behind a forecast; older ones stored neither medians nor all intervals."""
    median, intervals = as_mapping(forecast.fit.get("median")), as_mapping(forecast.fit.get("intervals"))
    unit = unit_for(forecast.axis, forecast.target_compute)
    A, B, C_mid = (
        Estimate(as_float(median.get(name)), pair(intervals.get(name))) for name in ("A", "B", "C_mid")
    )
    withheld = bool(forecast.fit.get("lack_of_fit"))
    mid = amount_cell(C_mid, unit)
    shown = [rate_cell(None if withheld else A, "withheld"), amount_cell(B)]
    return [*shown, replace(mid, beside=f"{mid.beside} {unit.name}" if mid.beside != DASH else mid.beside)]


def health_table(view: RunsView) -> Table:
    """One row per run: alarms, and the health figures of its last evaluation that has them."""
    columns = (
        TableColumn("run", ("run",), prose=True),
        *(TableColumn(label, (name,)) for name, label in _HEALTH),
        TableColumn("alarms and warnings", ("alarms",), prose=True),
    )
    rows, unchecked = [], False
    for run in view.runs:
        figures = [(last_measured(run, name)) for name, _ in _HEALTH]
        alarms = health_text(run.record)
        unchecked |= alarms == NOT_CHECKED
        cells = (words(run.name), *(Cell(text, (text,)) for text in figures), words(alarms))
        rows.append(Row(cells, "open" if alarms.partition(" ")[2].startswith("alarm") else ""))
    note = "Figures of the last evaluation that has them; a dash is what a run did not log."
    if unchecked:
        note += f" {NOT_CHECKED.capitalize()}: {WHO_CHECKS}."
    return Table("health", "Health", columns, tuple(rows), note)


def recipes_table(fits: Mapping[str, Fit | Sequence[Fit]], at: float | None = None) -> Table:
    """Return a small table for a paper: a row per recipe, with A, B, C_mid and the mean curve at `at`.

    One run has its posterior median and credible interval, several (seeds) have the mean of the medians and
    their standard deviation. A ceiling has a star where the runs do not identify it, and is withheld where no
    saturating curve describes them.

    Args:
        fits: a fit, or the fits of the seeds, by the name of the recipe; all on one axis.
        at: a compute in the unit of the axis, for the last column.

    Raises:
        InputError: `at` is negative or not finite.
    """
    recipes = {name: list(own) if isinstance(own, Sequence) else [own] for name, own in fits.items()}
    every = [fit for own in recipes.values() for fit in own]
    unit = unit_for(every[0].axis, max(at or 0.0, *(fit.median.C_mid for fit in every)))
    columns = [
        TableColumn("recipe", ("recipe",), prose=True),
        TableColumn("A", spread_keys("A")),
        TableColumn("B", spread_keys("B")),
        TableColumn(f"C_mid ({unit.name})", spread_keys("C_mid")),
    ]
    if at is not None:
        columns.append(TableColumn(f"at {unit.show(at)}", spread_keys("pass_rate")))
    rows = []
    for name, own in recipes.items():
        sound = [fit for fit in own if fit.misfit is None]
        star = "" if all(fit.identified for fit in sound) else "*"
        cells = [
            words(f"{name} ({len(own)} seeds)" if len(own) > 1 else name),
            _of_seeds([Estimate(fit.median.A, fit.intervals.A) for fit in sound], rate_cell, star),
            _of_seeds([Estimate(fit.median.B, fit.intervals.B) for fit in own], amount_cell),
            _of_seeds(
                [Estimate(fit.median.C_mid, fit.intervals.C_mid) for fit in own],
                lambda one: amount_cell(one, unit),
            ),
        ]
        if at is not None:
            found = [fit.forecast(at) for fit in own]
            cells.append(_of_seeds([Estimate(one.median, one.interval) for one in found], rate_cell))
        rows.append(Row(tuple(cells)))
    level = percent(every[0].intervals.level)
    note = (
        f"One run: posterior median and {level} credible interval; seeds: mean and standard deviation of "
        "their medians. *: the data do not identify the ceiling."
    )
    return Table("recipes", "Parameters of the curves", tuple(columns), tuple(rows), note)


def _of_seeds(found: Sequence[Estimate], cell: Callable[[Estimate | None], Cell], mark: str = "") -> Cell:
    """The median of one run with its interval, or mean and standard deviation of several."""
    if len(found) < 2:
        one = cell(found[0] if found else None)
        return replace(one, text=f"{one.text}{mark if found else ''}")
    median_N = np.array([one.median for one in found])
    mean, sd = (cell(Estimate(x, (math.nan, math.nan))).text for x in (median_N.mean(), median_N.std(ddof=1)))
    return Cell(f"{mean} ± {sd}{mark}", (float(median_N.mean()), None, None))
