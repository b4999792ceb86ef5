import io
import math

import numpy as np
import pytest

from scalerl import CannotAnswerError, Forecaster, InputError, Points, fit
from scalerl.curve import LOG_LOGISTIC, Curve

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)
COMPUTE = np.linspace(0, 12_000, 17)
RATE = TRUTH(COMPUTE) + np.random.default_rng(0).normal(0, 0.003, 17)


def filled(n=17, **options):
    forecaster = Forecaster(axis="gpu_hours", **options)
    for compute, rate in zip(COMPUTE[:n], RATE[:n], strict=True):
        forecaster.add(float(compute), float(rate))
    return forecaster


def same(one, other):
    return one.to_json([2e4], 0.58, 2e4) == other.to_json([2e4], 0.58, 2e4)


@pytest.mark.parametrize("options", [{}, {"r0": 0.4}, {"r0": "free"}, {"min_compute": 1500.0, "level": 0.8}])
def test_it_is_the_fit_of_the_same_points(options):
    points = Points.from_arrays(COMPUTE, RATE, axis="gpu_hours")
    forecaster = filled(9, **options)
    assert same(forecaster.fit, fit(points.select(np.arange(9)), **options))
    for compute, rate in zip(COMPUTE[9:], RATE[9:], strict=True):
        forecaster.add(compute, rate)
    whole = fit(points, **options)
    assert same(forecaster.fit, whole)
    assert forecaster.forecast(2e4) == whole.forecast(2e4)


def test_noise_and_steps_are_used():
    noise, step, samples = np.full(17, 0.02), np.cumsum(np.arange(1.0, 18.0)), 400.0 + np.arange(17)
    forecaster = Forecaster()
    for row in zip(COMPUTE, RATE, noise, step, samples, strict=True):
        forecaster.add(*row)
    np.testing.assert_array_equal(forecaster.points.samples_N, samples)
    points = Points.from_arrays(COMPUTE, RATE, noise_sd=noise, step=step, samples=samples)
    assert same(forecaster.fit, fit(points))
    assert not same(forecaster.fit, fit(Points.from_arrays(COMPUTE, RATE, step=step)))
    # One evaluation without a step: steps are of no use then, as in a table.
    forecaster.add(13_000, 0.6, 0.02)
    assert forecaster.points.step_N is None


def test_a_fit_is_made_once_per_evaluation():
    forecaster = filled(12)
    first = forecaster.fit
    forecaster.forecast(2e4)
    assert forecaster.fit is first
    forecaster.add(13_000, 0.6)
    assert forecaster.fit is not first
    assert forecaster.fit.n_points == 13


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ((1000, 1.2), "above 1"),
        ((1000, -0.1), "below 0"),
        ((-1, 0.5), "negative"),
        ((math.inf, 0.5), "not a finite number"),
        ((1000, math.nan), "not a finite number"),
        ((1000, None), "not a finite number|float"),
        (("1 000", 0.5), "could not convert string to float: '1 000'"),
        (([1.0, 2.0], 0.5), "compute has 2 axes"),
        ((1000, [[0.5]]), "pass_rate_N has 1 values"),
        ((1000, 0.5, -0.01), "noise sd"),
        ((1000, 0.5, math.inf), "noise sd"),
        ((1000, 0.5, None, math.nan), "step nan"),
        ((1000, 0.5, None, None, 0), "samples"),
        (({}, 0.5), "float"),
    ],
)
def test_garbage_leaves_all_as_it_was(row, what):
    forecaster = filled(8)
    before = forecaster.fit
    with pytest.raises(InputError, match=f"^run, evaluation 9: .*({what})") as raised:
        forecaster.add(*row)
    assert "\n" not in str(raised.value)
    assert len(forecaster) == 8
    assert forecaster.fit is before


def test_before_there_is_an_answer():
    forecaster = filled(3)
    forecaster.add(float(COMPUTE[2]), 0.5)  # a replicate is no new place on the curve
    assert forecaster.line(2e4) == "too early: 3 of 4 evaluations"
    with pytest.raises(CannotAnswerError, match="a curve needs at least 4"):
        forecaster.forecast(2e4)
    assert Forecaster().line(1.0) == "too early: 0 of 4 evaluations"
    flat = Forecaster()
    for step in range(8):
        flat.add(step, 0.5 + 0.001 * (step % 2))
    assert flat.line(20).startswith("forecast of the end (20 compute): 0.5")


def test_the_line_and_the_callback():
    out = io.StringIO()
    forecaster = Forecaster(axis="gpu_hours")
    evaluated = forecaster.callback(20_000, out)
    for compute, rate in zip(COMPUTE, RATE, strict=True):
        evaluated(compute, rate)
    lines = out.getvalue().splitlines()
    assert len(lines) == 17
    assert lines[2] == "too early: 3 of 4 evaluations"
    assert lines[3].endswith("; ceiling not identified yet")
    result = forecaster.fit
    assert result.identified
    forecast = result.forecast(20_000)
    assert lines[-1] == (
        f"forecast of the end (20,000 GPU-hours): {forecast.median:.3f} "
        f"[{forecast.prediction[0]:.3f}, {forecast.prediction[1]:.3f}]; "
        f"ceiling {result.ceiling:.3f} [{result.intervals.A[0]:.3f}, {result.intervals.A[1]:.3f}]"
    )
    assert forecaster.line(1.5e12).startswith("forecast of the end (1.50e+12 GPU-hours)")
    with pytest.raises(InputError):
        evaluated(13_000, 61.0)
    assert len(forecaster) == 17
