"""Runs of a chart in groups, with mean curves; and what they logged, for the lines below."""

from dataclasses import replace

import docs_logs
import numpy as np
import pytest
from simulated_runs import BUDGET, write_run

from scalerl.curve import Points, fit
from scalerl.ingest import load_run
from scalerl.ingest.formats import numbers
from scalerl.ingest.formats.table import read_table
from scalerl.record.reader import RunRecord
from scalerl.view.facts.shown import ShownRun
from scalerl.view.plotting import key_of
from scalerl.view.runs.answer import sentence_of
from scalerl.view.runs.figures import runs_figures
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.overlay import overlay
from scalerl.view.runs.page import runs_document
from scalerl.view.runs.panels import logged


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two recipes of two seeds, which differ in a learning rate and a loss, and a third recipe of one run."""
    folder, found = tmp_path_factory.mktemp("groups"), []
    recipes = {
        "a": (0.6, {"lr": 1e-4, "loss": {"kind": "cispo"}}),
        "b": (0.5, {"lr": 3e-4, "loss": {"kind": "gspo"}}),
    }
    recipes |= {"c": (0.55, {"lr": 1e-4, "loss": {"kind": "gspo"}})}
    for name, (A, recipe) in recipes.items():
        for seed in range(2 if name != "c" else 1):
            path = write_run(
                folder / f"{name}{seed}", f"{name}{seed}", A, seed, recipe=recipe | {"seed": seed}
            )
            record = RunRecord.read(path)
            points = Points.from_record(record, "gpu_hours")
            found.append(ShownRun(record.name, points, record, fit(points)))
    return found


def test_runs_are_grouped_by_recipe_and_by_every_key_that_differs(runs):
    data = overlay(runs, budget=1.5 * BUDGET)
    found = {
        one["by"]: {group["name"]: group["runs"] for group in one["groups"]} for one in data["groupings"]
    }
    assert found == {
        "recipe": {"a0": ["a0", "a1"], "b0": ["b0", "b1"], "c0": ["c0"]},
        "lr": {"0.0001": ["a0", "a1", "c0"], "0.0003": ["b0", "b1"]},
        "loss.kind": {"cispo": ["a0", "a1"], "gspo": ["b0", "b1", "c0"]},
    }
    assert data["runs"][0]["recipe"] == {"lr": "0.0001", "loss.kind": "cispo", "seed": "0"}


def test_the_mean_curve_of_a_group_lies_among_those_of_its_runs(runs):
    data = overlay(runs, budget=1.5 * BUDGET)
    group = data["groupings"][0]["groups"][0]["fit"]
    ends = [run["fit"]["curve"]["line"][-1] for run in data["runs"][:2]]
    line, low, high = (group["curve"][name][-1] for name in ("line", "low", "high"))
    assert min(ends) - 0.01 < line < max(ends) + 0.01
    assert low < line < high
    assert group["curve"]["compute"][-1] == 1.5 * BUDGET
    assert group["A"][1] < 0.6 < group["A"][2]
    assert data["groupings"][0]["groups"][2]["fit"] is None  # a run by itself has its own curve


def test_a_copy_of_a_run_is_shown_and_is_no_further_seed(runs):
    a0, a1 = runs[:2]
    earlier = a0.points.select(np.arange(len(a0.points) - 5))
    copy = replace(a0, name="backup", points=earlier, fit=fit(earlier))
    with_copy, without = (
        overlay(some, budget=1.5 * BUDGET)["groupings"][0]["groups"][0] for some in ([copy, a0, a1], [a0, a1])
    )
    assert with_copy["runs"] == ["backup", "a0", "a1"]
    assert with_copy["fit"]["A"] == without["fit"]["A"]
    assert with_copy["fit"]["curve"]["high"][-1] == without["fit"]["curve"]["high"][-1]
    view = RunsView((copy, a0), recipes={"a": [copy, a0]})
    alone = sentence_of(RunsView((a0,))).partition(")")[2]
    assert alone in sentence_of(view)
    assert "seeds" not in sentence_of(view)
    assert "backup: A copy." in runs_document(view).markdown()
    assert "a (" not in " ".join(key_of(runs_figures(view)["overlay"].axes[0])[1])


def test_given_groups_are_those_of_the_chart_and_of_the_figure(runs):
    view = RunsView(tuple(runs), recipes={"first": runs[:2], "rest": runs[2:]})
    data = overlay(view.runs, groups=view.recipe_groups)
    assert [group["name"] for group in data["groupings"][0]["groups"]] == ["first", "rest"]
    axes = runs_figures(view)["overlay"].axes[0]
    labels = [str(line.get_label()) for line in axes.lines]
    assert [text.split(" (")[0] for text in labels if text[0] != "_"] == ["first", "rest"]
    markers = [line for line in axes.lines if line.get_marker() != "None"]
    assert sum(np.size(line.get_xdata()) for line in markers) == 5 * 25


def test_what_a_run_logged_is_there_by_name(run, runs):
    names, (found,) = logged([ShownRun("one", Points.from_record(run, "steps"), run)])
    assert names[:4] == ["reward_mean", "entropy", "mean_length", "truncated"]
    assert "ratio_max" in names
    assert len(found["step"]) == len(found["values"]["entropy"]) == 240
    rows = run.steps()
    assert found["values"]["entropy"][7] == pytest.approx(rows[7]["entropy"], rel=1e-3)
    names, (found,) = logged(runs[:1])  # without steps, what evaluations have
    assert names == ["entropy", "truncated"]
    assert found["values"]["entropy"] == [0.31] * 25


TABLE = "".join(f"{n},{'' if n % 5 else n / 100},{2 / (n + 1)},{n},note\n" for n in range(50))


@pytest.mark.parametrize("clock", ["step", "hours"])
def test_a_table_has_its_other_columns_of_numbers_of_every_row(tmp_path, clock):
    path = tmp_path / "log.csv"
    path.write_text(f"{clock},accuracy,loss,reward_mean,text\n{TABLE}")
    names, (found,) = logged([ShownRun("log", read_table(path, x=clock, y="accuracy"))])
    assert names == ["reward_mean", "loss"]
    assert found["compute"] == list(range(50))
    assert found["step"] == (found["compute"] if clock == "step" else [None] * 50)
    assert found["values"]["loss"] == pytest.approx([2 / (n + 1) for n in range(50)], rel=1e-3)


def test_of_a_table_of_any_length_as_many_numbers_are_held(monkeypatch):
    monkeypatch.setattr(numbers, "_MOST", 100)
    held = numbers.Numbers()
    for row in range(1000):
        held.add({"step": row, "loss": f"{row / 4}", "eval": "" if row % 8 else "nan", "text": "a"})
    columns = held.columns()
    assert list(columns) == ["step", "loss"]
    assert columns["step"].tolist() == list(range(0, 1000, 32))
    assert (columns["loss"] == columns["step"] / 4).all()


def test_foreign_runs_have_what_they_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs_logs.trl()
    record = load_run("outputs", devices=8)
    names, (found,) = logged([ShownRun("trl", Points.from_record(record, "gpu_hours"), record)])
    assert {"reward_mean", "mean_length"} & set(names)
    assert all(any(value is not None for value in values) for values in found["values"].values())
