import math
from statistics import NormalDist

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Points, fit, nodes
from scalerl.curve.least_squares import least_squares
from scalerl.curve.noise import make_noise
from scalerl.curve.posterior import posterior
from scalerl.curve.prior import DEFAULT, FLAT, PRIOR_REACH, SD_RANGE
from scalerl.curve.sample import make_sample
from scalerl.quantiles import noisy_quantiles, span_quantiles, weighted_quantiles


def noisy(ratio=2.5, sd=0.008, n=14, seed=5):
    rng = np.random.default_rng(seed)
    truth = Curve(LOG_LOGISTIC, 0.7, 1.7, 3000.0, 0.3)
    compute_N = np.linspace(0, ratio * 3000.0, n + 1)[1:]
    return compute_N, truth(compute_N) + rng.normal(0, sd, n)


PHI = [model.phi for model in FLAT.noise]


def averaged(sample, floor, prior=DEFAULT):
    return posterior(sample, floor, [least_squares(sample, family) for family in FAMILIES], prior)


def jeffreys(share, log_c, bb, mm):
    """log sqrt det of the information on (A, log B, log C_mid), less the factor (A - R_0)^2."""
    slope = share * (1 - share) * np.exp(bb)[:, None]
    J = np.stack([share, slope * (log_c - mm[:, None]), -slope], axis=2)
    return 0.5 * np.linalg.slogdet(np.einsum("cni,cnj->cij", J, J) + 1e-250 * np.eye(3))[1]


def brute_force(compute_N, y_N, r0, at):
    """The same posterior by dense matrices on a plain grid: log B, log C_mid, A, phi and sd."""
    n = len(y_N)
    log_b = np.linspace(*FLAT.log_b, 91)
    log_mid = np.linspace(math.log(compute_N[0] / PRIOR_REACH), math.log(compute_N[-1] * PRIOR_REACH), 161)
    A = np.linspace(r0, 1.0, 161)
    sds = np.geomspace(*SD_RANGE, 24)
    distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    values, logs = [], []
    bb, mm = (g.ravel() for g in np.meshgrid(log_b, log_mid))
    share = 1 / (1 + np.exp(-np.exp(bb)[:, None] * (np.log(compute_N) - mm[:, None])))
    end = 1 / (1 + np.exp(-np.exp(bb) * (math.log(at) - mm)))
    z = y_N - r0
    prior = jeffreys(share, np.log(compute_N), bb, mm)
    for phi in PHI:
        K = phi**distance if phi else np.eye(n)
        inverse, log_det = np.linalg.inv(K), np.linalg.slogdet(K)[1]
        gg = np.einsum("cn,nm,cm->c", share, inverse, share)
        gz = share @ inverse @ z
        rss = z @ inverse @ z - 2 * np.outer(A - r0, gz) + np.outer((A - r0) ** 2, gg)
        # Eight times the least sum of squares is e^-14 in likelihood at 14 points: no mass is left out.
        near = rss < 8 * rss.min()
        log_like = -n * np.log(sds) - rss[near][:, None] / (2 * sds**2)
        top = log_like.max(axis=1, keepdims=True)
        volume = prior + 2 * np.log(np.maximum(A - r0, 1e-12))[:, None]
        logs.append(np.log(np.exp(log_like - top).sum(axis=1)) + top[:, 0] - log_det / 2 + volume[near])
        values.append((r0 + np.outer(A - r0, end))[near])
    value, log_weight = np.concatenate(values), np.concatenate(logs)
    weight = np.exp(log_weight - log_weight.max())
    order = np.argsort(value)
    held = np.cumsum(weight[order]) / weight.sum()
    return np.interp([0.025, 0.5, 0.975], held, value[order])


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_forecast_equals_brute_force_quadrature(ratio):
    compute_N, y_N = noisy(ratio)
    at = 2 * compute_N[-1]
    expected = brute_force(compute_N, y_N, 0.3, at)
    sample = make_sample(Points.from_arrays(compute_N, y_N), 0.3)
    post = posterior(sample, SD_RANGE[0], [least_squares(sample, LOG_LOGISTIC)], FLAT)
    found = weighted_quantiles(post.curve_at(at), post.weight, np.array([0.025, 0.5, 0.975]))
    np.testing.assert_allclose(found, expected, atol=0.05 * (expected[2] - expected[0]))


