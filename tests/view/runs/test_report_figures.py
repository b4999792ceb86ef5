from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import Points, fit
from scalerl.errors import InputError
from scalerl.view import frozen_forecasts, main_forecast
from scalerl.view.facts.facts import axis_for
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.details import strata_table
from scalerl.view.runs.figures import run_figure
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.panels import always_zero, in_blocks, step_panels, tokens_per_second
from scalerl.view.runs.roles import in_flight_rows
from scalerl.view.style import inline_svg, new_figure, save_figure


def shown(run, found=None):
    axis = axis_for(run, found, main_forecast(frozen_forecasts(run)))
    return ShownRun("one", Points.from_record(run, axis), run, found)


def saved(run, frozen, path):
    return save_figure(run_figure(shown(run), frozen), path)


def test_the_figure_shows_the_forecast_as_stored(run):
    row = json.loads((run.path / "forecasts.jsonl").read_text().splitlines()[1])
    linear, _ = run_figure(shown(run), main_forecast(frozen_forecasts(run))).axes
    before, after = [line for line in linear.lines if np.size(line.get_xdata()) > 40]
    # Solid up to where the forecast was made, dashed from there on.
    drawn = np.concatenate([before.get_xydata(), np.asarray(after.get_xydata())[1:]])
    np.testing.assert_allclose(drawn.T, [row["curve"]["compute"], row["curve"]["median"]])
    assert np.asarray(before.get_xdata())[-1] == row["compute"]
    levels = {
        line.get_label(): np.asarray(line.get_ydata())[0]
        for line in linear.lines
        if "ceiling" in str(line.get_label())
    }
    assert list(levels.values()) == [0.811, 0.82]
    assert "ceiling A 0.811 [0.768, 0.879] (as frozen)" in levels


def test_step_0_stands_where_it_is_fitted_whatever_the_start_cost(run):
    evals = tuple(
        replace(point, device_seconds=replace(point.device_seconds, idle=point.device_seconds.idle + 900))
        for point in run.evals
    )
    run = replace(run, evals=evals)
    points = Points.from_record(run, "gpu_hours")
    lines = run_figure(shown(run, fit(points))).axes[0].lines
    (drawn,) = [line for line in lines if line.get_marker() == "o"]
    assert run.compute("gpu_hours")[0] > 0
    assert np.asarray(drawn.get_xdata())[0] == 0
    np.testing.assert_array_equal(drawn.get_xdata(), points.compute_N)
    data = overlay([ShownRun("one", Points.from_record(run, "steps"), run)])
    assert data["runs"][0]["compute"]["gpu_hours"][0] == 0


def test_changing_the_stored_curve_changes_the_figure(run, tmp_path):
    frozen = main_forecast(frozen_forecasts(run))
    assert frozen is not None
    before = saved(run, frozen, tmp_path / "a.svg").read_text()
    assert frozen.band is not None
    frozen.band.median_M[50] += 0.01
    assert saved(run, frozen, tmp_path / "b.svg").read_text() != before


def test_the_axis_follows_the_forecast_and_else_what_was_logged(run):
    assert axis_for(run, None, main_forecast(frozen_forecasts(run))) == "flops"
    assert axis_for(run) == "gpu_hours"


