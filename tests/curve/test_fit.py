import dataclasses
import json
import math

import numpy as np
import pytest
from noisy_curve import TRUTH, noisy_points

import scalerl
from scalerl import CannotAnswerError, InputError
from scalerl.curve import FAMILIES, LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.fit import _end
from scalerl.curve.noise import ar1


@pytest.mark.parametrize(
    ("C_mid", "B", "A", "top"),
    [(2542, 1.92, 0.610, 8000), (10909, 1.70, 0.645, 50000), (4242, 1.65, 0.710, 16000)],
)
def test_published_parameters_lie_in_the_intervals(C_mid, B, A, top):
    truth = Curve(LOG_LOGISTIC, A, B, float(C_mid), 0.40)
    result = fit(noisy_points(truth, float(top), n=20))
    intervals = result.intervals
    for (low, high), value in ((intervals.A, A), (intervals.A_given_family, A), (intervals.B, B)):
        assert low < value < high
    assert intervals.C_mid[0] < C_mid < intervals.C_mid[1]
    low, high = result.forecast(2.0 * top).interval
    assert low < float(truth(2.0 * top)) < high
    assert high - low < 0.10


def test_exact_points_fit_exactly():
    compute_N = np.linspace(0, 8000, 16)
    result = fit(Points.from_arrays(compute_N, TRUTH(compute_N)))
    np.testing.assert_allclose(
        (result.paper_curve.A, result.paper_curve.B, result.paper_curve.C_mid, result.paper_curve.R_0),
        (0.61, 1.92, 2542, 0.40),
        rtol=1e-6,
    )
    assert result.families["log_logistic"] > 0.99
    assert result.identified
    assert result.forecast(16000.0).median == pytest.approx(float(TRUTH(16000.0)), abs=0.002)


def test_the_unit_of_compute_and_the_order_of_rows_do_not_matter():
    plain, scaled = fit(noisy_points()), fit(noisy_points(scale=3.6e18))
    assert scaled.paper_curve.C_mid == pytest.approx(3.6e18 * plain.paper_curve.C_mid, rel=1e-7)
    assert pytest.approx(plain.intervals.A, abs=1e-6) == scaled.intervals.A
    assert scaled.forecast(3.6e18 * 2e4).median == pytest.approx(plain.forecast(2e4).median, abs=1e-7)
    points = noisy_points()
    shuffled = fit(points.select(np.random.default_rng(1).permutation(len(points))))
    assert shuffled.to_json([1e4]) == plain.to_json([1e4])


def test_replicates_narrow_the_answer():
    one = noisy_points(sd=0.008)
    rng = np.random.default_rng(9)
    compute_N = np.repeat(one.compute_N, 4)
    four = Points.from_arrays(compute_N, TRUTH(compute_N) + rng.normal(0, 0.008, len(compute_N)))
    narrow, wide = fit(four).forecast(16000.0).interval, fit(one).forecast(16000.0).interval
    assert narrow[1] - narrow[0] < 0.8 * (wide[1] - wide[0])


def test_where_r0_comes_from():
    points = noisy_points()
    measured = fit(points)
    assert (measured.r0_source, measured.r0_value) == ("measured", float(points.pass_rate_N[0]))
    rest = points.select(points.compute_N > 0)
    fitted = fit(rest, r0="free")
    assert (fitted.r0_source, fitted.r0_value) == ("fitted", fitted.paper_curve.R_0)
    given = fit(points, r0=0.40)
    assert (given.r0_source, given.r0_value, given.paper_curve.R_0) == ("given", 0.40, 0.40)
    assert given.n_points == len(points) - 1


def test_min_compute_keeps_step_0_and_the_rest_apart():
    result = fit(noisy_points(), min_compute=1500.0)
    assert result.points.compute_N[0] == 0.0
    assert (result.points.compute_N[1:] >= 1500).all()
    assert ((result.excluded.compute_N > 0) & (result.excluded.compute_N < 1500)).all()
    assert result.n_points + len(result.excluded) == 16


