import json
import math

import numpy as np
import pytest

from scalerl import EvalPoint, InputError, RunRecord, RunWriter
from scalerl.forecast.paired import paired_prompts
from scalerl.record.prompts import of_task

IDS = ["a", "b", "c", "d"]


def write(folder, evaluations, prompt_set="set", ids=IDS, recipe=None):
    """A run with 4 prompts of 2 samples; `evaluations` maps the step to the successes."""
    writer = RunWriter(folder, {"name": folder.name, "recipe": recipe or {}})
    for step, correct in evaluations.items():
        point = EvalPoint(step, float(np.mean(correct)) / 2, n_prompts=4, n_samples=2)
        writer.evaluation(point, prompt_set, ids, np.array(correct))
    return RunRecord.read(folder)


def test_standard_errors_by_hand(tmp_path):
    # At step 200: rates 0, .5, 1, 1 and .5, .5, 1, 1. Differences .5, 0, 0, 0: mean .125, sd .25, se .125.
    # Unpaired: variances .229167 and .083333 over 4 prompts each, so sqrt(.3125 / 4) = .279508.
    base = write(
        tmp_path / "base", {0: [0, 0, 0, 0], 100: [0, 0, 1, 1], 210: [0, 1, 2, 2], 300: [2, 2, 2, 2]}
    )
    recipe = write(tmp_path / "recipe", {0: [0, 0, 0, 0], 200: [1, 1, 2, 2]})
    found = paired_prompts([base], [recipe], "steps")
    assert found
    assert (found.n_prompts, found.prompt_set) == (4, "set")
    assert (found.matched_at, found.base_compute, found.recipe_compute) == (200, 210, 200)
    assert found.difference == pytest.approx(0.125)
    assert found.se == pytest.approx(0.125)
    assert found.se_unpaired == pytest.approx(math.sqrt(0.3125 / 4))
    assert json.loads(json.dumps(found.to_json()))["matched_at"] == 200


def test_seeds_are_averaged_prompt_by_prompt(tmp_path):
    base = [
        write(tmp_path / f"b{i}", {100: correct}) for i, correct in enumerate(([0, 0, 2, 2], [2, 0, 2, 0]))
    ]
    recipe = write(tmp_path / "recipe", {100: [1, 1, 2, 2]})
    found = paired_prompts(base, [recipe], "steps")
    assert found
    # The base's rates are .5, 0, 1, .5: differences 0, .5, 0, .5 with sd .288675.
    assert found.difference == pytest.approx(0.25)
    assert found.se == pytest.approx(0.288675 / 2, rel=1e-5)


def test_prompts_are_matched_by_their_id(tmp_path):
    base = write(tmp_path / "base", {100: [0, 1, 2, 2]})
    recipe = write(tmp_path / "recipe", {100: [2, 2, 1, 0]}, ids=IDS[::-1])
    found = paired_prompts([base], [recipe], "steps")
    assert found
    assert (found.difference, found.se) == (0.0, 0.0)


def test_other_prompts_are_not_compared(tmp_path):
    base = write(tmp_path / "base", {100: [0, 1, 2, 2]})
    assert paired_prompts([base], [write(tmp_path / "x", {100: [1, 1, 2, 2]}, "other")], "steps") is None
    (tmp_path / "x" / "eval_prompts.jsonl").unlink()
    assert paired_prompts([base], [RunRecord.read(tmp_path / "x")], "steps") is None


def test_lines_that_do_not_fit_together(tmp_path):
    base = write(tmp_path / "base", {100: [0, 1, 2, 2]})
    other = write(tmp_path / "other", {100: [0, 1, 2, 2]}, ids=["a", "b", "c", "e"])
    with pytest.raises(InputError, match=r"other/eval_prompts.jsonl: set set has other prompts than in"):
        paired_prompts([base], [other], "steps")
    row = {"step": 100, "prompt_set": "set", "n": 2, "id": IDS, "correct": [1]}
    (tmp_path / "other" / "eval_prompts.jsonl").write_text(json.dumps(row) + "\n")
    assert paired_prompts([base], [other], "steps") is None  # a line that is not whole


def test_the_tasks_of_a_mixture_differ_each_by_its_prompts(tmp_path):
    recipe = {"task": {"kind": "mix", "tasks": {"sums": {}, "code": {}}}}
    ids = ["sums/0", "sums/1", "code/0", "code/1"]
    runs = [
        write(tmp_path / name, {100: correct}, ids=ids, recipe=recipe)
        for name, correct in (("base", [0, 1, 2, 2]), ("recipe", [2, 1, 1, 1]))
    ]
    found = paired_prompts(runs[:1], runs[1:], "steps")
    assert found
    # Sums differ by 1 and 0: mean .5, sd .7071, se .5. Code by -.5 twice.
    assert found.difference == 0.0
    assert {name: (one.n_prompts, one.difference) for name, one in found.tasks.items()} == {
        "sums": (2, 0.5), "code": (2, -0.5)
    }  # fmt: skip
    assert found.tasks["sums"].se == pytest.approx(0.5)
    assert found.to_json()["tasks"]["code"]["se"] == 0.0
    # Runs that were read by one task are compared on its prompts alone.
    code = paired_prompts([of_task(runs[0], "code")], [of_task(runs[1], "code")], "steps")
    assert code
    assert (code.n_prompts, code.difference, code.tasks) == (2, -0.5, {})
