"""Forecasts against outcomes, on records of a few hand-set evaluations."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from scalerl.errors import InputError
from scalerl.record.evaluation import EvalPoint, Flops
from scalerl.record.reader import RunRecord
from scalerl.view.facts.frozen import REACHED, FrozenForecast, judge, main_forecast, sentence


def record(*points: tuple[int, float, float]) -> RunRecord:
    """A record of evaluations (step, flops, pass rate)."""
    evals = [EvalPoint(step=s, pass_rate=r, flops=Flops(generate=c / 2, train=c / 2)) for s, c, r in points]
    return RunRecord(Path("run"), {}, tuple(evals))


RUN = record((0, 0.0, 0.23), (50, 500.0, 0.6), (100, 1000.0, 0.805))
HALF = FrozenForecast(50, "flops", 500.0, 1000.0, median=0.8, prediction=(0.77, 0.83))


@pytest.mark.parametrize(
    ("prediction", "word"),
    [((0.77, 0.83), "inside"), ((0.805, 0.9), "inside"), ((0.7, 0.8), "outside"), ((0.806, 0.9), "outside")],
)
def test_inside_or_outside(prediction, word):
    outcome = judge(RUN, dataclasses.replace(HALF, prediction=prediction))
    assert outcome.word == word
    assert outcome.measured is RUN.evals[2]


def test_the_sentence():
    assert sentence(HALF, judge(RUN, HALF)) == (
        "Forecast at half of the compute: 0.800 [0.770, 0.830]; measured 0.805: inside."
    )
    early = dataclasses.replace(HALF, compute=240.0, prediction=(0.4, 0.7))
    assert sentence(early, judge(RUN, early)).startswith(
        "Forecast at 24 % of the compute: 0.800 [0.400, 0.700];"
    )
    assert "outside" in sentence(early, judge(RUN, early))


def test_a_target_that_is_not_reached_is_not_judged():
    run = record((0, 0.0, 0.23), (50, 500.0, 0.6), (94, 940.0, 0.9))
    outcome = judge(run, HALF)
    assert (outcome.measured, outcome.inside) == (None, None)
    assert outcome.progress == pytest.approx(0.94)
    assert "not measured yet: the run is at 94 % of the forecast's compute" in sentence(HALF, outcome)


def test_within_five_per_cent_the_nearest_evaluation_counts():
    run = record((50, 500.0, 0.6), (96, 960.0, 0.75), (102, 1020.0, 0.81))
    assert judge(run, HALF).measured is run.evals[2]


@pytest.mark.parametrize(
    ("compute", "judged"),
    [
        (1.0 - REACHED - 0.01, False),
        (1.0 - REACHED + 0.01, True),
        (1.0 + 2 * REACHED - 0.01, True),
        (1.0 + 2 * REACHED + 0.01, False),
    ],
)
def test_past_the_target_twice_as_much_is_near_enough(compute, judged):
    run = record((0, 0.0, 0.23), (50, 500.0, 0.6), (100, 1000.0 * compute, 0.8))
    assert (judge(run, HALF).measured is run.evals[2]) == judged


def test_a_forecast_is_not_judged_by_what_it_was_fitted_on():
    run = record((0, 0.0, 0.23), (100, 1000.0, 0.8))
    assert judge(run, dataclasses.replace(HALF, compute=1000.0)).measured is None


def test_without_an_interval_nothing_is_inside():
    outcome = judge(RUN, dataclasses.replace(HALF, prediction=(math.nan, math.nan)))
    assert outcome.word == "not measured"


def test_counters_of_another_axis_are_an_error():
    with pytest.raises(InputError, match="no GPU-hours"):
        judge(RUN, dataclasses.replace(HALF, axis="gpu_hours"))


def test_the_report_leads_with_the_forecast_nearest_half():
    made_at = [
        FrozenForecast(s, "flops", c, 1000.0, 0.8, (0.7, 0.9)) for s, c in ((25, 250), (48, 480), (75, 750))
    ]
    assert main_forecast(made_at) is made_at[1]
    assert main_forecast([]) is None


def test_a_poor_row_is_read_as_unknown():
    forecast = FrozenForecast.from_row({"made_at_step": 3, "prediction": None, "curve": {"compute": [1]}})
    assert math.isnan(forecast.median)
    assert math.isnan(forecast.width)
    assert forecast.band is None
    assert main_forecast([forecast]) is None


def test_the_stored_curve_is_read_as_it_stands():
    curve = {"compute": [1, 2], "median": [0.2, 0.3], "lo": [0.1, None], "hi": [0.3, 0.4]}
    band = FrozenForecast.from_row({"curve": curve}).band
    assert band is not None
    assert band.median_M.tolist() == [0.2, 0.3]
    assert math.isnan(band.lo_M[1])


def test_the_interval_of_a_rerun_is_read_where_it_was_stored():
    row = {"median": 0.8, "prediction": [0.77, 0.83], "compute": 500, "target_compute": 1000, "axis": "flops"}
    fit = {"forecast": [{"compute": 1000.0, "rerun": [0.74, 0.86]}]}
    forecast = FrozenForecast.from_row({**row, "fit_json": fit})
    assert forecast.rerun == (0.74, 0.86)
    assert sentence(forecast, judge(RUN, forecast)).endswith(" inside.")
    for older in (None, {}, {"forecast": []}, {"forecast": [{"rerun": None}]}, {"forecast": 3}):
        forecast = FrozenForecast.from_row({**row, "fit_json": older})
        assert math.isnan(sum(forecast.rerun))
        assert sentence(forecast, judge(RUN, forecast)).endswith(" inside.")


def test_a_forecast_made_where_no_curve_fitted_says_so():
    doubtful = dataclasses.replace(HALF, fit={"lack_of_fit": "jump", "intervals": {"A": None}})
    text = sentence(doubtful, judge(RUN, doubtful))
    assert text.endswith("inside. No saturating curve described the run then: the pass rate jumps.")
