"""Runs whose shape is not that of a curve: flat, falling, past a peak, not bent, on an uneven clock."""

import numpy as np
import pytest

from scalerl import CannotAnswerError
from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.fit import _clock_is_uneven


@pytest.mark.parametrize(
    ("pass_rate", "message"),
    [
        (np.linspace(0.6, 0.3, 9), "falls"),
        ([0.4] * 9, "does not rise"),
        ([0.40, 0.41, 0.39, 0.40, 0.41, 0.39, 0.40, 0.41, 0.395], "does not rise"),
    ],
)
def test_a_flat_prior_needs_a_rise_and_the_default_forecasts_none(pass_rate, message):
    points = Points.from_arrays(np.arange(9.0), pass_rate)
    with pytest.raises(CannotAnswerError, match=message):
        fit(points, prior="flat")
    result = fit(points)
    low, high = result.forecast(12.0).prediction
    # What falls is forecast to fall on.
    assert low < (0.2 if message == "falls" else pass_rate[-1]) < high
    assert not result.identified
    assert result.verdict(0.9, 12.0) in ("no-go", "too early")


@pytest.mark.parametrize("samples", [None, 800])
@pytest.mark.parametrize("n", [8, 40])
def test_a_run_at_1_throughout_does_not_fall(n, samples):
    samples_N = None if samples is None else np.full(n, samples)
    flat = fit(Points.from_arrays(np.arange(n) * 100.0, np.ones(n), samples=samples_N))
    assert "falls" not in str(flat)
    assert not flat.identified
    assert flat.verdict(0.9, 200.0 * n) == "go"
    # One that starts at 1 and comes down by ever so little does.
    assert "the run falls" in fit(Points.from_arrays(np.arange(n) * 100.0, [1.0] + [0.98] * (n - 1))).why


def test_six_flat_evaluations_are_no_take_off():
    """Of a real run: the flat prior's forecast at step 200 was .79, and what was measured then was .537."""
    rate_N = [0.527, 0.534, 0.541, 0.529, 0.541, 0.547]
    forecast = fit(Points.from_arrays(np.arange(6) * 20.0, rate_N)).forecast(200.0)
    assert forecast.prediction[0] < 0.537 < forecast.prediction[1]
    assert forecast.median == pytest.approx(0.548, abs=0.03)
    assert forecast.prediction[1] - forecast.prediction[0] < 0.2


def test_a_run_past_its_peak_is_forecast_to_fall_on():
    compute_N = np.linspace(0.0, 1000.0, 41)
    rise_N = 0.3 + 0.3 / (1.0 + (100.0 / np.maximum(compute_N, 1e-9)) ** 2)
    rate_N = rise_N - 0.25 * np.maximum(compute_N - 300.0, 0.0) / 1000.0
    noise_N = np.random.default_rng(0).normal(0.0, 0.005, 41)
    early = Points.from_arrays(compute_N[:27], (rate_N + noise_N)[:27])
    result = fit(early)
    low, high = result.forecast(1000.0).interval
    assert low < rate_N[-1] < high < rate_N[26]  # it has fallen by .085 so far, and falls by another .085
    assert not result.identified


def test_a_run_that_has_wandered_far_has_no_identified_ceiling():
    """Real: Qwen3-0.6B, GRPO, MATH-500 every 50 steps; it peaks at once and falls (rasbt, 7_3)."""
    rate_N = [0.156, 0.462, 0.434, 0.428, 0.442, 0.412, 0.37, 0.38, 0.38, 0.336, 0.33]
    result = fit(Points.from_arrays(np.arange(11) * 50.0, rate_N))
    assert not result.identified
    assert result.noise.wander < -0.05
    assert result.verdict(0.5, 1000.0) == "no-go"


def test_a_fall_does_not_count_as_noise_in_what_is_said_of_it():
    compute_N = np.linspace(1, 30, 30)
    noise_N = np.random.default_rng(3).normal(0, 0.006, 30)
    with pytest.raises(CannotAnswerError, match="the pass rate falls") as refused:
        fit(Points.from_arrays(compute_N, 0.6 - 0.01 * compute_N + noise_N), prior="flat")
    said = float(str(refused.value).split("scatter of neighbours ")[1].split(")")[0])
    assert said == pytest.approx(0.006, abs=0.0025)


def test_an_uneven_clock_is_no_misfit_of_the_run():
    """Even in its steps; in hours it stands still for twice as long as it has run, and goes on."""
    rng = np.random.default_rng(9)
    step_N = np.arange(0.0, 4000.0, 100.0)
    curve = Curve(LOG_LOGISTIC, 0.61, 1.9, 900.0, 0.3)
    pass_rate_N = curve(step_N) + rng.normal(0, 0.003, len(step_N))
    hours_N = np.where(step_N < 2000, step_N, step_N + 4000)
    without = fit(Points.from_arrays(hours_N, pass_rate_N))
    assert without.lack_of_fit is not None
    assert without.ceiling is None
    known = fit(Points.from_arrays(hours_N, pass_rate_N, step=step_N))
    assert known.lack_of_fit is None
    assert any("but not in steps: its clock ran unevenly" in warning for warning in known.warnings)


def test_an_even_clock_is_not_blamed():
    """GPU-hours between evaluations of .967 to 1.046, of a real run; and of a run that slows down by 1.5."""
    step_N = np.arange(0.0, 240.0, 10.0)
    even_N = np.cumsum([0.0, *np.linspace(0.967, 1.046, 23)])
    assert not _clock_is_uneven(even_N, step_N)
    assert not _clock_is_uneven(step_N / 3600, step_N)
    assert _clock_is_uneven(np.cumsum([0.0] + [1.0] * 12 + [1.5] * 11), step_N)


def test_a_line_that_has_not_bent_is_no_no_go():
    """.2 + .4 x to half of the run: without a ramp its end, .6, was above the interval."""
    compute_N = np.linspace(0, 5000, 31)
    noise_N = np.random.default_rng(0).normal(0, 0.005, 31)
    points = Points.from_arrays(compute_N, 0.2 + 0.4 * compute_N / 10_000 + noise_N)
    flat = fit(points, prior="flat").chance(0.58, 10_000)  # without a ramp
    assert flat.probability < 0.05
    assert flat.verdict == "too early"
    assert flat.why.endswith("but nothing bends yet, and as it has risen so far the run reaches it")
    result = fit(points)
    low, high = result.forecast(10_000).interval
    assert low < 0.6 < high
    assert result.verdict(0.8, 10_000) == "no-go"
