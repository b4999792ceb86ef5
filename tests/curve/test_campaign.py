import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Points, Weibull, fit
from scalerl.curve.campaign import A_FLOOR, LOG_B_FLOOR, STRANGER, FamilyPrior, check_siblings, learn
from scalerl.curve.prior import DEFAULT, FLAT
from scalerl.errors import InputError
from scalerl.record.evaluation import EvalPoint
from scalerl.record.metric import Metric
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter

TOP = 9000.0


def run(seed, B=1.9, A=0.6, C_mid=2500.0, source="points", axis="compute"):
    rng = np.random.default_rng(seed)
    compute_N = np.linspace(0, TOP, 25)
    y_N = Curve(LOG_LOGISTIC, A, B, C_mid, 0.3)(compute_N) + rng.normal(0, 0.005, 25)
    return Points.from_arrays(compute_N, y_N, source=source, axis=axis)


def first(points, share):
    return points.select(points.compute_N <= share * TOP)


@pytest.fixture(scope="module")
def siblings():
    rng = np.random.default_rng(3)
    drawn = zip(rng.normal(math.log(1.9), 0.25, 6), rng.normal(0.6, 0.03, 6), strict=True)
    return [fit(run(i, math.exp(log_b), A)) for i, (log_b, A) in enumerate(drawn)]


@pytest.fixture(scope="module")
def own():
    return fit(first(run(100), 0.3))


def learnt(siblings, own):
    prior, _ = learn(siblings, own)
    assert prior is not None
    return prior


def test_the_prior_is_the_siblings_mean_and_spread(siblings, own):
    prior, said = learn(siblings, own)
    assert prior is not None
    for index, found in enumerate(prior.families):
        posts = [sibling.posterior.only(index) for sibling in siblings]
        log_b_k = np.array([post.weight_cells @ post.log_b_cells for post in posts])
        error_k = [
            math.sqrt(post.weight_cells @ (post.log_b_cells - m) ** 2)
            for post, m in zip(posts, log_b_k, strict=True)
        ]
        s = max(log_b_k.std(ddof=1), math.sqrt(np.mean(np.square(error_k))), LOG_B_FLOOR)
        assert found.log_b == pytest.approx(log_b_k.mean())
        assert found.scale == pytest.approx(s * math.sqrt(7 / 6))
        draws = [post.draws(4000).A_n for post in posts]
        assert pytest.approx(np.mean(draws), abs=0.003) == found.A
        assert found.A_sd >= max(A_FLOOR, 1.9 * np.std([d.mean() for d in draws], ddof=1))
    assert prior.families[0].log_b == pytest.approx(math.log(1.9), abs=0.25)
    assert said == str(prior)
    assert said.startswith("campaign (6 siblings): log-logistic B ")


def test_density_of_the_prior_integrates_to_one_and_has_the_tails_of_t():
    prior = FamilyPrior("log_logistic", 0.6, 0.2, 0.85, 0.1)
    log_b, A = np.linspace(*FLAT.log_b, 4001)[:, None], np.linspace(0, 1, 1001)
    base = FLAT.log_base(LOG_LOGISTIC, log_b, A, np.zeros(1))
    for degrees in (4, 30):
        density = np.exp(prior.log_ratio(log_b, A, degrees, base) + base)
        total = np.trapezoid(np.trapezoid(density, A, axis=1), log_b[:, 0])
        assert total == pytest.approx(1.0, abs=0.005)
    # Student's t with 4 degrees: 3/8 at its centre; half of it at t^2 = 4 (2^(2/5) - 1).
    t = 2 * math.sqrt(2**0.4 - 1)
    nodes, centre_A = np.array([0.6, 0.6 + 0.2 * t]), np.full(2, 0.85)
    centre, half = prior.log_ratio(nodes, centre_A, 4, base[:2, 0]) + base[:2, 0]
    flat = STRANGER / (FLAT.log_b[1] - FLAT.log_b[0])
    inside = 0.5 * (math.erf(1.5 / math.sqrt(2)) + math.erf(8.5 / math.sqrt(2)))
    expected = 0.8 * 0.375 / 0.2 / (0.1 * math.sqrt(2 * math.pi) * inside) + flat
    assert math.exp(centre) == pytest.approx(expected, rel=1e-9)
    assert math.exp(half) - flat == pytest.approx((math.exp(centre) - flat) / 2, rel=1e-9)


