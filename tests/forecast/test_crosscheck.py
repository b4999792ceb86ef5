import dataclasses
import math

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.sample import make_sample
from scalerl.errors import CannotAnswerError
from scalerl.forecast.crosscheck import _replicates, bootstrap, cross_check, profile
from scalerl.numbers import percent

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)


def points(top=8000.0, n=20, sd=0.004, seed=1, **more):
    compute_N = np.linspace(0, top, n + 1)
    noise_N = np.random.default_rng(seed).normal(0, sd, n + 1)
    return Points.from_arrays(compute_N, TRUTH(compute_N) + noise_N, **more)


@pytest.fixture(scope="module", params=[None, 0.4])
def known(request):
    """A run that has seen its bend, with R_0 measured and given."""
    return fit(points(), r0=request.param, prior="flat")


def test_on_a_well_identified_run_the_three_agree(known):
    check = cross_check(known, [16000.0])
    low, high = check.A
    width = high - low
    for other in (check.bootstrap.A, check.profile.interval):
        assert other == pytest.approx(check.A, abs=0.25 * width)
    assert pytest.approx(check.B, abs=0.3 * (check.B[1] - check.B[0])) == check.bootstrap.B
    own, other = check.curve[0][1], check.bootstrap.curve[0][1]
    assert other == pytest.approx(own, abs=0.3 * (own[1] - own[0]))
    assert check.bootstrap.at_bound == 0.0


def test_of_a_long_run_the_three_agree_too():
    """4,000 evaluations are fitted as means of ten: it is of those means that the bootstrap's noise is."""
    check = cross_check(fit(points(n=4000, sd=0.01)))
    low, high = check.A
    for other in (check.bootstrap.A, check.profile.interval):
        assert other == pytest.approx(check.A, abs=0.25 * (high - low))
    assert pytest.approx(check.B, abs=0.3 * (check.B[1] - check.B[0])) == check.bootstrap.B


def test_profile_equals_brute_force(known):
    """Dense matrices on a plain grid of (log B, log C_mid), with R_0 solved for at every ceiling."""
    fitted, found = known.points, profile(known)
    with np.errstate(divide="ignore"):
        log_c = np.log(fitted.compute_N)
    y = fitted.pass_rate_N
    n, first = len(y), int(not math.isinf(log_c[0]))
    place = np.concatenate([np.full(1 - first, -1e9), np.arange(n - 1 + first)])
    K = known.noise.phi ** np.abs(np.subtract.outer(place, place))
    L = np.linalg.inv(np.linalg.cholesky(K))
    bb, mm = np.meshgrid(np.linspace(math.log(1.2), math.log(3), 181), np.linspace(7.5, 8.2, 241))
    g = L @ (1 / (1 + np.exp(-np.exp(bb.ravel()) * (log_c[:, None] - mm.ravel()))))
    one = L.sum(axis=1)[:, None]
    z = (L @ y)[:, None]
    ceilings = np.linspace(0.58, 0.68, 401)
    rss = []
    for A in ceilings:
        h, rest = one - g, z - A * g
        R_0 = (h * rest).sum(axis=0) / (h * h).sum(axis=0) if known.r0_source != "given" else 0.4
        rss.append(((rest - R_0 * h) ** 2).sum(axis=0).min())
    degrees = n - (3 if known.r0_source == "given" else 4)
    t = {17: 2.110, 16: 2.120, 18: 2.101}[degrees]  # tables of Student's t at .975
    within = ceilings[np.array(rss) <= min(rss) * (1 + t**2 / degrees)]
    assert found.interval == pytest.approx((within[0], within[-1]), abs=0.0006)
    assert pytest.approx(ceilings[np.argmin(rss)], abs=0.0006) == found.A


def test_ends_are_open_where_the_likelihood_never_falls():
    early = fit(points(top=2000.0, n=10))
    found = profile(early)
    assert found.interval == (pytest.approx(0.5, abs=0.08), None)
    check = cross_check(early)
    assert "open]" in str(check)
    assert str(check).startswith("given log-logistic, 95 %")
    assert check.to_json()["profile"]["interval"][1] is None
    assert check.bootstrap.A[1] == pytest.approx(1.0)
    assert f"{percent(check.bootstrap.at_bound)} of the bootstrap's ceilings are 1" in str(check)


def test_noise_of_the_bootstrap_has_the_fits_correlation():
    result = fit(points(step=100 * np.array([*range(20), 21])))
    sample = result.sample
    noise_nN = _replicates(sample, 0.5, 40_000, np.random.default_rng(0))
    np.testing.assert_allclose(noise_nN.std(axis=0), 1.0, atol=0.02)
    found = np.corrcoef(noise_nN.T)
    assert found[0, 1] == pytest.approx(0.0, abs=0.02)  # before training: sampling noise alone
    assert found[5, 6] == pytest.approx(0.5, abs=0.02)
    assert found[5, 7] == pytest.approx(0.25, abs=0.02)
    assert found[19, 20] == pytest.approx(0.25, abs=0.02)  # two steps apart


def test_bootstrap_follows_its_seed_and_replicates_count(known):
    one = bootstrap(known, 200, seed=3, at=[0.0, 1e4])
    assert one == bootstrap(known, 200, seed=3, at=[0.0, 1e4])
    assert one != bootstrap(known, 200, seed=4, at=[0.0, 1e4])
    narrow, wide = (bootstrap(fit(points(), level=level), 200).A for level in (0.5, 0.99))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]
    single = points()
    four = Points.from_arrays(np.repeat(single.compute_N, 4), np.repeat(single.pass_rate_N, 4))
    sample = fit(four).sample
    np.testing.assert_array_equal(sample.weight_N, 4.0)
    noise_nN = _replicates(sample, 0.0, 20_000, np.random.default_rng(0))
    np.testing.assert_allclose(noise_nN.std(axis=0), 0.5, atol=0.02)


def test_known_noise_bounds_the_profile_from_below():
    exact = Points.from_arrays(np.linspace(0, 8000, 21), TRUTH(np.linspace(0, 8000, 21)), noise_sd=0.004)
    low, high = profile(fit(exact)).interval
    assert (low, high) == (pytest.approx(0.59, abs=0.015), pytest.approx(0.63, abs=0.015))


def test_a_profile_needs_more_evaluations_than_parameters():
    few = Points.from_arrays([1000, 2000, 3000, 5000, 6500, 8000], [0.41, 0.47, 0.52, 0.57, 0.58, 0.59])
    assert profile(fit(few)).level == 0.95
    fewer = fit(points(n=6), r0="free")
    four = make_sample(fewer.points.select(np.arange(4)), None)
    with pytest.raises(
        CannotAnswerError, match="4 evaluations leave no degrees of freedom beside 4 parameters"
    ):
        profile(dataclasses.replace(fewer, sample=four))


def test_a_misfit_is_not_checked():
    jump = points()
    moved_N = np.where(jump.compute_N > 4000, jump.pass_rate_N - 0.08, jump.pass_rate_N)
    with pytest.raises(CannotAnswerError, match="points: no interval is worth a check: the pass rate jumps"):
        cross_check(fit(dataclasses.replace(jump, pass_rate_N=moved_N)))
