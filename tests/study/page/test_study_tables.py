"""The tables of a study and the files that they are written to: they say what its verdict says."""

import csv
import io
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from hostile_study import ARMS, BUDGET, FAILED, check_latex

from scalerl.numbers import rate, rate_interval
from scalerl.study.page.figures import forest_figure
from scalerl.study.page.page import study_document, write_study_report
from scalerl.study.page.tables import (
    decisions_table,
    forecasts_table,
    scores_table,
    stability_table,
    study_tables,
    verdict_table,
)
from scalerl.study.verdict.answers import answers
from scalerl.study.verdict.verdict import kind_of
from scalerl.view import formats
from scalerl.view.facts.notices import claim_text
from scalerl.view.runs.tables import latex
from scalerl.view.table import Table, difference_cell, rate_cell


def by_header(table: Table) -> list[dict]:
    return [dict(zip(table.headers, row.cells, strict=True)) for row in table.rows]


def test_the_table_of_verdicts_holds_the_numbers_of_the_verdict(verdict):
    rows = by_header(verdict_table(verdict))
    assert [row["arm"].text for row in rows] == [*ARMS, FAILED]
    shown = {"A": "ceiling A", "pass_rate": "pass rate at 12,000 GPU-hours"}
    for row, arm in zip(rows, verdict.arms, strict=True):
        assert row["seeds"].text == f"{arm.stability.outcomes.get('finished', 0)}/2"
        for key, header in shown.items():
            cell = rate_cell(arm.quantities.get(key))
            assert (row[header].text, row[header].beside.split("\n")[0]) == (cell.text, cell.beside)
    for pair in verdict.comparison.pairs:
        row = next(row for row in rows if row["arm"].text == pair.recipe)
        own = "efficiency: compute to 3/4 of own gain, against base"
        for header, name in (("ceiling A, against base", "A"), (own, "compute_to_own")):
            cell = difference_cell(pair.differences[name])
            assert row[header].text == cell.text
            assert row[header].beside == f"{cell.beside}\n{claim_text(pair.claims[name])}"


def test_a_cell_shows_its_number_in_the_unit_of_its_heading(verdict):
    cell, found = (
        by_header(verdict_table(verdict))[0]["C_mid (GPU-hours)"],
        verdict.arms[0].quantities["C_mid"],
    )
    assert cell.text == f"{found.median:,.0f}"
    assert cell.beside == f"[{found.interval[0]:,.0f}, {found.interval[1]:,.0f}]"


def test_what_moves_what_is_told_apart_from_noise(verdict):
    base, seen, efficiency, noise, failed = answers(verdict)
    kinds = [one.kind for one in (base, seen, efficiency, noise, failed)]
    assert kinds == [
        "the base",
        "lower at the compute seen",
        "reaches it sooner",
        "not significant",
        "not compared",
    ]
    for one in (seen, efficiency, noise):  # three questions, each with its number
        measured, ceiling, own = (
            one.text.split("; ceiling A ")[0],
            *one.text.split("; ceiling A ")[1].split("; compute to"),
        )
        assert measured.startswith(("measured at 12,000 GPU-hours ", "its last pass rate was "))
        assert "not significant" in ceiling
        assert own.startswith(" 3/4 of its own gain ×")
    assert ", sooner (p " in efficiency.text
    assert "seeds would detect it" in noise.text
    assert failed.text.startswith("not compared: none of its 2 runs could be fitted: no memory")


def test_of_a_run_that_no_curve_describes_no_claim_is_shown(misfit):
    rows = verdict_table(misfit).rows
    assert [row.cells[1].text for row in rows] == ["the base", *["inconclusive"] * 3]
    assert all("no saturating curve describes a run of base" in row.cells[1].beside for row in rows[1:])
    assert rows[1].cells[3].text == "withheld"
    pair = misfit.pairs["loss=dapo"]
    assert kind_of(pair) == "inconclusive"
    assert forest_figure(misfit) is not None
    assert all(one.text.startswith("inconclusive") for one in answers(misfit)[1:])


def test_one_claim_of_two_says_what_it_is_about(verdict):
    pair = verdict.comparison.pairs[1]
    held = replace(pair.ceiling, verdict="inconclusive", why="the ceiling of <x> is not identified")
    one = replace(verdict, comparison=replace(verdict.comparison, pairs=(replace(pair, ceiling=held),)))
    text = answers(one)[2].text
    assert ", sooner (p " in text
    # What is known of it is said all the same.
    known = difference_cell(pair.differences["A"]).whole
    assert f"; ceiling A {known}, inconclusive (p " in text
    assert "): the ceiling of <x> is not identified; " in text


def test_stability_counts_outcomes_alarms_and_causes(verdict):
    rows = by_header(stability_table(verdict))
    assert (rows[-1]["failed"].text, rows[-1]["why runs failed"].text) == ("2", "no memory | at step_3")
    assert rows[1]["runs with an alarm"].text == "truncated 1, <i>entropy</i> 2"
    assert (rows[0]["truncated"].text, rows[1]["truncated"].text) == ("–", "2.0 %")
    assert rows[0]["why runs failed"].text == "–"


