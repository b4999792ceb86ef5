from pathlib import Path

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, fit
from scalerl.forecast.freeze import freeze
from scalerl.record.evaluation import DeviceSeconds, EvalPoint
from scalerl.record.reader import RunRecord

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)


def make_run(n=14, top=7000.0):
    noise_N = np.random.default_rng(2).normal(0, 0.004, n)
    hours_N = np.linspace(0, top, n)
    # The devices idled for an hour before step 0, which is no training compute.
    evals = [
        EvalPoint(100 * i, float(TRUTH(c)) + e, device_seconds=DeviceSeconds(3600 * c, 0.0, 0.0, 3600.0))
        for i, (c, e) in enumerate(zip(hours_N, noise_N, strict=True))
    ]
    return RunRecord(Path("run"), {}, tuple(evals))


def test_a_frozen_forecast_is_the_fit_at_that_time():
    run = make_run()
    row, result = freeze(run, "gpu_hours", 14000.0), fit(run)
    assert (row["made_at_step"], row["axis"], row["target_compute"]) == (1300, "gpu_hours", 14000.0)
    assert row["compute"] == 7001.0
    assert row["median"] == result.forecast(14000.0).median
    assert row["prediction"] == list(result.forecast(14000.0).prediction)
    assert row["fit_json"] == result.to_json([14000.0])
    assert row["fit_json"]["median"]["A"] == result.ceiling


def test_the_stored_curve_serves_both_axes_and_ends_at_the_target():
    run = make_run()
    curve = freeze(run, "gpu_hours", 14000.0)["curve"]
    compute_M = curve["compute"]
    first = 7000 / 13 + 1  # the evaluation after step 0
    assert compute_M[0] == pytest.approx(first / 4)
    assert compute_M[-1] == 14000.0
    assert np.diff(compute_M).max() < 14000 / 75
    assert np.diff(np.log(compute_M)).max() < 0.1
    assert (curve["lo"] < curve["median"]).all()
    assert (curve["median"] < curve["hi"]).all()
    last = np.interp(14000.0, compute_M, curve["median"])
    assert fit(run).probability(float(last), 14000.0) == pytest.approx(0.5, abs=0.01)
