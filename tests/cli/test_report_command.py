"""`scalerl report` of several runs: a page whose numbers are those of `fit` and `compare`, and its files."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from hostile_study import check_latex
from reports import data_of, report, write_reported
from simulated_runs import BUDGET, HOSTILE, write_many, write_run, write_table

from scalerl.cli.main import main
from scalerl.curve import fit
from scalerl.forecast import compare
from scalerl.forecast.recipes import distinct
from scalerl.numbers import chance_text, rate, rate_interval
from scalerl.record.alarms import Alarm
from scalerl.record.reader import RunRecord
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.tables import health_table


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_reported(tmp_path_factory.mktemp("runs"))


def rows_of(markdown, title):
    """Cells of a table's rows by their first."""
    table = markdown.split(f"## {title}")[1].split("\n\n")[1].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {row[0]: row for row in cells}


def test_the_page_says_what_fit_and_compare_say(runs, tmp_path, capsys):
    page, tables = tmp_path / "page.html", tmp_path / "tables.md"
    asked = ["--budget", "16000", "--target", ".55"]
    assert report(runs, *asked, "-o", page, "--markdown", tables) == 0
    out, err = capsys.readouterr()
    assert out.split() == [str(page), str(tables)]
    assert "short: no curve: 3 evaluations; a curve needs" in err
    rows = rows_of(tables.read_text(), "Curves and forecasts")
    fits = {name: fit(RunRecord.read(runs / name)) for name in ("a0", "a1", "b", "flat")}
    own, forecast = fits["a0"], fits["a0"].forecast(16000)
    found = rows["base (a0)"]
    assert found[3] == f"{rate(own.median.A)} {rate_interval(own.intervals.A)}"
    assert found[6] == f"{rate(forecast.median)} {rate_interval(forecast.prediction)}"
    assert found[7] == rate_interval(forecast.rerun)
    chance = own.chance(0.55, 16000)
    share = chance_text(chance.probability)
    assert found[8].startswith(f"{chance.verdict} (chance {share}")
    assert rows["flat"][8].startswith("no-go")
    assert rows["flat"][-1].startswith("no (the data reach")
    assert "no fit (3 evaluations; a curve" in rows["short"][-1]
    health = rows_of(tables.read_text(), "Health")
    assert health["base (a0)"][1:] == ["2.1 %", "–", "0.310", "–", "none"]
    assert health["tab"][1:] == ["–", "–", "–", "–", "not checked"]
    assert health["flat"][-1] == "not checked"  # no recipe of the trainer: nobody looked
    assert "Not checked: only the trainer of scalerl" in tables.read_text()
    # Recipes are told by config.json; a table is a recipe of its own.
    assert [run["name"] for run in data_of(page.read_text())["runs"]][-1] == "tab"
    recipes = {"base": [fits["a0"], fits["a1"]], "b": [fits["b"]], "flat": [fits["flat"]]}
    alone = compare(recipes, budget=16000).pairs[0].differences["A"]
    against = next(
        row for name, row in rows_of(tables.read_text(), "Compared with base").items() if "&lt;" in name
    )
    assert ", lower, p " in against[2]
    assert float(against[2].split()[0].replace("−", "-")) == pytest.approx(alone.median, abs=0.003)


def test_the_comparison_says_which_way_it_goes_and_what_is_corrected(runs, tmp_path):
    tables = tmp_path / "t.md"
    assert report(runs, "-o", tmp_path / "p.html", "--markdown", tables, "--budget", "16000") == 0
    note = tables.read_text().split("## Compared with base")[1].split("\n\n")[2]
    assert "ratio: its compute over that of base (×2: twice the compute)" in note
    assert "p is corrected (Holm) over three questions about every recipe, 9 in all, and intervals" in note
    assert "probability that the lead changes" in note
    assert len(note.split()) < 110
    assert "are assumed to be evaluated on the same prompts" in tables.read_text()


def test_a_difference_that_is_not_claimed_says_so_beside_itself(tmp_path):
    write_run(tmp_path / "a", "base", seed=0, recipe={"loss": "a"})
    early = RunRecord.read(write_run(tmp_path / "b", "early", 0.5, 2, recipe={"loss": "b"}))
    lines = (tmp_path / "b" / "evals.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b" / "evals.jsonl").write_text("".join(lines[:7]))
    assert len(early.evals) > 7
    write_run(tmp_path / "c", "whole", 0.5, 3, recipe={"loss": "c"})
    tables = tmp_path / "t.md"
    sources = ("a", "b", "c")
    assert report(tmp_path, "-o", tmp_path / "p.html", "--markdown", tables, sources=sources) == 0
    rows = rows_of(tables.read_text(), "Compared with base")
    assert rows["early (1 and 1 seeds)"][2].endswith(", inconclusive")
    assert "inconclusive" not in rows["whole (1 and 1 seeds)"][2]
    assert "Both recipes are mostly assumed to share a family of curves" in tables.read_text()


