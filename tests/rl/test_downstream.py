"""Downstream suites: evaluated beside the held-out prompts, and changing nothing of the run."""

import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from cut_runs import CutError, cut_at, lines, record_and_weights
from record_checker import check
from small_runs import small_recipe

import scalerl
from scalerl.errors import InputError
from scalerl.record.reader import RunRecord
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.config.settings import Suite
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.evaluate import evaluate
from scalerl.rl.tasks.chain import Chain
from scalerl.rl.tasks.code import Code
from scalerl.rl.tasks.dataset import Dataset
from scalerl.rl.tasks.reasoning_gym import ReasoningGym
from scalerl.rl.tasks.verifiers import Math
from scalerl.rl.tracking.metrics import of_suite
from scalerl.rl.train import train
from scalerl.rl.types import Prompt

LONGER = Suite("longer", Chain(k_max=3, skip=(1, 2), heldout_per_length=6, train_per_length=1, seed=5), 3)
SPARSE = Suite("sparse", Chain(k_max=2, heldout_per_length=4, train_per_length=1, seed=9), samples=1, every=3)


def with_suites(recipe, *suites):
    return replace(recipe, evaluation=replace(recipe.evaluation, downstream=suites))


@pytest.fixture(scope="module")
def recipe(guesser):
    """Eight evaluations, at every second of 14 steps."""
    return with_suites(small_recipe(guesser), LONGER, SPARSE)


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    return train(recipe, tmp_path_factory.mktemp("runs") / "run", recipe.model, evaluate_aside=False)


def of(folder, suite):
    return [row for row in lines(folder / "downstream.jsonl") if row["suite"] == suite]


def timeless(folder):
    rows = lines(folder / "downstream.jsonl")
    return [{k: v for k, v in row.items() if k not in ("time", "device_seconds")} for row in rows]


def test_the_run_is_what_it_is_without_them(recipe, run, tmp_path):
    without = train(with_suites(recipe), tmp_path / "run", recipe.model, evaluate_aside=False)
    assert record_and_weights(without.path) == record_and_weights(run.path)
    assert not (without.path / "downstream.jsonl").exists()
    assert check(run.path) == []


def test_they_are_evaluated_when_they_are_due_and_at_the_end(run):
    assert [row["step"] for row in of(run.path, "longer")] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [row["step"] for row in of(run.path, "sparse")] == [0, 6, 12, 14]


def test_a_line_has_the_counters_of_its_step_and_the_rates_of_its_prompts(run):
    at = {row["step"]: row for row in lines(run.path / "evals.jsonl")}
    for row in lines(run.path / "downstream.jsonl"):
        beside, n = at[row["step"]], row["n_samples"]
        for key in ("time", "device_seconds", "flops", "tokens", "samples", "prompts", "version"):
            assert row[key] == beside[key], key
        correct = np.array(row["correct"])
        assert len(correct) == len(row["id"]) == row["n_prompts"]
        assert row["pass_rate"] == pytest.approx(correct.mean() / n)
        assert row["pass_at_k"] == pytest.approx((correct > 0).mean())
        for name in ("pass_rate", "pass_at_k"):
            low, high = row[f"{name}_interval"]
            assert 0 <= low <= row[name] <= high <= 1
            assert low < high


