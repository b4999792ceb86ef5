"""The report of a study: what its tables, figures and files say is what its verdict says."""

import csv
import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.curve.freeze import freeze
from scalerl.jsonl import dumps
from scalerl.record import DeviceSeconds, EvalPoint
from scalerl.run_writer import RunWriter
from scalerl.study import formats
from scalerl.study.answers import answers
from scalerl.study.curve_figures import linearised
from scalerl.study.curves import RunPoints
from scalerl.study.figures import forest_figure, study_figures
from scalerl.study.kinds import kind_of
from scalerl.study.labels import apart, short_names
from scalerl.study.page import print_study, study_html, study_latex, study_markdown, write_study_report
from scalerl.study.record import StudyRecord
from scalerl.study.table import Table
from scalerl.study.tables import (
    decisions_table,
    forecasts_table,
    scores_table,
    stability_table,
    study_tables,
    verdict_table,
)
from scalerl.study.verdict import judge_study

BUDGET, R_0 = 12_000.0, 0.3
ARMS = {
    "base": (0.60, 1.9, 2500.0),
    "loss=dapo": (0.55, 1.9, 2500.0),
    "<script>alert('a_b & 5%')</script>": (0.60, 1.9, 1650.0),
    "=cmd|' /C calc'!A0": (0.603, 1.9, 2500.0),
}


def write_run(folder, rng, truth, until=1.0, finished=True, truncated=math.nan):
    """A run with an evaluation every 400 GPU-hours along the curve (A, B, C_mid)."""
    A, B, C_mid = truth
    compute = np.arange(0, int(BUDGET * until) + 1, 400.0)
    rates = Curve(LOG_LOGISTIC, A, B, C_mid, R_0)(compute) + rng.normal(0, 0.005, len(compute))
    writer = RunWriter(folder, {"name": folder.parent.name})
    for step, (hours, rate) in enumerate(zip(compute, rates, strict=True)):
        seconds = DeviceSeconds(hours * 3000.0, hours * 500.0, 0.0, hours * 100.0)
        point = EvalPoint(step * 100, float(rate), device_seconds=seconds, truncated=truncated)
        writer.evaluation(point, "held-out", ["p"], np.array([1]))
    writer.close()
    if finished:
        (folder / "checkpoints" / "final").mkdir(parents=True)


def write_study(folder, arms, seeds=2, draw=7, **plan):
    """The folder of a study; an arm whose truth is None never got to an evaluation."""
    rng = np.random.default_rng(draw)
    runs, attempts = [], []
    last = max((n for n, truth in enumerate(arms.values()) if truth), default=0)
    for place, (name, truth) in enumerate(arms.items()):
        for seed in range(seeds):
            where = f"runs/{place}/seed{seed}"
            runs.append({"arm": name, "seed": seed, "model": "m", "folder": where})
            key = f"{name} seed {seed}"
            if truth is None:
                attempts += [
                    {
                        "run": key,
                        "outcome": "failed",
                        "cause": "no memory | at step_3",
                        "seconds": 1,
                        "until": 1e4,
                    }
                ] * 3
            else:
                # The last such arm has one seed that was cut short, and the others log their truncation.
                cut = place == last and seed == 1
                write_run(
                    folder / where, rng, truth, 0.4 if cut else 1.0, not cut, 0.02 if place else math.nan
                )
                attempts.append({"run": key, "outcome": "done", "cause": "", "seconds": 9.0, "until": 1e4})
    (folder / "runs" / "0" / "seed0" / "report.html").write_text("a page")
    document = {
        "schema": 1,
        "name": folder.name,
        "kind": "arms",
        "base": next(iter(arms)),
        "axis": "gpu_hours",
        "budgets": [3000.0, 6000.0, BUDGET],
        "target": 0.55,
        "price": None,
        "retries": 2,
        "warnings": ["<b>seeds</b> & little else"],
        "design": None,
        "arms": [{"name": n, "changes": {"loss": {"kind": n}}, "recipe": {}} for n in arms],
        "runs": runs,
        **plan,
    }
    (folder / "study.json").write_text(json.dumps(document))
    (folder / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in attempts))
    decisions = [
        {
            "decision": "stopped",
            "arm": list(arms)[-1],
            "budget": 6000.0,
            "probability": 0.97,
            "saved": 9e3,
        },
        {"decision": "learning rate", "arm": "base", "value": 2e-4, "tried": {"1e-4": 0.41, "2e-4": 0.45}},
    ]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in decisions))
    return StudyRecord.read(folder)


