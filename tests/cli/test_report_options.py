"""Options of `scalerl report`: axis, budget, level, groups and sources, and what is refused."""

import io
import itertools
import json
import os
import re
import shutil
import time
from types import SimpleNamespace

import pytest
from reports import data_of, report, write_reported
from simulated_runs import BUDGET, write_run, write_table

from scalerl.cli.main import main
from scalerl.curve import fit
from scalerl.numbers import plain, rate_interval
from scalerl.record.reader import RunRecord


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_reported(tmp_path_factory.mktemp("runs"))


def test_runs_meet_on_the_axis_that_all_have(runs, tmp_path, capsys):
    steps = tmp_path / "steps"
    shutil.copytree(runs / "b", steps)
    rows = [json.loads(line) for line in (steps / "evals.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"device_seconds": {}, "flops": {}}
    (steps / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-o", str(tmp_path / "p.html"), "--json"]
    assert main(["report", str(runs / "a0"), str(steps), *words]) == 0
    assert json.loads(capsys.readouterr().out)["axis"] == "tokens"
    assert main(["report", str(runs / "tab.csv"), str(steps), *words]) == 2
    err = capsys.readouterr().err
    assert "all runs need one compute axis" in err
    assert f"none is common: '{runs / 'tab.csv'}' has gpu_hours; '{steps}' has tokens" in err


@pytest.mark.parametrize("option", ["--budget", "--min-compute"])
def test_compute_is_asked_for_on_an_axis_that_was_chosen(runs, tmp_path, capsys, option):
    steps = tmp_path / "steps"
    shutil.copytree(runs / "b", steps)
    config = json.loads((steps / "config.json").read_text())
    (steps / "config.json").write_text(json.dumps(config | {"budget": {"kind": "steps"}}))
    words = ["report", str(runs / "a0"), str(steps), option, "30", "-o", str(tmp_path / "p.html"), "--json"]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"{option} 30 could be on either axis: {runs / 'a0'} is on gpu_hours; {steps} is on steps" in err
    assert "--x" in err
    assert main([*words, "--x", "steps"]) == 0
    assert json.loads(capsys.readouterr().out)["axis"] == "steps"


def test_recipes_have_the_names_that_compare_gives_them(runs, tmp_path, capsys):
    other = write_run(tmp_path / "other", "base", seed=2, recipe={"loss": "gspo"})
    sources = [str(runs / "a0"), str(runs / "a1"), str(other)]
    assert main(["report", *sources, "-o", str(tmp_path / "p.html"), "--json"]) == 0
    recipes = json.loads(capsys.readouterr().out)["recipes"]
    assert recipes == [
        {"name": "base", "runs": ["base (a0)", "base (a1)"]},
        {"name": "base (other)", "runs": ["base (other)"]},
    ]
    assert main(["compare", *sources, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["sources"]) == [recipe["name"] for recipe in recipes]
    for command in ("report", "compare"):
        assert main([command, "--group", f"base={sources[0]}", *sources[1:]]) == 2
        assert "--group base has the name of a run that is not in it" in capsys.readouterr().err


def test_the_page_of_one_run_has_intervals_of_the_level_asked_for(runs, tmp_path):
    def page(*level):
        assert main(["report", str(runs / "b"), *level, "-o", str(tmp_path / "p.html")]) == 0
        return (tmp_path / "p.html").read_text()

    own = fit(RunRecord.read(runs / "b"), level=0.5)
    assert rate_interval(own.intervals.A) in page("--level", "0.5")
    assert rate_interval(own.intervals.A) not in page()
    assert "Frozen forecasts" in page("--level", "0.5")
    pictures = [tmp_path / "at.svg", tmp_path / "default.svg"]
    for picture, level in zip(pictures, (["--level", ".5"], []), strict=True):
        assert main(["report", str(runs / "b"), *level, "--figure", str(picture)]) == 0
    assert pictures[0].read_text() != pictures[1].read_text()


def test_a_file_name_that_is_no_text_is_shown_escaped(runs, tmp_path, capsys):
    table, folder = tmp_path / os.fsdecode(b"log\xff.csv"), tmp_path / os.fsdecode(b"run\xff")
    shutil.copy(runs / "tab.csv", table)
    shutil.copytree(runs / "a1", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["name"]
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "evals.jsonl").open("a") as evals:
        evals.write('{"step": 250, "pa')  # a warning that names the file
    assert main(["report", str(folder)]) == 0
    assert "run\\udcff" in (folder / "report.html").read_text()
    page, tables = tmp_path / "p.html", tmp_path / "t.md"
    files = [
        "--markdown",
        str(tables),
        "--latex",
        str(tmp_path / "t.tex"),
        "--figure",
        str(tmp_path / "o.svg"),
    ]
    assert main(["report", str(table), str(folder), "-o", str(page), *files]) == 0
    assert [run["name"] for run in data_of(page.read_text())["runs"]] == ["log\\udcff", "run\\udcff"]
    assert "report.html" not in page.read_text()  # a page that is sent has no folders beside it
    assert "run\\udcff" in tables.read_text().replace("\\\\", "\\")


def test_all_runs_of_a_log_are_shown_and_seeds_can_be_named(tmp_path, capsys):
    header = '"Step","one - val/acc","one - val/acc__MIN","one - val/acc__MAX"'
    header += ',"two - val/acc","two - val/acc__MIN","two - val/acc__MAX"'
    rows = []
    for step in range(0, 200, 10):
        value = 0.6 - 0.3 / (1 + (step / 60) ** 2)
        other = value - 0.05 * (step > 0)
        rows.append(",".join(f"{v:.4f}" for v in (step, value, value, value, other, other, other)))
    log = tmp_path / "wandb.csv"
    log.write_text("\n".join([header, *rows]))
    page = tmp_path / "p.html"
    assert main(["report", str(log), "-o", str(page), "--y", "val/acc"]) == 0
    assert [run["name"] for run in data_of(page.read_text())["runs"]] == ["one", "two"]
    assert "What was taken for what" in page.read_text()


def test_one_run_has_the_same_page_with_or_without_an_option(runs, tmp_path, capsys):
    for words in ([], ["--budget", "20000"]):
        assert main(["report", str(runs / "b"), *words, "-o", str(tmp_path / "p.html")]) == 0
        text = (tmp_path / "p.html").read_text()
        assert "scalerlChart(" in text
        for section in ("Frozen forecasts", "The fit", "Health of the training", "Recipe and environment"):
            assert f"<h2>{section}" in text
    assert "At 20,000 GPU-hours (the budget) about" in text
    assert (
        main(
            [
                "report",
                str(runs / "b"),
                "--budget",
                "20000",
                "--target",
                ".49",
                "-o",
                str(tmp_path / "p.html"),
            ]
        )
        == 0
    )
    assert "Will it reach 0.490 by 20,000 GPU-hours? " in (tmp_path / "p.html").read_text()
    assert main(["report", str(runs / "b"), "--figure", str(tmp_path / "c.pdf")]) == 0
    assert (tmp_path / "c.pdf").read_bytes().startswith(b"%PDF")


def test_groups_name_the_seeds_of_a_recipe(runs, tmp_path, capsys):
    table = write_table(tmp_path / "again.csv", 30, 0.59)
    words = ["--group", f"tables={runs / 'tab.csv'},{table}", "-o", str(tmp_path / "p.html"), "--json"]
    assert main(["report", str(runs / "b"), *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recipes"][0] == {"name": "tables", "runs": ["tab", "again"]}
    assert answer["comparison"]["runs"]["tables"] == 2


def test_seeds_of_one_recipe_are_answered_as_one(runs, tmp_path, capsys):
    table = write_table(tmp_path / "again.csv", 30, 0.59)
    words = ["--group", f"A={runs / 'tab.csv'},{table}"]
    page = tmp_path / "p.html"
    assert main(["report", *words, "-o", str(page), "--markdown", str(tmp_path / "p.md")]) == 0
    assert "A: At " in (text := (tmp_path / "p.md").read_text())
    assert " over 2 seeds." in text
    assert "is forecast highest" not in text
    more = ["--target", "0.7", "--budget", "16000", "-o", str(page), "--markdown", str(tmp_path / "p.md")]
    assert main(["report", *words, *more]) == 0
    assert "No: A." in (text := (tmp_path / "p.md").read_text())
    assert " over 2 seeds; chance of 0.700: under 1 %." in text
    assert "**tab**" not in text


def test_a_target_is_asked_at_the_budget_of_the_run(runs, tmp_path, capsys):
    words = [str(runs / "b"), "--target", "0.5", "-o", str(tmp_path / "p.html"), "--json"]
    config = runs / "b" / "config.json"
    before = config.read_text()
    try:
        config.write_text(json.dumps(json.loads(before) | {"budget": {"kind": "gpu_hours", "amount": 12000}}))
        assert main(["report", *words, "--x", "gpu_hours"]) == 0
    finally:
        config.write_text(before)
    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    assert shown["fit"]["target"]["budget"] == 12000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{a0}", "{a0}"], "given twice"),
        (["{a0}", "{b}", "--target", ".5"], "--target needs --budget"),
        (["{a0}", "{b}", "--base", "nothing"], "no recipe 'nothing'"),
        (["{a0}", "{b}", "--x", "dollars"], "needs a price"),
        (["{a0}", "{folder}"], "given twice; list every run only once"),
        (["{a0}", "{b}", "--figure", "x.jpg"], "x.jpg: a figure is written as .svg, .png or .pdf"),
        (["{a0}", "{b}", "-o", "{a0}/evals.jsonl/p.html"], "evals.jsonl/p.html: "),
        ([], "needs a RUN or a FILE"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(runs, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    places = {"tab": runs / "tab.csv", "a0": runs / "a0", "b": runs / "b", "folder": runs}
    status = main(["report", *(word.format(**places) for word in words)])
    assert status in (1, 2)
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("name", ["evals.jsonl", "steps.jsonl"])
def test_a_damaged_run_is_left_out_among_others_and_an_error_alone(runs, tmp_path, capsys, name):
    torn = shutil.copytree(runs / "a1", tmp_path / "torn")
    lines = (torn / name).read_text().splitlines() if name == "evals.jsonl" else ["{}"] * 3
    (torn / name).write_text("\n".join([*lines[:2], "{torn", *lines[2:]]) + "\n")
    page, said = tmp_path / "p.html", f"{torn}/{name}, line 3: not JSON ("
    assert main(["report", str(torn), "-o", str(page)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"scalerl: {said}")
    assert not page.exists()
    written = ["-o", str(page), "--markdown", str(tmp_path / "p.md")]
    assert main(["report", str(runs / "a0"), str(torn), str(runs / "b"), *written]) == 0
    assert f"warning: left out: {torn}: {said}" in capsys.readouterr().err
    assert len(data_of(page.read_text())["runs"]) == 2
    assert f"left out: torn: torn/{name}, line 3" in (tmp_path / "p.md").read_text()


def test_a_run_too_short_to_compare_is_named_as_compare_names_it(runs, tmp_path, capsys):
    young = shutil.copytree(runs / "a1", tmp_path / "young")
    rows = (young / "evals.jsonl").read_text().splitlines()[:5]
    (young / "evals.jsonl").write_text("\n".join(rows) + "\n")
    paths = [str(runs / "a0"), str(young), str(runs / "b")]
    why = "5 evaluations; a verdict needs at least 6"
    assert main(["compare", *paths]) == 0
    assert f"warning: left out: {young}: {why}" in capsys.readouterr().err
    words = ["-o", str(tmp_path / "p.html"), "--markdown", str(tmp_path / "p.md")]
    assert main(["report", *paths, *words]) == 0
    assert f"warning: left out of the comparison: base (young): {why}" in capsys.readouterr().err
    assert f"left out of the comparison: base (young): {why}" in (tmp_path / "p.md").read_text()
    assert main(["report", *paths, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [
        f"left out of the comparison: base (young): {why}"
    ]


def test_the_numbers_of_the_json_are_those_of_fit(runs, tmp_path, capsys):
    assert report(runs, "-o", tmp_path / "p.html", "--budget", BUDGET, "--json", sources=("a0", "b")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert main(["fit", str(runs / "a0"), "--at", str(BUDGET), "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    fitted["forecast"] = fitted["forecast"][:1]  # `fit` goes on to ten times the data
    assert answer["runs"][0]["fit"] == fitted
    assert plain(answer["runs"][0]["fit"]["forecast"][0]["compute"]) == "12,000"


def test_a_terminal_sees_how_many_runs_are_fitted(runs, tmp_path, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    ticks = itertools.count(step=2.0)  # a bar comes after a second, and here every look at the clock is later
    monkeypatch.setattr(
        "scalerl.cli.console.time", SimpleNamespace(monotonic=lambda: next(ticks), time=time.time)
    )
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    assert report(runs, "-o", tmp_path / "page.html", sources=("a0", "a1")) == 0
    assert re.search(r"report.*100%", terminal.getvalue())
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
