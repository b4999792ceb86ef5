"""`evaluation.keep = "best"`: the weights of the best evaluations are there, and are what was evaluated."""

import json
from dataclasses import replace

import pytest
from cut_runs import CutError, cut_at, lines, record_and_weights
from record_checker import check
from small_runs import small_recipe

from scalerl.cli.main import main
from scalerl.errors import InputError, WriteError
from scalerl.forecast.best import rates_by_step
from scalerl.record.saved_weights import saved_weights
from scalerl.rl.checkpoint import best as best_weights
from scalerl.rl.config.settings import Lora
from scalerl.rl.evaluate import evaluate
from scalerl.rl.train import train

PEAK = 6


def peaked(record):
    """As if the run was the best at step 6, whatever was measured."""
    return {point.step: 0.5 - 0.01 * abs(point.step - PEAK) for point in record.evals}


@pytest.fixture(scope="module")
def recipe(guesser):
    recipe = small_recipe(guesser, lora=Lora(rank=2))
    return replace(recipe, evaluation=replace(recipe.evaluation, keep="best"))


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return train(recipe, folder, recipe.model, evaluate_aside=False, smooth=peaked)


def kept(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("best-*"))


def test_the_best_ones_are_kept_and_the_run_is_what_it_is_without(recipe, run, tmp_path):
    assert kept(run.path) == ["best-00004", "best-00006", "best-00008"]
    last = replace(recipe, evaluation=replace(recipe.evaluation, keep="last"))
    without = train(last, tmp_path / "run", recipe.model, evaluate_aside=False)
    assert kept(without.path) == []
    assert record_and_weights(without.path) == record_and_weights(run.path)
    assert check(run.path) == []


def test_they_are_the_weights_of_their_evaluation(recipe, run):
    measured = {row["step"]: row["correct"] for row in lines(run.path / "eval_prompts.jsonl")}
    assert len({tuple(correct) for correct in measured.values()}) > 3
    for step in (4, 6, 8):
        folder = saved_weights(run.path)[step]
        plain = replace(recipe, lora=Lora())  # the adapters are merged
        assert evaluate(plain, folder).correct_P.tolist() == measured[step]


def test_a_resume_goes_on_with_what_it_has(recipe, run, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(CutError):
        train(recipe, folder, recipe.model, evaluate_aside=False, smooth=peaked, progress=cut_at(11))
    seen = []

    def smooth(record):
        seen.append(kept(folder))
        return peaked(record)

    train(recipe, folder, recipe.model, evaluate_aside=False, smooth=smooth, resume=True)
    assert seen[0] == ["best-00004", "best-00006", "best-00008"]
    assert kept(folder) == kept(run.path)
    assert record_and_weights(folder) == record_and_weights(run.path)


def test_weights_that_the_record_does_not_have_go_at_a_resume(tmp_path):
    for step in (2, 8, 10):
        (tmp_path / f"best-{step:05d}").mkdir()
    best_weights.drop_newer(tmp_path, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-00002", "best-00008"]


def test_a_disk_that_does_not_take_them_is_a_warning(recipe, tmp_path, monkeypatch, caplog):
    def full(path, write):
        raise WriteError(f"{path.name}: no space left")

    monkeypatch.setattr(best_weights, "write_whole", full)
    short = replace(recipe, budget=replace(recipe.budget, amount=2))
    train(short, tmp_path / "run", recipe.model, evaluate_aside=False, smooth=peaked)
    assert "best-00002: no space left; training goes on without these weights" in caplog.text


def test_it_needs_the_rates_to_choose_by(recipe, tmp_path):
    with pytest.raises(InputError, match="'best' needs the smoothed pass rates"):
        train(recipe, tmp_path / "run", recipe.model, evaluate_aside=False)
    assert not (tmp_path / "run").exists()


def test_the_command_says_which_is_the_best_of_those_there_are(run, capsys):
    assert main(["best", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = rates_by_step(run)
    steps = [one["step"] for one in found["weights"]]
    assert steps == [4, 6, 8, 12, 14]  # step-00014 is also final
    best = found["best"]
    assert best["step"] == best["version"] == max(steps, key=lambda step: (rates[step], step))
    assert best["path"] == str(saved_weights(run.path)[best["step"]])
    assert best["interval"][0] <= best["pass_rate"] <= best["interval"][1]
    assert found["is_last"] == (best["step"] == 14) == (found["better_than_last"] is None)
    assert found["last"]["path"] == str(run.path / "checkpoints" / "final")
    assert main(["best", str(run.path)]) == 0
    assert f"{best['step']} (version {best['step']})" in capsys.readouterr().out


def test_the_command_ends_with_status_3_where_it_cannot_say(recipe, tmp_path, capsys):
    short = replace(recipe, budget=replace(recipe.budget, amount=1), lora=Lora())
    train(short, tmp_path / "run", recipe.model, evaluate_aside=False, smooth=peaked)
    assert main(["best", str(tmp_path / "run")]) == 3
    assert "2 evaluations, and 3 are needed" in capsys.readouterr().err
    assert main(["best", str(tmp_path)]) == 2