def test_ar1_precision_is_the_inverse_of_the_correlation():
    compute_N, y_N = noisy(n=6)
    steps = np.array([100, 200, 300, 500, 600, 900.0])
    sample = make_sample(Points.from_arrays(compute_N, y_N, step=steps), None)
    noise = make_noise(sample, 1e-3, FLAT)
    place = np.cumsum(np.array([0, 1, 1, 2, 1, 3.0]))
    for p, phi in enumerate(PHI):
        distance = np.abs(np.subtract.outer(place, place))
        K = phi**distance if phi else np.eye(6)
        precision = np.diag(noise.diagonal_PN[p]) + np.diag(noise.below_PN[p, 1:], -1)
        precision = precision + np.diag(noise.below_PN[p, 1:], 1)
        np.testing.assert_allclose(precision @ K, np.eye(6), atol=1e-12)
        assert noise.log_prior_P[p] == pytest.approx(-0.5 * np.linalg.slogdet(K)[1], abs=1e-12)


def test_walks_are_those_of_gaussian_processes():
    """Against dense matrices: the solved rows, the determinant, and the walk at the last evaluation."""
    compute_N, y_N = noisy(n=12)
    sample = make_sample(Points.from_arrays(np.append(0.0, compute_N), np.append(0.3, y_N)), None)
    noise, n = make_noise(sample, 1e-3, DEFAULT), 13
    t_N = np.log1p(np.append(0.0, compute_N) / compute_N[0]) / math.log1p(compute_N[-1] / compute_N[0])
    np.testing.assert_allclose(sample.clock_N, t_N, atol=1e-12)
    # The slope of a trend is a walk in compute, here in 2,000 steps of it; its sd at the last one is root 3.
    even_N, step_S = np.append(0.0, compute_N) / compute_N[-1], (np.arange(2000) + 0.5) / 2000
    lever_NS = math.sqrt(3 / 2000) * np.maximum(even_N[:, None] - step_S, 0.0)
    slope_S = np.full(2000, math.sqrt(3 / 2000))
    solved_PN = noise._times(sample.y_N)
    for p, model in enumerate(DEFAULT.noise):
        if not model.wander + model.trend:
            assert not noise.walks.filter_PsN[p].any()
            continue
        K = np.eye(n) + model.wander * np.minimum.outer(t_N, t_N) + model.trend * lever_NS @ lever_NS.T
        at_last = np.stack(
            [model.wander * t_N + model.trend * lever_NS @ lever_NS[-1], model.trend * lever_NS @ slope_S]
        )
        own = model.wander * np.diag([1.0, 0.0]) + model.trend * np.array([[1.0, 1.5], [1.5, 3.0]])
        # Waves that are left out have a hundredth of the variance of an evaluation at most.
        np.testing.assert_allclose(solved_PN[p], np.linalg.solve(K, sample.y_N), atol=0.01)
        solved_sN = np.linalg.solve(K, at_last.T).T
        np.testing.assert_allclose(noise.walks.filter_PsN[p], solved_sN, atol=0.03)
        np.testing.assert_allclose(noise.walks.left_Pss[p], own - solved_sN @ at_last.T, atol=0.05)
        log_prior = math.log(model.weight) - 0.5 * np.linalg.slogdet(K)[1]
        assert noise.log_prior_P[p] == pytest.approx(log_prior, abs=0.03)


