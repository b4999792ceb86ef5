import math

import numpy as np
import pytest

from scalerl.forecast.scores import covered, distance, half_spread, interval_score

ONE = np.ones(1)


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


def crps_normal_mixture(mean_K, sd_K, weight_K, outcome):
    apart_1 = distance(mean_K[:, None], sd_K, weight_K, np.array([outcome]))
    return float(apart_1[0]) - half_spread(mean_K, sd_K, weight_K)


def test_crps_of_a_sample_by_hand():
    """Without noise about its values a mixture is a weighed sample."""

    def crps(value, weight, outcome):
        return crps_normal_mixture(np.array(value), np.zeros(len(value)), np.array(weight), outcome)

    assert crps([0.3], [1.0], 0.5) == pytest.approx(0.2)
    # Values 0 and 1, alike: E|X - y| = 1/2 for y in [0, 1], E|X - X'| / 2 = 1/4.
    assert crps([1.0, 0.0], [1.0, 1.0], 0.7) == pytest.approx(0.25)
    # Weights 3/4 at 0 and 1/4 at 2, y = 1: E|X - y| = 1, E|X - X'| / 2 = 3/16 x 2 = .375.
    assert crps([0.0, 2.0], [3.0, 1.0], 1.0) == pytest.approx(0.625)


def test_crps_of_one_normal_by_hand():
    # sd (2 phi(0) - 1 / sqrt(pi)) at the mean (Gneiting and Raftery 2007): .2336950 sd.
    centre = math.sqrt(2 / math.pi) - 1 / math.sqrt(math.pi)
    assert centre == pytest.approx(0.2336950, abs=1e-7)
    assert crps_normal_mixture(np.zeros(1), 3 * ONE, ONE, 0.0) == pytest.approx(3 * centre, rel=1e-12)
    # At z = 1: z (2 Phi - 1) + 2 phi - 1 / sqrt(pi) = .6826895 + .4839414 - .5641896.
    assert crps_normal_mixture(np.zeros(1), ONE, ONE, 1.0) == pytest.approx(0.6024413, abs=2e-7)


def test_crps_of_a_mixture_is_the_integral_of_its_definition():
    mean, sd, weight, outcome = (
        np.array([-1.0, 0.5, 2.0]),
        np.array([0.3, 1.0, 0.1]),
        np.array([1.0, 2.0, 1.0]),
        0.8,
    )
    z = np.linspace(-12, 12, 480_001)
    erf = np.vectorize(math.erf)
    cdf = sum(
        w / 4 * (1 + erf((z - m) / s / math.sqrt(2))) / 2 for m, s, w in zip(mean, sd, weight, strict=True)
    )
    integral = float(np.sum((cdf - (z >= outcome)) ** 2) * (z[1] - z[0]))
    assert crps_normal_mixture(mean, sd, weight, outcome) == pytest.approx(integral, abs=3e-5)


def test_a_mixture_without_noise_is_a_sample():
    rng = np.random.default_rng(1)
    value, weight = rng.normal(size=20), rng.uniform(size=20)
    share = weight / weight.sum()
    apart = np.abs(np.subtract.outer(value, value))
    exact = share @ np.abs(value - 0.3) - share @ apart @ share / 2
    assert crps_normal_mixture(value, np.zeros(20), weight, 0.3) == pytest.approx(exact, rel=1e-12)
