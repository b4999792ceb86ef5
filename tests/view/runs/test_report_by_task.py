"""Tasks and downstream suites: lines of a table, and the curves of tasks beside that of their run."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mixed_runs import write_mixed

from scalerl.curve import Points, fit
from scalerl.numbers import DASH
from scalerl.record.reader import RunRecord
from scalerl.view import report_html
from scalerl.view.facts.shown import ShownRun
from scalerl.view.runs.details import task_table
from scalerl.view.runs.gathered import RunsView
from scalerl.view.runs.page import runs_document


def view_of(folder: Path) -> RunsView:
    record = RunRecord.read(folder)
    points = Points.from_record(record, "flops")
    return RunsView((ShownRun(record.name, points, record, fit(points)),))


def chart_of(view: RunsView) -> Mapping[str, Any]:
    chart = runs_document(view).chart
    assert chart is not None
    return chart


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mixed(tmp_path_factory.mktemp("runs") / "mixed")


def test_every_task_and_suite_has_a_line_of_its_last_evaluation(folder):
    table = task_table(view_of(folder))
    rows = [[cell.text for cell in row.cells] for row in table.rows]
    assert [(name, prompts, step) for name, prompts, _, step, *_ in rows] == [
        ("hard", "300", "240"), ("easy", "300", "240"), ("aime", "30", "240")
    ]  # fmt: skip
    last = json.loads((folder / "eval_prompts.jsonl").read_text().splitlines()[-1])["correct"]
    assert rows[0][4] == f"{sum(last[:300]) / 2400:.3f}"
    assert rows[1][4] == f"{sum(last[300:]) / 2400:.3f}"
    ends = [[[*map(float, cell.beside[1:-1].split(", "))] for cell in row.cells[4:6]] for row in table.rows]
    for row, ((low, high), _) in zip(rows, ends, strict=True):
        assert low < float(row[4]) < high
        assert row[4] < row[5]
    widths = [high - low for (low, high), _ in ends]
    assert widths[2] > widths[0]
    low, high = map(float, table.rows[0].cells[6].beside[1:-1].split(", "))
    assert low < 0.8 < high


def test_the_report_shows_them_below_the_curve(folder):
    html = report_html(RunRecord.read(folder))
    assert "Pass rate by task and suite" in html
    assert html.index("Pass rate by task and suite") < html.index("The fit<")


def test_a_run_of_one_task_has_no_such_table(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"name": "one"}))
    (tmp_path / "run" / "downstream.jsonl").unlink()
    record = RunRecord.read(tmp_path / "run")
    assert task_table(view_of(tmp_path / "run")) is None
    assert "by task and suite" not in report_html(record)


def test_lines_that_are_damaged_cost_their_line_and_not_the_page(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "downstream.jsonl"
    path.write_text(path.read_text().replace('"pass_rate": 0.', '"pass_rate": "one", "x": 0.'))
    table = task_table(view_of(tmp_path / "run"))
    assert [row.cells[0].text for row in table.rows] == ["hard", "easy", "aime"]
    assert table.rows[-1].cells[-1].text == DASH


def test_each_task_is_a_curve_beside_that_of_the_run(folder):
    view = view_of(folder)
    chart = chart_of(view)
    assert [(run["name"], run["task"]) for run in chart["runs"]] == [
        ("mixed", False), ("hard", True), ("easy", True)
    ]  # fmt: skip
    whole, hard, easy = chart["runs"]
    assert hard["compute"] == whole["compute"]
    assert hard["fit"]["A"][0] == pytest.approx(0.8, abs=0.03)
    assert whole["fit"]["A"][0] == pytest.approx(0.85, abs=0.03)
    assert easy["pass_rate"][0] == pytest.approx(0.9, abs=0.03)
    # The tasks have the recipe of their run, and are yet no seeds of it.
    assert [group["runs"] for group in chart["groupings"][0]["groups"]] == [["mixed"]]


def test_a_task_of_the_name_of_its_run(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "hard")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "hard" / "config.json").write_text(json.dumps(config | {"name": "hard"}))
    assert [run.name for run in view_of(tmp_path / "hard").tasks] == ["hard (task)", "easy"]


def test_runs_over_one_another_are_drawn_without_their_tasks(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "again")
    (one,), (other,) = (view_of(path).runs for path in (folder, tmp_path / "again"))
    view = RunsView((one, replace(other, name="again")), not_compared="Nothing is compared.")
    assert [run["name"] for run in chart_of(view)["runs"]] == ["mixed", "again"]
