"""The pass rates of one task of a mixture, from the successes by prompt."""

import json
import math

import pytest

from scalerl import load_run
from scalerl.curve.points import Points
from scalerl.errors import InputError
from scalerl.record.prompts import noise_between, of_task


@pytest.fixture
def folder(tmp_path):
    """Three evaluations of two prompts of mathematics and three of code, two completions each."""
    correct = [[0, 1, 0, 0, 2], [1, 2, 0, 1, 2], [2, 2, 1, 1, 2]]
    ids = ["math/a/0", "math/a/1", "code/0", "code/1", "code/2"]
    evals = [
        {"step": step, "pass_rate": sum(c) / 10, "flops": {"generate": step * 1e9, "train": step * 1e9},
         "n_prompts": 5, "n_samples": 2, "mean_p_1mp": 0.1, "mean_length": 7.0}
        for step, c in enumerate(correct)
    ]  # fmt: skip
    prompts = [
        {"step": step, "prompt_set": "s", "n": 2, "id": ids, "correct": c} for step, c in enumerate(correct)
    ]
    for name, rows in (("evals", evals), ("eval_prompts", prompts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"kind": "mix", "tasks": {"math": {}, "code": {}}}
    (tmp_path / "config.json").write_text(json.dumps({"name": "mixed", "recipe": {"task": task}}))
    return tmp_path


def test_pass_rates_prompts_and_noise_are_those_of_the_task(folder):
    math_, code = (load_run(folder, metric=f"pass_rate/{name}") for name in ("math", "code"))
    assert [point.pass_rate for point in math_.evals] == [0.25, 0.75, 1.0]
    assert [point.pass_rate for point in code.evals] == pytest.approx([2 / 6, 3 / 6, 4 / 6])
    assert {point.n_prompts for point in code.evals} == {3}
    # p (1 - p) without bias at two samples is 1/2 for a prompt solved once, 0 else.
    assert [point.mean_p_1mp for point in math_.evals] == [0.25, 0.25, 0.0]
    assert math.isnan(code.evals[0].mean_length)  # that of all is not that of one
    assert list(Points.from_record(code, "flops").compute_N) == [0.0, 2e9, 4e9]
    assert math_.metric.name == "pass_rate/math"
    assert not math_.metric.is_alike(code.metric)


def test_the_noise_between_evaluations_is_of_the_tasks_prompts(tmp_path, folder):
    rows = [json.loads(line) for line in (folder / "eval_prompts.jsonl").read_text().splitlines()]
    ids = [f"math/{i}" for i in range(120)] + [f"code/{i}" for i in range(120)]
    for step, row in enumerate(rows):  # mathematics stands still, code flips
        row |= {"id": ids, "correct": [1] * 120 + [(i + step) % 2 * 2 for i in range(120)]}
    (folder / "eval_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = load_run(folder)
    assert noise_between(of_task(record, "math")) == 0.0
    # Neighbours differ by 1 or -1, half of the prompts each: the variance is 1 (120 / 119) / 120 / 2.
    assert noise_between(of_task(record, "code")) == pytest.approx((1 / 119 / 2) ** 0.5)


def test_a_task_that_is_not_there_is_said_with_those_that_are(folder):
    with pytest.raises(
        InputError, match=r"no prompts of task 'maths' at step 0; its tasks and suites are code, math"
    ):
        load_run(folder, metric="pass_rate/maths")
    with pytest.raises(InputError, match="a run folder has its own pass rates"):
        load_run(folder, metric="reward")
