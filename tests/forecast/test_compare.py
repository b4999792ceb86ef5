import json
import math
from statistics import NormalDist

import numpy as np
import pytest

import scalerl
from scalerl import InputError
from scalerl.curve import FAMILIES, LOG_LOGISTIC, SEED_PRIOR, Curve, Points, SeedPrior, fit
from scalerl.curve.families import TwoSpeeds
from scalerl.forecast import compare
from scalerl.forecast.compare import holm, seeds_needed

BASE = Curve(LOG_LOGISTIC, 0.61, 1.92, 2500.0, 0.40)


def run(A=0.61, B=1.92, C_mid=2500.0, sd=0.002, seed=0, top=25_000.0, n=30, axis="gpu_hours", tau=(0, 0, 0)):
    """One fitted run, moved by seed effects of sd `tau` on (A, log B, log C_mid)."""
    rng = np.random.default_rng(seed)
    own_A, log_b, log_mid = rng.normal(0, tau)
    truth = Curve(LOG_LOGISTIC, A + own_A, B * math.exp(log_b), C_mid * math.exp(log_mid), 0.40)
    compute_N = np.linspace(0, top, n)
    return fit(Points.from_arrays(compute_N, truth(compute_N) + rng.normal(0, sd, n), axis=axis))


@pytest.fixture(scope="module")
def base():
    return run()


@pytest.fixture(scope="module")
def higher():
    return run(A=0.64, seed=1)


def only_pair(recipes, **arguments):
    (pair,) = compare(recipes, **arguments).pairs
    return pair


def test_holm_by_hand():
    # Sorted .005, .01, .03, .04 times 4, 3, 2, 1 is .02, .03, .06, .04, and none below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.7, 0.6]) == [1.0, 1.0]


def test_seeds_needed_by_hand():
    # (1.959964 + .841621)^2 * 2 * .013^2 / .03^2 = 7.84888 * .000338 / .0009 = 2.948.
    assert seeds_needed(0.03, 2 * 0.013**2, 0.05) == 3
    assert seeds_needed(0.001, 2 * 0.013**2, 0.05) is None
    assert seeds_needed(0.0, 1e-6, 0.05) is None
    assert seeds_needed(0.0, 0.0, 0.05) is None  # arms that are one and the same


def test_known_curves_and_a_known_seed_sd_give_the_normal_answer():
    # Curves known to .0005 or so, and a seed sd of .013 without doubt: A differs by .02 with sd .013 sqrt(2).
    exact = {"a": [run(sd=1e-4, n=60)], "b": [run(A=0.63, sd=1e-4, n=60, seed=1)]}
    pair = only_pair(exact, seed_prior=SeedPrior(log_sd=1e-6))
    sd = 0.013 * math.sqrt(2)
    assert pair.ceiling.p == pytest.approx(2 * NormalDist().cdf(-0.02 / sd), abs=0.02)
    np.testing.assert_allclose(
        pair.differences["A"].interval, [0.02 - 1.96 * sd, 0.02 + 1.96 * sd], atol=0.0015
    )
    assert pair.differences["A"].median == pytest.approx(0.02, abs=5e-4)
    assert pair.ceiling.p_runs_only is not None
    assert pair.ceiling.p_runs_only < 1e-3
    assert pair.ceiling.verdict == "not significant"
    # (2.3940 + .8416)^2 * 2 * .013^2 / .02^2 = 8.85, with .05 split between three questions.
    assert pair.ceiling.seeds in (9, 10)
    # The efficiency sd of two seeds: sqrt(2) * hypot(.06, .08 log(3) / 1.92) in log C.
    half = 1.96 * math.sqrt(2) * math.hypot(0.06, 0.08 * math.log(3) / 1.92)
    np.testing.assert_allclose(np.log(pair.differences["compute_to_own"].interval), [-half, half], atol=0.01)


def test_seeds_turn_a_difference_into_a_verdict(base, higher):
    one = only_pair({"base": [base], "higher": [higher]})
    assert one.ceiling.verdict == "not significant"
    three = only_pair(
        {
            "base": [base, run(seed=2), run(seed=3)],
            "higher": [higher, run(A=0.64, seed=4), run(A=0.64, seed=5)],
        }
    )
    assert three.ceiling.verdict == "higher ceiling"
    assert three.efficiency.verdict == "not significant"
    # Replicates that agree also say that the seeds of these recipes are close.
    one_low, one_high = one.differences["A"].interval
    low, high = three.differences["A"].interval
    assert high - low < 0.5 * (one_high - one_low)