def test_auto_leaves_out_what_came_before_a_jump_and_else_nothing():
    points = noisy_points(top=12_000.0, n=49, sd=0.005)
    jumped = dataclasses.replace(points, pass_rate_N=points.pass_rate_N - 0.08 * (points.compute_N < 3500))
    whole, auto = fit(jumped), fit(jumped, min_compute="auto")
    assert whole.misfit is not None
    assert whole.misfit.kind == "jump"
    assert (auto.min_compute, auto.r0_source) == (whole.misfit.at, "fitted")
    assert auto.points.compute_N.min() == whole.misfit.at
    assert auto.misfit is None
    assert (
        auto.warnings[0]
        == f"left out: compute below {whole.misfit.at:.10g}, as {whole.misfit.why.split(';')[0]}"
    )
    low, high = auto.forecast(24_000.0).interval
    assert low - 0.002 < TRUTH(24_000.0) < high  # at the edge of 95 %
    # The whole run is forecast with the jump as a change of level: no evaluation is lost.
    assert np.ptp(whole.forecast(24_000.0).interval) < 0.7 * (high - low)
    without = fit(points).forecast(24_000.0).median
    assert whole.forecast(24_000.0).median == pytest.approx(without, abs=0.01)


def test_forecast_band_and_probability_agree():
    result = fit(noisy_points())
    forecast = result.forecast(16000.0)
    median_M, low_M, high_M = result.band(np.array([0.0, 4000.0, 16000.0]))
    assert low_M[-1] == pytest.approx(forecast.interval[0], abs=2e-3)
    assert high_M[-1] == pytest.approx(forecast.interval[1], abs=2e-3)
    assert forecast.prediction[0] < forecast.interval[0] < forecast.median < forecast.interval[1]
    assert forecast.interval[1] < forecast.prediction[1]
    assert result.probability(float(median_M[-1]), 16000.0) == pytest.approx(0.5, abs=0.02)
    assert result.probability(forecast.interval[0], 16000.0) == pytest.approx(0.975, abs=0.005)
    assert forecast.paper_point == pytest.approx(float(result.paper_curve(16000.0)))
    assert [float(end_1[0]) for end_1 in result.band(4000.0)] == [median_M[1], low_M[1], high_M[1]]
    for compute in (-1.0, float("inf")):
        with pytest.raises(InputError, match="the compute must be a number of 0 or more"):
            result.band(np.array([4000.0, compute]))


def test_compute_to_reach_a_target_is_where_the_band_crosses_it():
    result = fit(noisy_points())
    low, high = result.compute_to(0.55)
    assert result.probability(0.55, low) == pytest.approx(0.025, abs=0.01)
    assert result.probability(0.55, high) == pytest.approx(0.975, abs=0.01)
    assert result.compute_to(0.9)[1] == math.inf


def test_a_target_in_percent_is_never_reached_in_silence():
    with pytest.raises(InputError, match=r"the target must be a pass rate in \[0, 1\], found 55"):
        fit(noisy_points()).compute_to(55)


def test_points_are_on_their_own_axis_alone():
    with pytest.raises(InputError, match="the points are on 'compute', not on 'gpu_hours': leave out x"):
        fit(noisy_points(), x="gpu_hours")
    assert fit(noisy_points(), x="compute").axis == "compute"


def test_a_fit_can_be_looked_for_in_a_list_and_be_a_key():
    """Its arrays have no truth value: a comparison of them would raise."""
    one, other = fit(noisy_points()), fit(noisy_points())
    assert [other, one].index(one) == 1
    assert {one: "first", other: "second"}[other] == "second"
    assert one.points != other.points
    assert one.forecast([1.0]) != one.forecast([1.0])


def test_json_takes_numbers_of_numpy():
    data = fit(noisy_points()).to_json([16000.0], target=np.float64(0.5), budget=np.int64(16000))  # type: ignore[arg-type]
    assert json.loads(json.dumps(data))["target"]["budget"] == 16000.0


def test_verdicts():
    seen = fit(noisy_points(n=24, sd=0.003, top=10000.0))
    assert seen.identified
    assert seen.verdict(0.50, 20000.0) == "go"
    assert seen.verdict(0.90, 20000.0) == "no-go"
    assert seen.verdict(seen.forecast(20000.0).median, 20000.0) == "too close"
    early = fit(noisy_points(top=2000.0))
    assert not early.identified
    assert early.verdict(early.forecast(4000.0).median, 4000.0) == "too early"
    assert "C_mid" in early.why


