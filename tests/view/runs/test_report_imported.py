"""Pages of logs of other trainers: what such a log does not say, and what is forecast of it."""

import math
import re
from dataclasses import replace
from html import unescape

import docs_logs
import pytest

from scalerl.curve import Points, fit
from scalerl.ingest import load_run
from scalerl.numbers import duration, rate, rate_interval
from scalerl.view import report_html
from scalerl.view.facts.facts import compute_rows
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.gathered import RunsView, assumptions


def text_of(html):
    body = re.sub(r"<(style|svg|script)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of a trainer on 8 devices that splits no step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("log"))
        docs_logs.trl()
        yield load_run("outputs", devices=8)


def test_what_a_log_does_not_split_is_unknown_and_not_zero(log, run):
    rows = dict(compute_rows(log))
    assert rows["steps"].startswith(duration(240 * 900.0 * 8))
    assert [rows[name] for name in ("generating", "training", "idle devices")] == ["–"] * 3
    # Our own trainer measures each, and a zero of it is one.
    seconds = replace(run.evals[-1].device_seconds, idle=0.0)
    own = dict(compute_rows(replace(run, evals=(replace(run.evals[-1], device_seconds=seconds),))))
    assert "steps" not in own
    assert own["idle devices"] == "0 s"
    assert own["training"].startswith(duration(seconds.train))


def test_compute_is_what_was_taken_of_each_run(log, run):
    def said(*records):
        shown = [ShownRun(f"run {n}", Points.from_record(r, "gpu_hours"), r) for n, r in enumerate(records)]
        return assumptions(RunsView(tuple(shown)))[1]

    assert "evaluating is left out." in said(run)
    assert "evaluating" not in said(log)
    assert said(log).startswith(f"Compute is GPU-hours by the log: {log.config['taken']['GPU-hours']}.")
    assert "evaluating is left out (run 0); GPU-hours by the log: step_time" in said(run, log)


def test_a_log_is_forecast_at_twice_its_compute_and_by_its_budget_where_it_has_one(log):
    own = fit(log)
    end = 2 * float(own.points.compute_N[-1])
    told = own.forecast(end)
    stated = f"{rate(told.median)} {rate_interval(told.prediction)}"
    page = text_of(report_html(log, own))
    assert f"At {end:,.0f} GPU-hours (twice the compute so far) about {stated}." in page
    assert f"GPU-hours, one evaluation {stated}" in page
    assert f"another seed {rate_interval(told.rerun)}" in page
    assert "Frozen forecasts" not in page
    budget = {"kind": "gpu_hours", "amount": 700.0}
    page = text_of(report_html(replace(log, config={**log.config, "budget": budget}), own))
    assert f"At 700 GPU-hours (the end of the run) about {rate(own.forecast(700.0).median)}" in page
    assert not math.isclose(own.forecast(700.0).median, told.median, abs_tol=1e-3)
