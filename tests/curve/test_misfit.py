import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.evidence import (
    PHI,
    candidate_changes,
    healthy_model,
    integrated,
    log_bayes,
    noise_nodes,
)
from scalerl.curve.families import Gompertz, Weibull
from scalerl.curve.least_squares import least_squares
from scalerl.curve.misfit import find_misfit
from scalerl.curve.noise import ar1
from scalerl.curve.sample import make_sample

TRUTH = Curve(LOG_LOGISTIC, 0.60, 1.9, 1000.0, 0.25)
COMPUTE = np.linspace(0, 4000, 49)
NOISE = np.random.default_rng(11).normal(0, 0.006, 49)


def best(points):
    sample = make_sample(points, None)
    return [least_squares(sample, family) for family in FAMILIES]


def look(pass_rate, compute=COMPUTE, **known):
    points = Points.from_arrays(compute, np.clip(pass_rate, 0, 1), axis="gpu_hours", **known)
    found = find_misfit(points, best(points))
    return found if found and found.sure else None


def after(start):
    return np.maximum(COMPUTE - start, 0) / (COMPUTE[-1] - start)


def test_a_healthy_run_has_no_misfit():
    assert look(TRUTH(COMPUTE) + NOISE) is None


def test_a_peak_is_found_with_what_came_before_it():
    held = np.where(COMPUTE < 2800, TRUTH(COMPUTE), TRUTH(2800.0) - 0.05 * after(2800.0))
    found = look(held + NOISE)
    assert found is not None
    assert found.kind == "peaked"
    assert found.at == pytest.approx(2800, abs=300)
    assert found.size == pytest.approx(0.05, abs=0.02)
    assert found.keep == (0.0, found.at)
    assert "GPU-hours" in found.why


@pytest.mark.parametrize("size", [0.05, -0.05])
def test_a_jump_is_found_where_it_is_and_the_run_after_it_kept(size):
    found = look(TRUTH(COMPUTE) + size * (COMPUTE > 2010) + NOISE)
    assert found is not None
    assert found.kind == "jump"
    first = COMPUTE[COMPUTE > 2010][0]
    assert found.at == pytest.approx(first)
    assert found.size == pytest.approx(size, abs=0.01)
    assert found.keep == (pytest.approx(first), pytest.approx(4000))


def test_a_small_drop_in_a_short_run_is_found_as_often_as_not():
    """18 evaluations, noise .006: the curve fitted to all of the run bends towards the drop."""
    rng, compute = np.random.default_rng(4), np.linspace(0, 4000, 19)[1:]
    drop = 0.05 * (np.arange(18) >= 10)
    found = [look(TRUTH(compute) - drop + rng.normal(0, 0.006, 18), compute) for _ in range(40)]
    assert sum(m is not None and m.kind == "jump" and m.size < 0 for m in found) >= 18


def test_a_restart_with_better_data_is_a_jump_up_where_it_is():
    found = [run for run in map(restarted, range(24)) if run is not None]
    assert len(found) >= 20
    assert all(kind == "jump" and size > 0 and abs(off) <= 2 for kind, size, off in found)


def restarted(seed):
    """(kind, size, evaluations from the true place) of what is found in a steep run that jumps by .05."""
    rng, compute = np.random.default_rng(2000 + seed), np.linspace(0, 2000, 21)[seed % 2 :]
    noise = ar1(rng.normal(0, 0.006, len(compute)), 0.3 * (seed % 3))
    first = int(np.argmax(compute > 1201))
    steep = Curve(LOG_LOGISTIC, 0.60, 2.5, 1000.0, 0.30)
    found = look(steep(compute) + 0.05 * (np.arange(len(compute)) >= first) + noise, compute)
    if found is None:
        return None
    return found.kind, found.size, int(np.argmin(np.abs(compute - (found.at or 0)))) - first


@pytest.mark.parametrize("n", [49, 1001])
@pytest.mark.parametrize("kind", ["jump", "peaked"])
def test_compute_is_given_exactly_as_in_the_data(kind, n):
    """Also of a run so long that its evaluations are averaged."""
    compute = np.linspace(0, 4000, n) * 1.1e17 / 3
    x, noise = compute / compute[-1] * 4000, np.random.default_rng(1).normal(0, 0.006, n)
    lost = 0.10 * (x > 2010) if kind == "jump" else 0.1 * np.maximum(x - 2800, 0) / 1200
    found = look(TRUTH(x) - lost + noise, compute)
    assert found is not None
    assert found.kind == kind
    assert found.keep is not None
    assert {found.at, *found.keep} <= set(compute.tolist())
    assert found.keep[1] in (found.at, compute[-1])


def test_a_late_jump_keeps_what_came_before():
    found = look(TRUTH(COMPUTE) + 0.06 * (COMPUTE > 3510) + NOISE)
    assert found is not None
    assert found.kind == "jump"
    assert found.keep == (0.0, pytest.approx(3500))