def test_a_run_that_was_cut_is_resumed_to_the_same(recipe, run, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(CutError):
        train(recipe, folder, recipe.model, evaluate_aside=False, progress=cut_at(8))
    train(recipe, folder, recipe.model, evaluate_aside=False, resume=True)
    assert timeless(folder) == timeless(run.path)
    assert check(folder) == []


def test_a_resume_may_have_other_suites_but_not_other_prompts_by_the_same_name(recipe, tmp_path):
    folder, more = tmp_path / "run", replace(SPARSE, name="more", every=1)
    train(recipe, folder, recipe.model, evaluate_aside=False, until=7)
    changed = replace(LONGER, task=replace(cast(Chain, LONGER.task), seed=6))
    with pytest.raises(InputError, match="suite longer have changed"):
        train(with_suites(recipe, changed), folder, recipe.model, evaluate_aside=False, resume=True)
    train(with_suites(recipe, LONGER, more), folder, recipe.model, evaluate_aside=False, resume=True)
    assert [row["step"] for row in of(folder, "more")] == [8, 10, 12, 14]
    assert [row["step"] for row in of(folder, "sparse")] == [0, 6]
    assert RunRecord.read(folder).suites == ("longer", "more")


def test_a_suite_has_a_curve_of_its_own(run):
    points = scalerl.load_run(run.path, metric="pass_rate/sparse")
    assert [point.step for point in points.evals] == [0, 6, 12, 14]
    assert [point.pass_rate for point in points.evals] == [r["pass_rate"] for r in of(run.path, "sparse")]
    assert points.metric.name == "pass_rate/sparse"
    assert run.metric.others == ("pass_rate/longer", "pass_rate/sparse")
    with pytest.raises(InputError, match="its tasks and suites are longer, sparse"):
        scalerl.load_run(run.path, metric="pass_rate/none")


def test_a_model_is_evaluated_on_the_suites_that_are_named(recipe, run):
    found = evaluate(recipe, recipe.model, suites=["longer"])
    assert list(found.downstream) == ["longer"]
    assert found.downstream["longer"].correct_P.tolist() == of(run.path, "longer")[0]["correct"]
    with pytest.raises(InputError, match="no suite 'hard'; there are: longer, sparse"):
        evaluate(recipe, recipe.model, suites=["hard"])


def test_trackers_have_them_under_their_names(run):
    found = of_suite(of(run.path, "longer")[-1])
    assert found["downstream/longer/pass_rate"] == of(run.path, "longer")[-1]["pass_rate"]
    assert found["downstream/longer/pass_at_k_low"] <= found["downstream/longer/pass_at_k"]


# -- what a recipe says --------------------------------------------------------------------------------

AIME = [{"problem": f"What is {n}?", "answer": answer} for n, answer in enumerate(["073", 204, "5"])]


@pytest.fixture
def aime(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in AIME))
    return path


def test_all_rows_of_a_file_are_evaluated(aime):
    table = {
        "task": {"kind": "dataset", "path": str(aime), "prompt": "problem"},
        "name": "aime",
        "samples": 8,
    }
    recipe = load_recipe("demo")
    values = recipe.to_dict()
    values["evaluation"]["downstream"] = [table]
    (suite,) = from_dict(values).evaluation.downstream
    assert [prompt.answer for prompt in suite.task.prompts("heldout")] == ["073", "204", "5"]
    assert from_dict(from_dict(values).to_json()).evaluation.downstream == (suite,)
    with pytest.raises(InputError, match="no training prompt"):
        suite.task.prompts("train")


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("073", r"so \boxed{73}", True),
        ("204", "204.", True),
        ("5", r"\boxed{005}", True),
        ("73", r"\boxed{730}", False),
        ("204", r"\boxed{204\%}", True),
    ],
)
def test_integer_answers_are_compared_as_numbers(answer, text, right):
    assert Math().verify(Prompt("", "", answer), f"<think>1</think>{text}").correct is right


def test_a_suite_may_be_one_line(aime):
    lines_ = f'evaluation.downstream=["{aime}", "reasoning-gym:chain_sum", "code:humaneval.jsonl"]'
    suites = load_recipe("demo", [lines_]).evaluation.downstream
    assert [suite.name for suite in suites] == ["aime", "chain_sum", "humaneval"]
    assert [type(suite.task) for suite in suites] == [Dataset, ReasoningGym, Code]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('["chain", "chain"]', "two suites are called 'chain'"),
        ('[{name = "a/b", task = "chain"}]', "must not be empty, or hold a slash"),
        ('[{name = "a", task = "chain", samples = 0}]', "samples must be at least 1"),
        ('[{name = "a"}]', "missing key 'evaluation.downstream.task'"),
        (
            '[{name = "a", task = {kind = "chain", kmax = 2}}]',
            "did you mean 'evaluation.downstream.task.k_max'",
        ),
        ('"chain"', "expected a list"),
    ],
)
def test_wrong_suites_are_refused_in_a_line(value, message):
    with pytest.raises(InputError, match=message):
        load_recipe("demo", [f"evaluation.downstream={value}"])


def test_a_suite_of_prompts_that_are_trained_on_is_a_warning(recipe, tmp_path, caplog):
    trained = recipe.task.prompts("train")[0]
    path = tmp_path / "leaked.jsonl"
    path.write_text(json.dumps({"prompt": trained.text, "answer": trained.answer}) + "\n")
    leaked = Suite("leaked", Dataset(str(path), heldout_path=str(path), chat_template=False))
    assert check_prompts(with_suites(recipe, leaked), recipe.model).evaluation.downstream == (leaked,)
    assert "1 of 1 prompts of 'leaked' are trained on" in caplog.text


def test_prompts_of_a_suite_that_do_not_fit_are_an_error_that_names_it(recipe):
    long = Suite("long", Chain(k_max=9, skip=(1, 2, 3, 4), heldout_per_length=2, train_per_length=1))
    with pytest.raises(InputError, match=r"suite long: context\.prompt: 8 tokens are allowed"):
        check_prompts(with_suites(recipe, long), recipe.model)
