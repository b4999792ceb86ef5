"""What a study cannot tell: every sentence where it applies, and none where it does not."""

import json

import pytest

from scalerl.study.record import StudyRecord
from scalerl.study.verdict.answers import answers
from scalerl.study.verdict.arm_fits import last_gains
from scalerl.study.verdict.verdict import judge_study

ONE = {"ratio_mean": 1.0, "ratio_max": 1.000004, "ratio_clipped": 0.0, "ess": 1.0, "staleness_max": 0}
AGED = {"ratio_mean": 1.0, "ratio_max": 1.9, "ratio_clipped": 0.01, "ess": 0.97, "staleness_max": 8}


def cautions_of(studies, path, arms, **more):
    return judge_study(StudyRecord.read(studies.write(path, arms, seeds=3, **more))).cautions


def test_losses_that_cannot_be_told_apart_are_named(studies, tmp_path):
    truth, dapo = studies.Truth, {"loss": {"kind": "dapo", "max_ratio": 1.26}}
    on_policy = {"schedule": {"kind": "pipeline_rl", "k": 0}}
    # By the steps: k may be 8, if all the ratios are 1.
    arms = {
        "base": truth(steps=(ONE,)),
        "dapo": truth(steps=(ONE, ONE), changes=dapo),
        "aged": truth(steps=(AGED,)),
    }
    (said,) = cautions_of(studies, tmp_path / "a", arms)
    assert "never leave 1 in base and dapo" in said
    assert said.endswith("cannot be distinguished, as base and dapo do.")
    # By the recipe, where no steps are logged; the arms differ in more than the loss.
    arms = {"base": truth(), "new": truth(changes=on_policy | dapo)}
    (said,) = cautions_of(studies, tmp_path / "b", arms)
    assert "never leave 1 in new" in said
    assert said.endswith("cannot be distinguished.")
    # Steps tell it better than k: kernels in a low precision leave 1, or a bound that is close acts.
    close = ONE | {"ratio_max": 1.006, "ratio_clipped": 0.2}
    arms = {
        "base": truth(steps=(AGED,)),
        "new": truth(changes=on_policy, steps=(AGED | {"staleness_max": 0},)),
        "close": truth(changes=on_policy, steps=(close,)),
    }
    assert cautions_of(studies, tmp_path / "c", arms) == ()


def test_a_bound_that_never_acts_is_named(studies, tmp_path):
    truth = studies.Truth
    idle, skipped = AGED | {"ratio_clipped": 0.0}, {"skipped": True, "ratio_clipped": None}
    arms = {
        "base": truth(steps=(AGED, idle)),
        "cap=8": truth(steps=(idle, skipped)),
        "no cap": truth(steps=(idle,), changes={"loss": {"kind": "cispo", "max_ratio": None}}),
    }
    (said,) = cautions_of(studies, tmp_path, arms)
    assert said == "The bound of the loss never acts in cap=8: the study does not test its value there."


def test_a_budget_that_is_too_small_is_named_with_what_would_tell(studies, tmp_path):
    arms = {"base": studies.Truth(), "x": studies.Truth()}
    said = cautions_of(studies, tmp_path, arms, budget=3000.0)
    assert [text.partition(":")[0] for text in said] == ["base", "x"]
    for text in said:
        assert ", less than 3; the ceiling is identified in " in text
        needed = float(text.partition("about ")[2].split()[0].replace(",", ""))
        assert 3000 < needed < 24_000


def test_runs_that_were_not_made_alike_are_named(studies, tmp_path):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=3)
    for n, run in enumerate(StudyRecord.read(path).runs):
        made = {
            "versions": {"torch": f"2.{n % 2}", "numpy": "2.4"},
            "devices": {"train": "cpu", "eval": "cpu"},
        }
        (path / run.plan.folder / "config.json").write_text(json.dumps(made))
    (said,) = judge_study(StudyRecord.read(path)).cautions
    assert said.startswith("The runs were not all made with the same torch (2.0 in 3, 2.1 in 3). Runs of one")


def test_a_combination_is_not_judged_as_if_it_had_been_planned(studies, tmp_path):
    path = studies.write(tmp_path, {"base": studies.Truth(), "a": studies.Truth()}, seeds=3)
    rows = [{"decision": "combined", "arm": "a + b", "of": ["a", "b"], "gains": {}}]
    studies.lines(path / "decisions.jsonl", rows)
    (said,) = judge_study(StudyRecord.read(path)).cautions
    assert said.startswith("a + b was made of the arms that were ahead of these very runs of base")
    studies.lines(path / "decisions.jsonl", [{"decision": "combined", "arm": "a", "of": ["a"]}])
    (said,) = judge_study(StudyRecord.read(path)).cautions
    assert said == "Nothing was combined: a alone is ahead of base as measured at the end."


def test_a_ceiling_that_is_known_to_be_higher_is_named(studies, tmp_path):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=3)
    for run in StudyRecord.read(path).runs:
        (path / run.plan.folder / "config.json").write_text('{"ceiling": {"value": 0.95}}')
    (said,) = judge_study(StudyRecord.read(path)).cautions
    assert said.startswith("The fitted ceiling lies below the one known beforehand in base (")
    assert "known 0.950)" in said


def test_an_arm_with_a_model_of_its_own_leaves_the_others_as_sure_as_they_were(studies, tmp_path):
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=3)
    plan = json.loads((path / "study.json").read_text())
    widths = []
    for other in ("m", "another"):
        for run in plan["runs"]:
            run["model"] = "m" if run["arm"] == "base" else other
        (path / "study.json").write_text(json.dumps(plan))
        low, high = judge_study(StudyRecord.read(path)).arms[0].quantities["A"].interval
        widths.append(high - low)
    assert widths[0] == widths[1]


def test_a_ceiling_that_one_of_two_runs_leaves_open_is_claimed_of_nobody(studies, tmp_path):
    arms = {"base": studies.Truth(), "low": studies.Truth(A=0.5, last={1: 128})}
    study = StudyRecord.read(studies.write(tmp_path, arms, seeds=2))
    verdict = judge_study(study)
    assert [run.fit.identified for run in verdict.arms[1].runs] == [True, False]
    assert verdict.pairs["low"].ceiling.verdict == "inconclusive"
    assert "the ceiling of low is not identified" in verdict.pairs["low"].ceiling.why


@pytest.mark.parametrize(
    ("kept", "says"),
    [(5, "not compared: none of its 3 runs could be fitted"), (1000, "inconclusive: no saturating")],
)
def test_what_was_measured_of_an_arm_that_has_no_curve_is_said(studies, tmp_path, kept, says):
    """Of too few evaluations, or of a fall."""
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=3)
    for run in StudyRecord.read(path).of_arm("x"):
        rows = studies.evaluations(path / run.plan.folder)[-kept:]
        for row in rows:
            row["pass_rate"] = 0.3 - 0.2 * row["step"] / 400
        studies.lines(path / run.plan.folder / "evals.jsonl", rows)
    study = StudyRecord.read(path)
    last = [run.record.evals[-1].pass_rate for run in study.of_arm("base")]
    gain = 0.1 - sum(last) / 3
    assert last_gains(study) == {"x": pytest.approx(gain)}
    text = answers(judge_study(study))[1].text
    assert text.startswith(says)
    assert f"measured at 10,000 FLOP −{-gain:.3f}" in text
