import math

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve
from scalerl.curve.posterior import Draws
from scalerl.curve.seeds import SEED_PRIOR, SeedPrior, pooled, rerun, shifted, theta_moments


def exact_draws(n=20_000, A=0.61, B=1.9, C_mid=2500.0, R_0=0.4):
    """A run whose curve is known without error."""
    A_n, log_b_n, log_mid_n, R_0_n = (np.full(n, v) for v in (A, math.log(B), math.log(C_mid), R_0))
    drift_n = np.zeros(n)
    return Draws(FAMILIES, np.zeros(n, int), A_n, log_b_n, log_mid_n, R_0_n, drift_n, drift_n, (0.0, 1.0))


def test_the_prior_has_the_root_mean_square_that_it_states():
    # The nodes end at 3.5 sd of log tau; what lies beyond holds 1.7 % of tau's second moment at log_sd .7.
    np.testing.assert_allclose(SEED_PRIOR.spread().rms_3, [0.013, 0.08, 0.06], rtol=0.01)
    (effect_3n,) = SEED_PRIOR.spread().effects(200_000)
    np.testing.assert_allclose(effect_3n.std(axis=1), [0.013, 0.08, 0.06], rtol=0.03)
    # Heavy tails: the kurtosis of a normal with log-normal sd is 3 exp(4 log_sd^2) = 21, less what is cut.
    z_n = effect_3n[0] / effect_3n[0].std()
    assert np.mean(z_n**4) > 10


def test_replicates_find_the_seed_sd():
    # 8 recipes of 6 seeds, tau .02 and within-run sd .005: a standard error of .02 / sqrt(2 * 40) = .0022.
    rng = np.random.default_rng(0)
    recipe_R = np.repeat(np.arange(8), 6)
    truth_R3 = rng.normal(0, 1, (8, 3))[recipe_R] + rng.normal(0, 0.02, (48, 3))
    sd_R3 = np.full((48, 3), 0.005)
    spread = SEED_PRIOR.spread().given(truth_R3 + rng.normal(0, 0.005, (48, 3)), sd_R3, recipe_R)
    np.testing.assert_allclose(spread.rms_3, 0.02, atol=0.0066)


def test_restricted_likelihood_of_two_runs_by_hand():
    # Two runs of one recipe: their difference d ~ N(0, 2 (s^2 + tau^2)), and no more is known of tau.
    d, s = 0.03, 0.01
    mean_R3, sd_R3 = np.array([[0.0] * 3, [d] * 3]), np.full((2, 3), s)
    prior = SEED_PRIOR.spread()
    found = prior.given(mean_R3, sd_R3, np.zeros(2, dtype=int))
    variance_T = 2 * (s**2 + prior.tau_3T[0] ** 2)
    weight_T = prior.weight_3T[0] * np.exp(-0.5 * d**2 / variance_T) / np.sqrt(variance_T)
    np.testing.assert_allclose(found.weight_3T[0], weight_T / weight_T.sum(), rtol=1e-10)


def test_single_runs_leave_the_prior_alone():
    prior = SEED_PRIOR.spread()
    found = prior.given(np.array([[0.6, 0.5, 8.0], [0.5, 0.1, 7.0]]), np.full((2, 3), 0.01), np.arange(2))
    np.testing.assert_allclose(found.weight_3T, prior.weight_3T, rtol=1e-12)


def test_a_rerun_differs_by_two_seed_effects():
    # Far out the curve is A, so the sd is sqrt(2) tau; at C_mid it is that of half the ceiling, and of
    # log C_mid times the slope, gain * B / 4.
    draws = exact_draws()

    def at(compute, prior):
        return rerun(draws, prior).curves_at(np.array([compute]))[:, 0]

    far = at(2.5e7, SeedPrior(A=0.01, log_sd=1e-6))
    assert far.std() == pytest.approx(math.sqrt(2) * 0.01, rel=0.03)
    assert far.mean() == pytest.approx(0.61, abs=5e-4)
    middle = at(2500.0, SeedPrior(A=0.01, log_b=0.08, log_mid=0.06, log_sd=1e-6))
    expected = math.sqrt(2) * math.hypot(0.01 / 2, 0.06 * 0.21 * 1.9 / 4)
    assert middle.std() == pytest.approx(expected, rel=0.04)
    np.testing.assert_array_equal(middle, at(2500.0, SeedPrior(A=0.01, log_sd=1e-6)))


def test_moved_ceilings_stay_pass_rates():
    draws = exact_draws(4, A=0.99, R_0=0.98)
    effect_3n = np.array([[-0.1, 0.1, 0.0, 0.005], [0.0] * 4, [0.0] * 4])
    np.testing.assert_allclose(shifted(draws, effect_3n).A_n, [0.98, 1.0, 0.99, 0.995])
    # A run that falls does not rise with another seed.
    falling = exact_draws(3, A=0.02, R_0=0.05)
    effect_3n = np.array([[-0.1, 0.1, 0.01], [0.0] * 3, [0.0] * 3])
    np.testing.assert_allclose(shifted(falling, effect_3n).A_n, [0.0, 0.05, 0.03])


def test_moments_of_a_run_are_those_of_its_curve():
    mean_R3, sd_R3 = theta_moments([exact_draws(10)])
    truth = Curve(LOG_LOGISTIC, 0.61, 1.9, 2500.0, 0.4)
    np.testing.assert_allclose(mean_R3, [[truth.A, math.log(truth.B), math.log(truth.C_mid)]])
    np.testing.assert_allclose(sd_R3, 0.0, atol=1e-12)


def test_runs_are_pooled_by_what_each_is_worth():
    # sd .03 and 0 against a seed rms of .013 and the rest exact: variances (in units of the seed's) of
    # 1 + (.03 / .013)^2 / 3 = 2.775 and 1, so weights of .2649 and .7351, and a share of .6106.
    n = 10_000
    vague, sharp = exact_draws(n, A=0.5), exact_draws(n, A=0.6)
    vague.A_n[::2] += 0.03
    vague.A_n[1::2] -= 0.03
    mean, share = pooled([vague, sharp], SeedPrior(log_sd=1e-6).spread())
    assert mean.A_n.mean() == pytest.approx(0.6 - 0.2649 * 0.1, abs=1e-5)
    assert mean.A_n.std() == pytest.approx(0.2649 * 0.03, abs=1e-5)
    assert share == pytest.approx(0.6106, abs=1e-4)