def test_figure_files(run, tmp_path):
    frozen = main_forecast(frozen_forecasts(run))
    png = saved(run, frozen, tmp_path / "curve.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = saved(run, frozen, tmp_path / "curve.svg")
    assert "#0072b2" in svg.read_text()
    assert "frozen at step 120" in svg.read_text()
    ET.parse(svg)
    pdf = saved(run, frozen, tmp_path / "curve.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert saved(run, frozen, tmp_path / "curve.pdf").read_bytes() == pdf
    with pytest.raises(InputError, match=r"curve\.jpg: a figure is written as \.svg, \.png or \.pdf"):
        saved(run, frozen, tmp_path / "curve.jpg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.pdf", "curve.png", "curve.svg"]


def titles(steps):
    return [panel["title"] for panel in step_panels(steps)]


def test_health_leaves_out_what_was_not_logged():
    assert titles([{"step": n, "entropy": 0.5, "truncated": None} for n in range(10)]) == ["Entropy"]
    assert titles([]) == titles([{"step": 1, "loss": 0.1}]) == []


def test_the_largest_ratio_is_shown_beside_the_mean_and_the_clipped_share():
    steps = [
        {"step": n, "ratio_mean": 1.001, "ratio_max": 2.5 + n, "ratio_clipped": 0.01 * n} for n in range(1, 5)
    ]
    clipped, ratio = step_panels(steps)
    assert (clipped["title"], clipped["unit"], clipped["lines"][0]["y"]) == (
        "Ratios clipped",
        "% of tokens",
        [1, 2, 3, 4],
    )
    mean, largest = ratio["lines"]
    assert (mean["name"], mean["y"], mean["smooth"]) == ("mean", [1.001] * 4, True)
    assert (largest["name"], largest["y"], largest["smooth"]) == ("max", [3.5, 4.5, 5.5, 6.5], False)
    (older,) = step_panels([{"step": n, "ratio_mean": 1.001} for n in range(1, 5)])
    assert [line["name"] for line in older["lines"]] == ["mean"]


def test_zeros_are_named_and_get_no_panel():
    steps = [
        {"step": n, "ratio_clipped": 0.0, "staleness_mean": 0.0, "staleness_max": min(n, 3)} for n in range(9)
    ]
    # The mean staleness shares a panel with the largest.
    assert always_zero(steps) == ["ratios clipped (% of tokens)"]
    assert titles(steps) == ["Staleness of tokens"]
    assert titles([{"step": 1, "truncated": 0.0}]) == []
    assert always_zero([]) == []


def test_evidence_of_updates_in_flight():
    steps = [
        {
            "multi_version": n / 30,
            "staleness_share_over_4": 0.3,
            "staleness_max": n % 9,
            "kv_staleness_max": 11,
        }
        for n in range(30)
    ]
    assert in_flight_rows(steps, {"schedule": {"kind": "pipeline_rl", "k": 8}}) == [
        # Mean of 0, 1/30, ..., 29/30, and of the last three.
        (
            "completions sampled by two or more versions of the weights",
            "48 %; in the last tenth of the run 93 %",
        ),
        ("trained tokens with a staleness over 4 steps", "30 %; in the last tenth of the run 30 %"),
        ("largest staleness of a trained token", "8 steps; the schedule allows k = 8"),
        ("largest staleness of an entry of a KV cache", "11 steps"),
    ]
    off_policy = in_flight_rows([{"staleness_max": 7}], {"schedule": {"kind": "off_policy", "k": 8}})
    assert off_policy == [("largest staleness of a trained token", "7 steps; the schedule allows k - 1 = 7")]
    assert in_flight_rows([{"staleness_max": 3}], None) == [
        ("largest staleness of a trained token", "3 steps")
    ]
    assert in_flight_rows([{"loss": 0.1}], None) == []


@pytest.mark.parametrize("counts", [[100, 300, 350], [100, 200, 50]], ids=["cumulative", "per step"])
def test_throughput(counts):
    times = [10.0, 12.0, 12.5]
    steps = [{"time": t, "tokens": {"generated": n}} for t, n in zip(times, counts, strict=True)]
    np.testing.assert_array_equal(tokens_per_second(steps), [math.nan, 100.0, 100.0])


def test_throughput_without_counters_is_unknown():
    assert np.isnan(tokens_per_second([{"step": 1}, {"step": 2, "tokens": None}])).all()


def test_long_runs_are_drawn_in_blocks():
    values = np.arange(1000.0)
    values[4] = math.nan
    blocks = in_blocks(values)  # 1000 steps in blocks of 3
    assert blocks.size == 334
    np.testing.assert_allclose(blocks[:2], [1.0, 4.0])  # the second of 3, 5
    assert in_blocks(values, largest=True)[1] == 5.0
    assert in_blocks(values[:400]).size == 400


def test_strata_are_grouped_by_what_stands_before_the_last_slash():
    ids = ["chain/10/1", "chain/2/1", "chain/2/2", "loose"]
    first = {"step": 0, "prompt_set": "h", "n": 4, "id": ids, "correct": [0, 1, 3, 4]}
    last = {**first, "step": 9, "correct": [1, 4, 4, 4]}
    table = strata_table([first, last])
    assert table is not None
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    assert rows == [["chain/2", "2", "0.500", "1.000"], ["chain/10", "1", "0.000", "0.250"]]
    assert table.headers[2:] == ("at step 0", "at step 9")
    assert strata_table([first]) is None
    assert strata_table([first, {**last, "prompt_set": "other"}]) is None
    for broken in ({"step": 0}, {**first, "n": 0}, {**first, "correct": [1]}):
        assert strata_table([broken, last]) is None


def test_the_description_of_a_figure_is_escaped():
    svg = inline_svg(new_figure(1, 1), "f", '<b> & "c"')
    assert ET.fromstring(svg).get("aria-label") == '<b> & "c"'
