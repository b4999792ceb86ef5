from statistics import NormalDist

import numpy as np
import pytest

from scalerl.forecast.scores import covered, crps, interval_score, levels


def test_interval_score_by_hand():
    low, high = np.full(4, 0.5), np.full(4, 0.6)
    outcome = np.array([0.55, 0.60, 0.48, 0.63])
    # alpha = .05: inside costs the width .1, a miss by .02 costs 40 x .02 more, by .03 40 x .03.
    np.testing.assert_allclose(interval_score(low, high, outcome, 0.95), [0.1, 0.1, 0.9, 1.3], rtol=1e-12)
    assert covered(low, high, outcome).tolist() == [True, True, False, False]


def test_the_central_interval_has_the_best_expected_score():
    """Proper: on a large standard normal sample the true 80 % interval beats its neighbours."""
    outcome = np.random.default_rng(0).normal(size=200_000)

    def mean_score(half_width, shift=0.0):
        return float(np.mean(interval_score(shift - half_width, shift + half_width, outcome, 0.8)))

    true = mean_score(1.2816)
    assert all(true < other for other in (mean_score(1.1), mean_score(1.5), mean_score(1.2816, 0.2)))


def crps_of(value, outcome):
    return float(crps(np.array(value)[:, None], np.array([outcome]))[0])


def test_crps_of_a_sample_by_hand():
    """E|X - y| - E|X - X'| / 2 of the values, alike."""
    assert crps_of([0.3], 0.5) == pytest.approx(0.2)
    # Values 0 and 1: E|X - y| = 1/2 for y in [0, 1], E|X - X'| / 2 = 1/4.
    assert crps_of([0.0, 1.0], 0.7) == pytest.approx(0.25)
    # 3/4 at 0 and 1/4 at 2, y = 1: E|X - y| = 1, E|X - X'| / 2 = 3/16 x 2 = .375.
    assert crps_of([0.0, 0.0, 0.0, 2.0], 1.0) == pytest.approx(0.625)


def test_crps_of_one_normal_by_hand():
    z = np.array([NormalDist().inv_cdf(at) for at in levels(4000)])
    # sd (2 phi(0) - 1 / sqrt(pi)) at the mean (Gneiting and Raftery 2007): .2336950 sd.
    assert crps_of(3 * z, 0.0) == pytest.approx(3 * 0.2336950, rel=1e-3)
    # At z = 1: z (2 Phi - 1) + 2 phi - 1 / sqrt(pi) = .6826895 + .4839414 - .5641896.
    assert crps_of(z, 1.0) == pytest.approx(0.6024413, rel=1e-3)
    # The hundred quantiles of a backtest are enough.
    hundred = np.array([NormalDist().inv_cdf(at) for at in levels(100)])
    assert crps_of(hundred, 1.0) == pytest.approx(0.6024413, rel=0.01)


def test_crps_of_a_sample_is_the_integral_of_its_definition():
    rng = np.random.default_rng(1)
    value = np.sort(rng.normal(size=20))
    z = np.linspace(-6, 6, 240_001)
    cdf = np.searchsorted(value, z, side="right") / 20
    integral = float(np.sum((cdf - (z >= 0.3)) ** 2) * (z[1] - z[0]))
    assert crps_of(value, 0.3) == pytest.approx(integral, abs=1e-4)