def test_a_second_rise_is_no_jump_and_no_peak():
    found = look(TRUTH(COMPUTE) + 0.2 * after(2600.0) + NOISE)
    assert found is not None
    assert found.kind == "regime"
    assert found.at == pytest.approx(2600, abs=200)
    assert found.size == pytest.approx(0.2, abs=0.06)
    assert found.keep == (found.at, pytest.approx(4000))


def test_the_small_noise_near_a_ceiling_of_one_is_no_misfit():
    """Evaluations on 512 samples: their sd is .02 at the start and .004 at .99."""
    truth, called = Curve(LOG_LOGISTIC, 1.0, 1.9, 400.0, 0.4), 0
    for seed in range(30):
        drawn = np.random.default_rng(seed).binomial(512, truth(COMPUTE)) / 512
        called += look(drawn) is not None
    assert called <= 1


@pytest.mark.parametrize("steep", [4.0, 12.0])
def test_a_burst_before_an_ordinary_rise_is_no_misfit(steep):
    """Easy prompts first: before bursts were looked for, most of these were jumps or changes of slope."""
    rng, slow, called = np.random.default_rng(8), Curve(LOG_LOGISTIC, 0.75, 1.6, 1500.0, 0.5), 0
    for _ in range(15):
        at, size = float(rng.uniform(150, 400)), float(rng.uniform(0.15, 0.35))
        burst = size / (1.0 + (np.maximum(COMPUTE, 1e-9) / at) ** steep)
        called += look(slow(COMPUTE) - burst + rng.normal(0, 0.006, 49)) is not None
    assert called <= 1


def test_a_decline_that_has_hardly_begun_is_suspected():
    """By .04 in 49 evaluations: about as likely as none, so that no ceiling is identified."""
    fallen = TRUTH(COMPUTE) - 0.04 * after(2400.0) + NOISE
    result = fit(Points.from_arrays(COMPUTE, fallen, axis="gpu_hours"))
    assert result.misfit is None
    assert result.suspected is not None
    assert not result.identified
    assert result.ceiling is not None
    assert "perhaps" in result.why
    (warning,) = [text for text in result.warnings if "may have changed" in text]
    assert "fit the part that holds with" in warning
    whole = fit(Points.from_arrays(COMPUTE, TRUTH(COMPUTE) + NOISE, axis="gpu_hours"))
    assert whole.identified
    assert whole.suspected is None


def test_a_small_decline_is_suspected_as_the_last_third_falls():
    """By two and a half times the noise in 24 evaluations: without the last third 11 of 30 were suspected."""
    compute_N = np.linspace(0, 2000, 25)[1:]
    rise = Curve(LOG_LOGISTIC, 0.6, 1.8, 1000.0, 0.3)
    falls_N = np.where(compute_N < 1400, rise(compute_N), rise(1400.0) - 0.02 * (compute_N - 1400) / 600)

    def suspected(mean_N):
        noise_RN = [np.random.default_rng(seed).normal(0, 0.008, 24) for seed in range(10)]
        fits = [fit(Points.from_arrays(compute_N, mean_N + noise_N)) for noise_N in noise_RN]
        return sum(one.suspected is not None for one in fits)

    assert suspected(falls_N) >= 8
    assert suspected(rise(compute_N)) <= 1


def test_a_jump_after_a_burst_is_found_where_it_is():
    burst = 0.25 / (1.0 + (np.maximum(COMPUTE, 1e-9) / 250.0) ** 6)
    slow = Curve(LOG_LOGISTIC, 0.75, 1.6, 1500.0, 0.5)
    found = look(slow(COMPUTE) - burst - 0.08 * (COMPUTE > 2510) + NOISE)
    assert found is not None
    assert found.kind == "jump"
    assert found.at == pytest.approx(COMPUTE[COMPUTE > 2510][0])


def test_slow_waves_are_residuals():
    found = look(TRUTH(COMPUTE) + 0.025 * np.sin(COMPUTE / 250) + NOISE)
    assert found is not None
    assert found.kind == "residuals"
    assert found.keep is None


def test_a_collapse_over_the_last_evaluations_is_a_peak():
    fallen = TRUTH(COMPUTE) + NOISE
    fallen[-4:] -= [0.05, 0.10, 0.20, 0.30]
    found = look(fallen)
    assert found is not None
    assert found.kind == "peaked"
    assert found.at == pytest.approx(COMPUTE[-5], abs=170)


@pytest.mark.parametrize("where", [[20], [12, 37], [48], [0]])
def test_single_evaluations_far_off_are_neither_jump_nor_peak(where):
    off = TRUTH(COMPUTE) + NOISE
    off[where] -= 0.1
    assert look(off) is None


def test_noise_far_above_the_sampling_noise_is_no_misfit():
    assert look(TRUTH(COMPUTE) + 4 * NOISE, noise_sd=0.003) is None


