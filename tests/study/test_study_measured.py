"""What was measured, without any curve: pass rates seed by seed, and their standard errors."""

import math

import numpy as np
import pytest

from scalerl.study.page.tables import study_tables
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.measured import _standard_error
from scalerl.study.verdict.verdict import judge_study


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
