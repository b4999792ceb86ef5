"""Effects of switches: exact without noise, calibrated with it, frank about what is aliased or missing."""

import itertools
import json

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.seeds import SEED_PRIOR, SeedPrior
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.effects import DesignRun, Moments, effects, effects_of
from scalerl.forecast.splits.mixed import ScalePrior, half_t, linear_posterior

FULL_2 = {
    "factors": ["a", "b"],
    "levels": {"base": [0, 0], "a": [1, 0], "b": [0, 1], "a+b": [1, 1]},
    "aliases": [[["a", "b"]]],
}
# 2^(4-1): d = abc.
HALF_4 = {
    "factors": list("abcd"),
    "levels": {
        "".join(f for f, on in zip("abcd", row, strict=True) if on) or "base": list(row)
        for row in [(a, b, c, a ^ b ^ c) for c, b, a in itertools.product((0, 1), repeat=3)]
    },
    "aliases": [[["a", "b"], ["c", "d"]], [["a", "c"], ["b", "d"]], [["a", "d"], ["b", "c"]]],
}
NO_SEEDS = SeedPrior(A=1e-7, log_b=1e-7, log_mid=1e-7)
SD = np.array([0.006, 0.05, 0.04])


def moments(mean_R, sd=1e-7):
    mean_R3 = np.repeat(np.asarray(mean_R, dtype=float)[:, None], 3, axis=1)
    return [Moments(1.0, mean_R3, np.full(mean_R3.shape, sd))]


def on_A(found):
    return {effect.name: effect for effect in found.on[0].effects}


def test_two_switches_by_hand():
    # a adds .02 alone and .04 with b: mean .03. b adds .01 and .03: mean .02. Half of .04 - .02 is .01.
    found = effects_of(
        moments([0.60, 0.62, 0.61, 0.65]), list(FULL_2["levels"]), [1] * 4, FULL_2, seed_prior=NO_SEEDS
    )
    medians = {name: effect.median for name, effect in on_A(found).items()}
    assert medians == pytest.approx({"a": 0.03, "b": 0.02, "a x b": 0.01}, abs=1e-6)
    assert [effect.verdict for effect in found.on[0].effects] == ["higher ceiling"] * 3
    assert found.main("a", "log_C_mid").verdict == "reaches it later"


def test_an_interaction_shows_in_its_chain_which_is_said():
    # c x d alone is .02: with both or none on +.01, with one on -.01.
    levels = HALF_4["levels"]
    mean_R = [0.6 + (0.01 if row[2] == row[3] else -0.01) for row in levels.values()]
    found = effects_of(moments(mean_R), list(levels), [1] * 8, HALF_4, seed_prior=NO_SEEDS)
    on = on_A(found)
    assert on["a x b + c x d"].median == pytest.approx(0.02, abs=1e-6)
    assert on["a x b + c x d"].of == (("a", "b"), ("c", "d"))
    others = [effect.median for name, effect in on.items() if name != "a x b + c x d"]
    np.testing.assert_allclose(others, 0, atol=1e-6)
    assert any("3 sums of interactions that this design cannot tell apart" in text for text in found.cautions)
    assert "a x b + c x d" in str(found)
    assert json.loads(json.dumps(found.to_json()))["on"][0]["effects"][0]["of"] == [["a"]]


def test_shrinkage_by_hand():
    # Two runs apart by d, each with variance s^2 + tau^2: b given d is normal, precision 1 / v + 1 / scale^2.
    d, s, tau, scale = 0.03, 0.01, 0.012, 0.02
    known = [ScalePrior(np.array([value]), np.array([1.0])) for value in (scale, tau)]
    post = linear_posterior(
        np.array([0.6, 0.6 + d]),
        np.array([s, s]),
        np.ones((2, 1)),
        [(np.array([[-0.5], [0.5]]), known[0])],
        known[1],
    )
    v = 2 * (s**2 + tau**2)
    assert post.mean_NP[0, 0] == pytest.approx(d * scale**2 / (scale**2 + v), rel=1e-12)
    assert post.sd_NP[0, 0] == pytest.approx((1 / v + 1 / scale**2) ** -0.5, rel=1e-12)
    low, high = post.quantiles(np.array([0.025, 0.975]))[:, 0]
    assert high - low == pytest.approx(2 * 1.959964 * post.sd_NP[0, 0], rel=1e-4)