def test_forecasts_stand_beside_what_was_measured(verdict):
    rows = by_header(forecasts_table(verdict))
    assert len(rows) == len(verdict.forecasts) == 16
    for row, judged in zip(rows, verdict.forecasts, strict=True):
        measured = judged.outcome.measured
        assert row["measured"].text == rate(measured.pass_rate if measured else None)
        assert row["outcome"].text == judged.outcome.word
        assert row["forecast, one evaluation"].beside == rate_interval(judged.forecast.prediction)
    assert "not measured" in {row["outcome"].text for row in rows}  # of the run that was cut short
    scores = by_header(scores_table(verdict.scores))
    for row, score in zip(scores, verdict.scores, strict=True):
        assert float(row["rms error"].text) == pytest.approx(score.rms, abs=5e-4)
        rival = score.rivals_rms.get("power law")
        assert row["rms: power law"].text == rate(rival)


def test_decisions_say_what_was_saved(verdict):
    stopped, chosen = decisions_table(verdict).rows
    assert "at 6,000 GPU-hours: probability that its ceiling is below" in stopped.cells[2].text
    assert stopped.cells[2].text.endswith("97 %")
    assert stopped.cells[3].text == "9,000"
    assert chosen.cells[2].text == "0.0002 of 2 tried (1e-4: 0.410, 2e-4: 0.450)"
    unsaved = {"decision": "stopped", "arm": "dapo", "budget": 6000.0}
    bare = replace(verdict, study=replace(verdict.study, decisions=(unsaved,)))
    assert decisions_table(bare).rows[0].cells[3].text == "–"


def test_csv_reads_back_with_every_digit_and_runs_no_formula(verdict, tmp_path):
    write_study_report(verdict, tmp_path)
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[3]["arm"] == "'" + list(ARMS)[3]
    assert rows[2]["arm"] == list(ARMS)[2]
    for row, arm in zip(rows[:4], verdict.arms, strict=False):
        assert float(row["quantities.A.median"]) == arm.quantities["A"].median
        assert float(row["quantities.A.interval.low"]) == arm.quantities["A"].interval[0]
    pair = verdict.comparison.pairs[0]
    difference = float(rows[1]["comparison.differences.A.median"])
    assert difference == pair.differences["A"].median < 0  # no apostrophe at a number
    assert math.isinf(float(rows[1]["quantities.compute_to_target.interval.high"]))
    assert (rows[0]["stability.truncated"], rows[4]["quantities.A.median"]) == ("", "")
    with (tmp_path / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 10
    assert float(runs[0]["fit.A"]) == verdict.arms[0].runs[0].fit.ceiling
    assert float(runs[0]["fit.compute"]) == BUDGET


def test_csv_keeps_what_text_means():
    values = ["=1+1", "+x", "-y", "@z", "\tw", 'a,"b"', "plain", -0.1, 3, None, math.nan]
    rows = [dict(zip("abcdefghijk", values, strict=True))]
    (found,) = csv.reader(io.StringIO(formats.csv_text(rows).split("\n", 1)[1]))
    assert found == ["'=1+1", "'+x", "'-y", "'@z", "'\tw", 'a,"b"', "plain", "-0.1", "3", "", ""]


def test_latex_is_balanced_and_escaped(verdict):
    text = study_document(verdict, verdict.study.path, []).latex()
    # A wide table goes on in further parts, with all of its rows.
    parts = [
        (len(table.rows) + 1, text.count(f"\\label{{tab:{table.name}")) for table in study_tables(verdict)
    ]
    rows = sum(height * count for height, count in parts)
    assert check_latex(text) == rows
    assert r"failed\_everywhere 100\% \& \{more\} \textbackslash{}x \$2\textasciicircum{}3" in text
    assert r"\textless{}script\textgreater{}" in text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_pdflatex_sets_all_tables_within_the_page(verdict, tmp_path):
    fits = {FAILED: verdict.arms[0].fits, "[a]": verdict.arms[1].fits[0], 'the "b"': verdict.arms[1].fits[1]}
    tables = [
        study_document(verdict, verdict.study.path, []).latex(),
        formats.latex(forecasts_table(replace(verdict, forecasts=verdict.forecasts * 3))),
        verdict.comparison.to_latex(),
        latex(fits, 12_000),
    ]
    head = r"\documentclass{article}\usepackage{booktabs,longtable}\begin{document}"
    (tmp_path / "all.tex").write_text("\n".join([head, *tables, r"\end{document}"]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    said = made.stdout.decode(errors="replace")
    assert made.returncode == 0, said[-2000:]
    assert "Overfull" not in said


def test_a_long_latex_table_breaks_over_pages(verdict):
    table = forecasts_table(replace(verdict, forecasts=verdict.forecasts * 3))
    text = formats.latex(table)
    parts = text.count("\\label{tab:")
    assert parts == 3
    assert check_latex(text) == parts * (48 + 2)  # a head stands on the first page, and on the others
    assert r"\begin{longtable}" in formats.latex(table)


@pytest.mark.parametrize("text", ["[x]", "*", "a--b", 'say "x"', "|", "100 % – ×∞"])
def test_latex_takes_no_letter_for_its_own(text):
    escaped = formats.latex_text(text)
    assert not escaped.startswith(("[", "*"))
    assert "--" not in escaped.replace("--", "", text.count("–"))


def test_markdown_rows_have_their_cells(verdict):
    text = study_document(verdict, verdict.study.path, []).markdown()
    for table in study_tables(verdict):
        lines = formats.markdown(table).splitlines()
        tables = [line for line in lines if line.startswith("|")]
        assert len(tables) == len(table.rows) + 2
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {len(table.headers) + 1}
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
