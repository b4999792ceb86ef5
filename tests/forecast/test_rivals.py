import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, POWER_LAW, Curve, Points
from scalerl.errors import CannotAnswerError
from scalerl.forecast.backtest import backtest
from scalerl.forecast.backtest_result import OURS
from scalerl.forecast.rivals import (
    BANK_RIVALS,
    Part,
    Seen,
    fit_last_value,
    fit_log_linear,
    fit_power_law,
)

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)
TAILS = np.array([0.025, 0.975])
HALF = 1.959964  # of a normal 95 % interval, in sd


def a_run(seed=0, n=25, top=10_000.0, sd=0.004, source="run"):
    compute_N = np.linspace(0, top, n)
    noise_N = np.random.default_rng(seed).normal(0, sd, n)
    return Points.from_arrays(compute_N, TRUTH(compute_N) + noise_N, source=source)


def seen(points, others=(), r0=None):
    return Seen(points, float(points.compute_N.max()), r0, None, "no fit", others)


def predict(name, data, compute):
    found = BANK_RIVALS[name](data, np.array(compute, dtype=float), TAILS)
    assert found.value_QK is not None
    return found.point_K, found.value_QK


@pytest.mark.parametrize(
    ("name", "truth", "free"),
    [("least squares, Wald", TRUTH, 4), ("power law, Wald", Curve(POWER_LAW, 0.6, 0.7, 300.0, 0.0), 3)],
)
def test_the_errors_of_a_wald_interval_sum_to_the_parameters(name, truth, free):
    """The leverages of a least-squares fit sum to its free parameters: s^2 (1 + p / n) on average."""
    compute_N = np.linspace(500, 12_000, 24)
    y_N = truth(compute_N) + np.random.default_rng(2).normal(0, 0.004, 24)
    point_K, (low_K, high_K) = predict(name, seen(Points.from_arrays(compute_N, y_N)), compute_N)
    variance = np.sum((y_N - point_K) ** 2) / (24 - free)
    assert np.mean(((high_K - low_K) / (2 * HALF)) ** 2) == pytest.approx(
        variance * (1 + free / 24), rel=1e-4
    )
    np.testing.assert_allclose((low_K + high_K) / 2, point_K, atol=1e-9)


def test_the_bootstrap_is_seeded_and_as_wide_as_wald_where_the_curve_is_known():
    late = seen(a_run(n=60, top=25_000.0))
    point_K, value_QK = predict("least squares, bootstrap", late, [26_000, 30_000])
    _, again_QK = predict("least squares, bootstrap", late, [26_000, 30_000])
    np.testing.assert_array_equal(value_QK, again_QK)
    wald_K, wald_QK = predict("least squares, Wald", late, [26_000, 30_000])
    np.testing.assert_array_equal(point_K, wald_K)
    ratio_K = np.diff(value_QK, axis=0) / np.diff(wald_QK, axis=0)
    assert (ratio_K > 0.75).all()
    assert (ratio_K < 1.33).all()


def test_a_random_walk_by_hand():
    # Steps of .2 over 1 and -.1 over 2: (.04 + .01) / 3 for a unit of compute, .05 for the three to 7.
    walk = seen(Points.from_arrays([4, 1, 2, 2], [0.2, 0.1, 0.25, 0.35]))
    point_K, value_QK = predict("random walk", walk, [4.0, 7.0])
    np.testing.assert_allclose(point_K, [0.2, 0.2])
    np.testing.assert_allclose(value_QK[1] - 0.2, [0, HALF * np.sqrt(0.05)], rtol=1e-6)


def test_the_band_of_the_last_value_is_that_of_other_runs():
    # At 1.5 times the cut: .1 and -.2 away from their last values.
    others = [
        Part(10.0, Points.from_arrays([10], [0.3]), Points.from_arrays([15, 20], [0.4, 0.9])),
        Part(100.0, Points.from_arrays([90], [0.5]), Points.from_arrays([140, 160], [0.4, 0.2])),
    ]
    run = seen(Points.from_arrays([1, 2], [0.1, 0.6]), others)
    point_K, value_QK = predict("last value, other runs", run, [3.0])
    assert point_K == pytest.approx(0.6)
    assert value_QK[1, 0] - 0.6 == pytest.approx(HALF * np.sqrt((0.01 + 0.04) / 2 * 1.5))
    with pytest.raises(CannotAnswerError, match="1 other runs"):
        predict("last value, other runs", seen(run.points, others[:1]), [3.0])


