"""Runs that no saturating curve describes, or too short for one to be known: what the report says."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from scalerl.curve import fit
from scalerl.forecast.freeze import freeze
from scalerl.numbers import unit_for
from scalerl.record.reader import RunRecord
from scalerl.view import closing_rows, frozen_forecasts, main_forecast, report_html
from scalerl.view.facts.notices import ceiling_text, part_that_holds, to_tell_text
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.figures import run_figure
from scalerl.view.runs.overlay import overlay

TERA = 1e12
END, MID = 240 * 0.061 * TERA, 55 * 0.061 * TERA  # of the run, and C_mid of its curve, in flops


def rise(compute):
    ratio = np.divide(MID, compute, out=np.full(np.shape(compute), np.inf), where=compute > 0)
    return 0.23 + 0.59 / (1 + ratio**1.6)


def peaked(compute):
    return rise(compute) - 0.1 * np.maximum(compute / MID - 2.6, 0)


def jumped(compute):
    return rise(compute) + 0.07 * (compute > 2.4 * MID)


def waves(compute):
    return rise(compute) + 0.03 * np.sin(4 * compute / MID)


def late(compute):
    return rise(compute / 4)


def words(html: str) -> str:
    body = re.sub(r"<script.*?</script>", " ", html.split("</style>", 1)[1], flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def levels(run, whole, frozen=None):
    """The levels of `report --figure`, by what the key says of them."""
    lines = run_figure(ShownRun("one", whole.points, run, whole), frozen).axes[0].lines
    return {
        str(line.get_label()): np.asarray(line.get_ydata())[0]
        for line in lines
        if "ceiling" in str(line.get_label())
    }


def test_a_run_that_has_peaked_is_said_marked_and_fitted_up_to_there(make_run):
    run = make_run(steps=False, truth=peaked)
    whole = fit(run, x="flops")
    assert whole.misfit is not None
    assert whole.misfit.kind == "peaked"
    part = part_that_holds(whole)
    assert part is not None
    assert whole.misfit.keep == (0.0, whole.misfit.at)
    assert part.points.compute_N[-1] == pytest.approx(whole.misfit.at)
    assert part.n_points == np.argmin(np.abs(whole.points.compute_N - whole.misfit.at)) + 1
    lines, at = run_figure(ShownRun("one", whole.points, run, whole)).axes[0].lines, whole.misfit.at
    assert at is not None
    curves = [line for line in lines if np.size(line.get_xdata()) > 40]
    assert max(np.max(line.get_xdata()) for line in curves) <= at  # the curve of the whole describes nothing
    assert part.median.A in levels(run, whole).values()
    assert any(np.allclose(line.get_xdata(), at) for line in lines)
    chart = overlay([ShownRun("one", whole.points, run, whole)])["runs"][0]["fit"]
    assert chart["change"] == pytest.approx(whole.misfit.at, rel=1e-5)
    assert chart["A"] is None
    assert chart["curve"] is not None

    html = report_html(run, whole)
    text = words(html)
    assert "<b>No saturating curve describes this run.</b>" in html
    assert "No saturating curve describes it: the run has peaked. Its ceiling is withheld." in text
    assert f"{whole.misfit.why[1:]}. The ceiling of the whole run is withheld." in text
    assert f"is fitted alone: ceiling A {ceiling_text(part.to_json(), math.nan)}." in text
    assert "ceiling A withheld" in text
    assert "Fitted on the part that holds" in text
    assert text.count(whole.misfit.why[10:]) == 3  # a caution, in the table, in the fit: not a warning too
    assert not re.search(r"\b(nan|None)\b", text)


def test_a_forecast_frozen_after_a_jump_withholds_its_ceiling_on_page_and_terminal(make_run):
    path = make_run(steps=False, truth=jumped).path
    run = RunRecord.read(path)
    row = freeze(dataclasses.replace(run, evals=run.evals[:24], lines=run.lines[:24]), "flops", END)
    assert row["fit_json"]["lack_of_fit"] == "jump"
    stored = json.loads(json.dumps(row, default=lambda array: array.tolist()))
    (frozen,) = frozen_forecasts(dataclasses.replace(run, forecasts=(stored,)))
    assert frozen.rerun == tuple(row["fit_json"]["forecast"][0]["rerun"])
    run = dataclasses.replace(run, forecasts=(stored,))
    closing = dict(closing_rows(run))
    assert closing["ceiling A at 77 %"] == "withheld: the pass rate jumps; known beforehand 0.820"
    assert closing["why withheld"] == row["fit_json"]["why"]
    text = words(report_html(run))
    assert "ceiling A withheld" in text
    assert re.search(r"(inside|outside) the pass rate jumps", text)  # the forecast was made in spite of it
    whole = fit(run, x="flops")
    part = part_that_holds(whole)
    assert part is not None
    assert part.points.compute_N.tolist() == run.compute("flops")[17:].tolist()  # the jump is at step 136
    assert any(
        text.endswith("(part fitted)") for text in levels(run, whole, main_forecast(frozen_forecasts(run)))
    )


def test_waves_leave_nothing_to_fit_and_nothing_to_draw(make_run):
    run = make_run(steps=False, truth=waves)
    whole = fit(run, x="flops")
    assert whole.lack_of_fit == "residuals"
    assert part_that_holds(whole) is None
    assert list(levels(run, whole)) == ["ceiling known beforehand 0.820"]
    text = words(report_html(run, whole))
    assert "describes it: slow waves around every curve. Its ceiling is withheld." in text


def test_too_early_says_how_much_compute_would_tell(make_run):
    run = make_run(steps=False, truth=late, forecasts=[{}])
    whole = fit(run, x="flops")
    needed = whole.compute_to_identify
    assert not whole.identified
    assert needed is not None
    assert needed > END
    told = f"about {needed / TERA:.1f} TFLOP in all ({needed / END:.2f} times the compute so far)"
    html = report_html(run, whole)
    assert f"<b>Too early to tell the ceiling.</b> T{whole.why[1:]}. To identify it: {told}." in html
    (said,) = [text for text in levels(run, whole) if text.startswith("ceiling A")]
    assert said.endswith("not identified")
    stated = dataclasses.replace(
        run, forecasts=tuple(row | {"fit_json": whole.to_json()} for row in run.forecasts)
    )
    assert dict(closing_rows(stated))["identified"] == f"about {needed / TERA:.1f} TFLOP in all"


def test_what_would_tell_is_left_out_where_it_is_told_or_unknown():
    unit = unit_for("flops", TERA)
    early = {"identified": False, "compute_to_identify": 2 * TERA}
    assert to_tell_text(early, unit) == "about 2 TFLOP in all"
    assert to_tell_text(early, unit, TERA) == "about 2 TFLOP in all (2 times the compute so far)"
    never = {**early, "compute_to_identify": None}
    assert to_tell_text(never, unit) == "not expected within 8 times the compute so far"
    for told in (
        {"identified": False},
        {**early, "identified": True},
        {**never, "lack_of_fit": "peaked"},
        {},
    ):
        assert to_tell_text(told, unit) == ""


def test_a_run_that_cannot_be_fitted_has_its_page_and_its_reason(make_run):
    text = words(report_html(make_run(n_evals=3, steps=False)))
    assert "No curve is fitted: 3 evaluations; a curve needs at least 4." in text


def test_a_flat_run_is_forecast_and_its_ceiling_is_said_to_be_unknown(make_run):
    run = make_run(steps=False, truth=lambda compute: 0.5 + 0 * compute)
    text = words(report_html(run))
    assert "No curve is fitted" not in text
    assert "Its ceiling is not known yet" in text
    assert "Too early to tell the ceiling." in text
    assert "To identify it: " in text


def test_a_falling_run_is_forecast_and_its_ceiling_is_withheld(make_run):
    run = make_run(steps=False, truth=lambda compute: 0.5 - 0.04 * compute / MID)
    assert part_that_holds(fit(run, x="flops")) is None
    text = words(report_html(run))
    assert "No saturating curve describes this run. The run has peaked: from" in text
    assert "describes it: the run has peaked. Its ceiling is withheld." in text
    forecast = fit(run, x="flops").forecast(2.0 * run.compute("flops")[-1])
    assert 0.1 < forecast.median < 0.3  # it has fallen to .33, and goes on


def test_six_evaluations_are_fitted_and_are_too_early(make_run):
    run = make_run(n_evals=6, steps=False)
    text = words(report_html(run))
    assert "Too early to tell the ceiling." in text
    assert "points 6 on GPU-hours" in text


def test_the_key_covers_nothing(make_run):
    run = make_run(steps=False, truth=late)
    found = fit(run, x="flops")
    figure = run_figure(ShownRun("one", found.points, run, found))
    figure.draw_without_rendering()
    (key,) = figure.legends
    assert key.get_window_extent().y1 < min(axes.get_tightbbox().y0 for axes in figure.axes)
