import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.paper import (
    PAPER_C_MIDS,
    PAPER_CEILINGS,
    linearised,
    paper_compare,
    paper_fit,
    paper_fit_of,
)
from scalerl.record.metric import Metric

# (C_mid, B, A, end of the fitted range in GPU-hours): table 1 and the leave-one-out column with A free of
# arXiv 2510.13786. Its MoE row (4242, 1.65, .710) lies on neither grid and does not fit its own figure.
PUBLISHED = [
    (2542, 1.92, 0.610, 8000),
    (11272, 1.89, 0.645, 50000),
    (2542, 2.44, 0.585, 8000),
    (3054, 2.22, 0.590, 8000),
    (2936, 2.07, 0.595, 8000),
    (2818, 1.77, 0.605, 8000),
    (10909, 1.70, 0.645, 50000),
    (2896, 2.05, 0.595, 8000),
    (1675, 1.09, 0.615, 8000),
    (2463, 2.09, 0.590, 8000),
    (2660, 1.68, 0.610, 8000),
    (2503, 1.84, 0.595, 8000),
    (3409, 1.89, 0.605, 8000),
    (2857, 1.88, 0.610, 8000),
    (2621, 1.93, 0.600, 8000),
    (2621, 1.62, 0.605, 8000),
    (3093, 1.77, 0.610, 8000),
]


def run(truth: Curve, end: float, n: int = 40, sd: float = 0.0, seed: int = 0, **options) -> Points:
    """Evaluations at step 0 and n times up to `end` GPU-hours."""
    compute_N = np.linspace(0, end, n + 1)
    noise_N = np.random.default_rng(seed).normal(0, sd, n + 1)
    return Points.from_arrays(
        compute_N, np.clip(truth(compute_N) + noise_N, 0, 1), **{"axis": "gpu_hours", **options}
    )


def test_every_published_value_lies_on_the_grids():
    for C_mid, _, A, _ in PUBLISHED:
        assert C_mid in PAPER_C_MIDS
        assert A in PAPER_CEILINGS
    assert (len(PAPER_CEILINGS), PAPER_CEILINGS[0], PAPER_CEILINGS[-1]) == (71, 0.450, 0.800)
    assert (len(PAPER_C_MIDS), PAPER_C_MIDS[1], PAPER_C_MIDS[-1]) == (199, 139, 40000)


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_every_published_row_comes_back(row):
    C_mid, B, A, end = row
    found = paper_fit(run(Curve(LOG_LOGISTIC, A, B, float(C_mid), 0.40), end), 0.40)
    assert (found.curve.A, found.curve.C_mid) == (A, C_mid)
    assert pytest.approx(B, rel=1e-6) == found.curve.B
    assert found.rss < 1e-15
    assert found.points.compute_N.min() >= 1500


@pytest.mark.parametrize(("C_mid", "A"), [(2560.0, 0.6075), (10700.0, 0.6475)])
def test_truth_between_the_nodes_comes_back_to_the_quantisation(C_mid, A):
    # A to its step of .005 and C_mid to its own (39 below 4,000 GPU-hours, 364 above), half of it in itself
    # and half for what the rounding of the other shifts. Half a step of A alone moves B by 4 %.
    found = paper_fit(run(Curve(LOG_LOGISTIC, A, 1.8, C_mid, 0.40), 5 * C_mid), 0.40).curve
    assert abs(found.A - A) <= 0.005
    assert abs(found.C_mid - C_mid) <= (39.4 if C_mid < 4000 else 363.7)
    assert pytest.approx(1.8, rel=0.05) == found.B