def test_scales_are_weighed_by_the_marginal_likelihood():
    # Two nodes of one scale: the weights are the densities of d under N(0, scale^2 + v), times the prior's.
    d, s, scales = 0.05, 0.01, np.array([0.01, 0.06])
    prior = ScalePrior(scales, np.array([0.7, 0.3]))
    still = ScalePrior(np.array([1e-9]), np.array([1.0]))
    X = np.array([[-0.5], [0.5]])
    post = linear_posterior(np.array([0.0, d]), np.array([s, s]), np.ones((2, 1)), [(X, prior)], still)
    total = scales**2 + 2 * s**2
    expected = prior.weight_T * np.exp(-0.5 * d**2 / total) / np.sqrt(total)
    found = dict(zip(post.scale_NG[:, 0].tolist(), post.weight_N.tolist(), strict=True))
    np.testing.assert_allclose([found[0.01], found[0.06]], expected / expected.sum(), rtol=1e-9)


def test_what_a_seed_does_to_all_arms_drops_out():
    rng, levels = np.random.default_rng(0), HALF_4["levels"]
    arms, seeds = list(levels) * 2, [1] * 8 + [2] * 8
    mean_R = 0.6 + rng.normal(0, 0.01, 16)
    shift_R = np.where(np.array(seeds) == 2, 0.1, 0.0)
    one = effects_of(moments(mean_R, 0.005), arms, seeds, HALF_4)
    other = effects_of(moments(mean_R + shift_R, 0.005), arms, seeds, HALF_4)
    for a, b in zip(one.on[0].effects, other.on[0].effects, strict=True):
        assert (a.median, a.p) == pytest.approx((b.median, b.p), abs=1e-9)


def simulated(rng, design, seeds, main_sd, missing=0.0):
    """A study: about half of the switches do something, seeds as the prior has them, fits with errors."""
    arms = [arm for arm in design["levels"] for _ in range(seeds)]
    seed_R = np.tile(np.arange(seeds), len(design["levels"]))
    x_RF = np.array([design["levels"][arm] for arm in arms]) - 0.5
    mean_R3, truth = np.zeros((len(arms), 3)), {}
    for j, name, unit in ((0, "A", 1.0), (2, "log_C_mid", 8.0)):
        b_F = unit * main_sd * rng.normal(size=x_RF.shape[1]) * (rng.random(x_RF.shape[1]) < 0.5)
        tau = SEED_PRIOR.median_3[j] * np.exp(SEED_PRIOR.log_sd * rng.normal())
        noise_R = tau * rng.normal(size=len(arms)) + SD[j] * rng.normal(size=len(arms))
        mean_R3[:, j] = x_RF @ b_F + tau * rng.normal(size=seeds)[seed_R] + noise_R
        truth[name] = b_F
    keep = np.flatnonzero(rng.random(len(arms)) >= missing)
    given = [Moments(1.0, mean_R3[keep], np.tile(SD, (len(keep), 1)))]
    return given, [arms[i] for i in keep], seed_R[keep].tolist(), truth


@pytest.mark.parametrize(("seeds", "main_sd", "missing"), [(1, 0.03, 0.0), (2, 0.03, 0.15), (2, 0.0, 0.0)])
def test_intervals_of_main_effects_hold_and_verdicts_are_rarely_false(seeds, main_sd, missing):
    rng, studies = np.random.default_rng(7), 40
    covered, false = [], 0
    for _ in range(studies):
        given, arms, seed_R, truth = simulated(rng, HALF_4, seeds, main_sd, missing)
        found = effects_of(given, arms, seed_R, HALF_4)
        wrong = []
        for on in found.on:
            true_P = np.concatenate([truth[on.parameter], np.zeros(3)])
            for effect, value in zip(on.effects, true_P, strict=True):
                wrong.append(effect.verdict != "not distinguishable" and value * effect.median <= 0)
                if effect.is_main:
                    covered.append(effect.interval[0] <= value <= effect.interval[1])
        false += any(wrong)
    # 320 intervals: two standard errors are .025. Too wide is wrong only where there is something to find.
    assert 0.92 < np.mean(covered) <= (0.985 if main_sd else 1.0)
    assert false <= 5  # at .05 of 40 studies, 6 or more come once in 70


