import dataclasses

import numpy as np
import pytest
from noisy_curve import noisy_points

from scalerl.curve import Points, fit


def test_a_failed_evaluation_is_left_out_and_named():
    points = noisy_points(n=24, sd=0.003, top=10000.0)
    rate_N = points.pass_rate_N.copy()
    rate_N[12] = 0.0
    broken = fit(dataclasses.replace(points, pass_rate_N=rate_N))
    whole = fit(points)
    (warning,) = (text for text in broken.warnings if text not in whole.warnings)
    assert warning.startswith(
        f"left out: the evaluation at compute {points.compute_N[12]:.10g} (0.000) is 0."
    )
    assert warning.endswith("below its neighbours, as if it had failed")
    assert broken.n_points == len(points) - 1
    assert broken.excluded.pass_rate_N.tolist() == [0.0]
    assert dict(broken.left_out.counts) == {"failed": 1}
    assert pytest.approx(whole.intervals.A, abs=0.01) == broken.intervals.A


@pytest.mark.parametrize("n", [8, 12, 20, 30])
@pytest.mark.parametrize("place", [2, -2, -1], ids=["third", "second to last", "last"])
def test_a_failed_evaluation_is_named_in_short_runs_and_near_the_end(n, place):
    """Before, none was named in 8 evaluations or beside an end, and a newest one made no-go of a go."""
    for seed in range(3):
        points = noisy_points(n=n, sd=0.01, top=10000.0, seed=seed)
        rate_N = points.pass_rate_N.copy()
        rate_N[place] = 0.0
        result = fit(dataclasses.replace(points, pass_rate_N=rate_N))
        assert result.excluded.pass_rate_N.tolist() == [0.0]
        assert sum("failed" in text for text in result.warnings) == 1
        assert bool(result.newest_failed) == (place == -1)
        whole = fit(points).forecast(20000.0).median
        assert result.forecast(20000.0).median == pytest.approx(whole, abs=0.03)


def test_there_is_no_verdict_between_a_newest_evaluation_that_fell_and_the_next_one():
    points = noisy_points(n=24, sd=0.005, top=10000.0)
    rate_N = points.pass_rate_N.copy()
    rate_N[-2] = 0.3
    fallen = fit(dataclasses.replace(points, pass_rate_N=rate_N).select(np.arange(24) < 23))
    assert (fallen.verdict(0.5, 20000.0), fallen.identified) == ("too early", False)
    assert fallen.reasons(0.5, 20000.0) == fallen.newest_failed == fallen.left_out.ending
    # Of public runs whose newest evaluation fell like this three in five stayed there.
    forecast = fallen.forecast(20000.0)
    assert forecast.interval[0] == forecast.prediction[0] == 0.3
    assert forecast.rerun[0] > 0.5
    again = fit(dataclasses.replace(points, pass_rate_N=rate_N))
    assert again.verdict(0.5, 20000.0) == "go"
    assert again.forecast(20000.0).prediction[0] > 0.5
    # A second one that is as low is no failure: the run has fallen.
    rate_N[-1] = 0.3
    assert fit(dataclasses.replace(points, pass_rate_N=rate_N)).n_points == 24


def test_the_first_of_a_step_has_not_failed():
    for at in range(3, 22):
        points = noisy_points(n=24, sd=0.005, top=10000.0, seed=at)
        rate_N = points.pass_rate_N - 0.15 * (np.arange(24) >= at)
        assert fit(dataclasses.replace(points, pass_rate_N=rate_N)).n_points == 24


@pytest.mark.parametrize("n", [6, 7, 12])
def test_a_run_that_has_fallen_says_so_first(n):
    """Also below the eight evaluations that a misfit takes."""
    rate_N = np.zeros(n)
    rate_N[:2] = 0.156, 0.408
    found = fit(Points.from_arrays(np.arange(0.0, 50.0 * n, 50.0), rate_N, axis="steps"))
    said = "the pass rate has fallen from 0.408 to 0.000 since step 50"
    assert found.lack_of_fit or (found.warnings[0], found.why[: len(said)]) == (said, said)
    assert found.lack_of_fit is None or n > 7
    assert "fallen" not in " ".join(fit(noisy_points()).warnings)
