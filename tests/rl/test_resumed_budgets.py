"""Runs that are resumed with another budget, or with one in any unit; and those that are finished."""

import json
from dataclasses import replace

import pytest
from cut_runs import CutError, cut_at, lines, run, timeless
from record_checker import check
from small_runs import small_recipe

from scalerl.errors import InputError
from scalerl.record.saved_weights import final_folder
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.config.settings import (
    Epochs,
    Evaluation,
    FlopsBudget,
    GpuHours,
    Steps,
    TokensBudget,
)


@pytest.fixture(scope="module")
def recipe(guesser):
    # One sample a prompt: evaluations of which no spread is known.
    return small_recipe(guesser, evaluation=Evaluation(count=5, samples=1))


def test_a_finished_run_is_left_as_it_is(recipe, tmp_path):
    run(recipe, tmp_path / "run")
    before = (tmp_path / "run" / "evals.jsonl").read_bytes()
    assert len(run(recipe, tmp_path / "run", resume=True).evals) == 6
    assert (tmp_path / "run" / "evals.jsonl").read_bytes() == before


def test_a_finished_run_of_another_recipe_is_refused(recipe, tmp_path):
    run(recipe, tmp_path / "run")
    with pytest.raises(InputError, match="the run has seed = 0, and this recipe 1"):
        run(replace(recipe, seed=1), tmp_path / "run", resume=True)


def test_another_kind_of_budget_and_one_that_is_spent_are_refused(recipe, tmp_path):
    run(recipe, tmp_path / "run")
    with pytest.raises(
        InputError, match=r"budget.amount = 7 is less than the 14 steps that the run has spent"
    ):
        run(replace(recipe, budget=Steps(7)), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"budget.kind = 'steps', and this recipe 'tokens'"):
        run(replace(recipe, budget=TokensBudget(1e9)), tmp_path / "run", resume=True)
    other = replace(recipe, loss=replace(recipe.loss, max_ratio=9.0))
    with pytest.raises(InputError, match=r"loss.max_ratio = 5.0, and this recipe 9.0; .*another run \(-o\)"):
        run(other, tmp_path / "run", resume=True)


def end_of(run, axis, target):
    """A forecaster that says when it was asked, and of which end."""
    return {"axis": axis, "target": target, "of": run.evals[-1].step}


def test_a_finished_run_is_extended_to_the_run_of_the_larger_budget(recipe, tmp_path):
    """Ten steps, whose five evaluations are two steps apart, and then twenty."""
    short, long = (
        replace(recipe, budget=Steps(n), evaluation=Evaluation(count, samples=1, forecast_at=(0.5,)))
        for n, count in ((10, 5), (20, 10))
    )
    run(long, tmp_path / "whole", forecaster=end_of)
    run(short, tmp_path / "run", forecaster=end_of)
    assert (tmp_path / "run" / "checkpoints" / "step-00010").is_dir()
    with pytest.raises(CutError):  # before it has another checkpoint, and so from the same one again
        run(longer(short), tmp_path / "run", resume=True, progress=cut_at(11), forecaster=end_of)
    assert not final_folder(tmp_path / "run").is_dir()
    record = run(load_recipe(tmp_path / "run"), tmp_path / "run", resume=True, forecaster=end_of)
    assert record.config["budget"] == {"kind": "steps", "amount": 20, "before": [10]}
    assert record.config["recipe"]["budget"]["amount"] == 20
    assert [(row["target"], row["of"]) for row in record.forecasts] == [(10, 4), (20, 10)]
    (tmp_path / "run" / "forecasts.jsonl").unlink()  # which the checker would hold against one budget
    (tmp_path / "whole" / "forecasts.jsonl").unlink()
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def longer(recipe):
    return replace(recipe, budget=Steps(20))


