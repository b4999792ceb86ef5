"""Changes of level: what they forecast, that they are stated, and that a healthy run has none."""

from __future__ import annotations

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, SEED_PRIOR, Curve, Points, fit
from scalerl.curve.seeds import pooled

SLOW = Curve(LOG_LOGISTIC, 0.6, 1.5, 4000.0, 0.4)
COMPUTE = np.linspace(0.0, 10_000.0, 41)


def run_of(mean_N: np.ndarray, sd: float = 0.006, seed: int = 0) -> Points:
    noise_N = np.random.default_rng(seed).normal(0.0, sd, len(mean_N))
    return Points.from_arrays(COMPUTE[: len(mean_N)], np.clip(mean_N + noise_N, 0.0, 1.0))


def burst(compute: np.ndarray | float) -> np.ndarray:
    """The pass rate of a run that gains .3 in a burst about 500, and then slowly up to .6."""
    return SLOW(compute) - 0.3 / (1.0 + (np.maximum(compute, 1e-9) / 500.0) ** 6)


def said(points: Points) -> list[str]:
    return [warning for warning in fit(points).warnings if "the level changes" in warning]


def test_a_run_that_has_collapsed_to_zero_stays_there():
    """Without steps the wander that explains the fall made it [0, .59]."""
    y_N = np.array([0.156, 0.408, 0.0, 0.0, 0.0, 0.0])
    result = fit(Points.from_arrays(50.0 * np.arange(6), y_N))
    low, high = result.forecast(500.0).prediction
    assert low == 0.0
    assert high < 0.05
    (warning,) = [one for one in result.warnings if "the level changes" in one]
    assert "by -0.4" in warning
    assert result.noise.wander < -0.3
    assert not result.identified


def test_a_burst_is_part_of_the_curve_before_it_and_after():
    points = run_of(burst(COMPUTE))
    result = fit(points)
    low, high = result.forecast(20_000.0).interval
    assert low < burst(20_000.0) < high
    assert high - low < 0.1
    median_M, _, _ = result.band(np.array([0.0, 100.0, 500.0, 1000.0, 5000.0]))
    assert np.abs(median_M - burst(np.array([0.0, 100.0, 500.0, 1000.0, 5000.0]))).max() < 0.02
    probability, change, size = result.posterior.likeliest_change()
    assert (probability, size) == (pytest.approx(1.0, abs=0.05), pytest.approx(0.3, abs=0.05))
    assert change is not None
    assert np.exp(change.log_at) == pytest.approx(500.0, rel=0.1)
    assert abs(result.noise.wander) < 0.02


def test_draws_of_the_curve_have_the_burst_too():
    """Of which reruns, comparisons and the mean curves of a page are made, that of several seeds as well."""
    fits = [fit(run_of(burst(COMPUTE), seed=seed)) for seed in range(2)]
    early_M = np.array([250.0, 500.0, 1000.0, 20_000.0])
    for result in fits:
        drawn_nM = result.posterior.draws(1024).curves_at(early_M)
        nodes = [result.forecast(float(c)).median for c in early_M]
        np.testing.assert_allclose(np.median(drawn_nM, axis=0), nodes, atol=0.005)
        rerun = result.forecast(250.0).rerun
        assert rerun[0] < burst(250.0) < rerun[1] < 0.2
    mean, _ = pooled([result.posterior.only(0).draws(512) for result in fits], SEED_PRIOR.spread())
    np.testing.assert_allclose(np.median(mean.curves_at(early_M), axis=0), burst(early_M), atol=0.02)


def test_a_single_rise_has_no_change_of_level():
    assert [said(run_of(SLOW(COMPUTE), seed=seed)) for seed in range(5)] == [[]] * 5


def test_the_flat_prior_knows_no_changes():
    assert fit(run_of(burst(COMPUTE)), prior="flat").posterior.changes == ()