@pytest.mark.parametrize("points", [([0], [0.3]), ([0, 0], [0.3, 0.4]), (np.arange(9), np.full(9, 0.5))])
@pytest.mark.parametrize("name", list(BANK_RIVALS))
def test_little_data_and_exact_data_are_refused_or_forecast(name, points):
    run = seen(Points.from_arrays(*points), [Part(1.0, a_run(), a_run(1))] * 2)
    if run.compute == 0:
        run = replace(run, compute=1.0)
    try:
        found = BANK_RIVALS[name](run, np.array([20.0]), TAILS)
    except CannotAnswerError:
        return
    assert np.isfinite(found.point_K).all()
    assert np.isfinite(found.value_QK).all()


def test_what_came_later_in_a_run_changes_no_forecast_of_it():
    """And what came later in other runs changes that of the one rival that learns from them."""
    runs = [a_run(seed, source=f"run {seed}") for seed in range(3)]
    own = runs[0]
    changed = replace(own, pass_rate_N=np.where(own.compute_N > 5000, 0.9, own.pass_rate_N))
    plain, other = (
        backtest([first, *runs[1:]], fractions=[0.5], rivals=BANK_RIVALS) for first in (own, changed)
    )
    of_run = plain.cuts[0].later, other.cuts[0].later
    assert set(of_run[0].point_M) == {OURS, *BANK_RIVALS}
    for name in of_run[0].point_M:
        for what in ("point_M", "low_M", "high_M"):
            one, two = (getattr(later, what)[name] for later in of_run)
            np.testing.assert_array_equal(one, two)
    for name in (OURS, *BANK_RIVALS):
        one, two = (test.cuts[1].later.high_M[name] for test in (plain, other))
        assert np.array_equal(one, two) == (name != "last value, other runs")


# The published 100k run (A .645, B 1.70, C_mid 10909) without noise, for R_0 from .20 to .40. The power law
# fitted to ever later parts of it: arXiv 2510.13786 reports 1.0, .74 and about .65.
@pytest.mark.parametrize(
    ("start", "end", "at_20", "at_40"),
    [(1500, 50000, 1.0, 1.0), (5000, 50000, 0.806, 0.733), (30000, 60000, 0.650, 0.648)],
)
def test_the_power_law_mistakes_the_ceiling_of_a_sigmoid(start, end, at_20, at_40):
    compute_N = np.linspace(start, end, 200)
    for r0, ceiling in ((0.20, at_20), (0.40, at_40)):
        truth = Curve(LOG_LOGISTIC, 0.645, 1.70, 10909.0, r0)
        found = fit_power_law(Points.from_arrays(compute_N, truth(compute_N)))
        assert pytest.approx(ceiling, abs=7e-4) == found.A
        assert found.R_0 == 0


def test_the_power_law_gives_its_own_parameters_back():
    # .7 - 8 / C^.5; step 0, where it would be minus infinity, is left out
    compute_N = np.linspace(0, 8000, 17)
    y_N = np.append(0.0, 0.7 - 8 / compute_N[1:] ** 0.5)
    found = fit_power_law(Points.from_arrays(compute_N, y_N))
    D = found.A * found.C_mid**found.B / 2
    np.testing.assert_allclose((found.A, found.B, D), (0.7, 0.5, 8.0), rtol=1e-6)


def test_last_value_is_the_mean_of_the_last_evaluations():
    points = Points.from_arrays([300, 100, 300, 200], [0.5, 0.9, 0.6, 0.1])
    line = fit_last_value(points)
    np.testing.assert_array_equal(line(np.array([1.0, 1e9])), [0.55, 0.55])


def test_log_linear_by_hand():
    # Through (1, .1), (e, .2), (e^2, .6): slope .25, at the mean of the logarithms (1) it is .3.
    line = fit_log_linear(Points.from_arrays([0.0, 1.0, math.e, math.e**2], [0.0, 0.1, 0.2, 0.6]))
    np.testing.assert_allclose(line(np.array([1.0, math.e, math.e**3])), [0.05, 0.3, 0.8], rtol=1e-14)


@pytest.mark.parametrize(("fit", "needed"), [(fit_last_value, 1), (fit_log_linear, 2), (fit_power_law, 3)])
def test_too_few_points_are_said(fit, needed):
    compute_N = np.arange(1.0, needed)
    with pytest.raises(CannotAnswerError, match=f"{needed} are needed"):
        fit(Points.from_arrays(compute_N, np.full(needed - 1, 0.3)))