def test_a_recipe_that_is_twice_as_quick_reaches_it_sooner(base):
    pair = only_pair({"base": [base], "quick": [run(C_mid=1250.0, seed=1)]})
    assert pair.efficiency.verdict == "reaches it sooner"
    assert pair.ceiling.verdict == "not significant"
    assert pair.differences["C_mid"].median == pytest.approx(0.5, abs=0.03)
    slow = only_pair({"base": [base], "slow": [run(C_mid=5000.0, seed=1, top=25_000.0)]})
    assert slow.efficiency.verdict == "reaches it later"


def test_sides_change_places(base, higher):
    recipes = {"base": [base], "higher": [higher]}
    there, back = only_pair(recipes, budget=2e4), only_pair(recipes, budget=2e4, base="higher")
    assert (back.recipe, back.base) == ("base", "higher")
    for name in ("A", "pass_rate"):
        low, high = there.differences[name].interval
        np.testing.assert_allclose(back.differences[name].interval, [-high, -low], atol=0.003)
    assert back.ceiling.p == pytest.approx(there.ceiling.p, abs=0.02)


def test_both_sides_share_one_family():
    # Posterior weights of the families multiply, and the prior's count once.
    short = [run(seed=seed, n=10, sd=0.006, top=9000.0) for seed in (0, 1)]
    _, prior = short[0].posterior.prior.families(FAMILIES)
    product = {
        f.name: short[0].families[f.name] * short[1].families[f.name] / before
        for f, before in zip(FAMILIES, prior, strict=True)
    }
    total = sum(product.values())
    pair = only_pair({"a": short[:1], "b": short[1:]})
    assert pair.families == pytest.approx({name: value / total for name, value in product.items()})
    assert len([w for w in pair.families.values() if w > 0.02]) > 1


def test_a_ceiling_that_is_not_identified_is_not_claimed(base):
    short = run(A=0.75, seed=3, top=2500.0, n=12)
    pair = only_pair({"base": [base], "short": [short]})
    assert pair.ceiling.verdict == "inconclusive"
    assert pair.ceiling.why.startswith("the ceiling of short is not identified")


def test_a_target_that_one_side_never_reaches(base, higher):
    comparison = compare({"base": [base], "higher": [higher]}, target=0.625, seed_prior=SeedPrior(A=1e-4))
    reach = comparison.pairs[0].differences["compute_to_target"]
    assert reach.base == math.inf
    assert reach.recipe == pytest.approx(run(A=0.64, seed=1).paper_curve.inverse(0.625), rel=0.05)
    assert reach.interval[0] == 0.0
    assert reach.interval[1] < 0.5
    data = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert data["pairs"][0]["differences"]["compute_to_target"]["base"] is None
    never = compare({"base": [base], "higher": [higher]}, target=0.95)
    assert math.isnan(never.pairs[0].differences["compute_to_target"].median)


def test_the_same_answer_twice_and_as_text(base, higher):
    recipes = {"base": [base], "higher": [higher], "again": [run(seed=7)]}
    first = scalerl.compare(recipes, budget=2e4, target=0.6)
    assert first == scalerl.compare(recipes, budget=2e4, target=0.6)
    text = str(first)
    assert "higher against base" in text
    assert "again against base" in text
    assert "NOT SIGNIFICANT" in text
    assert "gpu_hours   log-logistic " in text
    assert f"sd {SEED_PRIOR.A:g} in A" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 1.0}, "between 0 and 1"),
        ({"budget": "600 GFLOP"}, "the budget must be a number, found '600 GFLOP'"),
        ({"budget": -1.0}, "the budget must be a compute above 0"),
        ({"target": 60.0}, "a pass rate between 0 and 1"),
        ({"base": "bse"}, "no recipe 'bse' to compare with; recipes: base, higher"),
    ],
)
def test_arguments_out_of_range(base, higher, arguments, message):
    with pytest.raises(InputError, match=message):
        compare({"base": [base], "higher": [higher]}, **arguments)


def test_recipes_that_cannot_be_compared(base):
    with pytest.raises(InputError, match="takes a list of fits for every recipe"):
        compare({"base": base, "other": base})
    with pytest.raises(InputError, match="two recipes or more, found 1: base"):
        compare({"base": [base]})
    with pytest.raises(InputError, match="recipe 'none' has no runs"):
        compare({"base": [base], "none": []})
    with pytest.raises(InputError, match="'base' is on gpu_hours, 'other' on flops"):
        compare({"base": [base], "other": [run(axis="flops")]})


