import numpy as np
import pytest

from scalerl import EvalPoint, InputError, RunRecord
from scalerl.curve import Points
from scalerl.curve.sample import make_sample
from scalerl.record.evaluation import DeviceSeconds


@pytest.mark.parametrize(
    ("compute", "pass_rate", "message"),
    [
        ([0, 1, 2], [0.1, 45.0, 0.3], "point 2: pass rate 45 is above 1.*add --percent"),
        ([0, 1, 2], [0.1, 0.2, -0.3], "point 3: pass rate -0.3 is below 0"),
        ([0, -1, 2], [0.1, 0.2, 0.3], "point 2: compute -1 is negative"),
        ([0, 1, np.nan], [0.1, 0.2, 0.3], "point 3: compute nan is not a finite"),
        ([0, 1, 1e305], [0.1, 0.2, 0.3], "point 3: compute 1e[+]305 is outside of 1e-300 to 1e"),
        ([0, 5e-323, 2], [0.1, 0.2, 0.3], "point 2: compute 4.*e-323 is outside of 1e-300 to 1e"),
        ([0, 1, 2], [np.nan, 0.2, 0.3], "point 1: pass rate nan is not a finite"),
        ([0, 1, 2], [0.1, 0.2], "2 values for 3"),
    ],
)
def test_bad_values_are_named(compute, pass_rate, message):
    with pytest.raises(InputError, match=message):
        Points.from_arrays(compute, pass_rate)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_sd": [0.01, -0.01, 0.01]}, r"point 2: noise sd -0.01 is outside of \[0, 0.5\]"),
        ({"noise_sd": np.inf}, "point 1: noise sd inf is outside"),
        ({"noise_sd": [0.01]}, "noise_sd_N has 1 values for 3"),
        ({"samples": [16, 0, 16]}, "point 2: number of samples 0 must be finite and above 0"),
        ({"samples": np.inf}, "point 1: number of samples inf must be finite"),
        ({"samples": [1, 2]}, "samples_N has 2 values for 3"),
        ({"step": [1, 2]}, "step_N has 2 values for 3"),
        ({"step": [1, 2, np.nan]}, "point 3: step nan is not a finite number"),
    ],
)
def test_what_is_said_of_the_noise_is_checked_too(arguments, message):
    with pytest.raises(InputError, match=message):
        Points.from_arrays([0, 1, 2], [0.1, 0.2, 0.3], **arguments)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (
            np.ma.array([0.0, 1.0, 2.0], mask=[False, True, False]),
            "points, point 2: compute nan is not a finite number",
        ),
        (np.array([0, 60, 120], "timedelta64[m]"), "points, compute: holds dates or durations: give numbers"),
        (np.array(["2026-01-01"] * 3, "datetime64[D]"), "points, compute: holds dates or durations"),
        (["none", 1, 2], "points, compute: not all numbers .could not convert string to float: 'none'"),
        ([[0, 1], [2]], "points, compute: not all numbers"),
        (iter([0, 1, 2]), "points, compute: not all numbers"),
    ],
)
def test_what_is_no_number_is_refused(compute, message):
    """Masked cells and durations have a number underneath, which is not the compute."""
    with pytest.raises(InputError, match=message):
        Points.from_arrays(compute, [0.1, 0.2, 0.3])
    with pytest.raises(InputError, match="points, noise sd: not all numbers"):
        Points.from_arrays([0, 1, 2], [0.1, 0.2, 0.3], noise_sd="unknown")


def test_a_tensor_that_is_no_array_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match=r"points, compute: not all numbers .*requires grad"):
        Points.from_arrays(torch.ones(3, requires_grad=True), [0.1, 0.2, 0.3])


def test_points_keep_their_numbers_when_an_array_is_reused():
    pass_rate = np.array([0.1, 0.2, 0.3])
    points = Points.from_arrays([0, 1, 2], pass_rate)
    pass_rate[:] = 0.0
    assert points.pass_rate_N.tolist() == [0.1, 0.2, 0.3]


def test_a_column_of_durations_is_refused():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"hours": pd.to_timedelta(range(3), unit="h"), "pass_rate": [0.1, 0.2, 0.3]})
    with pytest.raises(InputError, match="data frame, column 'hours': holds dates or durations"):
        Points.from_frame(frame, x="hours")


def test_compute_is_one_row():
    with pytest.raises(InputError, match="compute has 2 axes"):
        Points.from_arrays([[0, 1]], [[0.1, 0.2]])


def test_select_takes_everything_along():
    points = Points.from_arrays(
        [0, 1, 2], [0.1, 0.2, 0.3], noise_sd=[0.01, np.nan, 0.03], samples=[16, 32, np.nan], step=[0, 5, 9]
    ).select(np.array([2, 0]))
    np.testing.assert_allclose(points.samples_N, [np.nan, 16])
    np.testing.assert_allclose(points.noise_sd_N, [0.03, 0.01])
    assert points.step_N is not None
    np.testing.assert_allclose(points.step_N, [9, 0])


def test_a_run_becomes_points(tmp_path):
    seconds = DeviceSeconds(generate=3600, train=1800, evaluate=999, idle=1800)
    evals = (
        EvalPoint(0, 0.2, device_seconds=DeviceSeconds(0, 0, 50, 36)),
        EvalPoint(100, 0.3, device_seconds=seconds, n_prompts=100, n_samples=16, mean_p_1mp=0.16),
    )
    points = Points.from_record(RunRecord(tmp_path, {}, evals), "dollars", price=3.0)
    # (3600 + 1800 + 1800) s = 2 h, at 3 dollars; sqrt(.16 / 1600) = .01; step 0 is before any training.
    np.testing.assert_allclose(points.compute_N, [0.0, 6.0])
    np.testing.assert_allclose(points.noise_sd_N, [np.nan, 0.01])
    np.testing.assert_allclose(points.samples_N, [np.nan, 1600])
    assert points.step_N is not None
    np.testing.assert_allclose(points.step_N, [0, 100])
    assert points.source.endswith("evals.jsonl")


def test_evaluations_of_one_step_are_pooled_by_their_samples():
    points = Points.from_arrays(
        [0, 1, 1, 2], [0.1, 0.2, 0.5, 0.6], samples=[100, 100, 200, 100], step=[0, 1, 1, 2]
    )
    pooled = make_sample(points, None)
    np.testing.assert_allclose(pooled.y_N, [0.1, 0.4, 0.6])
    assert pooled.n_points == 3  # the same weights again are no further observation of the curve
    assert pooled.within == 0.0
    apart = make_sample(Points.from_arrays([0, 1, 1, 2], [0.1, 0.2, 0.5, 0.6]), None)
    np.testing.assert_allclose(apart.y_N, [0.1, 0.35, 0.6])
    assert apart.n_points == 4
    assert apart.within == pytest.approx(2 * 0.15**2)
    np.testing.assert_allclose(apart.weight_N, [1, 2, 1])


def test_the_evaluation_before_training_counts_by_its_own_noise():
    precise = Points.from_arrays([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], noise_sd=[0.002, 0.004, 0.004, 0.004])
    sample = make_sample(precise, None)
    np.testing.assert_allclose(sample.weight_N, [4, 1, 1, 1])
    assert sample.gap_N[1] == np.inf  # nothing that training adds is shared with it