def test_the_base_of_the_default_prior_integrates_to_one():
    log_b, A = np.linspace(*DEFAULT.log_b, 801)[:, None], np.linspace(0.3, 1, 4001)
    density = np.exp(DEFAULT.log_base(LOG_LOGISTIC, log_b, A, np.array(0.3)))
    # The rest of the probability is at A = 1 itself.
    expected = pytest.approx(1.0 - DEFAULT.certain, abs=0.01)
    assert np.trapezoid(np.trapezoid(density, A, axis=1), log_b[:, 0]) == expected


def test_reweighed_nodes_are_the_product_of_posterior_and_prior(siblings, own):
    prior = learnt(siblings, own)
    post = own.posterior
    found = prior.apply(post)
    expected = np.empty_like(post.weight)
    for i, family in enumerate(post.family_cells):
        base = post.prior.log_base(FAMILIES[family], post.log_b_cells[i], post.A[i], post.R_0[i])
        ratio = prior.families[family].log_ratio(post.log_b_cells[i], post.A[i], 5, base)
        expected[i] = post.weight[i] * np.exp(ratio)
    np.testing.assert_allclose(found.weight, expected / expected.sum(), rtol=1e-9)
    np.testing.assert_allclose(np.exp(found.log_weight), found.weight)
    np.testing.assert_array_equal(found.sd_weight_J, post.sd_weight_J)


def test_siblings_narrow_an_early_forecast_and_hold_it(siblings):
    flat, campaign, held = [], [], 0
    for seed in range(200, 208):
        B, A = math.exp(np.random.default_rng(seed).normal(math.log(1.9), 0.25)), 0.6
        early = fit(first(run(seed, B, A), 0.25))
        end = float(Curve(LOG_LOGISTIC, A, B, 2500.0, 0.3)(TOP))
        prior = learnt(siblings, early)
        posterior = prior.apply(early.posterior)
        low, high = dataclasses.replace(early, posterior=posterior).forecast(TOP).interval
        campaign.append(high - low)
        held += low <= end <= high
        low, high = early.forecast(TOP).interval
        flat.append(high - low)
    assert np.median(campaign) < 0.85 * np.median(flat)
    assert held >= 7


def test_data_overrule_the_siblings(siblings):
    points = run(300, B=4.2, A=0.85)
    stranger = fit(points)
    prior = learnt(siblings, stranger)
    moved = prior.apply(stranger.posterior).draws(8000)
    low, high = np.quantile(moved.A_n, [0.025, 0.975])
    assert low < 0.85 < high
    assert float(np.median(moved.log_b_n[moved.family_n == 0])) == pytest.approx(math.log(4.2), abs=0.12)


def test_a_run_is_no_sibling_of_its_own_and_none_counts_twice(siblings):
    whole = run(0, source="runs/a/evals.jsonl")
    early = fit(first(dataclasses.replace(whole, source="runs/a-copy.csv"), 0.4))
    prior, said = learn([*siblings, fit(whole), siblings[2]], early)
    assert prior is not None
    alone = learnt(siblings, early)
    assert prior.families == alone.families
    assert prior.dropped == ("runs/a/evals.jsonl", "points")
    assert said.endswith("without runs/a/evals.jsonl, points")
    renamed = fit(run(7, source="runs/a/evals.jsonl"))
    assert learnt([*siblings, renamed], fit(whole)).dropped == ("runs/a/evals.jsonl",)


def test_a_misfit_teaches_nothing(siblings, own):
    points = run(400, source="peaked.csv")
    late_N = np.maximum(points.compute_N / TOP - 0.6, 0.0)
    peaked = fit(dataclasses.replace(points, pass_rate_N=points.pass_rate_N - 0.5 * late_N))
    assert peaked.lack_of_fit is not None
    assert learnt([*siblings, peaked], own).dropped == ("peaked.csv",)


