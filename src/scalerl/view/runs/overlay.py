"""Several runs in one chart, as the JSON that `scalerlChart` (scalerl/view/web/chart.js) draws.

A run is fitted on one compute axis. On another axis the chart draws its curve along the run's clock: its
evaluations have both computes, with linear interpolation between two of them. Beyond the last evaluation, the
rate of the last two continues.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalerl.curve.result import Fit
from scalerl.errors import InputError
from scalerl.forecast.sides import mostly_identified
from scalerl.numbers import short_number, short_numbers, unit_for
from scalerl.quantiles import draw_quantiles, tails
from scalerl.record.devices import HOURS, check_devices, is_of_one_device, mixed_devices
from scalerl.record.reader import RunRecord
from scalerl.view.facts.facts import known_ceiling
from scalerl.view.facts.frozen import Band, frozen_forecasts, judge, main_forecast
from scalerl.view.facts.notices import misfit_in_words
from scalerl.view.facts.sampled import PLACES, places_between, thin
from scalerl.view.facts.shown import RunGroup, ShownRun
from scalerl.view.runs.groups import groupings, recipe_groups, recipe_values
from scalerl.view.runs.panels import logged

MOST_DRAWN = 4000
"""Most evaluations that a chart draws in total: with more, a browser becomes slow."""
_FEWEST_DRAWN, _MOST_OF_ONE = 40, 1200
"""The bounds on the evaluations drawn per run."""
_PLACES_OF_MANY, _MANY = 31, 24
"""Computes of a drawn curve if there are more than `_MANY` runs."""


def overlay(
    runs: Sequence[ShownRun],
    *,
    budget: float | None = None,
    target: float | None = None,
    groups: Sequence[RunGroup] | None = None,
    tasks: Sequence[ShownRun] = (),
) -> dict[str, Any]:
    """Return the data of a chart of these runs: numbers, texts, lists and None, for JSON.

    Args:
        runs: all on one compute axis.
        budget: compute on that axis to mark, up to which curves are drawn; by default a curve ends at the
            run's own budget, else at twice its compute.
        target: pass rate to mark.
        groups: the runs by recipe; by default, runs with the same recipe in config.json are a group.
        tasks: tasks of the mixture of a single run, drawn thin beside it.

    Returns an object with these keys. Compute is on the axis of all fits, except for `runs[].compute`, which
    has every axis; an interval is [low, high]:
        axis                  the axis of all fits, on which the chart opens
        axes[].{key, label, size}   every axis of any run: `shown = compute / size` in units of `label`
        budget, target        as given
        end                   compute to which the chart extends: the budget, or twice the compute so far
        thinned               whether some evaluations are not drawn
        metrics               names of all logged metrics, to be drawn below
        groupings[].by        "recipe", or a key in which the recipes of runs differ
        groupings[].groups[].{name, runs, fit}    a group, the names of its runs, and its mean curve: None, or
                              like the `fit` of a run, with A, identified, window and curve
        runs[].name, .reason  as given; the tasks come last
        runs[].key            key under which a browser stores the name that a user gives it
        runs[].task           whether it is a task of the run
        runs[].recipe         the values of the keys in which recipes differ, as texts
        runs[].logged         {step, values: {METRIC: [...]}}: means over blocks; for a table also compute
        runs[].evaluations    number of evaluations
        runs[].compute.AXIS   compute of every drawn evaluation, for the axes of this run
        runs[].pass_rate, .noise, .step, .used    of each drawn evaluation; noise is one sd or None, step may
                              be None, and used says if it is part of the fit
        runs[].known          the ceiling that was known before the run, or None
        runs[].fit            None without a fit, else:
            .A                [median, low, high]; None if withheld
            .identified, .misfit    whether A is identified; the misfit in words, empty if a curve fits
            .change           compute from which no curve describes the run any more, or None
            .window           interval of the fitted compute
            .curve            {compute, line, low, high}: the median of the mean curve, and the interval; for
                              a misfit, those of the part that holds, or None if there is no such part
        runs[].forecasts[]    forecasts frozen during the run, with compute on their own axis:
            .axis, .step, .made, .target    when it was made, and for which compute
            .median, .interval  of one evaluation at the target
            .measured, .outcome    the pass rate at the target; "inside", "outside" or "not measured"
            .leads            whether it is the forecast made nearest to half of the compute
            .curve            as above, as it was frozen, or None
    """
    drawn = [*runs, *tasks]
    names = [run.name for run in drawn]
    if len(set(names)) < len(names):
        raise InputError("two runs of a chart have one name")
    axes = {run.points.axis for run in drawn}
    if len(axes) != 1:
        found = ", ".join(sorted(axes)) or "none"
        raise InputError(f"all runs of a chart need one compute axis, found {found}")
    axis, named = axes.pop(), [(run.name, run.record) for run in runs]
    check_devices(named, axis)
    most = min(max(MOST_DRAWN // len(drawn), _FEWEST_DRAWN), _MOST_OF_ONE)
    places = _PLACES_OF_MANY if len(drawn) > _MANY else PLACES
    mixed = [one for one in HOURS if mixed_devices(named, one)]
    clocks = [{one: clock_N for one, clock_N in _clocks(run).items() if one not in mixed} for run in drawn]
    spent = max(run.compute for run in runs)
    # Up to the budget of the chart or of the run, else to twice its own compute.
    budgets = [run.budget if budget is None else budget for run in drawn]
    ends = [own if own > 0 else 2 * run.compute for run, own in zip(drawn, budgets, strict=True)]
    fits = [run.fit for run in runs if run.fit is not None]
    level = fits[0].intervals.level if fits else 0.95
    end_of = {run.name: end for run, end in zip(drawn, ends, strict=True)}
    metrics, values = logged(runs)
    recipes = recipe_values(runs)
    shown = [_run(*each, most, places) for each in zip(drawn, clocks, ends, strict=True)]
    for place, one in enumerate(shown):
        one["task"] = place >= len(runs)
        one["recipe"] = {} if one["task"] else {key: text_R[place] for key, text_R in recipes.items()}
        one["logged"] = {"step": [], "values": {}} if one["task"] else values[place]
    return {
        "axis": axis,
        "axes": _units(axis, clocks, max(ends), runs[0].record),
        "budget": budget,
        "target": target,
        "end": short_number(max(ends, default=0.0) if budget is None else max(budget, spent)),
        "thinned": any(len(run.points) > most for run in drawn),
        "metrics": metrics,
        "groupings": [
            {"by": by, "groups": [_group(group, end_of, level, places) for group in made]}
            for by, made in groupings(runs, recipe_groups(runs) if groups is None else groups)
        ],
        "runs": shown,
    }


def _group(group: RunGroup, ends: dict[str, float], level: float, places: int) -> dict[str, Any]:
    found: dict[str, Any] = {"name": group.name, "runs": [run.name for run in group.runs], "fit": None}
    if group.draws is None:
        return found
    compute_N = group.compute_N
    last = max(compute_N[-1], *(ends[name] for name in found["runs"]))
    A = draw_quantiles(group.draws.A_n, np.array([0.5, *tails(level)]))
    found["fit"] = {
        "A": short_numbers(A),
        "identified": mostly_identified(group.fits),
        "window": short_numbers(np.array([0.0, compute_N[-1]])),
        "curve": _curve(group.mean_curve(places_between(compute_N, last, places), level)),
    }
    return found


def _clocks(run: ShownRun) -> dict[str, np.ndarray]:
    """Return the compute of every evaluation on every axis of the run, arrays (N,)."""
    found = {run.points.axis: run.points.compute_N}
    if run.record is not None:
        for axis in run.record.logged_axes():
            found.setdefault(axis, run.record.training_compute(axis))
    return found


def _units(
    axis: str, clocks: Sequence[dict[str, np.ndarray]], end: float, record: RunRecord | None
) -> list[dict[str, Any]]:
    found = []
    for name in dict.fromkeys(name for clock in clocks for name in (axis, *clock)):
        largest = max(float(clock[name].max(initial=0.0)) for clock in clocks if name in clock)
        of_one = is_of_one_device(record, name)  # the same for all, as axes on which they differ are left out
        unit = unit_for(name, max(largest, end if name == axis else 0.0), of_one)
        found.append({"key": name, "label": unit.name, "size": unit.size})
    return found


def _run(run: ShownRun, clocks: dict[str, np.ndarray], end: float, most: int, places: int) -> dict[str, Any]:
    points, fit = run.points, run.fit
    order_N = np.argsort(points.compute_N, kind="stable")
    chosen = order_N[thin(points.pass_rate_N[order_N], most)]
    # Evaluations at the same compute are either all fitted or none.
    used_N = np.isin(points.compute_N, () if fit is None else fit.points.compute_N)
    return {
        "name": run.name,
        "key": run.key,
        "reason": run.reason,
        "evaluations": len(points),
        "compute": {axis: short_numbers(clock_N[chosen]) for axis, clock_N in clocks.items()},
        "pass_rate": short_numbers(points.pass_rate_N[chosen]),
        "noise": short_numbers(points.noise_sd_N[chosen], 3),
        "step": [None] * len(chosen) if points.step_N is None else short_numbers(points.step_N[chosen]),
        "used": used_N[chosen].tolist(),
        "known": short_number(known_ceiling(run.record)),
        "fit": None if fit is None else _fit(fit, run.part, places, end),
        "forecasts": _forecasts(run.record, clocks, places) if run.record else [],
    }


def _fit(fit: Fit, part: Fit | None, places: int, end: float) -> dict[str, Any]:
    drawn, known_N = fit if fit.misfit is None else part, fit.points.compute_N
    curve = None
    if drawn is not None:
        last = drawn.points.compute_N[-1] if fit.misfit else max(known_N[-1], end)
        compute_M = places_between(drawn.points.compute_N, float(last), places)
        curve = _curve(Band(compute_M, *drawn.band(compute_M)))
    at = math.nan if fit.misfit is None or fit.misfit.at is None else fit.misfit.at
    return {
        "A": None if fit.misfit else short_numbers(np.array([fit.median.A, *fit.intervals.A])),
        "identified": fit.identified,
        "misfit": misfit_in_words(fit.lack_of_fit),
        "change": short_number(at),
        "window": short_numbers(known_N[[0, -1]]),
        "curve": curve,
    }


def _curve(band: Band) -> dict[str, Any]:
    return {
        "compute": short_numbers(band.compute_M),
        "line": short_numbers(band.median_M, 4),
        "low": short_numbers(band.lo_M, 4),
        "high": short_numbers(band.hi_M, 4),
    }


def _forecasts(record: RunRecord, clocks: dict[str, np.ndarray], places: int) -> list[dict[str, Any]]:
    made = [one for one in frozen_forecasts(record) if one.axis in clocks and one.target_compute > 0]
    lead = main_forecast(made)
    found = []
    for one in made:
        outcome = judge(record, one)
        shown = {
            "axis": one.axis,
            "step": short_number(one.made_at_step),
            "made": short_number(one.compute),
            "target": short_number(one.target_compute),
            "median": short_number(one.median),
            "interval": short_numbers(np.array(one.prediction)) if math.isfinite(one.width) else None,
            "measured": short_number(outcome.measured.pass_rate) if outcome.measured else None,
            "outcome": outcome.word,
            "curve": one.band and _curve(_thinned(one.band, 2 * places)),
            "leads": one is lead,
        }
        found.append(shown)
    return found


def _thinned(band: Band, most: int) -> Band:
    """Return the stored curve of a forecast, thinned to `most` computes."""
    count = len(band.compute_M)
    chosen = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    return Band(band.compute_M[chosen], band.median_M[chosen], band.lo_M[chosen], band.hi_M[chosen])
