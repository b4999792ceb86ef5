import numpy as np
import pytest

from scalerl import EvalPoint, InputError, RunRecord
from scalerl.curve import Points
from scalerl.record import DeviceSeconds


@pytest.mark.parametrize(
    ("compute", "pass_rate", "message"),
    [
        ([0, 1, 2], [0.1, 45.0, 0.3], "point 2: the pass rate is above 1.*divide by 100"),
        ([0, 1, 2], [0.1, 0.2, -0.3], "point 3: the pass rate is below 0"),
        ([0, -1, 2], [0.1, 0.2, 0.3], "point 2: compute is negative"),
        ([0, 1, np.nan], [0.1, 0.2, 0.3], "point 3: compute is not a finite"),
        ([0, 1, 2], [np.nan, 0.2, 0.3], "point 1: the pass rate is not a finite"),
        ([0, 1, 2], [0.1, 0.2], "2 values for 3"),
    ],
)
def test_bad_values_are_named(compute, pass_rate, message):
    with pytest.raises(InputError, match=message):
        Points.from_arrays(compute, pass_rate)


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
    assert points.step_N is not None
    np.testing.assert_allclose(points.step_N, [0, 100])
    assert points.source.endswith("evals.jsonl")