def test_a_run_given_twice_is_no_second_seed(base, higher):
    """A copy would shrink the seed variance, and make verdicts of noise."""
    copy = fit(base.points.select(np.arange(len(base.points))[::-1]))
    with pytest.raises(InputError, match="recipe 'base': points and points have the same evaluations"):
        compare({"base": [base, higher, copy], "higher": [higher]})
    # A folder that was copied while its run went on is no second seed either.
    earlier = fit(base.points.select(np.arange(len(base.points) - 9)))
    with pytest.raises(InputError, match="which are no two seeds: give the run once"):
        compare({"base": [earlier, base], "higher": [higher]})
    # Seeds that all stay where they are agree in every evaluation, and are seeds all the same.
    flat = [fit(Points.from_arrays(base.points.compute_N, np.full(30, 0.4), axis="gpu_hours"))] * 2
    assert compare({"flat": flat, "base": [base]}).runs == {"flat": 2, "base": 1}


def test_seeds_of_one_recipe_are_seldom_told_apart():
    """A short version of benchmarks/comparison.py: 20 pairs, of which 1 may be claimed on average."""
    rng = np.random.default_rng(0)
    claimed = told = 0
    for i in range(20):
        tau = SEED_PRIOR.median_3 * np.exp(SEED_PRIOR.log_sd * rng.standard_normal(3))
        pair = only_pair(
            {s: [run(sd=0.003, seed=1000 + 2 * i + j, n=20, tau=tau)] for j, s in enumerate("ab")}
        )
        claims = pair.claims.values()
        claimed += any(claim.verdict not in ("not significant", "inconclusive") for claim in claims)
        told += any(claim.p_runs_only is not None and claim.p_runs_only <= 0.05 / 3 for claim in claims)
    assert claimed <= 3  # more with probability .016 at a rate of .05
    assert told >= 3  # what the seed variance is for


def test_a_ceiling_is_compared_with_the_families_of_either_side():
    """A lower ceiling, of a curve with a shorter tail: given one family for both it would be the higher."""
    rng = np.random.default_rng(0)
    compute_N = np.linspace(0, 9, 31)
    (frechet,) = [family for family in FAMILIES if family.name == "frechet"]

    def fitted(family, A, B, C_mid):
        truth_N = Curve(family, A, B, C_mid, 0.27)(compute_N)
        return fit(Points.from_arrays(compute_N, truth_N + rng.normal(0, 0.004, 31)))

    recipes = {
        "base": [fitted(frechet, 0.80, 1.5, 1.0) for _ in range(4)],
        "lower": [fitted(LOG_LOGISTIC, 0.785, 1.4, 1.15) for _ in range(4)],
    }
    pair = only_pair(recipes)
    assert pair.one_family < 0.1
    assert pair.differences["A"].median == pytest.approx(-0.015, abs=0.005)
    low, high = pair.differences["A"].interval
    assert low < 0 < high
    assert pair.ceiling.verdict == "not significant"
    # Three quarters of the gain are at 1.80 and 2.52 by hand, and have been seen.
    assert pair.efficiency.verdict == "reaches it later"


def test_a_slower_tail_is_lower_at_the_compute_seen_and_no_lower_ceiling():
    """One ceiling, .61: the recipe has .65 of its gain as the base, the rest 8 times later and less steep."""
    rng = np.random.default_rng(0)
    compute_N = np.linspace(0, 20_000, 41)
    slow = TwoSpeeds("slow", "slow", early=0.65, later=1.92 * math.log(8), slower=0.8 / 1.92)
    # Its early part has the midpoint of the base: half of .65 of the gain is at 2,500.
    C_mid = 2500.0 * math.exp(-float(slow.inverse(np.array(1.92), np.array(0.5 * 0.65))))
    curves = {"base": BASE, "slow": Curve(slow, BASE.A, BASE.B, C_mid, BASE.R_0)}

    def fitted(curve, n):
        y_N = curve(compute_N[:n]) + rng.normal(0, 0.003, n)
        return fit(Points.from_arrays(compute_N[:n], y_N))

    ends = {"base": 36, "slow": 41}
    recipes = {name: [fitted(curve, ends[name]) for _ in range(3)] for name, curve in curves.items()}
    pair = only_pair(recipes)
    assert pair.seen.verdict == "lower at the compute seen"
    assert pair.ceiling.verdict not in ("lower ceiling", "higher ceiling")
    # The base has been run to 17,500 alone: beyond that nothing is measured.
    assert pair.compute_seen == compute_N[35]
    true = float(curves["slow"](17_500) - curves["base"](17_500))
    assert pair.differences["pass_rate_seen"].median == pytest.approx(true, abs=0.003)
    # Given one family alone, the ceiling would be lower by what is only still to come.
    assert pair.differences["pass_rate_seen"].interval[1] < 0 < pair.differences["A"].interval[1]
