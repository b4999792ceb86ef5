import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl import InputError
from scalerl.curve import LOG_LOGISTIC, SEED_PRIOR, Curve, Points, fit
from scalerl.curve.seeds import pooled_alike
from scalerl.forecast import compare
from scalerl.forecast.sides import given_family


def run(seed, A=0.61, C_mid=2500.0, sd=0.003, top=25_000.0, n=20, block=(0.0, 0.0)):
    """One fitted run whose block moves A and log C_mid."""
    truth = Curve(LOG_LOGISTIC, A + block[0], 1.92, C_mid * math.exp(block[1]), 0.35)
    compute_N = np.linspace(0, top, n)
    noise_N = np.random.default_rng(seed).normal(0, sd, n)
    return fit(Points.from_arrays(compute_N, truth(compute_N) + noise_N))


BLOCKS = [(0.06, -0.3), (-0.05, 0.25), (0.02, 0.3), (-0.04, -0.2)]


@pytest.fixture(scope="module")
def base():
    return [run(s, block=block) for s, block in enumerate(BLOCKS)]


@pytest.fixture(scope="module")
def higher():
    return [run(10 + s, A=0.64, block=block) for s, block in enumerate(BLOCKS)]


def only_pair(recipes, seeds=None):
    seeds = seeds or {name: range(len(fits)) for name, fits in recipes.items()}
    (pair,) = compare(recipes, blocks=seeds).pairs
    return pair


def test_the_restricted_likelihood_in_blocks_by_hand():
    # Two recipes in two blocks: all that is left is the contrast (y11 - y12) - (y21 - y22), whose variance is
    # 4 (s^2 + tau^2) whatever the effects of the blocks are.
    prior, s = SEED_PRIOR.spread(), 0.01
    y_R3 = np.repeat(np.array([0.6, 0.9, 0.64, 0.97])[:, None], 3, axis=1)
    found = prior.given(y_R3, np.full((4, 3), s), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]))
    contrast, variance_T = (0.6 - 0.9) - (0.64 - 0.97), 4 * (s**2 + prior.tau_3T[0] ** 2)
    weight_T = prior.weight_3T[0] * np.exp(-0.5 * contrast**2 / variance_T) / np.sqrt(variance_T)
    np.testing.assert_allclose(found.weight_3T[0], weight_T / weight_T.sum(), rtol=1e-9)
    # Without the blocks, .3 between the seeds of a recipe is the seed.
    assert prior.given(y_R3, np.full((4, 3), s), np.array([0, 0, 1, 1])).rms_3[0] > 3 * found.rms_3[0]


def test_a_run_that_is_alone_in_its_block_says_nothing_of_tau():
    prior, rng = SEED_PRIOR.spread(), np.random.default_rng(0)
    y_R3, sd_R3 = rng.normal(0, 0.02, (7, 3)), np.full((7, 3), 0.005)
    recipe_R, block_R = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2, 3])
    found = prior.given(y_R3, sd_R3, recipe_R, block_R)
    without = prior.given(y_R3[:6], sd_R3[:6], recipe_R[:6], block_R[:6])
    np.testing.assert_allclose(found.weight_3T, without.weight_3T, rtol=1e-9)


def test_pairing_finds_what_the_base_models_hide(base, higher):
    recipes = {"base": base, "higher": higher}
    apart = compare(recipes).pairs[0]
    assert apart.common_seeds is None
    assert apart.ceiling.verdict == "not significant"
    pair = only_pair(recipes)
    assert pair.common_seeds == 4
    assert pair.ceiling.verdict == "higher ceiling"
    assert pair.efficiency.verdict == "not significant"
    assert pair.differences["A"].median == pytest.approx(0.03, abs=0.006)
    assert pair.differences["C_mid"].median == pytest.approx(1.0, abs=0.05)
    (low, high), (apart_low, apart_high) = pair.differences["A"].interval, apart.differences["A"].interval
    assert high - low < 0.4 * (apart_high - apart_low)


def test_effects_of_blocks_cancel_exactly_in_the_mean():
    # Runs that are one posterior, moved by their block: both sides move alike, whatever the weights are.
    one = run(0)
    given = given_family({"a": [one] * 3, "b": [one] * 3}, SEED_PRIOR, 0)
    draws = [post.draws(500, seed=1) for post in given.posteriors["a"]]
    moved = [
        replace(d, A_n=d.A_n + 0.1 * i, log_b_n=d.log_b_n + i, log_mid_n=d.log_mid_n + i)
        for i, d in enumerate(draws)
    ]
    (base, recipe), share = pooled_alike(moved, moved, given.spread, range(3))
    np.testing.assert_array_equal(base.A_n, recipe.A_n)
    assert share == pytest.approx(1 / 3, abs=1e-3)
    # A vague partner makes its block count for less, on both sides.
    vague = [*moved[:2], replace(moved[2], A_n=moved[2].A_n + 0.1 * (-1.0) ** np.arange(500))]
    (base, recipe), share = pooled_alike(moved, vague, given.spread, range(3))
    assert share > 0.4
    assert base.A_n.mean() == pytest.approx(recipe.A_n.mean(), abs=1e-9)