def test_some_models_of_the_noise_have_the_quadratics_that_they_have_among_all():
    compute_N, y_N = noisy(n=12)
    sample = make_sample(Points.from_arrays(compute_N, y_N), None)
    noise, share = make_noise(sample, 1e-3, DEFAULT), np.linspace(0.0, 0.9, 12)[None] ** [[1.0], [0.3]]
    for models in ([0], [1, 3], [4, 6], [2, 5]):
        few = noise.only(models).quadratic(share, y_N)
        for some, every in zip(few, noise.quadratic(share, y_N), strict=True):
            np.testing.assert_allclose(some, every[models], rtol=1e-9)


@pytest.mark.parametrize("gain", [0.0, 0.02, 0.3])
def test_a_fall_that_is_not_searched_for_has_no_mass(monkeypatch, gain):
    """Where every later mean is above R_0 a flat curve stands for the falling ones."""
    compute_N, y_N = noisy(n=20)
    y_N = 0.3 + (y_N - 0.3) * gain / 0.4
    known = make_sample(Points.from_arrays(compute_N, y_N), None), SD_RANGE[0]
    found = averaged(*known)
    monkeypatch.setattr("scalerl.curve.posterior._best_flat", lambda sample: False)
    searched = averaged(*known)
    for post in (found, searched):
        assert math.isclose(post.weight.sum(), 1.0)
    value, exact = (np.sum(post.curve_at(2e4) * post.weight) for post in (found, searched))
    assert value == pytest.approx(exact, abs=1e-7)


def test_runs_that_wander_are_held_and_those_that_do_not_are_told_so():
    """A flat run that walks by .03 in all over its clock, to twice the compute: 40 of them."""
    held, compute_N = 0, np.arange(1.0, 61.0)
    clock_N = np.log1p(compute_N) / math.log1p(30.0)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        steps_N = rng.normal(0, 0.03, 60) * np.sqrt(np.diff(clock_N, prepend=0.0))
        level_N = 0.4 + np.cumsum(steps_N)
        early = Points.from_arrays(compute_N[:30], level_N[:30] + rng.normal(0, 0.004, 30))
        low, high = fit(early).forecast(60.0).interval
        held += low <= level_N[-1] <= high
    assert held >= 35  # fewer with probability .04 at .95


def test_weights_sum_to_one_and_respect_the_bounds():
    compute_N, y_N = noisy(1.2)
    post = averaged(make_sample(Points.from_arrays(compute_N, y_N), None), SD_RANGE[0])
    assert post.weight.sum() == pytest.approx(1.0)
    assert sum(post.family_weights().values()) == pytest.approx(1.0)
    assert post.A.max() <= 1.0
    assert post.R_0.min() >= 0.0
    rising = post.weight[post.A >= post.R_0].sum()
    assert rising > 0.999
    fallen = averaged(make_sample(Points.from_arrays(compute_N, 0.9 - y_N), None), SD_RANGE[0])
    assert fallen.weight[fallen.A < fallen.R_0].sum() > 0.95


def test_a_family_that_is_ruled_out_still_has_intervals_of_its_own():
    # 600 nearly exact Weibull points leave the log-logistic shape less than 1e-300 of the probability.
    compute_N = np.linspace(10, 9000, 600)
    y_N = Curve(FAMILIES[1], 0.7, 1.7, 3000.0, 0.3)(compute_N)
    post = averaged(make_sample(Points.from_arrays(compute_N, y_N), None), SD_RANGE[0])
    assert post.family_weights()["log_logistic"] < 1e-100
    assert post.family_weights()["weibull"] == pytest.approx(1.0)
    assert post.only(0).weight.sum() == pytest.approx(1.0)


def test_the_known_sampling_noise_is_a_lower_bound():
    compute_N, y_N = noisy(2.5, sd=0.002)
    sample = make_sample(Points.from_arrays(compute_N, y_N), None)
    free, floored = averaged(sample, SD_RANGE[0], FLAT), averaged(sample, 0.01, FLAT)
    assert free.sd_J @ free.sd_weight_J < 0.0045
    assert floored.sd_J[floored.sd_weight_J > 0].min() >= 0.01 * (1 - 1e-12)