def test_every_run_has_the_r0_that_it_was_fitted_with(runs, tmp_path):
    tables = tmp_path / "t.md"
    late = tmp_path / "late.csv"
    rows = (runs / "tab.csv").read_text().splitlines()
    late.write_text("\n".join([rows[0], *rows[2:]]))  # without the evaluation before training
    words = ["-o", str(tmp_path / "p.html"), "--markdown", str(tables)]
    assert main(["report", str(runs / "a0"), str(late), *words]) == 0
    said = tables.read_text().replace("\\", "")
    assert "is measured; the evaluation enters the fit as the others do: base." in said
    assert "is fitted, as no evaluation before training is used: late." in said
    assert main(["report", str(runs / "a0"), "-o", str(tmp_path / "own.html")]) == 0
    own = (tmp_path / "own.html").read_text()
    assert f"{fit(RunRecord.read(runs / 'a0')).r0_value:.3f}   measured" in own
    assert main(["report", str(runs / "a0"), str(late), "--r0", ".3", *words]) == 0
    assert "is given as 0.300, and held there." in tables.read_text().replace("\\", "")


def test_alarms_stand_in_the_table_of_health(runs, tmp_path):
    run = tmp_path / "alarmed"
    shutil.copytree(runs / "b", run)
    row = {"step": 9, "metric": "truncated", "level": "alarm", "worst": 0.2, "threshold": 0.1, "since": 9}
    (run / "alarms.jsonl").write_text(json.dumps(row) + "\n")
    tables = tmp_path / "t.md"
    words = ["-o", str(tmp_path / "p.html"), "--markdown", str(tables)]
    assert main(["report", str(runs / "a0"), str(run), *words]) == 0
    assert "1 alarm: truncated 0.2 (threshold 0.1), from step 9 on" in tables.read_text()


def test_a_run_with_an_alarm_stands_out_and_one_with_a_warning_does_not(runs):
    """By the level on record, whatever the words are."""
    record, points = RunRecord.read(runs / "b"), fit(RunRecord.read(runs / "b")).points
    found = [Alarm("entropy", level, 9, None, 0.2, 0.1) for level in ("alarm", "warning")]
    kept = [replace(record, alarms=(alarm,)) for alarm in found]
    shown = RunsView(tuple(ShownRun(str(n), points, one) for n, one in enumerate([*kept, None])))
    assert [row.mark for row in health_table(shown).rows] == ["open", "", ""]


def test_a_page_of_half_a_run_says_what_fit_says_of_it(runs, tmp_path, capsys):
    """`--max-compute`, in any unit, of a table and of a run folder; the rest of the run is drawn hollow."""
    for source, cut in (("tab.csv", "0.5x"), ("b", "0.5x")):
        words = [str(runs / source), "--max-compute", cut, "--budget", "2x", "--json"]
        page = tmp_path / "half.html"
        assert main(["report", *words, "-o", str(page)]) == 0
        (shown,) = json.loads(capsys.readouterr().out)["runs"]
        assert main(["fit", *words[:3], "--at", "2x", "--json"]) == 0
        fitted = json.loads(capsys.readouterr().out)
        assert shown["fit"]["intervals"] == fitted["intervals"]
        assert shown["fit"]["forecast"] == fitted["forecast"][:1]  # `fit` goes on to ten times the data
        # One meaning of "so far", and a count of the fitted.
        (drawn,) = data_of(page.read_text())["runs"]
        assert 0 < sum(drawn["used"]) < len(drawn["used"])
        assert f"{fitted['points']} of {len(drawn['used'])}<" in page.read_text()
        assert "are not fitted." in page.read_text()


def test_names_are_told_apart_by_as_much_of_the_path_as_it_takes():
    paths = ["x/a/run", "y/a/run", "z/b", "tab", "tab"]
    names = distinct(["n", "n", "other", "twice", "twice"], paths)
    assert names == ["n (x/a/run)", "n (y/a/run)", "other", "twice (1)", "twice (2)"]
    assert distinct(["n", "n", "n (a)"], ["a", "b", "c"]) == ["n (1)", "n (2)", "n (a) (3)"]
    # Tables that all runs call alike are named after their folders.
    assert distinct(["evals", "evals"], ["x/a/evals.csv", "x/b/evals.csv"]) == ["a/evals", "b/evals"]