def test_off_below_three_siblings(siblings, own):
    prior, why = learn([*siblings[:2], own], own)
    assert prior is None
    assert why == (
        "no campaign prior: needs 3 sibling runs, found 2 (left out: points, as the run itself, a duplicate, "
        "or fitted by no family)"
    )


def test_siblings_that_agree_by_luck_but_know_little_give_a_wide_prior(own):
    one = first(run(0), 0.25)
    alike = [dataclasses.replace(one, pass_rate_N=one.pass_rate_N + 1e-5 * i) for i in range(6)]
    prior = learnt([fit(points) for points in alike], own)
    post = fit(one).posterior.only(0)
    mean = post.weight_cells @ post.log_b_cells
    error = math.sqrt(post.weight_cells @ (post.log_b_cells - mean) ** 2)
    assert error > 1.3 * LOG_B_FLOOR
    assert prior.families[0].scale == pytest.approx(error * math.sqrt(7 / 6), rel=0.05)


def test_siblings_are_on_the_axis_of_the_run(siblings, own):
    with pytest.raises(InputError, match="sibling on the axis 'flops', and the run is on 'compute'"):
        learn([*siblings, fit(run(9, axis="flops"))], own)


def test_siblings_have_the_metric_of_the_run_unless_all_are_named(siblings, own):
    def of(name, is_chosen):
        return fit(dataclasses.replace(run(9), metric=Metric(name, is_chosen=is_chosen)))

    with pytest.raises(
        InputError, match=r"a sibling's metric is eval/acc.*name one for each \(--y NAME,NAME\)"
    ):
        learn([*siblings, of("eval/acc", False)], own)
    prior, _ = learn([*siblings, of("eval/acc", True)], own)
    assert prior is not None
    assert prior.n_siblings == len(siblings) + 1


def test_families_are_those_of_the_posterior(siblings, own):
    prior = learnt(siblings, own)
    assert [p.family for p in prior.families] == [family.name for family in FAMILIES]
    given = prior.apply(own.posterior.only(1))
    assert given.family_weights()["weibull"] == pytest.approx(1.0)


def test_a_warning_of_the_shape_is_of_the_fit_that_it_stands_in():
    """Siblings move the weights of the families: here that of the log-logistic, from .065 to .045."""
    compute_N, truth = np.linspace(0, TOP, 25), Curve(Weibull(), 0.6, 2.2, 2500.0, 0.3)
    runs = [
        Points.from_arrays(compute_N, truth(compute_N) + np.random.default_rng(30 + i).normal(0, 0.004, 25))
        for i in range(6)
    ]
    siblings = [fit(points, prior="flat") for points in runs[1:]]
    flat = fit(first(runs[0], 0.8), prior="flat", prior_from=siblings)
    assert flat.campaign is not None
    assert (flat.families["log_logistic"] < 0.05, flat.warnings) == (False, ())
    own = flat.campaign.families
    (warning,) = flat.campaign.warnings
    weights = f"weight {own['weibull']:.2f}, log-logistic {own['log_logistic']:.2f}"
    assert warning.startswith(f"the Weibull curve describes the run better ({weights})")
    later = fit(first(runs[0], 0.95), prior="flat", prior_from=siblings).campaign
    assert later is not None
    assert sum("describes the run better" in warning for warning in later.warnings) == 1


def write(path: Path, prompt_set: str) -> RunRecord:
    point = EvalPoint(step=0, pass_rate=0.5, n_prompts=2, n_samples=2)
    RunWriter(path, {}).evaluation(point, prompt_set, ["a", "b"], np.array([1, 1]))
    return RunRecord.read(path)


def test_siblings_need_the_same_prompts(tmp_path):
    records = [write(tmp_path / name, prompts) for name, prompts in (("a", "p"), ("b", "p"), ("c", "q"))]
    check_siblings(records[:2])
    (tmp_path / "b" / "eval_prompts.jsonl").unlink()  # not on record: nothing to refuse
    check_siblings(records[:2])
    with pytest.raises(InputError, match=r"c/eval_prompts.jsonl: prompt set q, but .*a has p"):
        check_siblings(records)