@pytest.mark.parametrize("row", PUBLISHED, ids=str)
def test_noise_moves_the_answer_as_far_as_its_standard_error(row):
    # Noise of .003, forty evaluations. Three standard errors of A and of log B given R_0 (Gauss-Newton), and
    # a step of the grid of A; B follows C_mid's grid, which is finer.
    C_mid, B, A, end = row
    truth = Curve(LOG_LOGISTIC, A, B, float(C_mid), 0.40)
    points = run(truth, end, sd=0.003, seed=C_mid)
    found = paper_fit(points, 0.40)
    fitted_N = found.points.compute_N
    share_N, by_log_b_N, by_log_c_N = LOG_LOGISTIC.slopes(B, np.log(fitted_N / C_mid))
    jacobian = np.stack([share_N, (A - 0.4) * by_log_b_N, (A - 0.4) * by_log_c_N], axis=1)
    error_A, error_log_b, _ = 0.003 * np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)))
    assert abs(found.curve.A - A) < 3 * error_A + 0.005
    assert abs(math.log(found.curve.B / B)) < 3 * error_log_b + 0.03
    # No other cell, whatever its B, leaves less: not the truth, and not its neighbours.
    assert found.rss <= np.sum((found.points.pass_rate_N - truth(fitted_N)) ** 2)


def test_no_cell_has_a_lower_squared_error():
    # A dense scan of B in every cell, by the definition.
    truth = Curve(LOG_LOGISTIC, 0.67, 1.3, 5000.0, 0.33)
    points = run(truth, 9000, n=18, sd=0.01, seed=4)
    found = paper_fit(points, 0.33)
    y_N, log_c_N = found.points.pass_rate_N, np.log(found.points.compute_N)
    least = np.inf
    for b in np.geomspace(0.05, 20, 250):
        share_MN = 1 / (1 + np.exp(-b * (log_c_N - np.log(PAPER_C_MIDS)[:, None])))
        for A in PAPER_CEILINGS:
            least = min(least, np.sum((y_N - 0.33 - (A - 0.33) * share_MN) ** 2, axis=1).min())
    assert found.rss <= least
    assert found.rss == pytest.approx(least, rel=2e-3)


def test_r0_is_measured_at_compute_0_or_asked_for():
    points = run(Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40), 8000)
    assert paper_fit(points).curve == paper_fit(points, 0.40).curve
    assert paper_fit(points).r0_source == "measured"
    with pytest.raises(InputError, match="give r0"):
        paper_fit(points.select(points.compute_N > 0))
    with pytest.raises(InputError, match=r"above R_0 = 0\.9"):
        paper_fit(points, 0.9)
    with pytest.raises(CannotAnswerError, match=r"1 evaluation .* at least 3"):
        paper_fit(points, 0.40, min_compute=7900)
    with pytest.raises(CannotAnswerError, match="the pass rate does not rise"):
        paper_fit(points, 0.62)
    with pytest.raises(CannotAnswerError, match="'eval/acc' does not rise"):
        paper_fit(replace(points, metric=Metric.of_column("eval/acc")), 0.62)


@pytest.mark.parametrize(
    ("first", "r0", "source"), [(0, None, "measured"), (0, 0.41, "given"), (200, 0.4, "given")]
)
def test_of_a_fit_r0_is_given_or_measured_as_it_was(first, r0, source):
    points = run(Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40), 8000)
    points = points.select(points.compute_N >= first)
    found = paper_fit_of(fit(points, r0=r0))
    assert found.r0_source == source
    assert found.curve == paper_fit(points, r0).curve


def test_of_a_fitted_r0_the_paper_says_nothing():
    points = run(Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40), 8000)
    for result in (fit(points, r0="free"), fit(points.select(points.compute_N > 0))):
        with pytest.raises(InputError, match="no evaluation at C = 0: give r0"):
            paper_fit_of(result)


def test_linearised_has_slope_b():
    found = paper_fit(run(Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40), 8000))
    points = Points.from_arrays([0, 1000, 2542, 6000, 7000], [0.40, 0.45, 0.505, 0.61, 0.60])
    F_N = linearised(points, found.curve)
    assert np.isnan(F_N[[0, 3]]).all()
    # at .505, half of the gain, the odds are 1; at .45 they are .05 / .16
    np.testing.assert_allclose(F_N[[1, 2]] / 2542**1.92, [0.05 / 0.16, 1.0], rtol=1e-5)
    on_curve_N = np.array([500.0, 5000.0])
    low, high = np.log(linearised(Points.from_arrays(on_curve_N, found.curve(on_curve_N)), found.curve))
    assert (high - low) / math.log(10) == pytest.approx(1.92, rel=1e-6)