def test_quantiles_of_a_normal():
    # Standard normal quantiles: 1.959964, 0 and -1.959964; a point mass with noise is that normal.
    at_Q = np.array([0.025, 0.5, 0.975])
    found = noisy_quantiles(np.array([0.5]), np.array([1.0]), np.array([0.01]), np.array([1.0]), at_Q)
    np.testing.assert_allclose(found, 0.5 + 0.01 * np.array([-1.959964, 0, 1.959964]), atol=1e-4)
    x = np.linspace(-6, 6, 20001)
    np.testing.assert_allclose(
        weighted_quantiles(x, np.exp(-(x**2) / 2), at_Q), [-1.959964, 0, 1.959964], atol=2e-3
    )


def test_quantiles_of_cells_are_those_of_their_density():
    """Between cells that hold much lie those of other families, which hold little: they move no quantile.

    As if a cell's weight lay at its middle, half on either side, the 95 % quantile here would be 8.83.
    """
    at_Q = np.array([0.05, 0.5, 0.95])
    wide_cells2 = np.stack([np.arange(4) * 2.5, np.arange(1, 5) * 2.5], axis=1)
    narrow_cells2 = np.stack([np.arange(40), np.arange(1, 41)], axis=1) / 4.0
    uniform = span_quantiles(wide_cells2, np.full(4, 0.25), at_Q)
    both = np.concatenate([wide_cells2, narrow_cells2]), np.repeat([0.25, 1e-6], [4, 40])
    np.testing.assert_allclose(uniform, [0.5, 5.0, 9.5], rtol=1e-12)
    np.testing.assert_allclose(span_quantiles(*both, at_Q), uniform, rtol=1e-4)
    edge = np.linspace(-6, 6, 41)
    mass = np.diff([NormalDist().cdf(x) for x in edge])
    found = span_quantiles(np.stack([edge[:-1], edge[1:]], axis=1), mass, at_Q)
    np.testing.assert_allclose(found, [-1.644854, 0, 1.644854], atol=0.02)


def test_the_interval_of_the_midpoint_is_that_of_four_times_as_many_rows(monkeypatch):
    compute_N, y_N = noisy(1.5, seed=2)
    points = Points.from_arrays(compute_N, y_N)
    usual = fit(points)
    monkeypatch.setattr(nodes, "_ROWS", 68)
    fine = fit(points)
    for few, many in ((usual.intervals.C_mid, fine.intervals.C_mid), (usual.intervals.B, fine.intervals.B)):
        np.testing.assert_allclose(np.log(few), np.log(many), atol=0.04)
    ratio, exact = usual.identification.ratio_interval, fine.identification.ratio_interval
    np.testing.assert_allclose(np.log(ratio), np.log(exact), atol=0.04)


def test_draws_have_the_quantiles_of_the_nodes():
    compute_N, y_N = noisy(2.5)
    post = averaged(make_sample(Points.from_arrays(compute_N, y_N), None), SD_RANGE[0])
    at = 2 * compute_N[-1]
    drawn = np.quantile(post.draws(4000).curves_at(np.array([at]))[:, 0], [0.025, 0.5, 0.975])
    exact = weighted_quantiles(post.curve_at(at), post.weight, np.array([0.025, 0.5, 0.975]))
    np.testing.assert_allclose(drawn, exact, atol=0.02 * (exact[2] - exact[0]))


def test_before_the_bend_the_prior_neither_ends_the_curve_nor_forgets_its_end():
    """Runs of known truth, to half a C_mid: flat over the evaluations alone, two in five would be missed."""
    truth, held = Curve(LOG_LOGISTIC, 0.6, 1.9, 2000.0, 0.3), []
    compute_N = np.arange(0.0, 1001.0, 100.0)
    for seed in range(30):
        noise_N = np.random.default_rng(seed).normal(0, 0.006, len(compute_N))
        low, high = fit(Points.from_arrays(compute_N, truth(compute_N) + noise_N)).forecast(12_000).interval
        held.append(low <= truth(12_000.0) <= high)
    assert sum(held) >= 25
