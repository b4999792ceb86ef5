"""The sentence that a page begins with."""

import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import Points, fit
from scalerl.forecast.comparison import Claim, Difference, Pair
from scalerl.numbers import percent, rate, rate_interval
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.answer import answers_of, more_text, plain_pair, sentence_of
from scalerl.view.runs.gathered import RunsView
from scalerl.view.table import Estimate, amount_cell, difference_cell


@pytest.fixture(scope="module")
def shown(run):
    """The run without the forecasts that it froze."""
    points = Points.from_record(run, "flops")
    return ShownRun("one", points, replace(run, forecasts=()), fit(points))


def view_of(run, **options):
    return RunsView((run,), **options)


def test_a_target_is_answered_with_the_probability_and_the_forecast(shown):
    found = {}
    for target in (0.7, 0.9):
        chance, forecast = shown.fit.chance(target, 2e13), shown.fit.forecast(2e13)
        found[chance.verdict] = sentence_of(view_of(shown, budget=2e13, target=target))
        assert found[chance.verdict].startswith(f"Will it reach {rate(target)} by 20 TFLOP? ")
        about = f"about {rate(forecast.median)} {rate_interval(forecast.prediction)}."
        assert found[chance.verdict].endswith(about)
    assert found.keys() == {"go", "no-go"}
    assert "? Yes (over 99 %): " in found["go"]
    assert "? No (under 1 %): " in found["no-go"]


def test_a_recipe_gets_no_verdict_that_its_seeds_do_not_get():
    """Beyond ten times the compute, with no ceiling identified, each is too early whatever its curve says."""
    runs = []
    for seed in range(2):
        compute_N = np.linspace(0.0, 1000.0, 13)
        rate_N = (
            0.3 + 0.2 * compute_N / (compute_N + 700.0) + np.random.default_rng(seed).normal(0, 0.003, 13)
        )
        points = Points.from_arrays(compute_N, rate_N)
        runs.append(ShownRun(f"seed {seed}", points, None, fit(points)))
    assert all(not run.fit.identified and run.fit.probability(0.99, 5e4) < 0.05 for run in runs)
    near = RunsView(tuple(runs), budget=2000.0, target=0.99, recipes={"A": runs})
    assert sentence_of(near).endswith("? No: A.")
    assert sentence_of(replace(near, budget=5e4)).endswith("? Too early: A.")


def test_the_highest_of_several_runs_is_told_by_what_they_are_ordered_by(shown, run):
    """Not by what each froze: that is for the end of its own budget, and of an earlier time."""
    ended = replace(shown, record=run)
    assert sentence_of(view_of(ended)).startswith("Forecast at half of the compute: ")
    lower = replace(
        shown, name="two", points=replace(shown.points, pass_rate_N=shown.points.pass_rate_N - 0.1)
    )
    lower = lower.fitted_with()
    view = RunsView((ended, lower), recipes={"one": [ended], "two": [lower]})
    said = sentence_of(view)
    assert said.startswith(
        f"Of 2 runs one is forecast highest: At {view.unit.show(view.end)} ({view.where}) "
    )


def test_the_only_run_with_a_curve_is_not_said_to_be_the_highest(shown, run):
    other = replace(shown, name="two", fit=None, reason="2 evaluations; a curve needs at least 4")
    view = RunsView((shown, other), recipes={"one": [shown], "two": [other]})
    assert sentence_of(view).startswith("Of 2 runs one alone has a curve: ")


def test_of_many_runs_the_list_says_how_many_more_there_are(shown):
    view = RunsView(tuple(replace(shown, name=f"run {n}", record=None) for n in range(8)), 0.95, 6000.0, 0.5)
    ((_, items, _),) = answers_of(view)
    assert [name for name, _ in items] == [*(f"run {n}" for n in range(6)), "And more."]
    assert items[-1][1] == "2 further runs: the tables have them."
    ((_, items, _),) = answers_of(replace(view, runs=view.runs[:6]))
    assert len(items) == 6