def frozen(run):
    """Forecasts of the end at a quarter and at half of a run, as the study keeps them."""
    compute = run.record.compute("gpu_hours")
    for share in (0.25, 0.5):
        early = tuple(np.array(run.record.evals, dtype=object)[compute <= share * BUDGET])
        yield {"run": run.plan.key, **freeze(replace(run.record, evals=early), "gpu_hours", BUDGET)}


def build(folder, arms=ARMS, seeds=2, draw=7, forecast=True, **plan):
    """The verdict of a simulated study, one arm with alarms of another kind than there are."""
    folder.mkdir(parents=True, exist_ok=True)
    study = write_study(folder, arms, seeds, draw, **plan)
    rows = [row for run in study.runs if run.record and forecast for row in frozen(run)]
    (folder / "forecasts.jsonl").write_text("".join(dumps(row) + "\n" for row in rows))
    verdict = judge_study(StudyRecord.read(folder))
    alarms = {"truncated": 1, "<i>entropy</i>": 2}
    found = [
        replace(arm, stability=replace(arm.stability, alarms=alarms)) if place == 1 else arm
        for place, arm in enumerate(verdict.arms)
    ]
    cautions = ("The importance ratios of <loss> never left 1, so the losses are one.",)
    return replace(verdict, arms=tuple(found), cautions=cautions)


FAILED = "failed_everywhere 100% & {more} \\x $2^3 ~#"


@pytest.fixture(scope="module")
def verdict(tmp_path_factory):
    return build(tmp_path_factory.mktemp("study") / "name <i>", ARMS | {FAILED: None})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return build(tmp_path_factory.mktemp("alone") / "study", {"base": ARMS["base"]}, 1)


@pytest.fixture(scope="module")
def misfit(tmp_path_factory):
    """The same draw in which a run of the base jumps at its end, so that no claim is made."""
    found = build(tmp_path_factory.mktemp("misfit") / "study", draw=1, forecast=False)
    assert any(run.misfit for run in found.arms[0].fits)
    return found


def by_key(table: Table) -> list[dict]:
    return [dict(zip(table.keys, row, strict=True)) for row in table.raw_rows()]


def test_the_table_of_verdicts_holds_the_numbers_of_the_verdict(verdict):
    rows = by_key(verdict_table(verdict))
    assert [row["arm"] for row in rows] == [*ARMS, FAILED]
    for row, arm in zip(rows, verdict.arms, strict=True):
        assert (row["seeds_finished"], row["seeds_planned"]) == (arm.stability.outcomes.get("finished", 0), 2)
        for key in ("A", "B", "C_mid", "pass_rate_at_budget"):
            found = arm.quantities.get(key.removesuffix("_at_budget"))
            wanted = (found.median, *found.interval) if found else (None, None, None)
            assert (row[key], row[f"{key}_low"], row[f"{key}_high"]) == wanted
    for pair in verdict.comparison.pairs:
        row = next(row for row in rows if row["arm"] == pair.recipe)
        assert row["A_difference"] == pair.differences["A"].median
        assert (row["A_difference_low"], row["A_difference_high"]) == pair.differences["A"].interval
        assert row["compute_to_own_ratio"] == pair.differences["compute_to_own"].median
        for name, claim in (("ceiling", pair.ceiling), ("efficiency", pair.efficiency)):
            assert (row[f"{name}_verdict"], row[f"{name}_p_adjusted"]) == (claim.verdict, claim.p_adjusted)
            assert row[f"{name}_seeds"] == claim.seeds


def test_a_cell_shows_its_number_in_the_unit_of_its_heading(verdict):
    table = verdict_table(verdict)
    place = [column.keys[0] for column in table.columns].index("C_mid")
    assert table.columns[place].header == "C_mid (GPU-hours)"
    cell, found = table.rows[0].cells[place], verdict.arms[0].quantities["C_mid"]
    assert cell.text == f"{found.median:,.0f}"
    assert cell.beside == f"[{found.interval[0]:,.0f}, {found.interval[1]:,.0f}]"


def test_what_moves_what_is_told_apart_from_noise(verdict):
    base, ceiling, efficiency, noise, failed = answers(verdict)
    kinds = [one.kind for one in (base, ceiling, efficiency, noise, failed)]
    assert kinds == ["base", "ceiling", "efficiency", "noise", "not compared"]
    assert ceiling.text.startswith("lowers the ceiling: A −.0")
    assert efficiency.text.startswith("gets to 3/4 of its own gain sooner: compute ×0.6")
    assert "seeds would tell" in noise.text
    assert failed.text.startswith("is not compared: none of its 2 runs could be fitted: no memory")


