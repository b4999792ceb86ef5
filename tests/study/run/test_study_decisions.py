"""What a study decides between its runs: from what was known then, and once."""

from dataclasses import replace

import pytest

from scalerl.jsonl import read_rows
from scalerl.rl.config.recipe import load_recipe
from scalerl.study.arms import Listed, expand
from scalerl.study.plan import make_plan
from scalerl.study.record import StudyRecord
from scalerl.study.run.decisions import freeze_forecasts, stop_arms
from scalerl.study.spec import Stop, Study
from scalerl.study.verdict.verdict import judge_study

BUDGETS = (2500.0, 5000.0, 10_000.0)


@pytest.fixture(scope="module")
def plan():
    """Three arms by names that the simulated studies have too, on their axis and budgets."""
    arms = {"low": {"decode_slots": 2}, "flat": {"decode_slots": 3}}
    found = make_plan(Study("demo", seeds=4, arm=arms, stop=Stop(0.95), budgets=(7.5e11, 1.5e12)))
    assert [arm.name for arm in expand(load_recipe("demo"), Listed(arms))] == ["base", "low", "flat"]
    return replace(found, budgets=BUDGETS)


@pytest.fixture
def folder(studies, tmp_path):
    """A study whose runs are all at their end."""
    truth = studies.Truth
    arms = {"base": truth(A=0.62, C_mid=900), "low": truth(A=0.50, C_mid=900), "flat": truth(C_mid=1e9)}
    return studies.write(tmp_path, arms, seeds=4)


def test_a_forecast_is_made_of_what_there_was_at_its_budget(studies, plan, folder):
    runs = [run.plan for run in StudyRecord.read(folder).runs]
    for run in runs:
        if run.arm == "flat":  # three evaluations up to the first budget, which are too few
            studies.lines(folder / run.folder / "evals.jsonl", studies.evaluations(folder / run.folder)[::4])
    freeze_forecasts(plan, folder, runs, BUDGETS[0])
    frozen = read_rows(folder / "forecasts.jsonl", [])
    assert [(row["run"], row["target_compute"]) for row in frozen] == [
        (run.key, target) for run in runs for target in BUDGETS[1:]
    ]
    told = [row for row in frozen if "why" not in row]
    assert {row["compute"] for row in told} == {
        2800.0
    }  # an evaluation every 400: that at or after the budget
    assert {row["run"] for row in frozen if "why" in row} == {f"flat seed {seed}" for seed in range(4)}
    assert len(StudyRecord.read(folder).forecasts) == len(told)
    freeze_forecasts(plan, folder, runs, BUDGETS[0])  # nothing is asked again, now that more is known
    assert read_rows(folder / "forecasts.jsonl", []) == frozen


def test_an_arm_below_the_best_is_stopped_by_what_was_known_then(plan, folder):
    assert stop_arms(plan, folder, BUDGETS[1]) == {"low"}
    decided = {row["arm"]: row for row in read_rows(folder / "decisions.jsonl", [])}
    assert (decided["low"]["decision"], decided["base"]["decision"]) == ("stopped", "goes on")
    assert decided["low"]["probability"] > 0.95
    assert decided["low"]["saved"] == 4 * (BUDGETS[2] - BUDGETS[1])
    assert decided["flat"]["probability"] is None
    before = read_rows(folder / "decisions.jsonl", [])
    assert stop_arms(plan, folder, BUDGETS[1]) == {"low"}
    assert read_rows(folder / "decisions.jsonl", []) == before
    early = StudyRecord.read(folder).until(BUDGETS[0])
    assert {run.record.compute("flops")[-1] for run in early.runs} == {2800.0}


def test_no_more_arms_are_stopped_than_the_study_allows(plan, folder):
    three = replace(plan, study=replace(plan.study, stop=Stop(0.95, at_least=3)))
    assert stop_arms(three, folder, BUDGETS[1]) == set()


def test_arms_that_are_evaluated_otherwise_are_named(studies, folder):
    assert not any("Before any training" in text for text in judge_study(StudyRecord.read(folder)).cautions)
    path = folder / "runs" / "low" / "seed1"
    points = studies.evaluations(path)
    points[0]["pass_rate"] += 0.03
    studies.lines(path / "evals.jsonl", points)
    (said,) = [t for t in judge_study(StudyRecord.read(folder)).cautions if "Before any training" in t]
    assert "low (+0.030)" in said