def test_the_page_is_one_file_that_loads_nothing_and_runs_no_name(runs, tmp_path):
    page = tmp_path / "page.html"
    assert report(runs, "-o", page) == 0
    text = page.read_text()
    assert str(tmp_path) not in text
    assert str(runs) not in text
    markup = re.sub(r"(<script)[^>]*>.*?</script>", r"\1>", text, flags=re.S)
    assert not re.search(r"<img|<link|<[^>]*\s(src|onerror)=|@import|url\(", markup)
    assert markup.count("<script") == 6  # ours: data, library, the chart in three files, its start
    assert data_of(text)["runs"][2]["name"] == HOSTILE
    assert report(runs, "-o", tmp_path / "again.html") == 0
    assert (tmp_path / "again.html").read_text() == text


def test_latex_and_figures_are_written(runs, tmp_path):
    assert (
        report(runs, "-o", tmp_path / "p.html", "--latex", tmp_path / "t.tex", "--figure", tmp_path / "f")
        == 0
    )
    latex = (tmp_path / "t.tex").read_text()
    check_latex(latex)
    assert "resizebox" not in latex
    parts = latex.split("Curves and forecasts (")[1:]
    assert [part[:7] for part in parts] == ["1 of 3)", "2 of 3)", "3 of 3)"]
    assert all("base (a1)" in part for part in parts)
    made = sorted(path.name for path in (tmp_path / "f").iterdir())
    assert made == [f"{name}.{end}" for name in ("linearised", "overlay") for end in ("pdf", "png", "svg")]
    assert (tmp_path / "f" / "overlay.pdf").read_bytes().startswith(b"%PDF")
    assert report(runs, "-o", tmp_path / "p.html", "--figure", tmp_path / "one.svg") == 0
    assert "onerror=" not in re.sub(r">[^<]*<", "><", (tmp_path / "one.svg").read_text())


def test_a_figure_alone_is_of_a_table_too_and_marks_what_is_asked(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        report(runs, "--figure", "t.svg", "--budget", 2 * BUDGET, "--target", 0.5, sources=["tab.csv"]) == 0
    )
    assert [path.name for path in tmp_path.iterdir()] == ["t.svg"]
    assert "target 0.500" in (tmp_path / "t.svg").read_text()
    capsys.readouterr()
    assert report(runs, "--figure", "f", sources=["a0"]) == 0
    assert {line.split(".")[0] for line in capsys.readouterr().out.split()} == {"f/run", "f/linearised"}
    assert "frozen at step" in (tmp_path / "f" / "run.svg").read_text()


def test_a_crowd_is_drawn_and_compared_with_the_base_that_was_named(tmp_path, capsys):
    folders = write_many(tmp_path, 8)
    page, figure = tmp_path / "p.html", tmp_path / "f.svg"
    words = ["--base", "run 4", "-o", page, "--figure", figure, "--json"]
    assert main(["report", *map(str, [*folders, *words])]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["comparison"]["base"] == "run 4"
    assert [pair["recipe"] for pair in answer["comparison"]["pairs"]] == ["run 0"]
    # Two recipes of 4 runs each: two mean curves, each with its name.
    assert re.findall(r">(run \d+) \(4 seeds\)", figure.read_text()) == ["run 0", "run 4"]


def test_a_page_that_cannot_be_written_beside_the_run_says_where_to_put_it(tmp_path, capsys):
    run = tmp_path / "run"
    write_run(run, "run")
    (run / "report.html").mkdir()
    assert main(["report", str(run)]) == 2
    assert capsys.readouterr().err.endswith("report.html: Is a directory; give another file with -o\n")
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    for folder in (".", ""):
        assert main(["report", str(run), "-o", folder]) == 2
        assert capsys.readouterr().err == "scalerl: .: Is a directory\n"


_FEW = "can be compared (3 evaluations; a curve needs at least 4)"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["long.csv", "short.csv"],
            "no run of short can be compared (3 evaluations; a curve needs at least 4)",
        ),
        (
            ["long.csv", "some.csv"],
            "no run of some can be compared (5 evaluations; a verdict needs at least 6)",
        ),
        (
            ["long.csv", "other.csv", "short.csv", "--base", "short"],
            "no run of short can be compared (3 evaluations; a curve needs at least 4)",
        ),
        (["--group", "mine=long.csv,other.csv"], "all runs are of one recipe, mine"),
    ],
)
def test_why_nothing_is_compared_names_the_recipe(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    for name, n, A in (("long", 30, 0.6), ("other", 30, 0.5), ("some", 5, 0.6), ("short", 3, 0.6)):
        write_table(tmp_path / f"{name}.csv", n, A)
    assert main(["report", *words, "-o", "page.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_compared"] == f"Nothing is compared: {why}."