def test_crashed_runs_leave_an_answer_and_a_caution():
    levels = HALF_4["levels"]
    truth_F = np.array([0.04, 0.0, 0.0, 0.0])
    present = [arm for arm in levels if arm not in ("ab", "ac")]
    mean_R = [0.6 + truth_F @ (np.array(levels[arm]) - 0.5) for arm in present]
    found = effects_of(moments(mean_R, 0.003), present, [1] * len(present), HALF_4)
    low, high = found.main("a").interval
    assert low < 0.04 < high
    assert high - low < 0.09
    assert "no run of ab, ac to go by" in found.cautions
    assert any("a is not free of" in text for text in found.cautions)
    assert any("taken from the prior" in text for text in found.cautions)
    # Every arm with a is gone: what is left is that a is a switch like the others, which here do nothing.
    without = [arm for arm in levels if "a" not in arm or arm == "base"]
    found = effects_of(moments([0.6] * 4, 0.003), without, [1] * 4, HALF_4)
    assert found.main("a").p > 0.9
    assert any("a is never switched within a block" in text for text in found.cautions)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(CannotAnswerError, match="no two runs share a seed"):
        effects_of(moments([0.6, 0.7]), ["base", "a"], [1, 2], FULL_2)
    with pytest.raises(InputError, match="arm 'c', which is not in the design"):
        effects_of(moments([0.6, 0.7]), ["base", "c"], [1, 1], FULL_2)


def test_a_half_t_has_its_quantiles():
    # Of |t| with 4 degrees of freedom half lies below .7407 and nine tenths below 2.1318 (tables of t).
    prior = half_t(2.0)
    held = np.cumsum(prior.weight_T)
    middle = 0.5 * (held + np.concatenate([[0.0], held[:-1]]))
    np.testing.assert_allclose(
        np.interp(np.log([1.4814, 4.2636]), np.log(prior.node_T), middle), [0.5, 0.9], atol=0.03
    )


def run(arm, seed, A, C_mid, rng, peak=False):
    compute_N = np.linspace(0, 12_000, 25)
    y_N = Curve(LOG_LOGISTIC, A, 1.9, C_mid, 0.3)(compute_N) + rng.normal(0, 0.004, 25)
    if peak:
        y_N[12:] -= 0.008 * np.arange(13)
    return DesignRun(arm, seed, fit(Points.from_arrays(compute_N, y_N, axis="gpu_hours")))


def test_from_the_fits_of_runs():
    """a raises the ceiling by .06, b takes C_mid to two thirds; one run peaks and is left out."""
    rng = np.random.default_rng(3)
    runs = [
        run(arm, seed, 0.6 + 0.06 * a, 2500 * (2 / 3) ** b, rng, peak=(arm, seed) == ("a+b", 2))
        for arm, (a, b) in FULL_2["levels"].items()
        for seed in (1, 2, 3)
    ]
    found = effects(runs, FULL_2)
    assert found.runs == 11
    assert len(found.left_out) == 1
    assert found.left_out[0].startswith("a+b seed 2: ")
    a, b = found.main("a"), found.main("b", "log_C_mid")
    assert a.interval[0] < 0.06 < a.interval[1]
    assert b.interval[0] < np.log(2 / 3) < b.interval[1]
    assert (a.verdict, b.verdict) == ("higher ceiling", "reaches it sooner")
    assert found.main("b").verdict == found.main("a", "log_C_mid").verdict == "not distinguishable"
