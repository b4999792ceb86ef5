"""The table of tasks and downstream suites: its lines are those of the record."""

import json
import shutil

import numpy as np
import pytest

from scalerl.record.reader import RunRecord
from scalerl.view import report_html
from scalerl.view.numbers import DASH
from scalerl.view.runs.details import task_table

N = 31


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks and a suite of 30 prompts each: `hard` goes to .8 at the end of a long run, `easy` stands."""
    draw, folder = np.random.default_rng(1), tmp_path_factory.mktemp("runs") / "mixed"
    folder.mkdir()
    lines = {"evals": [], "eval_prompts": [], "downstream": []}
    for i in range(N):
        step = 8 * i
        compute = {"flops": {"generate": step * 1e9, "train": step * 2e9}, "version": step}
        p = 0.1 + 0.7 / (1 + (20 / max(step, 1e-9)) ** 2)
        hard, easy, aime = draw.binomial(8, p, 300), draw.binomial(8, 0.9, 300), draw.binomial(8, p / 2, 30)
        ids = [f"{name}/{j}" for name in ("hard", "easy") for j in range(300)]
        both = np.concatenate([hard, easy])
        row = {"step": step, "n_samples": 8, "mean_p_1mp": 0.15, **compute}
        lines["evals"].append(row | {"pass_rate": both.mean() / 8, "n_prompts": 600})
        lines["eval_prompts"].append(
            {"step": step, "prompt_set": "s", "n": 8, "id": ids, "correct": both.tolist()}
        )
        if i % 3 == 0:
            rate = {"suite": "aime", "pass_rate": aime.mean() / 8, "n_prompts": 30}
            lines["downstream"].append(row | rate | {"correct": aime.tolist(), "id": list(range(30))})
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "mix", "tasks": {"hard": {}, "easy": {}}}
    suite = {"downstream": [{"name": "aime", "task": {"kind": "chain"}}]}
    config = {"name": "mixed", "recipe": {"task": task, "evaluation": suite}, "budget": {"kind": "flops"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_task_and_suite_has_a_line_of_its_last_evaluation(folder):
    table = task_table(RunRecord.read(folder), "flops")
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
    assert task_table(record, "flops") is None
    assert "by task and suite" not in report_html(record)


def test_lines_that_are_damaged_cost_their_line_and_not_the_page(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    path = tmp_path / "run" / "downstream.jsonl"
    path.write_text(path.read_text().replace('"pass_rate": 0.', '"pass_rate": "one", "x": 0.'))
    table = task_table(RunRecord.read(tmp_path / "run"), "flops")
    assert [row.cells[0].text for row in table.rows] == ["hard", "easy", "aime"]
    assert table.rows[-1].cells[-1].text == DASH