def test_a_run_under_way_is_shortened_to_what_it_has_spent(recipe, tmp_path):
    run(recipe, tmp_path / "run", until=8)
    with pytest.raises(InputError, match="less than the 8 steps"):
        run(replace(recipe, budget=Steps(7)), tmp_path / "run", resume=True)
    record = run(replace(recipe, budget=Steps(8)), tmp_path / "run", resume=True)
    assert [point.step for point in record.evals] == [0, 3, 6, 8]
    assert final_folder(tmp_path / "run").is_dir()
    assert check(tmp_path / "run") == []


def test_only_a_decay_with_steps_of_its_own_can_be_extended(recipe, tmp_path):
    """Over the budget it would be another decay with another budget, also for the steps made."""
    linear = replace(recipe.optimiser, lr_scheduler="linear", min_lr_ratio=0.2)
    recipe = replace(recipe, optimiser=linear, evaluation=Evaluation(every=5, samples=1))
    bound, own = replace(recipe, budget=Steps(5)), replace(linear, decay_steps=8)
    run(bound, tmp_path / "bound")
    with pytest.raises(InputError, match=r"decays over its budget of 5 steps.*sets optimiser.decay_steps"):
        run(replace(bound, budget=Steps(10)), tmp_path / "bound", resume=True)
    whole, short = (replace(recipe, optimiser=own, budget=Steps(n)) for n in (10, 5))
    run(short, tmp_path / "own")
    run(replace(short, budget=Steps(10)), tmp_path / "own", resume=True)
    run(whole, tmp_path / "whole")
    rates = [[row["lr"] for row in lines(tmp_path / name / "steps.jsonl")] for name in ("own", "whole")]
    trained = [rate is not None for rate in rates[0]]
    expected = [whole.lr_at(step) if trained[step] else None for step in range(10)]
    assert rates == [expected, expected]
    assert expected[-1] == pytest.approx(0.2 * linear.lr)
    assert len(set(expected[:8])) > 3


def test_a_budget_edited_in_config_json_is_refused(recipe, tmp_path):
    run(recipe, tmp_path / "run", until=8)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["recipe"]["budget"]["amount"] = 20
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"edited since the checkpoint of step 8.*budget.amount = 20"):
        run(longer(recipe), tmp_path / "run", resume=True)


def test_evaluations_every_so_many_steps_go_on_as_they_were(recipe, tmp_path):
    by_steps = replace(recipe, budget=Steps(9), evaluation=Evaluation(every=4, samples=1))
    record = run(by_steps, tmp_path / "run")
    assert [point.step for point in record.evals] == [0, 4, 8, 9]
    record = run(replace(by_steps, budget=Steps(14)), tmp_path / "run", resume=True)
    assert [point.step for point in record.evals] == [0, 4, 8, 9, 12, 14]
    assert check(tmp_path / "run") == []


@pytest.mark.parametrize("kind", [GpuHours, TokensBudget, FlopsBudget, Epochs])
def test_a_run_ends_with_its_budget_in_any_unit(recipe, tmp_path, kind):
    """At half of what a run of 14 steps has spent; of a clock, only that it ends is certain."""
    last = run(recipe, tmp_path / "whole").evals[-1]
    amount = {
        GpuHours: 1e-9,
        TokensBudget: last.tokens.generated / 2,
        FlopsBudget: (last.flops.generate + last.flops.train) / 2,
        Epochs: last.prompts / 2 / len(recipe.task.prompts("train")),
    }[kind]
    record = run(replace(recipe, budget=kind(amount)), tmp_path / "run", forecaster=end_of)
    steps = record.evals[-1].step
    assert steps == 1 if kind is GpuHours else 6 <= steps <= 8
    assert final_folder(tmp_path / "run").is_dir()
    axis = record.default_axis
    end = record.config["budget"]["amount"]
    assert record.compute(axis)[-1] >= end * (1 - 1e-9) > record.compute(axis)[-2]
    if kind is Epochs:
        assert (axis, end) == ("samples", last.samples / 2)
    (tmp_path / "run" / "forecasts.jsonl").unlink(missing_ok=True)
    assert check(tmp_path / "run") == []
