import json

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.forecast.sensitivity import sensitivity

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)
COMPUTE_N = np.linspace(0, 8000, 33)


def points(lag=0.0, seed=1):
    y_N = TRUTH(COMPUTE_N) + np.random.default_rng(seed).normal(0, 0.004, 33)
    y_N[(COMPUTE_N > 0) & (COMPUTE_N < 1500)] -= lag
    return Points.from_arrays(COMPUTE_N, y_N, axis="gpu_hours", source="a.csv")


def given(value):
    assert value is not None
    return value


def test_rows_are_fits_without_the_start():
    found = sensitivity(points(), cuts=[1500, 0])
    assert [row.min_compute for row in found.rows] == [0, 1500]
    assert [row.points for row in found.rows] == [33, 28]
    for row in found.rows:
        alone = fit(points(), min_compute=row.min_compute)
        assert pytest.approx(alone.intervals.A) == row.A_interval
        assert (row.A, row.B, row.C_mid) == pytest.approx(
            (alone.median.A, alone.median.B, alone.median.C_mid)
        )
        assert row.forecast == alone.forecast(16000.0)
        assert (row.identified, row.why) == (alone.identified, alone.why)


def test_default_cuts_that_change_nothing_are_left_out():
    found = sensitivity(points())  # an evaluation every 250: 1/32 of 8000 is the first of them
    assert [row.min_compute for row in found.rows] == [0, 500, 1000, 2000]
    assert [row.points for row in found.rows] == [33, 32, 30, 26]


def test_a_start_that_lags_moves_the_answer():
    straight, bent = (sensitivity(points(lag), cuts=[0, 1500], at=3e4) for lag in (0.0, 0.03))
    assert abs(given(straight.rows[0].B) - given(straight.rows[1].B)) < 0.15
    assert given(bent.rows[0].B) - given(bent.rows[1].B) > 0.2
    forecasts = [given(row.forecast).median for row in bent.rows]
    widths = [np.ptp(given(row.forecast).interval) for row in bent.rows]
    assert given(bent.moves["forecast"]).by == pytest.approx(abs(forecasts[0] - forecasts[1]))
    assert given(bent.moves["forecast"]).width == pytest.approx(min(widths))
    assert bent.said.startswith("over the cuts the forecast at 30000 moves by 0.0")


def test_a_cut_that_leaves_too_little_says_why():
    found = sensitivity(points(), cuts=[0, 7750])
    assert found.rows[1].A is None
    assert found.rows[1].why.startswith("only 3 of 33 evaluations at or above --min-compute; a curve needs")
    assert found.moves["A"] is None
    assert found.said == "fewer than two cuts can be fitted: nothing can be said of what the start changes"
    assert "only 3 of 33 evaluations" in str(found).splitlines()[2]
    body = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert body["rows"][1]["A"] is None
    assert body["moves"] == {"A": None, "forecast": None}
    assert body["rows"][0]["forecast"]["compute"] == 16000.0


def test_the_ceiling_of_a_misfit_is_withheld():
    plain = points()
    y_N = np.where(plain.compute_N > 5000, plain.pass_rate_N - 0.08, plain.pass_rate_N)
    jump = Points.from_arrays(plain.compute_N, y_N, axis="gpu_hours")
    found = sensitivity(jump, cuts=[0, 500])
    assert [(row.A, row.A_interval, row.identified) for row in found.rows] == [(None, None, False)] * 2
    assert found.rows[0].why.startswith("the pass rate jumps by -0.0")
    assert found.said.endswith("and A is withheld")
    assert "withheld" in str(found).splitlines()[1]
    part = sensitivity(jump, cuts=[0, 500], max_compute=5000, at=8000.0)
    assert given(part.rows[0].A_interval)[0] < 0.61 < given(part.rows[0].A_interval)[1]


def test_table():
    lines = str(sensitivity(points(), cuts=[0, 1000])).splitlines()
    assert lines[0].split() == ["from", "gpu_hours", "points", "A", "B", "C_mid", "at", "16000"]
    assert lines[1].split()[:2] == ["0", "33"]
    assert len(lines) == 4