def test_a_forecast_may_be_narrow_where_the_ceiling_is_not_identified():
    early = fit(noisy_points(top=2000.0))
    assert not early.identified
    assert early.verdict(float(TRUTH(1500.0)), 2500.0) == "go"
    assert early.verdict(0.95, 2500.0) == "no-go"
    chance = early.chance(0.95, 2500.0)
    assert chance.why.endswith("though the ceiling is not identified")
    # Beyond ten times the compute nothing is called.
    assert early.verdict(float(TRUTH(1500.0)), 20001.0) == "too early"
    assert "beyond 10 times the compute" in early.reasons(float(TRUTH(1500.0)), 20001.0)


def test_json_has_exactly_the_documented_keys():
    data = fit(noisy_points()).to_json([16000.0], target=0.6, budget=16000.0)
    assert {key: set(value) for key, value in data.items() if isinstance(value, dict)} == {
        "metric": {"name", "kind", "split", "dataset", "prompts", "samples", "others", "chosen"},
        "r0": {"value", "source"},
        "fit": {"family", "A", "B", "C_mid", "R_0", "rmse"},
        "median": {"A", "A_given_family", "B", "C_mid"},
        "intervals": {"level", "A", "A_given_family", "B", "C_mid"},
        "families": {family.name for family in FAMILIES},
        "noise": {"sd", "phi", "wander", "floor", "seed_sd", "floor_from"},
        "at_bounds": {"A", "B", "C_mid"},
        "left_out": {"total", "metric", "reasons", "evaluations", "ending"},
        "target": {
            *("reward", "budget", "probability", "probability_rerun", "compute_to_target", "verdict"),
            *("verdict_rerun", "why"),
        },
    }
    assert set(data) - {key for key, value in data.items() if isinstance(value, dict)} == {
        *("points", "axis", "min_compute", "prior", "identified", "why", "c_max_over_c_mid"),
        *("max_compute", "basins", "c_max_over_c_mid_interval", "compute_to_identify", "part_that_holds"),
        *("lack_of_fit", "suspected", "forecast", "campaign", "warnings"),
    }
    assert set(data["forecast"][0]) == {
        *("compute", "median", "paper_point", "interval", "prediction", "rerun"),
    }


@pytest.mark.parametrize(
    ("compute", "pass_rate", "message"),
    [
        ([0, 1, 2], [0.1, 0.2, 0.3], "3 evaluations; a curve needs at least 4"),
        ([0, 1, 1, 1, 2], [0.1, 0.2, 0.2, 0.2, 0.3], "5 evaluations at only 3 values of compute"),
    ],
)
def test_data_that_cannot_answer(compute, pass_rate, message):
    with pytest.raises(CannotAnswerError, match=message):
        fit(Points.from_arrays(list(compute), pass_rate))


def short_run(seed, n):
    """The first n of eight evaluations, and the pass rate of the last."""
    rng, compute_N = np.random.default_rng(seed), np.arange(8.0)
    truth = Curve(LOG_LOGISTIC, rng.uniform(0.4, 0.8), rng.uniform(1, 2), rng.uniform(1, 7), 0.2)
    rate_N = truth(compute_N) + rng.normal(0, 0.01, 8)
    return Points.from_arrays(compute_N[:n], rate_N[:n]), float(rate_N[-1])


def test_four_evaluations_have_a_forecast_and_six_a_verdict():
    held, targets = 0, (0.2, 0.9)
    for seed in range(60):
        points, end = short_run(seed, 4)
        few = fit(points)
        low, high = few.forecast(7).prediction
        held += low <= end <= high
        assert {few.verdict(target, 7) for target in targets} == {"too early"}
        assert few.reasons(0.2, 7) == "4 evaluations; a verdict needs at least 6"
    assert held >= 53  # of 57 expected; at least 53 with probability .98
    six = fit(short_run(0, 6)[0])
    assert [six.verdict(target, 7) for target in targets] == ["go", "no-go"]
    with pytest.raises(CannotAnswerError, match="4 evaluations; a verdict needs at least 6"):
        scalerl.compare({"old": [six], "new": [fit(short_run(1, 4)[0])]})
    with pytest.raises(CannotAnswerError, match="5 evaluations; a curve needs at least 6"):
        fit(short_run(0, 5)[0], prior="flat")


