"""Alarms on the page, in the figure and in the closing table."""

import re
from dataclasses import replace

from scalerl.curve import Points
from scalerl.record.alarms import Alarm
from scalerl.view import closing_rows, report_html
from scalerl.view.facts.notices import health_text
from scalerl.view.facts.standing import StandingQuery, stand
from scalerl.view.runs.panels import step_panels

ALARMS = (
    Alarm("truncated", "warning", 20, 30, 0.07, 0.05),
    Alarm("truncated", "alarm", 30, 60, 0.14, 0.10),
    Alarm("ess", "alarm", 50, None, 0.2, 0.3),
)
LIMITS = {"truncated": {"warning": 0.05, "alarm": 0.10}, "ratio_clipped": {"warning": 0.3, "alarm": 0.6}}


def steps_of(truncated, **more):
    return [{"step": n, "truncated": truncated, "ratio_clipped": 0.01, **more} for n in range(1, 61)]


def panel(steps, title="Truncated", **options):
    return next(one for one in step_panels(steps, **options) if one["title"] == title)


def test_alarms_are_shaded_in_their_own_panel():
    steps = steps_of(0.04)
    assert panel(steps)["marks"] == []
    assert panel(steps, alarms=ALARMS[:2])["marks"] == [
        {"from": 19.5, "to": 30.5, "level": "warning"},
        {"from": 29.5, "to": 60.5, "level": "alarm"},
    ]
    assert panel(steps, "Ratios clipped", alarms=ALARMS[:2])["marks"] == []
    unended = panel(steps_of(0.04, ess=0.2), "Effective sample", alarms=ALARMS)
    assert unended["marks"] == [{"from": 49.5, "to": 60.5, "level": "alarm"}]


def test_thresholds_are_drawn_where_the_values_come_near_them():
    def bounds(value):
        return [one["value"] for one in panel(steps_of(value), thresholds=LIMITS)["bounds"]]

    assert bounds(0.04) == [5.0]  # per cent, and not 10
    assert bounds(0.001) == []
    assert bounds(0.09) == [5.0, 10.0]


def test_a_figure_of_every_tenth_step_is_a_line():
    sparse = [{"step": n, **({"logp_gap": 1e-6 * n} if n % 10 == 0 else {})} for n in range(1, 61)]
    (line,) = panel(sparse, "Log-probability gap")["lines"]
    assert [n for n, y in enumerate(line["y"], 1) if y is not None] == [10, 20, 30, 40, 50, 60]
    assert line["smooth"]


def test_the_page_names_its_alarms(run):
    html = report_html(replace(run, alarms=ALARMS))
    assert "2 health alarms." in html
    assert "truncated 0.14 (threshold 0.1), steps 30 to 60; ess 0.2 (threshold 0.3), from step 50 on" in html
    table = html.partition("<h3>Alarms and warnings")[2]
    cells = re.findall(r'<td class="\w+"[^>]*>(.*?)</td>', table)
    assert cells[:5] == ["alarm", "truncated", "steps 30 to 60", "0.140", "0.100"]
    assert cells[10:13] == ["warning", "truncated", "steps 20 to 30"]  # warnings come last


def test_the_closing_table_names_them_too(run):
    rows = dict(closing_rows(replace(run, alarms=ALARMS)))
    assert rows["health"].startswith(
        "2 alarms, 1 warning: truncated 0.14 (threshold 0.1), steps 30 to 60; ess"
    )
    warned = dict(closing_rows(replace(run, alarms=ALARMS[:1])))
    assert warned["health"] == "1 warning: truncated 0.07 (threshold 0.05), steps 20 to 30"
    assert "health" not in dict(closing_rows(run))
    many = dict(closing_rows(replace(run, alarms=ALARMS[1:2] * 5)))
    assert many["health"].endswith("; and 2 more")


def test_where_nobody_looked_it_is_not_said_that_there_was_nothing(run):
    assert health_text(None) == "not checked"
    unwatched = replace(run, alarms=())
    watched = replace(unwatched, config={**run.config, "recipe": {"health": LIMITS}})
    assert (health_text(unwatched), health_text(watched)) == ("not checked", "none")
    assert health_text(replace(unwatched, alarms=ALARMS[:1])).startswith("1 warning")
    assert "not checked; only the trainer" in report_html(unwatched)
    assert '<p class="note">none.</p>' in report_html(watched)


def test_json_has_no_list_of_alarms_where_nobody_looked(run):
    for record, alarms in ((run, None), (replace(run, config={"recipe": {"health": {}}}), [])):
        told = stand(Points.from_record(record, "flops"), record, StandingQuery()).to_json(0.0)
        assert told["alarms"] == alarms
