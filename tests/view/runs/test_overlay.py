"""What a chart of several runs holds: computes on all axes, thinning, and what is drawn of fits."""

import json
from dataclasses import replace

import numpy as np
import pytest
from simulated_runs import BUDGET, write_run

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.errors import InputError
from scalerl.numbers import plain
from scalerl.record.reader import RunRecord
from scalerl.view.assets import script_json
from scalerl.view.facts.sampled import thin
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.figures import runs_figures
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.tables import curves_table


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    record = RunRecord.read(write_run(tmp_path_factory.mktemp("run") / "a", "a"))
    points = Points.from_record(record, "gpu_hours")
    return ShownRun("a", points, record, fit(points))


def by_key(found):
    return {axis["key"]: axis for axis in found["axes"]}


def test_the_axis_of_the_fits_comes_first_and_every_logged_one_is_there(shown):
    found = overlay([shown])
    assert found["axis"] == "gpu_hours"
    assert list(by_key(found)) == ["gpu_hours", "flops", "tokens", "tokens_processed", "samples", "steps"]
    run = found["runs"][0]
    assert run["compute"]["steps"] == run["step"]
    np.testing.assert_allclose(run["pass_rate"], shown.points.pass_rate_N, rtol=1e-5)
    np.testing.assert_allclose(run["noise"], shown.points.noise_sd_N, rtol=1e-2)


def test_the_band_is_that_of_the_fit(shown):
    curve = overlay([shown])["runs"][0]["fit"]["curve"]
    _, low, high = shown.fit.band(np.array(curve["compute"], dtype=float))
    for name, expected in (("low", low), ("high", high)):
        np.testing.assert_allclose(curve[name], expected, atol=1e-4)


@pytest.fixture(scope="module")
def early(shown):
    """The run as it stood early."""
    points = shown.points.select(np.arange(6))
    return replace(shown, points=points, fit=fit(points))


@pytest.mark.parametrize("times", [2, 50])
def test_the_line_ends_at_the_forecast_of_the_table_and_has_no_corners(early, times):
    budget = times * float(early.points.compute_N[-1])
    view = RunsView((early,), budget=budget)
    table = curves_table(view)
    place = next(n for n, header in enumerate(table.headers) if header.startswith("forecast at"))
    told = early.fit.forecast(budget).median
    assert table.rows[0].cells[place].text == f"{told:.3f}"
    curve = overlay([early], budget=budget)["runs"][0]["fit"]["curve"]
    compute, line = np.array(curve["compute"]), np.array(curve["line"])
    # It leaves out .1 % of the posterior, which changes no digit that is printed.
    assert (compute[-1], line[-1]) == (budget, pytest.approx(told, abs=5e-4))
    lines = runs_figures(view)["run"].axes[0].lines
    drawn = max(
        (one for one in lines if np.size(one.get_xdata()) > 2), key=lambda one: np.max(one.get_xdata())
    )
    assert np.asarray(drawn.get_ydata())[-1] == pytest.approx(told, abs=5e-4)
    known = early.points.compute_N[-1]
    for places in (compute, np.asarray(drawn.get_xdata())):
        beyond = places[places >= known * (1 - 1e-9)]
        assert len(beyond) >= 60
        # No gap is wide on either axis.
        assert np.diff(beyond).max() <= (beyond[-1] - known) / 59
        assert np.diff(np.log(beyond)).max() <= np.log(times) / 40


def test_the_slope_of_a_line_says_that_it_is_of_least_squares(shown):
    figure = runs_figures(RunsView((shown,)))["linearised"]
    texts = [line.get_label() for line in figure.axes[0].lines]
    assert f"a  B {plain(shown.fit.paper_curve.B)}" in texts
    assert figure.get_supylabel().endswith("B by least squares")
    assert plain(shown.fit.paper_curve.B) != plain(shown.fit.median.B)


def test_a_frozen_forecast_stands_as_it_was_written(shown):
    found = overlay([shown])["runs"][0]["forecasts"]
    row = shown.record.forecasts[0]
    assert [one["leads"] for one in found] == [True]
    assert found[0]["interval"] == pytest.approx(row["prediction"], rel=1e-5)
    assert (found[0]["axis"], found[0]["target"]) == ("gpu_hours", BUDGET)
    assert found[0]["measured"] == pytest.approx(shown.points.pass_rate_N[-1], rel=1e-5)
    assert found[0]["outcome"] in ("inside", "outside")
    assert found[0]["curve"]["line"] == pytest.approx(row["curve"]["median"], rel=1e-3)