@pytest.mark.parametrize("seed", range(4))
def test_a_ceiling_of_one_is_in_its_interval(seed):
    compute_N, samples = np.linspace(100.0, 3000.0, 24), 2048
    rate_N = 0.4 + 0.6 / (1.0 + (500.0 / compute_N) ** 2)
    found_N = np.random.default_rng(seed).binomial(samples, rate_N) / samples
    result = fit(Points.from_arrays(compute_N, found_N))
    assert result.intervals.A[0] < 1.0 == result.intervals.A[1]
    assert result.forecast(30_000.0).interval[1] > 0.998


def test_priors_are_named():
    with pytest.raises(InputError, match="no prior is named 'uniform': default, flat"):
        fit(noisy_points(), prior="uniform")  # pyright: ignore[reportArgumentType]
    assert fit(noisy_points(), prior="flat").to_json()["prior"] == "flat"
    assert fit(noisy_points()).to_json()["prior"] == "default"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"level": 1.0}, "level"), ({"level": 95}, "level"), ({"r0": 1.2}, "R_0"), ({"r0": -0.1}, "R_0")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        fit(noisy_points(), **arguments)
    result = fit(noisy_points())
    with pytest.raises(InputError, match="compute"):
        result.forecast(-1.0)
    with pytest.raises(InputError, match="target"):
        result.probability(60.0, 1000.0)


def test_a_fit_prints_its_answer():
    result = scalerl.fit(noisy_points())
    text = str(result)
    assert "C_mid" in text
    assert "identified" in text
    (low, high), point = result.intervals.A, result.ceiling
    assert f"A {point:.3f}  95 % [{low:.3f}, {high:.3f}]" in text
    assert f"least squares (paper)  A {result.paper_curve.A:.3f}  B {result.paper_curve.B:.3g}  " in text


def frechet_points(phi=0.6, sd=0.005, seed=3):
    """A run of another shape than the paper's, with noise that neighbours share."""
    rng = np.random.default_rng(seed)
    compute_N, noise_N = np.linspace(0, 14.0, 31), ar1(rng.normal(0, sd, 31), phi)
    truth = Curve(FAMILIES[2], 0.82, 1.3, 1.5, 0.28)
    return Points.from_arrays(compute_N, truth(compute_N) + noise_N)


def test_the_medians_lie_in_their_intervals_where_least_squares_does_not():
    result = fit(frechet_points(phi=0.0, sd=0.003))
    median, intervals = result.median, result.intervals
    assert not intervals.A[0] <= result.paper_curve.A <= intervals.A[1]
    for name in ("A", "A_given_family", "B", "C_mid"):
        low, high = getattr(intervals, name)
        assert low < getattr(median, name) < high
    assert result.ceiling == median.A == pytest.approx(0.82, abs=0.01)
    data = result.to_json()
    assert data["median"] == dataclasses.asdict(median)
    assert data["fit"]["A"] == result.paper_curve.A


def test_the_narrowest_interval_closes_on_the_median():
    narrow = fit(noisy_points(), level=0.002)
    for name in ("A", "A_given_family", "B", "C_mid"):
        ends = getattr(narrow.intervals, name)
        assert ends == pytest.approx((getattr(narrow.median, name),) * 2, rel=2e-3)
    exact = fit(Points.from_arrays(np.linspace(0, 8000, 16), TRUTH(np.linspace(0, 8000, 16))))
    found = (exact.median.A_given_family, exact.median.B, exact.median.C_mid)
    np.testing.assert_allclose(found, (0.61, 1.92, 2542), rtol=3e-3)