def test_of_a_run_that_no_curve_describes_no_claim_is_shown(misfit):
    rows = verdict_table(misfit).rows
    assert [row.cells[1].text for row in rows] == ["the base", *["no claim"] * 3]
    assert all("no saturating curve describes a run of base" in row.cells[1].beside for row in rows[1:])
    assert {row["ceiling_p_adjusted"] for row in by_key(verdict_table(misfit))} == {None}
    assert rows[1].cells[3].text == "withheld"
    pair = misfit.pairs["loss=dapo"]
    assert kind_of(pair) == "no claim"
    assert forest_figure(misfit) is not None
    assert all(one.text.startswith("allows no claim") for one in answers(misfit)[1:])


def test_one_claim_of_two_says_what_it_is_about(verdict):
    pair = verdict.comparison.pairs[1]
    held = replace(pair.ceiling, verdict="no claim", why="the ceiling of <x> is not identified")
    one = replace(verdict, comparison=replace(verdict.comparison, pairs=(replace(pair, ceiling=held),)))
    text = answers(one)[2].text
    assert text.startswith("gets to 3/4 of its own gain sooner")
    assert text.endswith("; no claim about its ceiling: the ceiling of <x> is not identified.")


def test_stability_counts_outcomes_alarms_and_causes(verdict):
    rows = by_key(stability_table(verdict))
    assert (rows[-1]["failed"], rows[-1]["causes"]) == (2, "no memory | at step_3")
    assert json.loads(rows[1]["alarms"]) == {"truncated": 1, "<i>entropy</i>": 2}
    assert math.isnan(rows[0]["truncated"])
    assert rows[1]["truncated"] == pytest.approx(0.02)
    assert stability_table(verdict).rows[0].cells[7].text == "–"


def test_forecasts_stand_beside_what_was_measured(verdict):
    rows = by_key(forecasts_table(verdict))
    assert len(rows) == len(verdict.forecasts) == 16
    for row, judged in zip(rows, verdict.forecasts, strict=True):
        measured = judged.outcome.measured
        assert row["measured"] == (measured.pass_rate if measured else None)
        assert row["inside"] == judged.outcome.word
        assert (row["forecast_low"], row["forecast_high"]) == judged.forecast.prediction
    assert "not measured" in {row["inside"] for row in rows}  # of the run that was cut short
    scores = by_key(scores_table(verdict.scores))
    assert [row["rms"] for row in scores] == [score.rms for score in verdict.scores]
    assert [row["rms_power_law"] for row in scores] == [
        score.rivals_rms["power law"] for score in verdict.scores
    ]


def test_decisions_say_what_was_saved(verdict):
    stopped, chosen = decisions_table(verdict).rows
    assert "at 6,000 GPU-hours: probability that its ceiling is below" in stopped.cells[2].text
    assert stopped.cells[2].raw[:2] == (6000.0, 0.97)
    assert stopped.cells[3].raw == (9e3,)
    assert chosen.cells[2].text == "0.0002 of 2 tried (1e-4: .410, 2e-4: .450)"
    bare = replace(verdict, study=replace(verdict.study, decisions=({"decision": "stopped"},)))
    assert decisions_table(bare).rows[0].cells[3].text == "–"