def test_another_unit_scales_the_grids_and_says_so():
    truth = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542e15, 0.40)
    found = paper_fit(run(truth, 8e18, axis="flops"), 0.40)
    assert (found.curve.A, found.min_compute) == (0.61, 1500e15)
    assert found.curve.C_mid == pytest.approx(2542e15, rel=1e-12)
    assert pytest.approx(1.92, rel=1e-6) == found.curve.B
    assert "scaled by 1e+15" in found.warnings[0]
    assert math.isfinite(linearised(found.points, found.curve)[0])
    given = paper_fit(run(truth, 8e18, axis="flops"), 0.40, min_compute=1e18, c_mids=(2e18, 3e18))
    assert given.curve.C_mid in (2e18, 3e18)
    assert not any("scaled" in warning for warning in given.warnings)


def test_it_warns_where_it_misleads():
    def warnings(A, B, C_mid, end, **options):
        return " ".join(paper_fit(run(Curve(LOG_LOGISTIC, A, B, C_mid, 0.40), end), **options).warnings)

    sound = warnings(0.61, 1.92, 11272.0, 50000)
    assert sound == ""
    assert "A = 0.8 lies on the edge" in warnings(0.90, 1.92, 2542.0, 8000)
    assert "C_mid = 100 lies on the edge" in warnings(0.61, 0.6, 40.0, 8000)
    assert "reach 1.6 C_mid" in warnings(0.61, 1.92, 5090.0, 8000)
    assert "first 27 % of the gain" in warnings(0.61, 1.92, 2542.0, 8000)
    assert "first" not in warnings(0.61, 1.92, 2542.0, 8000, min_compute=0)


def test_comparison_by_a_where_it_differs():
    first = paper_fit(run(Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40), 8000))
    second = paper_fit(run(Curve(LOG_LOGISTIC, 0.585, 2.44, 2542.0, 0.40), 8000))
    answer = paper_compare(first, second)
    assert (answer.by, answer.first, answer.second) == ("A", first, second)
    assert answer.difference == pytest.approx(-0.025, abs=1e-12)
    assert any("seed" in warning for warning in answer.warnings)


def test_comparison_by_b_at_exactly_the_average_where_it_does_not():
    truths = (Curve(LOG_LOGISTIC, a, b, 2542.0, 0.40) for a, b in ((0.61, 1.92), (0.595, 2.44)))
    first, second = (paper_fit(run(truth, 8000)) for truth in truths)
    answer = paper_compare(first, second)
    assert answer.by == "B"
    assert answer.first.curve.A == answer.second.curve.A == (0.61 + 0.595) / 2
    assert answer.separate == (first, second)
    held = [
        paper_fit(fit.points, 0.40, min_compute=1500, ceilings=(0.6025,)).curve.B for fit in (first, second)
    ]
    assert answer.difference == held[1] - held[0]
    assert 0 < answer.difference < 0.1  # of the true .52
    assert any("76 to 100 %" in warning for warning in answer.warnings)
    assert answer.to_json()["A_held"] == 0.6025
    # .02 itself still counts as no difference, whatever the rounding
    edge = paper_fit(run(Curve(LOG_LOGISTIC, 0.59, 1.92, 2542.0, 0.40), 8000))
    assert paper_compare(first, edge).by == "B"


def test_where_only_a_differs_the_comparison_claims_a_difference_in_b():
    # The known fault that the warning states. Same B, A differing by .015, no noise.
    truths = (Curve(LOG_LOGISTIC, A, 1.92, 2542.0, 0.40) for A in (0.61, 0.595))
    answer = paper_compare(*(paper_fit(run(truth, 8000)) for truth in truths))
    assert answer.by == "B"
    assert abs(answer.difference) > 0.1


def test_runs_on_two_axes_are_not_compared():
    truth = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)
    a, b = (paper_fit(run(truth, 8000, axis=axis)) for axis in ("gpu_hours", "steps"))
    with pytest.raises(InputError, match="one compute axis"):
        paper_compare(a, b)