def test_a_failed_evaluation_is_drawn_and_is_not_used(shown):
    rate_N = shown.points.pass_rate_N.copy()
    rate_N[12] = 0.0
    points = replace(shown.points, pass_rate_N=rate_N)
    run = overlay([replace(shown, points=points, fit=fit(points))])["runs"][0]
    assert run["used"] == [n != 12 for n in range(len(points))]
    assert run["pass_rate"][12] == 0.0


def test_evaluations_that_a_fit_leaves_out_are_said(shown):
    cut = fit(shown.points, r0=0.3, min_compute=2000.0, max_compute=10_000.0)
    run = overlay([replace(shown, fit=cut)])["runs"][0]
    hours = np.array(run["compute"]["gpu_hours"])
    np.testing.assert_array_equal(run["used"], (hours >= 2000) & (hours <= 10_000))
    assert run["fit"]["window"] == [2000, 10_000]


def test_of_a_run_that_no_curve_describes_the_part_that_holds_is_drawn():
    compute_N = np.linspace(0, BUDGET, 40)
    rates_N = Curve(LOG_LOGISTIC, 0.6, 1.9, 2500.0, 0.3)(compute_N)
    rates_N = rates_N + np.random.default_rng(0).normal(0, 0.004, 40)
    rates_N[28:] -= 0.1
    whole = fit(Points.from_arrays(compute_N, rates_N, noise_sd=0.004))
    assert whole.misfit is not None
    found = overlay([ShownRun("jump", whole.points, fit=whole)])["runs"][0]["fit"]
    assert found["A"] is None
    assert found["misfit"]
    assert found["curve"] is not None


def test_runs_without_a_fit_or_an_evaluation_are_shown_with_their_reason():
    none = Points.from_arrays([], [])
    flat = Points.from_arrays([1.0, 2.0], [0.3, 0.3])
    found = overlay([ShownRun("none", none, reason="too few"), ShownRun("flat", flat, reason="flat")])
    assert [run["reason"] for run in found["runs"]] == ["too few", "flat"]
    assert [run["fit"] for run in found["runs"]] == [None, None]
    assert json.loads(script_json(found)) == found


def test_one_name_or_two_axes_are_refused(shown):
    with pytest.raises(InputError, match="one name"):
        overlay([shown, shown])
    with pytest.raises(InputError, match="one compute axis, found compute, gpu_hours"):
        overlay([shown, ShownRun("b", Points.from_arrays([1.0], [0.5]))])


@pytest.mark.parametrize(("n", "most"), [(10_000, 1200), (5000, 40), (41, 40), (1201, 1200)])
def test_thinning_keeps_ends_and_outliers(n, most):
    value_N = np.random.default_rng(0).normal(size=n)
    value_N[n // 3], value_N[n // 2] = 9.0, -9.0
    kept = thin(value_N, most)
    assert len(kept) <= 1.05 * most
    assert len(kept) > 0.5 * most
    assert {0, n - 1, n // 3, n // 2} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_a_start_that_a_logarithmic_axis_stretches_is_drawn_densely():
    kept = thin(np.zeros(10_000), 1200)
    assert (kept < 30).sum() > 15
    assert (kept >= 9000).sum() > 40


def test_few_evaluations_are_all_drawn():
    np.testing.assert_array_equal(thin(np.arange(40.0), 40), np.arange(40))


def test_json_in_a_page_cannot_end_its_script():
    text = script_json({"name": "</script><!--&", "nan": float("nan")})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"name": "</script><!--&", "nan": None}


def test_a_name_that_a_browser_keeps_is_of_one_run_alone(tmp_path):
    paths = [write_run(tmp_path / folder, "same") for folder in ("a", "b")]
    records = [RunRecord.read(path) for path in (*paths, paths[0])]
    first, other, again = [ShownRun("one", Points.from_record(one, "steps"), one).key for one in records]
    assert first == again != other