def test_whether_a_ceiling_is_identified_does_not_depend_on_the_level():
    usual, narrow = fit(noisy_points()), fit(noisy_points(), level=0.8)
    assert narrow.identification.identified == usual.identification.identified
    low, high = usual.intervals.A
    assert f"A is in [{low:.3f}, {high:.3f}]:" in usual.why
    # Beside an interval at 80 % another would be taken for the same.
    assert f"A is in [{low:.3f}, {high:.3f}] at 95 %:" in narrow.why


def test_a_run_of_another_shape_is_warned_of():
    result = fit(frechet_points())
    assert result.families["log_logistic"] < 0.05
    (warning,) = result.warnings
    assert "the Fréchet curve describes the run better" in warning
    assert "B and C_mid" in warning
    assert fit(noisy_points()).warnings == ()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_prediction_intervals_hold_whatever_the_shape(family):
    """A short version of benchmarks/coverage.py: forecasts of the end from the first half of 20 runs."""
    rng = np.random.default_rng([7, FAMILIES.index(family)])
    hits, widths = 0, []
    for run in range(20):
        half = 3000.0 * (1.5, 2.5, 4.0)[run % 3]
        truth = Curve(family, 0.82, float(rng.uniform(1.2, 2.2)), 3000.0, 0.25)
        sd, phi = float(rng.uniform(0.004, 0.010)), float(rng.uniform(0, 0.5))
        compute_N, noise_N = np.linspace(0, half, 14), ar1(rng.normal(0, sd, 14), phi)
        forecast = fit(Points.from_arrays(compute_N, truth(compute_N) + noise_N)).forecast(2 * half)
        end = float(truth(2 * half)) + float(rng.normal(0, sd))
        hits += forecast.prediction[0] <= end <= forecast.prediction[1]
        if run % 3:
            widths.append(forecast.prediction[1] - forecast.prediction[0])
    assert hits >= 17
    assert np.median(widths) < 0.13


@pytest.mark.parametrize("known", [None, 0.01])
def test_a_long_run_forecasts_an_evaluation_and_not_a_mean_of_several(known):
    """Rows above 400 are averaged, and an evaluation still has the noise of one."""
    rng = np.random.default_rng(8)
    compute_N = np.linspace(25.0, 10_000.0, 4000)
    pass_rate_N = TRUTH(compute_N) + rng.normal(0, 0.01, 4000)
    result = fit(Points.from_arrays(compute_N, pass_rate_N, noise_sd=known))
    assert result.noise.sd == pytest.approx(0.01, rel=0.1)
    assert result.noise.phi < 0.3
    low, high = result.intervals.A
    assert high - low < 0.03
    forecast = result.forecast(15_000.0)
    new_N = float(TRUTH(15_000.0)) + rng.normal(0, 0.01, 1000)
    held = np.mean((new_N >= forecast.prediction[0]) & (new_N <= forecast.prediction[1]))
    assert 0.92 < held < 0.99


def test_too_few_evaluations_within_the_cuts_are_counted_beside_all():
    points = Points.from_arrays(np.arange(31.0), np.linspace(0.1, 0.5, 31))
    too_few = "; a curve needs at least 4"
    with pytest.raises(CannotAnswerError, match=f"only 3 of 31 evaluations at or below --max.*{too_few}"):
        fit(points, max_compute=2.0)
    with pytest.raises(CannotAnswerError, match=f"only 3 of 31 .* at or above --min.*{too_few}"):
        fit(points, min_compute=29.0)
    with pytest.raises(
        CannotAnswerError, match=f"only 3 of 31 .* at or above --min.* and at or below --max.*{too_few}"
    ):
        fit(points, min_compute=9.0, max_compute=10.0)


def test_ends_of_a_part_are_printed_whole_where_they_can_be():
    assert (_end(430.0, 1e-9), _end(1.0, -1e-9)) == ("430", "1")
    assert float(_end(1 / 3, 1e-9)) >= 1 / 3
    assert float(_end(2 / 3, -1e-9)) <= 2 / 3


def test_a_given_r_0_that_is_not_this_runs_is_warned_of():
    points = noisy_points()
    assert not any("R_0 is given" in w for w in fit(points, r0=0.40).warnings)
    assert any("R_0 is given as 0.5" in w for w in fit(points, r0=0.5).warnings)
