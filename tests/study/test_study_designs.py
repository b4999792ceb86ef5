"""What a study's design says: effects of switches, the best batch; in verdict, page and JSON."""

import math

import numpy as np
import pytest

from scalerl.rl.config.recipe import load_recipe
from scalerl.study.arms import Factorial, expand
from scalerl.study.page.page import study_html
from scalerl.study.page.tables import study_tables
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.measured import _standard_error
from scalerl.study.verdict.verdict import judge_study


@pytest.fixture(scope="module")
def factorial(studies, tmp_path_factory):
    """Four switches in eight arms: "a" raises the ceiling by .05, "b" delays by 40 %."""
    switches = {
        "a": {"loss": {"kind": "dapo"}},
        "b": {"schedule": {"k": 2}},
        "c": {"averaging": {"kind": "sample"}},
        "d": {"rows": 8},
    }
    base, rule = load_recipe("demo"), Factorial(switches)
    design = rule.design(base)
    on = {
        name: dict(zip(design["factors"], levels, strict=True)) for name, levels in design["levels"].items()
    }
    arms = {
        arm.name: studies.Truth(A=0.6 + 0.05 * on[arm.name]["a"], C_mid=2500 * 1.4 ** on[arm.name]["b"])
        for arm in expand(base, rule)
    }
    path = studies.write(tmp_path_factory.mktemp("factorial"), arms, seeds=2, design=design)
    return judge_study(StudyRecord.read(path))


def test_a_factorial_tells_which_switch_does_what(factorial):
    found = {on.parameter: on for on in factorial.effects.on}
    verdicts = {(e.name, p): e.verdict for p, on in found.items() for e in on.effects if e.is_main}
    assert verdicts["a", "A"] == "higher ceiling"
    assert verdicts["b", "log_C_mid"] == "reaches it later"
    assert {v for key, v in verdicts.items() if key not in {("a", "A"), ("b", "log_C_mid")}} == {
        "not distinguishable"
    }
    low, high = factorial.effects.main("a").interval
    assert low < 0.05 < high


def test_effects_stand_in_table_page_and_json(factorial):
    table = next(table for table in study_tables(factorial) if table.name == "effects")
    rows = [dict(zip(table.keys, row, strict=True)) for row in table.raw_rows()]
    delay = next(row for row in rows if (row["effect"], row["on"]) == ("b", "C_mid"))
    effect = factorial.effects.main("b", "log_C_mid")
    assert delay["difference"] == pytest.approx(np.exp(effect.median))
    assert (delay["difference_low"], delay["difference_high"]) == pytest.approx(np.exp(effect.interval))
    assert [row["effect"] for row in rows[:4]] == ["a", "b", "c", "d"]
    assert "a x b + c x d" in {row["effect"] for row in rows}  # one chain of resolution IV
    assert "Effects of the switches" in study_html(factorial)
    answer = factorial.to_json()
    assert answer["effects"]["factors"] == ["a", "b", "c", "d"]
    assert answer["allocation"] is None


def batches(studies, path, truths, seeds=2):
    arms = {
        f"{prompts} x {samples}": studies.Truth(
            A=A, changes={"batch": {"prompts": prompts, "samples": samples, "micro": 64}}
        )
        for (prompts, samples), A in truths.items()
    }
    return judge_study(StudyRecord.read(studies.write(path, arms, seeds=seeds)))


def test_a_grid_of_batches_has_a_best_one(studies, tmp_path):
    """The ceiling is highest at 16 completions of a prompt, whatever the prompts."""
    truths = {(p, n): 0.62 - 0.04 * abs(np.log2(n / 16)) for p in (8, 32) for n in (4, 8, 16, 32, 64)}
    verdict = batches(studies, tmp_path, truths)
    last = verdict.allocation.budgets[-1]
    assert last.samples.interval[0] <= 16 <= last.samples.interval[1]
    assert last.samples.interval[0] > 4
    assert last.samples.interval[1] < 64
    assert not last.prompts.tells
    # The simulated runs cost 25 a step of 32 completions.
    assert verdict.allocation.cost == pytest.approx(25 / 32)
    table = next(table for table in study_tables(verdict) if table.name == "allocation")
    row = dict(zip(table.keys, table.raw_rows()[-1], strict=True))
    assert (row["samples"], row["budget"]) == (last.samples.median, last.budget)
    assert "cannot tell" in table.rows[-1].cells[1].text
    assert "The best batch" in study_html(verdict)


def test_arms_that_differ_in_more_are_no_grid(studies, tmp_path):
    arms = {str(n): studies.Truth(changes={"batch": {"prompts": n, "samples": 16}}) for n in (8, 16, 32)}
    arms["other"] = studies.Truth(changes={"batch": {"prompts": 64, "samples": 16}, "rows": 3})
    assert judge_study(StudyRecord.read(studies.write(tmp_path, arms, seeds=1))).allocation is None


def test_what_was_measured_is_told_without_a_curve(studies, tmp_path):
    """By hand: two seeds, on computes at which they were evaluated, one arm cut short."""
    arms = {"base": studies.Truth(), "other": studies.Truth(last={1: 200})}
    path = studies.write(tmp_path, arms, seeds=2)
    verdict = judge_study(StudyRecord.read(path))
    table = next(table for table in study_tables(verdict) if table.name == "measured")
    base, other = (dict(zip(table.keys, row, strict=True)) for row in table.raw_rows())
    rates = {
        (arm, seed): {
            row["step"]: row["pass_rate"] for row in studies.evaluations(path / "runs" / arm / f"seed{seed}")
        }
        for arm in ("base", "other")
        for seed in (0, 1)
    }
    assert base["at_1"] == pytest.approx((rates["base", 0][400] + rates["base", 1][400]) / 2)
    assert other["at_1"] == pytest.approx(rates["other", 0][400] - rates["base", 0][400])
    assert other["at_1_se"] is None
    quarter = [(of[96] * 12 + of[112] * 4) / 16 for of in rates.values()]  # step 100
    assert base["at_0.25"] == pytest.approx((quarter[0] + quarter[1]) / 2)
    differences = quarter[2] - quarter[0], quarter[3] - quarter[1]
    assert other["at_0.25"] == pytest.approx(sum(differences) / 2)
    assert other["at_0.25_se"] == pytest.approx(abs(differences[0] - differences[1]) / 2)


def test_seeds_of_one_base_model_are_one_in_what_was_measured():
    """By hand: deviations -3, -1, 1, 3, the first two of one base model, the others of another."""
    value_S = np.array([1.0, 3.0, 5.0, 7.0])
    apart = _standard_error(value_S, ["a", "b", "c", "d"])
    assert apart == pytest.approx(math.sqrt(20 / 3) / 2)
    assert _standard_error(value_S, ["a"] * 4) == apart
    assert _standard_error(value_S, ["a", "a", "b", "b"]) == pytest.approx(math.sqrt(2 * (16 + 16)) / 4)
    assert math.isnan(_standard_error(value_S[:1], ["a"]))
