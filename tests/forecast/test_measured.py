"""Paired differences as measured: standard errors, moderated variances, and Student's t, against tables."""

import math

import numpy as np
import pytest

from scalerl import InputError
from scalerl.curve import Points, fit
from scalerl.forecast import compare
from scalerl.forecast.measured import (
    MeasuredRates,
    moderated,
    paired_differences,
    paired_seeds,
    polygamma,
    standard_error,
    t_quantile,
    t_tail,
)


def test_seeds_of_one_base_model_are_one_in_what_was_measured():
    """By hand: deviations -3, -1, 1, 3, the first two of one base model, the others of another."""
    value_S = np.array([1.0, 3.0, 5.0, 7.0])
    apart = standard_error(value_S, ["a", "b", "c", "d"])
    assert apart == pytest.approx(math.sqrt(20 / 3) / 2)
    assert standard_error(value_S, ["a"] * 4) == apart
    assert standard_error(value_S, ["a", "a", "b", "b"]) == pytest.approx(math.sqrt(2 * (16 + 16)) / 4)
    assert math.isnan(standard_error(value_S[:1], ["a"]))


def test_variances_of_few_seeds_are_moderated_by_those_of_other_arms():
    """By hand: variances that scatter as chi-squared of 2 alone does are replaced by their common mean."""
    rng = np.random.default_rng(0)
    alike_A = rng.chisquare(2, 2000) / 2
    moderated_A, degrees_A = moderated(alike_A, np.full(2000, 2.0))
    assert moderated_A.std() < 0.1 * alike_A.std()
    assert moderated_A.mean() == pytest.approx(1, abs=0.1)
    assert degrees_A[0] > 30
    apart_A = np.exp(rng.normal(0, 6, 2000)) * alike_A  # arms that scatter by themselves keep their own
    moderated_A, degrees_A = moderated(apart_A, np.full(2000, 2.0))
    assert np.corrcoef(np.log(moderated_A), np.log(apart_A))[0, 1] > 0.95
    assert degrees_A[0] < 3
    assert moderated(np.array([1.0, 4.0]), np.array([2.0, 2.0]))[0].tolist() == [1, 4]  # two tell nothing
    assert moderated(np.array([0.0, 1.0, 2.0, 3.0]), np.full(4, 2.0))[0][0] == 0


def test_student_t_against_tables():
    """NIST/SEMATECH e-Handbook, 1.3.6.7.2; digamma and trigamma at 1 and 1/2 by their closed forms."""
    for degrees, wanted in ((1, 12.706), (2, 4.303), (10, 2.228), (100, 1.984)):
        assert t_quantile(0.95, degrees) == pytest.approx(wanted, abs=6e-4)
    assert t_tail(0.0, 3) == pytest.approx(1, abs=1e-6)
    assert polygamma(1.0) == pytest.approx((-np.euler_gamma, math.pi**2 / 6), rel=1e-8)
    assert polygamma(0.5) == pytest.approx((-np.euler_gamma - math.log(4), math.pi**2 / 2), rel=1e-8)


def test_seeds_of_a_paired_t_test_against_tables():
    """G*Power 3.1, two-sided .05, power .8: effects of 2, 1 and .5 sd take 5, 10 and 34 pairs."""
    for effect, wanted in ((2.0, 5), (1.0, 10), (0.5, 34), (0.1, None), (0.0, None)):
        assert paired_seeds(effect, 1 / math.sqrt(3), 3, 2.0, 0.05) == wanted
    # Three pairs that are not significant (t = 7.1) are not told that fewer would do.
    assert paired_seeds(-0.0544, 0.00768, 3, 2.0, 0.05 / 3) == 4


def test_a_paired_difference_by_hand():
    """Differences .01, .02 and .03: their mean .02 has the standard error .01 / sqrt(3), so t = 3.46."""
    base = MeasuredRates({0: 0.50, 1: 0.40, 2: 0.45, 3: 0.99}, dict.fromkeys(range(4), ""), math.inf)
    own = MeasuredRates({0: 0.51, 1: 0.42, 2: 0.48, 4: 0.01}, dict.fromkeys((0, 1, 2, 4), ""), math.inf)
    found = paired_differences({"base": base, "own": own}, "base", 0.95)
    assert set(found) == {"own"}
    assert found["own"].seeds == 3  # each of the others has no partner
    assert found["own"].difference.median == pytest.approx(0.02)
    half = 4.3027 * 0.01 / math.sqrt(3)
    assert found["own"].difference.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-5)
    assert found["own"].claim.p == pytest.approx(0.0742, abs=1e-4)  # R: 2 * pt(-sqrt(12), 2)
    assert found["own"].claim.verdict == "not significant"


def runs(gain, last=(400, 400, 400)):
    """Three runs whose seeds move them far, and one recipe by `gain` alone, within .001."""
    compute_N = np.arange(0, 401, 25.0)
    made = []
    for seed, end in enumerate(last):
        noise_N = np.random.default_rng([seed, round(1e4 * gain)]).normal(0, 1e-3, len(compute_N))
        rate_N = 0.3 + 0.1 * seed + (0.2 + gain) * compute_N / (compute_N + 80) + noise_N
        made.append(fit(Points.from_arrays(compute_N, rate_N).select(np.flatnonzero(compute_N <= end))))
    return made


def test_compare_has_what_was_measured_beside_the_curves():
    recipes = {"old": runs(0.0), "new": runs(0.02, last=(400, 400, 300))}
    seeds = {"old": [0, 1, 2], "new": [0, 1, 2]}
    (pair,) = compare(recipes, seeds=seeds).pairs
    # The last compute that all runs reach; the seeds' own .1 drops out, with or without blocks.
    assert pair.measured_at == 300
    assert pair.measured.verdict == "higher as measured"
    assert pair.differences["measured"].median == pytest.approx(0.02 * 300 / 380, abs=2e-3)
    assert list(pair.claims) == ["measured", "pass_rate_seen", "A", "compute_to_own"]
    found = compare(recipes, seeds=seeds, budget=100)
    assert found.pairs[0].measured_at == 100
    assert "HIGHER AS MEASURED" in str(found)
    rows = found.to_dict()
    assert rows["verdict"][rows["quantity"].index("measured")] == "higher as measured"
    assert found.to_json()["pairs"][0]["measured"]["verdict"] == "higher as measured"


def test_without_two_common_seeds_nothing_is_measured():
    recipes = {"old": runs(0.0), "new": runs(0.02)}
    (pair,) = compare(recipes, seeds={"old": [0, 1, 2], "new": [2, 3, 4]}).pairs
    assert pair.measured is None
    assert "measured" not in pair.claims
    assert compare(recipes).pairs[0].measured is None
    with pytest.raises(InputError, match="needs a block of its own"):
        compare(recipes, seeds={"old": [0, 1], "new": [2, 3, 4]})
