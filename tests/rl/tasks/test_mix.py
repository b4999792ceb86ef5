"""Mixtures: tasks drawn by weight, each verified by its own verifier."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from byte_model import save_byte_model

from scalerl import load_run
from scalerl.errors import InputError
from scalerl.rl.config.recipe import from_dict
from scalerl.rl.train import train

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {
    "sums": {"kind": "reasoning_gym", "name": "chain_sum", "config": EASY, "size": 12, "heldout": 4},
    "gcd": {"kind": "reasoning_gym", "name": "gcd", "size": 6, "heldout": 2, "partial_credit": True},
}


def recipe_of(task, **changes):
    return from_dict({"model": "m", "budget": {"kind": "steps", "amount": 2}, "task": task, **changes})


def test_a_mixture_keeps_prompts_and_verifiers_apart():
    task: Any = recipe_of({"kind": "mix", "tasks": TASKS}).task
    heldout, train_ = task.prompts("heldout"), task.prompts("train")
    assert Counter(p.id.partition("/")[0] for p in heldout) == {"sums": 4, "gcd": 2}
    assert Counter(p.id.partition("/")[0] for p in train_) == {"sums": 12, "gcd": 6}
    for prompt in heldout:
        assert task.verify(prompt, prompt.answer).correct
        assert task.reference(prompt) == prompt.answer
        assert not task.verify(prompt, "99999").correct
    assert task.verify(heldout[0], "99999").value == -1.0
    assert task.verify(heldout[-1], "99999").value >= 0.0  # the score: partial credit is that task's own
    assert task.weights == {"sums": 1.0, "gcd": 1.0}
    assert recipe_of(recipe_of({"kind": "mix", "tasks": TASKS}).to_dict()["task"]).task == task


def test_tasks_of_a_mixture_in_one_line_and_of_ones_own(tmp_path):
    file = tmp_path / "tasks.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from scalerl.rl import Prompt, Task\n"
        "@dataclass(frozen=True)\n"
        "class Words(Task):\n"
        "    n: int = 3\n"
        "    def prompts(self, split):\n"
        "        return [Prompt(f'{split}/{i}', f'{split} {i}', str(i)) for i in range(self.n)]\n"
        "    def verify(self, prompt, text):\n"
        "        return text == prompt.answer\n"
    )
    own = {"kind": f"{file}:Words", "n": 5}
    recipe = recipe_of({"kind": "mix", "tasks": {"gcd": "reasoning-gym:gcd", "words": own}})
    task: Any = recipe.task
    assert task.tasks["gcd"].name == "gcd"
    assert task.tasks["words"].n == 5
    assert recipe.to_dict()["task"]["tasks"]["words"]["kind"] == f"{file}:Words"
    again: Any = from_dict(json.loads(json.dumps(recipe.to_dict()))).task
    assert again == task


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"tasks": {"a": TASKS["gcd"]}}, "tasks must have two or more"),
        ({"tasks": TASKS, "weights": {"gdc": 1.0}}, "there is no task 'gdc'"),
        ({"tasks": TASKS, "weights": {"gcd": 1.0}}, "'sums' has none"),
        ({"tasks": TASKS, "weights": {"gcd": 1.0, "sums": 0.0}}, "weights must be positive"),
        ({"tasks": {**TASKS, "a/b": TASKS["gcd"]}}, "'a/b' is no name"),
        (
            {"tasks": {**TASKS, "c": {"kind": "reasoning_gym", "nam": "gcd"}}},
            "unknown key 'task.tasks.c.nam'",
        ),
        ({"tasks": {**TASKS, "c": {"kind": "csv"}}}, "no kind 'csv'"),
        ({"tasks": {**TASKS, "c": 3}}, "task.tasks.c: expected a table, found 3"),
    ],
)
def test_what_is_wrong_in_a_mixture_is_said(task, message):
    with pytest.raises(InputError, match=message):
        recipe_of({"kind": "mix", **task})


def test_a_run_on_a_mixture_has_one_batch_over_all(tmp_path):
    model = str(save_byte_model(tmp_path / "model"))
    recipe = recipe_of(
        {"kind": "mix", "tasks": TASKS, "weights": {"sums": 3.0, "gcd": 1.0}},
        batch={"prompts": 4, "samples": 2},
        context={"prompt": 140, "thinking": 4, "answer": 4},
        length={"kind": "none"},
        truncated="keep",
        zero_variance="keep",
        schedule={"k": 1},
        evaluation={"count": 1, "samples": 1},
        decode_slots=8,
    )
    record = train(recipe, Path(tmp_path / "run"), model)
    rows = [json.loads(line) for line in (record.path / "groups.jsonl").read_text().splitlines()]
    names = [[name.partition("/")[0] for name in row["prompt"]] for row in rows]
    assert [Counter(row) for row in names] == [{"sums": 3, "gcd": 1}] * 2
    names = {name.partition("/")[0] for row in record.eval_prompts() for name in row["id"]}
    assert names == {"sums", "gcd"}
    joint = record.evals[-1]
    parts = [load_run(record.path, metric=f"pass_rate/{name}") for name in ("sums", "gcd")]
    rows = record.eval_prompts()
    for name, part in zip(("sums", "gcd"), parts, strict=True):
        assert part.metric.name == f"pass_rate/{name}"
        for point, row in zip(part.evals, rows, strict=True):
            own = [n for id, n in zip(row["id"], row["correct"], strict=True) if id.startswith(name)]
            assert point.pass_rate == sum(own) / len(own) / row["n"]
            assert point.n_prompts == len(own)
            assert point.flops == next(p.flops for p in record.evals if p.step == row["step"])
    total = sum(part.evals[-1].pass_rate * part.evals[-1].n_prompts for part in parts)
    assert total / joint.n_prompts == pytest.approx(joint.pass_rate)
    assert record.metric.others == ("pass_rate/sums", "pass_rate/gcd")
    with pytest.raises(InputError, match=r"no prompts of task 'gdc' at step 0; its .* gcd, sums"):
        load_run(record.path, metric="pass_rate/gdc")
