from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from scalerl.curve import fit
from scalerl.errors import CannotAnswerError, WriteError
from scalerl.numbers import percent, rate, rate_interval
from scalerl.record.reader import RunRecord
from scalerl.view import closing_rows, report_html, write_report
from scalerl.view.facts.fit_rows import fit_rows
from scalerl.view.facts.frozen import REACHED

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = "<script>alert('x')</script>\"&"


class Page(HTMLParser):
    """What a page holds: its text, its attributes, and whether every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def html(run):
    return report_html(run)


def test_the_page_states_what_was_forecast_and_what_came(run, html):
    text = Page(html).text
    measured = f"{run.evals[-1].pass_rate:.3f}"
    assert "Forecast at half of the compute: 0.753 [0.722, 0.781]; " in text
    assert f"measured {measured}: inside." in text
    for stated in (
        "107 thousand",  # parameters of the model
        "14.6 TFLOP",
        "3.31 [3.02, 3.66] TFLOP",  # C_mid then
        "1.63 [1.35, 1.94]",  # B then
        "0.811 [0.768, 0.879]",  # A then
        "the ceiling 0.820 that was known beforehand",
        "known ceiling 0.820",
        "base model, apart 2.20 TFLOP",
        "41 s, 2.20 TFLOP (15 % of the RL’s)",  # 2.2 of 14.64
        "largest staleness of a trained token 8 steps; the schedule allows k = 8",
        "trained on perfect demonstrations under the same budget",
        "max_ratio",
        "one evaluation lies 2.4 sd off the curve",
        "Pass rate by chain length",
        "chain/10",
        "making the base model",
        "2.20 TFLOP",
    ):
        assert stated in text, stated


def test_each_forecast_is_judged(html):
    table = html.partition("Frozen forecasts")[2].partition("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")[2:]]
    assert [(row[1], row[6]) for row in rows] == [("60", "outside"), ("120", "inside")]  # .77


def test_the_page_says_how_near_the_target_an_outcome_is(html):
    near = f"within {percent(REACHED)} of it, or {percent(2 * REACHED)} once the run is past it"
    assert near in Page(html).text


def test_an_outcome_outside_is_said_first(make_run):
    run = make_run(steps=False, forecasts=[{"prediction": [0.70, 0.74]}])
    html = report_html(run)
    assert '<p class="result outside">' in html
    assert ": outside." in Page(html).text


def test_the_page_stands_alone(html):
    page = Page(html)
    assert not {"link", "iframe", "img"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "href", "action", "srcset"), (name, value)
        assert "//" not in value, (name, value)
    assert "default-src 'none'" in html
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_hostile_text_stays_text(make_run):
    run = make_run(
        name=HOSTILE,
        steps=False,
        seed=HOSTILE,
        strata=HOSTILE,
        recipe={HOSTILE: {"loss": HOSTILE}},
        model={"path": HOSTILE, "parameters": HOSTILE},
        versions={HOSTILE: HOSTILE},
        ceiling={"value": 0.82, "why": HOSTILE},
        forecasts=[{"fit_json": {"why": HOSTILE, "warnings": [HOSTILE], "identified": False}}],
    )
    html = report_html(run)
    assert "<script>alert" not in html
    assert HOSTILE in Page(html).text


def test_one_input_gives_one_page(run, html):
    assert report_html(RunRecord.read(run.path), fit(run, x="flops")) == html


def test_the_fit_on_all_evaluations_is_as_the_command_prints_it(run, html):
    whole = fit(run, x="flops")
    text = Page(html).text
    assert f"{rate(whole.median.A)} {rate_interval(whole.intervals.A)}" in text
    for label, value in fit_rows(whole):
        assert " ".join(f"{label} {value}".split()) in text


def test_a_forecast_stored_without_medians_gives_its_intervals_alone(make_run):
    path = make_run(forecasts=[{}]).path
    row = json.loads((path / "forecasts.jsonl").read_text())
    del row["fit_json"]["median"]
    (path / "forecasts.jsonl").write_text(json.dumps(row) + "\n")
    run = RunRecord.read(path)
    text = Page(report_html(run)).text
    assert "– [0.768, 0.879] – [1.35, 1.94] – [3.02, 3.66] TFLOP" in text
    assert dict(closing_rows(run))["ceiling A at 50 %"] == "[0.768, 0.879]; known beforehand 0.820: inside"


def test_two_fits_that_warn_alike_warn_once(make_run):
    warning = "the counters stood still"
    run = make_run(steps=False, forecasts=[{"fit_json": {"warnings": [warning]}}])
    whole = dataclasses.replace(fit(run, x="flops"), warnings=(warning,))
    text = Page(report_html(run, whole)).text
    assert text.count(warning) == 1


def test_a_figure_that_is_zero_at_every_step_is_said_and_not_drawn(make_run):
    run = make_run(steps=False)
    rows = [{"step": n, "ratio_clipped": 0.0, "entropy": 0.5, "truncated": None} for n in range(1, 9)]
    (run.path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = report_html(run)
    assert "Zero at every step, and not drawn: ratios clipped (% of tokens)." in Page(html).text
    assert "Ratios clipped" not in html
    rows = [{"step": n, "ratio_clipped": 0.0} for n in range(1, 9)]
    (run.path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = Page(report_html(run)).text
    assert "Zero at every step, and not drawn: ratios clipped (% of tokens)." in text
    assert "holds no steps.jsonl" not in text


@pytest.mark.parametrize("n_evals", [1, 2, 3])
def test_too_few_evaluations_for_a_fit(make_run, n_evals):
    text = Page(report_html(make_run(n_evals=n_evals, steps=False))).text
    assert "No curve is fitted: " in text
    assert "Frozen forecasts" not in text
    count = "1 evaluation" if n_evals == 1 else f"{n_evals} evaluations"
    assert f"No curve is fitted: {count}; a curve needs at least 4" in text
    assert "holds no steps.jsonl" in text


def test_no_evaluation_at_all(make_run):
    run = make_run(n_evals=1)  # the successes of the prompts are there: they are written first
    (run.path / "evals.jsonl").write_text("")
    with pytest.raises(CannotAnswerError, match=r"evals\.jsonl: no evaluation yet"):
        write_report(run.path)
    assert not (run.path / "report.html").exists()


def test_without_config_or_steps(make_run):
    run = make_run(n_evals=12)
    for name in ("config.json", "steps.jsonl", "eval_prompts.jsonl"):
        (run.path / name).unlink()
    text = Page(write_report(run.path).read_text()).text
    assert "holds no recipe" in text
    assert "Pass rate by" not in text
    assert "(twice the compute so far) about 0." in text


def test_a_run_that_is_not_there_yet(make_run):
    run = make_run(n_evals=20, steps=False, forecasts=[{}])  # 19 intervals of 8 steps: 152 of 240
    text = Page(report_html(run)).text
    assert "At 18.5 TFLOP (twice the compute so far) about 0." in text
    assert "TFLOP 0.753 [0.722, 0.781] – not measured" in text


def test_a_forecast_row_without_its_numbers(make_run):
    lacking = {"median": None, "prediction": None, "curve": None, "fit_json": None}
    text = Page(report_html(make_run(steps=False, forecasts=[lacking]))).text
    assert "Frozen forecasts, and what came of them" in text
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)


def test_the_page_is_written_whole_beside_the_run_or_where_told(make_run, tmp_path):
    run = make_run(n_evals=3, steps=False)
    before = {path.name for path in run.path.iterdir()}
    assert write_report(run) == run.path / "report.html"
    assert {path.name for path in run.path.iterdir()} == before | {"report.html"}
    elsewhere = write_report(run.path, out=tmp_path / "page.html")
    assert elsewhere.read_text() == (run.path / "report.html").read_text()
    assert write_report(run, out=tmp_path / "new" / "page.html").read_text() == elsewhere.read_text()
    with pytest.raises(WriteError, match=r"page\.html/below\.html: File exists"):
        write_report(run, out=elsewhere / "below.html")


def test_numbers_of_an_older_page_do_not_stay(make_run):
    run = make_run(n_evals=3, steps=False)
    write_report(run)
    renamed = dataclasses.replace(run, config={**run.config, "name": "second"})
    assert "<h1>second</h1>" in write_report(renamed).read_text()


def test_importing_the_report_is_light():
    heavy = "torch", "transformers", "pydantic", "matplotlib", "jinja2", "rich"
    code = f"import scalerl.view, sys; print(set({heavy}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