def test_csv_reads_back_with_every_digit_and_runs_no_formula(verdict, tmp_path):
    write_study_report(verdict, tmp_path)
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[3]["arm"] == "'" + list(ARMS)[3]
    assert rows[2]["arm"] == list(ARMS)[2]
    for row, arm in zip(rows[:4], verdict.arms, strict=False):
        assert float(row["A"]) == arm.quantities["A"].median
        assert float(row["A_low"]) == arm.quantities["A"].interval[0]
    pair = verdict.comparison.pairs[0]
    assert float(rows[1]["A_difference"]) == pair.differences["A"].median < 0  # no apostrophe at a number
    assert math.isinf(float(rows[1]["compute_to_target_high"]))
    assert (rows[0]["truncated"], rows[4]["A"]) == ("", "")
    with (tmp_path / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 10
    assert float(runs[0]["A"]) == verdict.arms[0].runs[0].fit.ceiling
    assert float(runs[0]["compute"]) == BUDGET


def test_csv_keeps_what_text_means():
    rows = [["=1+1", "+x", "-y", "@z", "\tw", 'a,"b"', "plain", -0.1, 3, None, math.nan]]
    (found,) = csv.reader(io.StringIO(formats.csv_text(list("abcdefghijk"), rows).split("\n", 1)[1]))
    assert found == ["'=1+1", "'+x", "'-y", "'@z", "'\tw", 'a,"b"', "plain", "-0.1", "3", "", ""]


def check_latex(text):
    """Groups and environments close, every row has its cells, and no special letter stands bare."""
    opened, rows, width = [], 0, 0
    for line in text.splitlines():
        code = re.sub(r"(?<!\\)%.*", "", line)
        for kind, name in re.findall(r"\\(begin|end)\{(\w+\*?)\}", code):
            if kind == "begin":
                opened.append(name)
            else:
                assert opened.pop() == name
        shape = re.search(r"\\begin\{(?:tabular|longtable)\}\{((?:[lr]|p\{6cm\})+)\}", code)
        if shape:
            width = len(re.findall(r"[lr]|p\{6cm\}", shape[1]))
        elif code.endswith(r"\\") and "&" in code:
            assert len(re.findall(r"(?<!\\)&", code)) == width - 1, line
            assert not re.search(r"(?<!\\)[_#^~]", code), line
            assert code.count("$") % 2 == code.count(r"\$") % 2, line
            rows += 1
    assert not opened
    bare = re.sub(r"\\[{}\\]", "", text)
    depth = 0
    for letter in bare:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    return rows


def test_latex_is_balanced_and_escaped(verdict):
    text = study_latex(verdict)
    rows = sum(len(table.rows) + 1 for table in study_tables(verdict))
    assert check_latex(text) == rows
    assert r"failed\_everywhere 100\% \& \{more\} \textbackslash{}x \$2\textasciicircum{}3" in text
    assert r"\textless{}script\textgreater{}" in text


def test_a_long_latex_table_breaks_over_pages(verdict):
    table = forecasts_table(replace(verdict, forecasts=verdict.forecasts * 3))
    assert check_latex(formats.latex(table)) == 48 + 2  # its head stands on the first page, and on the others
    assert r"\begin{longtable}" in formats.latex(table)


@pytest.mark.parametrize("text", ["[x]", "*", "a--b", 'say "x"', "|", "100 % – ×∞"])
def test_latex_takes_no_letter_for_its_own(text):
    escaped = formats.latex_text(text)
    assert not escaped.startswith(("[", "*"))
    assert "--" not in escaped.replace("--", "", text.count("–"))


def test_markdown_rows_have_their_cells(verdict):
    text = study_markdown(verdict)
    for table in study_tables(verdict):
        lines = formats.markdown(table).splitlines()
        tables = [line for line in lines if line.startswith("|")]
        assert len(tables) == len(table.rows) + 2
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {len(table.columns) + 1}
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


class Checker(HTMLParser):
    """What a page opens, closes and refers to."""

    VOID = ("meta", "br", "path", "use", "rect", "circle", "line", "link", "img")

    def __init__(self):
        super().__init__()
        self.opened, self.tags, self.links, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.note(attrs)
        if tag not in self.VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.note(attrs)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.opened.pop() == tag

    def note(self, attrs):
        found = dict(attrs)
        self.links += [found[key] for key in ("href", "src") if key in found]
        self.ids += [found["id"]] if "id" in found else []


def checked(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert not checker.opened
    assert len(set(checker.ids)) == len(checker.ids)
    assert "script" not in checker.tags
    assert not [link for link in checker.links if ":" in link or link.startswith("//")]
    assert "url(http" not in page
    assert "@import" not in page
    return checker


def test_the_page_is_whole_and_refers_to_nothing_outside(verdict, tmp_path):
    page = study_html(verdict, tmp_path)
    checker = checked(page)
    assert "&lt;script&gt;alert(&#39;a_b &amp; 5%&#39;)&lt;/script&gt;" in page
    (link,) = [link for link in checker.links if not link.startswith("#")]
    assert (tmp_path / unquote(link)).read_text() == "a page"
    order = ["Moves the ceiling", "Verdicts", "Differences to the base", "Pass rate against compute"]
    order += ["The linearised curve", "Frozen forecasts", "Stability", "Decisions during", "Runs", "The plan"]
    places = [page.index(f">{heading}") for heading in order]
    assert places == sorted(places)
    assert "are taken to differ with sd" in page
    assert "What this study cannot tell." in page


def test_a_run_links_to_its_page_where_that_has_odd_letters(verdict):
    assert "runs/0/seed0/report.html" in study_html(verdict)


@pytest.mark.parametrize("name", ["verdict", "alone", "misfit"])
def test_every_format_is_the_same_each_time(name, request, tmp_path):
    found = request.getfixturevalue(name)
    first, second = (write_study_report(found, tmp_path, figures=["svg"]), None)
    texts = [path.read_text() for path in first]
    second = [path.read_text() for path in write_study_report(found, tmp_path, figures=["svg"])]
    assert texts == second
    names = {path.name for path in first}
    assert {"report.html", "report.md", "report.tex", "report.csv", "runs.csv", "overlay.svg"} <= names
    checked((tmp_path / "report.html").read_text())


def test_a_study_of_one_arm_has_no_differences(alone):
    assert alone.comparison is None
    assert forest_figure(alone) is None
    assert [one.name for one in study_figures(alone)] == ["overlay", "linearised", "forecasts"]
    checked(study_html(alone))


def test_a_study_before_its_first_evaluation_has_a_page(tmp_path):
    (tmp_path / "runs" / "0" / "seed0").mkdir(parents=True)
    found = build(tmp_path, {"base": None, "other": None})
    assert study_figures(found) == []
    assert [one.kind for one in answers(found)] == ["base", "not compared"]
    checked(study_html(found))
    check_latex(study_latex(found))


def test_many_runs_make_a_page_that_stays_fluent(verdict):
    """25 arms of 4 runs: small multiples against the base, and thinned evaluations."""
    arm, fits = verdict.arms[0], verdict.arms[0].runs * 2
    arms = [
        replace(arm, runs=fits),
        *(replace(verdict.arms[1], name=f"arm {n}", runs=fits) for n in range(24)),
    ]
    found = replace(verdict, arms=tuple(arms))
    figures = study_figures(found)
    overlay = next(one for one in figures if one.name == "overlay")
    assert sum(axes.get_visible() for axes in overlay.figure.axes) == 24
    page = study_html(found, figures=figures)
    assert len(page) < 3e6
    assert "<details>" in page
    checked(page)


def test_linearised_points_lie_on_a_line_of_slope_B():
    curve = Curve(LOG_LOGISTIC, 0.6, 1.9, 25.0, 0.3)
    compute = np.array([0.0, 5.0, 10.0, 50.0, 100.0])
    x, F, out = linearised(RunPoints(compute, curve(compute), curve))
    np.testing.assert_allclose(F, x**1.9, rtol=1e-9)
    assert (len(x), out) == (4, 0)
    rates = np.array([0.3, 0.29, 0.3, 0.6, 0.5])  # at R_0, below and at A: none has a value
    x, F, out = linearised(RunPoints(compute, rates, curve))
    assert (x.tolist(), out) == ([100.0], 3)
    np.testing.assert_allclose(F, 25.0**1.9 / (0.3 / 0.2 - 1))


def test_labels_keep_apart_and_in_order():
    placed = apart([0.5, 0.5, 0.51, 0.9], gap=0.1, low=0.05, high=0.95)
    np.testing.assert_allclose(np.diff(placed[:3]), 0.1)
    np.testing.assert_allclose(np.mean(placed[:3]), np.mean([0.5, 0.5, 0.51]))
    assert placed[3] == 0.9
    assert max(apart([0.94, 0.95, 0.95], 0.1, 0.05, 0.95)) <= 0.95 + 1e-12


def test_names_in_figures_are_short_and_never_alike():
    names = ["base", "optimiser.lr=0.0001 batch.prompts=16", "x" * 40, "x" * 20 + "y" * 5 + "x" * 20]
    found = short_names(names)
    assert found["optimiser.lr=0.0001 batch.prompts=16"] == "lr=0.0001 prompts=16"
    assert len(set(found.values())) == 4
    assert max(map(len, found.values())) <= 26


def test_the_terminal_shows_verdicts_and_no_control(verdict):
    stream = io.StringIO()
    odd = replace(verdict, cautions=("red \x1b[31m text\nnext",))
    print_study(odd, stream)
    text = stream.getvalue()
    assert "moves the ceiling" in text
    assert "caution: red  [31m text next" in text
    assert "\x1b" not in text
    assert max(map(len, text.split("\n\n")[1].splitlines())) < 170


def test_what_a_report_needs_loads_neither_torch_nor_pydantic():
    code = (
        "import sys\n"
        "from scalerl.study import curves, figures, formats, page, record, tables, verdict\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'matplotlib', 'rich', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