@pytest.mark.parametrize("size", [0.0, 0.05])
def test_the_answer_does_not_depend_on_the_order_or_the_unit_of_compute(size):
    pass_rate = TRUTH(COMPUTE) + size * (COMPUTE > 2010) + NOISE
    found, scaled = look(pass_rate), look(pass_rate[::-1], 1e12 * COMPUTE[::-1])
    assert (found is None) == (scaled is None) == (size == 0)
    if found is not None and scaled is not None:
        assert scaled.bayes_factor == pytest.approx(found.bayes_factor, rel=1e-3)
        assert scaled.at == pytest.approx(1e12 * (found.at or 0))


def test_too_few_evaluations_say_nothing():
    compute = np.linspace(0, 4000, 7)
    assert look([0.2, 0.4, 0.6, 0.5, 0.3, 0.2, 0.1], compute) is None


@pytest.mark.parametrize(("n", "least"), [(8, 40), (10, 50)])
def test_a_collapse_of_a_short_run_is_often_found(n, least):
    """A short run has little power: about half are found."""
    rng = np.random.default_rng(n)
    compute = np.linspace(0, 4000, n)
    fallen = np.zeros(n)
    fallen[-3:] = [0.05, 0.10, 0.15]
    found = [look(TRUTH(compute) + rng.normal(0, 0.006, n) - fallen, compute) for _ in range(100)]
    kinds = [misfit.kind for misfit in found if misfit is not None]
    assert len(kinds) >= least
    assert kinds.count("peaked") >= 0.8 * len(kinds)


def test_exact_points_of_a_family_have_no_misfit():
    assert look(TRUTH(COMPUTE)) is None


def test_replicates_count():
    """Two evaluations at each compute are worth two: the evidence for a small jump grows."""
    pass_rate = TRUTH(COMPUTE) + 0.03 * (COMPUTE > 2010) + NOISE
    once, twice = look(pass_rate), look(np.tile(pass_rate, 2), np.tile(COMPUTE, 2))
    assert once is not None
    assert twice is not None
    assert twice.bayes_factor > once.bayes_factor


def test_the_evidence_is_that_of_the_dense_gaussian():
    """Every node against the covariance written out: sd^2 K_phi + Z Z', and + v^2 d d' with a change."""
    points = Points.from_arrays(COMPUTE[:14], TRUTH(COMPUTE[:14]) + NOISE[:14], step=np.arange(14) * 5)
    sample = make_sample(points, None)
    null = healthy_model(sample, best(points))
    changes = candidate_changes(sample, null.residual_N)
    sd_S = noise_nodes(null.residual_N)
    log_PS, s, t = integrated(sample, null, sd_S, changes.columns_NJ)
    log_PS = log_PS - np.log(np.log(sd_S[1] / sd_S[0]))  # the prior of log sd
    log_change = log_PS[..., None] + log_bayes(s, t, 0.06)
    Z = null.columns_NK * null.sd_K
    path_N = np.cumsum(np.where(np.isfinite(sample.gap_N), sample.gap_N, 1e6))
    gap_NN = np.abs(path_N[:, None] - path_N)

    def dense(phi, sd, d_N):
        cov = sd**2 * np.where(gap_NN == 0, 1.0, phi**gap_NN) + Z @ Z.T + 0.06**2 * np.outer(d_N, d_N)
        r_N = null.residual_N
        return -0.5 * (np.linalg.slogdet(cov)[1] + r_N @ np.linalg.solve(cov, r_N))

    for p in (0, 2, 4):
        for i in (0, 4, 9):
            assert log_PS[p, i] == pytest.approx(dense(PHI[p], sd_S[i], np.zeros(14)), abs=1e-6)
            for j in (0, len(changes.first_J) - 1):
                expected = dense(PHI[p], sd_S[i], changes.columns_NJ[:, j])
                assert log_change[p, i, j] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", [LOG_LOGISTIC, Weibull(), Gompertz()], ids=lambda f: f.name)
def test_healthy_runs_are_rarely_called_misfits(family):
    """120 runs with correlated noise and a slow wander: at most 2 % flagged on average, so 4 % here."""
    rng = np.random.default_rng(5)
    flagged = 0
    for _ in range(120):
        n = int(rng.integers(12, 50))
        compute = np.linspace(0, 80.0 * n, n + 1)
        white = rng.normal(0, rng.uniform(0.0045, 0.010), n + 1)
        noise = ar1(white, rng.choice([0.0, 0.25, 0.5]))
        wander = 0.004 * np.sin(rng.uniform(3, 10) * compute / compute[-1] + rng.uniform(0, 6))
        curve = Curve(family, 0.60, float(rng.uniform(1.2, 2.2)), 1000.0, 0.25)
        flagged += look(curve(compute) + noise + wander, compute) is not None
    assert flagged <= 4