def test_too_early_says_how_much_more_would_tell_where_that_is_within_the_budget(make_run):
    record = make_run(n_evals=8, steps=False)
    points = Points.from_record(record, "flops")
    run = ShownRun("early", points, record, fit(points))
    assert run.fit is not None
    tell, unit = run.fit.compute_to_identify, view_of(run).unit
    assert tell is not None
    amount, _, name = unit.show(tell - points.compute_N[-1]).partition(" ")
    more = f"About {amount} more {name} would identify it."
    assert (more_text(run.fit, tell, unit), more_text(run.fit, 0.99 * tell, unit)) == (more, "")
    assert f"Its ceiling is not known yet. {more}" in sentence_of(view_of(run, budget=2 * tell))
    target = run.fit.forecast(tell).median
    for budget in (0.99 * tell, tell):
        chance, told = run.fit.chance(target, budget), sentence_of(view_of(run, budget=budget, target=target))
        assert chance.verdict == "too early"
        assert f"? Not certain yet. Forecast at {unit.show(budget)}: " in told
        assert f"; chance of {rate(target)}: {percent(chance.probability)}." in told
        assert ("would identify it" in told) == (budget == tell)


def test_without_a_budget_it_is_twice_the_compute_so_far(shown):
    view = view_of(shown)
    assert view.end == 2 * np.max(shown.points.compute_N)
    told = shown.fit.forecast(view.end)
    assert f"(twice the compute so far) about {rate(told.median)} " in sentence_of(view)
    budget = {**shown.record.config, "budget": {"kind": "flops", "amount": 3e13}}
    own = replace(shown, record=replace(shown.record, config=budget))
    assert (view_of(own).end, view_of(own).where) == (3e13, "the end of the run")


def test_a_ratio_without_end_is_said_in_words():
    def text(median):
        return difference_cell(
            Difference("ratio", math.nan, math.nan, median, (0.0, math.inf), (0.0, math.inf))
        ).whole

    assert text(math.inf) == "never reaches it"
    assert text(0.0) == "the other never reaches it"
    assert text(2.0) == "either may never reach it"
    computes = {
        (math.inf, math.inf): "never reaches it",
        (694.0, math.inf): "reached by under half [694, never]",
    }
    assert {ends: amount_cell(Estimate(math.inf, ends)).whole for ends in computes} == computes


def test_a_pair_is_answered_in_one_sentence_without_statistics():
    def claim(verdict, seeds=None, why=""):
        return Claim(verdict, 0.2, 0.4, 0.1, seeds, why)

    def pair(seen, **more):
        found = {"pass_rate_seen": Difference("difference", 0.6, 0.56, -0.04, (-0.08, 0.0), (-0.05, -0.03))}
        ceiling = claim("inconclusive", why="the ceiling of a is not identified")
        rest = {"ceiling": ceiling, "efficiency": claim("not significant", 3)} | more
        fields = {"families": {}, "one_family": 0.8, "compute_seen": 9.0, "crossing": None}
        return plain_pair(Pair("a", "base", seen=seen, differences=found, **rest, **fields))

    by = "(lower by 0.040 ± 0.040 at the compute seen)"
    few, many = claim("not significant", 27), claim("not significant")
    assert pair(claim("not significant", 1)).endswith("; about 1 seed of each would show it.")
    assert "   1 seed of each would detect" in str(claim("not significant", 1))
    assert pair(few) == f"No difference shown yet {by}; about 27 seeds of each would show it."
    assert pair(many) == f"No difference shown yet {by}; more than 100 seeds of each would show it."
    assert pair(claim("inconclusive", why="it jumps")) == f"Nothing can be said yet {by}: it jumps."
    assert pair(claim("lower at the compute seen"), efficiency=claim("reaches it sooner")) == (
        "A difference is shown: lower at the compute seen, by 0.040 ± 0.040; reaches three quarters of its "
        "own gain sooner."
    )
