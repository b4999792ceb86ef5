"""The table of tasks and downstream suites: its lines are those of the record."""

import json
import shutil
from typing import Any

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
    rows: list[dict[str, Any]] = [dict(zip(table.keys, row, strict=True)) for row in table.raw_rows()]
    assert [(row["name"], row["prompts"], row["step"]) for row in rows] == [
        ("hard", 300, 240), ("easy", 300, 240), ("aime", 30, 240)
    ]  # fmt: skip
    hard, easy, aime = rows
    last = json.loads((folder / "eval_prompts.jsonl").read_text().splitlines()[-1])["correct"]
    assert hard["pass_rate"] == pytest.approx(sum(last[:300]) / 2400)
    assert easy["pass_rate"] == pytest.approx(sum(last[300:]) / 2400)
    assert hard["A_low"] < 0.8 < hard["A_high"]
    for row in rows:
        assert row["pass_rate_low"] < row["pass_rate"] < row["pass_rate_high"]
        assert row["pass_rate"] < row["pass_at_k"]
    assert aime["pass_rate_high"] - aime["pass_rate_low"] > hard["pass_rate_high"] - hard["pass_rate_low"]


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
