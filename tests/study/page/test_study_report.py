"""The report of a study: what its tables, figures and files say is what its verdict says."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from hostile_study import ARMS, build, check_latex

from scalerl.curve import LOG_LOGISTIC, Curve, Points
from scalerl.study.page.figures import forest_figure, study_chart, study_figures
from scalerl.study.page.page import print_study, study_document, write_study_report
from scalerl.study.page.tables import verdict_table
from scalerl.study.verdict.answers import answers
from scalerl.view.runs.figures import linear_points
from scalerl.view.style import short_names


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
    assert checker.tags.count("script") <= 7  # ours: the data, and what draws them
    assert "<script>alert" not in page
    assert not [link for link in checker.links if ":" in link or link.startswith("//")]
    assert "url(http" not in page
    assert "@import" not in page
    return checker


def test_the_page_is_whole_and_refers_to_nothing_outside(verdict, tmp_path):
    page = study_document(verdict, tmp_path, study_figures(verdict)).html()
    checker = checked(page)
    assert "&lt;script&gt;alert(&#39;a_b &amp; 5%&#39;)&lt;/script&gt;" in page
    (link,) = [link for link in checker.links if not link.startswith("#")]
    assert (tmp_path / unquote(link)).read_text() == "a page"
    order = [
        "Lower at the compute seen",
        "Pass rate against compute",
        "Verdicts",
        "Differences to the base",
    ]
    order += ["The linearised curve", "Frozen forecasts", "Stability", "Decisions during", "Runs", "The plan"]
    places = [page.index(f">{heading}") for heading in order]
    assert places == sorted(places)
    assert "are assumed to differ with sd" in page
    assert '<div class="cautions"' in page


def test_a_run_links_to_its_page_where_that_has_odd_letters(verdict):
    assert "runs/0/seed0/report.html" in study_document(verdict, verdict.study.path, []).html()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return build(tmp_path_factory.mktemp("alone") / "study", {"base": ARMS["base"]}, 1)


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
    checked(study_document(alone, alone.study.path, study_figures(alone)).html())


def test_a_study_before_its_first_evaluation_has_a_page(tmp_path):
    (tmp_path / "runs" / "0" / "seed0").mkdir(parents=True)
    found = build(tmp_path, {"base": None, "other": None})
    assert study_figures(found) == []
    assert [one.kind for one in answers(found)] == ["the base", "not compared"]
    document = study_document(found, tmp_path, [])
    checked(document.html())
    check_latex(document.latex())


def test_many_runs_make_a_page_that_stays_fluent(verdict):
    """13 arms of 4 runs: small multiples against the base, and thinned evaluations."""

    def of_four_runs(arm, name):
        runs = []
        for seed, one in enumerate(verdict.arms[0].runs * 2):
            run = replace(one.run, plan=replace(one.run.plan, seed=seed))
            runs.append(replace(one, run=run, shown=replace(one.shown, name=f"{name} seed {seed}")))
        return replace(arm, name=name, runs=tuple(runs))

    arms = [of_four_runs(verdict.arms[0], verdict.arms[0].name)]
    arms += [of_four_runs(verdict.arms[1], f"arm {n}") for n in range(12)]
    found = replace(verdict, arms=tuple(arms))
    figures = study_figures(found)
    overlay = next(one for one in figures if one.name == "overlay")
    assert len(overlay.figure.axes) == 12
    page = study_document(found, found.study.path, figures).html()
    assert len(page) < 3e6
    assert "<details><summary>" in page
    chart: Any = study_chart(found)
    groups = chart["groupings"][0]["groups"]
    assert [group["name"] for group in groups] == [arm.name for arm in arms]
    checked(page)


def test_linearised_points_lie_on_a_line_of_slope_B():
    curve = Curve(LOG_LOGISTIC, 0.6, 1.9, 25.0, 0.3)
    compute = np.array([0.0, 5.0, 10.0, 50.0, 100.0])
    x, F, out = linear_points(Points.from_arrays(compute, curve(compute)), curve)
    np.testing.assert_allclose(F, x**1.9, rtol=1e-9)
    assert (len(x), out) == (4, 0)
    rates = np.array([0.3, 0.29, 0.3, 0.6, 0.5])  # at R_0, below and at A: none has a value
    x, F, out = linear_points(Points.from_arrays(compute, rates), curve)
    assert (x.tolist(), out) == ([100.0], 3)
    np.testing.assert_allclose(F, 25.0**1.9 / (0.3 / 0.2 - 1))


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
    assert "lower at the compute seen" in text
    # What the curves show, and what was measured does not, is beside that, and nowhere else.
    assert "not significant (p 0.178; 3 seeds would detect it); at the compute seen −0.047 [−0.064, " in text
    assert text.count("at the compute seen −") == 1
    assert "caution: red  [31m text next" in text
    assert "\x1b" not in text
    assert max(map(len, text.partition("\nbase: ")[0].splitlines())) < 210


def test_a_narrow_terminal_loses_no_digit(verdict):
    """80 columns are too few for the table: then every arm has a block of lines."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        print_study(verdict, stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    table = verdict_table(verdict)
    lines = [
        f"  {name}  {cell.whole}"
        for one in table.rows
        for name, cell in zip(table.headers[1:], one.cells[1:], strict=True)
    ]
    assert [line for line in lines if " ".join(line.split()) not in " ".join(text.split())] == []
    assert all(f"\n{one.cells[0].text}\n" in text for one in table.rows)
    assert "…" not in text


def test_what_a_report_needs_loads_neither_torch_nor_pydantic():
    code = (
        "import sys\n"
        "from scalerl.view import formats\n"
        "import scalerl.study.page.figures, scalerl.study.page.tables, scalerl.study.page.figures\n"
        "from scalerl.study import page, record, verdict\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'matplotlib', 'rich', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