def test_runs_without_a_partner_are_left_out_and_that_is_said(base, higher):
    # The seed that the base alone has is ten points better: unpaired, it would take the difference away.
    recipes = {"base": [*base[:3], run(20, A=0.71)], "higher": higher[:3]}
    seeds = {"base": [0, 1, 2, 9], "higher": [2, 0, 1]}
    recipes["higher"] = [higher[s] for s in seeds["higher"]]
    comparison = compare(recipes, blocks=seeds)
    (pair,) = comparison.pairs
    assert pair.common_seeds == 3
    assert pair.differences["A"].median == pytest.approx(0.03, abs=0.006)
    assert "paired by 3 common seeds (0 and 1 without a partner left out)" in str(comparison)
    assert comparison.runs == {"base": 4, "higher": 3}
    assert comparison.to_json()["pairs"][0]["common_seeds"] == 3


def test_a_misfit_without_a_partner_stands_in_the_way_of_nothing(base, higher):
    compute_N = np.linspace(0, 12_000, 30)
    peaked_N = 0.4 + 0.25 * np.sin(0.75 * np.pi * compute_N / 12_000)
    peaked = fit(Points.from_arrays(compute_N, peaked_N + np.random.default_rng(0).normal(0, 0.003, 30)))
    assert peaked.misfit
    recipes = {"base": [*base, peaked], "higher": higher}
    seeds = {"base": range(5), "higher": range(4)}
    assert only_pair(recipes, seeds).ceiling.verdict == "higher ceiling"
    assert compare(recipes).pairs[0].ceiling.verdict == "inconclusive"


def test_one_common_seed_is_no_pairing_and_counts_the_blocks_as_seeds(base, higher):
    recipes = {"base": base, "higher": higher[:1]}
    pair = only_pair(recipes)
    assert pair.common_seeds is None
    assert pair.differences == compare(recipes).pairs[0].differences
    assert pair.ceiling.verdict == "not significant"


def test_order_of_the_runs_is_nothing(base, higher):
    there = only_pair({"base": base, "higher": higher})
    back = only_pair({"base": base[::-1], "higher": higher}, {"base": [3, 2, 1, 0], "higher": range(4)})
    assert back.differences["A"].median == pytest.approx(there.differences["A"].median, abs=0.001)
    assert back.ceiling.verdict == there.ceiling.verdict


@pytest.mark.parametrize(
    "seeds",
    [
        {"base": range(4)},
        {"base": range(4), "higher": [0, 0, 1, 2]},
        {"base": [1], "higher": range(4)},
    ],
)
def test_blocks_are_one_for_each_run(base, higher, seeds):
    with pytest.raises(InputError, match="needs a block of its own for each of its 4 runs"):
        compare({"base": base, "higher": higher}, blocks=seeds)


def test_each_pair_has_its_own_blocks(base, higher):
    recipes = {"base": base, "two": higher[:2], "other": higher[2:]}
    pairs = compare(recipes, blocks={"base": range(4), "two": [0, 1], "other": [2, 3]}).pairs
    assert [pair.common_seeds for pair in pairs] == [2, 2]
    assert pairs[0].differences["A"].base != pairs[1].differences["A"].base


def test_seeds_of_one_group_are_no_evidence_of_others():
    """By hand: four equal runs in two groups leave half of a seed's variance, and not a quarter."""
    one = run(0)
    given = given_family({"a": [one] * 4}, SEED_PRIOR, 0)
    draws = [given.posteriors["a"][0].draws(500, seed=1)] * 4
    assert pooled_alike(draws, draws, given.spread, range(4))[1] == pytest.approx(1 / 4)
    assert pooled_alike(draws, draws, given.spread, ["m", "m", "n", "n"])[1] == pytest.approx(1 / 2)
    alone = {"base": [run(i) for i in range(4)], "new": [run(4 + i) for i in range(4)]}
    widths = []
    for blocks in ([0, 1, 2, 3], [("m", 0), ("m", 1), ("n", 2), ("n", 3)]):
        (pair,) = compare(alone, blocks={"base": blocks, "new": blocks}).pairs
        low, high = pair.differences["A"].interval
        widths.append(high - low)
    assert widths[1] > 1.2 * widths[0]
