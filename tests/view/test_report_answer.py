"""The sentence that a page begins with."""

import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import Points, fit
from scalerl.forecast.comparison import Difference
from scalerl.view.numbers import rate, rate_interval
from scalerl.view.runs.answer import more_text, sentence_of
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.groups import OverlayRun
from scalerl.view.table import difference_cell


@pytest.fixture(scope="module")
def shown(run):
    """The run without the forecasts that it froze."""
    points = Points.from_record(run, "flops")
    return OverlayRun("one", points, replace(run, forecasts=()), fit(points))


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


def test_too_early_says_how_much_more_would_tell(make_run):
    record = make_run(n_evals=8, steps=False)
    points = Points.from_record(record, "flops")
    run = OverlayRun("early", points, record, fit(points))
    assert run.fit is not None
    tell, unit = run.fit.compute_to_tell, view_of(run).unit
    more = "8 times the compute so far is not expected to identify it"
    if tell is not None:
        amount, _, name = unit.show(tell - points.compute_N[-1]).partition(" ")
        more = f"about {amount} more {name} would"
    assert more_text(run.fit, unit) == more
    assert f"Too early to tell its ceiling: {more}." in sentence_of(view_of(run))


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
    assert text(2.0) == "×2 [0, ∞]"
