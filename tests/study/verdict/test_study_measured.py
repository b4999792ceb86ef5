"""What was measured, without any curve: pass rates seed by seed, and their standard errors."""

import math

import pytest

from scalerl.study.page.page import study_document
from scalerl.study.page.tables import study_tables, verdict_table
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.verdict import judge_study


def number(text: str) -> float:
    return float(text.replace("−", "-").removeprefix("± "))


def test_what_was_measured_is_told_without_a_curve(studies, tmp_path):
    """By hand: two seeds, on computes at which they were evaluated, one arm cut short."""
    arms = {"base": studies.Truth(), "other": studies.Truth(last={1: 200})}
    path = studies.write(tmp_path, arms, seeds=2)
    verdict = judge_study(StudyRecord.read(path))
    table = next(table for table in study_tables(verdict) if table.name == "measured")
    base, other = (row.cells for row in table.rows)
    rates = {
        (arm, seed): {
            row["step"]: row["pass_rate"] for row in studies.evaluations(path / "runs" / arm / f"seed{seed}")
        }
        for arm in ("base", "other")
        for seed in (0, 1)
    }
    assert number(base[-1].text) == pytest.approx(
        (rates["base", 0][400] + rates["base", 1][400]) / 2, abs=5e-4
    )
    assert number(other[-1].text) == pytest.approx(rates["other", 0][400] - rates["base", 0][400], abs=5e-4)
    assert other[-1].beside == ""
    quarter = [(of[96] * 12 + of[112] * 4) / 16 for of in rates.values()]  # step 100
    assert number(base[3].text) == pytest.approx((quarter[0] + quarter[1]) / 2, abs=5e-4)
    differences = quarter[2] - quarter[0], quarter[3] - quarter[1]
    assert number(other[3].text) == pytest.approx(sum(differences) / 2, abs=5e-4)
    assert number(other[3].beside) == pytest.approx(abs(differences[0] - differences[1]) / 2, abs=5e-4)


def test_arms_behind_by_a_small_sure_amount_are_no_noise_and_twins_never_acted(studies, tmp_path):
    """By hand: .024 below the base at every evaluation, but for .003 that differ by seed; and a copy."""
    names = ["base", "behind", "level", "other", "twin"]
    path = studies.write(tmp_path, {name: studies.Truth() for name in names}, seeds=4)
    for run in StudyRecord.read(path).runs:
        arm, seed = run.plan.arm, run.plan.seed
        rows = studies.evaluations(path / "runs" / "base" / f"seed{seed}")
        jitter = {"behind": -1, "level": 1, "other": 0.7}.get(arm, 0) * 0.003 * (-1) ** seed
        for row in rows:
            row["pass_rate"] += jitter - 0.024 * (arm == "behind")
        if arm != "base":
            studies.lines(path / run.plan.folder / "evals.jsonl", rows)
    verdict = judge_study(StudyRecord.read(path))
    behind = verdict.measured["behind"]
    assert behind.difference.median == pytest.approx(-0.024)
    assert behind.claim.verdict == "lower as measured"
    assert behind.difference.interval[1] < 0
    assert verdict.kind("behind") == "lower as measured"
    assert verdict.measured["level"].claim.verdict == "not significant"
    assert verdict.kind("twin") == "never acted"
    # A difference of nothing is no result: blank cells, and one line in the list.
    page = study_document(verdict, path, ())
    assert page.sentence.startswith("Lower at 10,000 FLOP, as measured: behind by 0.024 [0.02")
    said = {name: text for _, items, _ in page.answers for name, text in items}
    assert set(said) == set(names) - {"base"}
    assert said["twin"].startswith("the runs of the base")
    (twin,) = [row for row in verdict_table(verdict).rows if row.cells[0].text == "twin"]
    assert [cell.whole for cell in twin.cells[1:5]] == [
        "never acted (its runs are those of the base)",
        *["–"] * 3,
    ]
    # Nor is it a test for which the claims of the curves are corrected.
    assert "twin" not in verdict.pairs
    (arm,) = [one for one in verdict.to_json()["arms"] if one["arm"] == "behind"]
    assert arm["measured"]["difference"] == pytest.approx(-0.024)


def test_seeds_that_differ_by_the_same_step_of_a_coarse_rate_are_no_proof(studies, tmp_path):
    """By hand: two seeds, each 1 of 24 completions lower; and a copy, by which nothing is corrected."""
    path = studies.write(tmp_path, {name: studies.Truth() for name in ("base", "lower", "twin")}, seeds=2)
    for run in StudyRecord.read(path).runs:
        rows = studies.evaluations(path / "runs" / "base" / f"seed{run.plan.seed}")
        for row in rows:
            made = round(24 * row["pass_rate"]) - (run.plan.arm == "lower")
            row |= {"n_prompts": 24, "n_samples": 1, "pass_rate": max(made, 0) / 24}
        studies.lines(path / run.plan.folder / "evals.jsonl", rows)
    found = judge_study(StudyRecord.read(path)).measured
    lower = found["lower"]
    half = 12.7062 * math.sqrt(1 / (6 * 24**2) / 2)  # t of one degree of freedom
    assert lower.difference.median == pytest.approx(-1 / 24)
    assert lower.difference.interval == pytest.approx((-1 / 24 - half, -1 / 24 + half), abs=1e-5)
    assert lower.claim.verdict == "not significant"
    assert lower.claim.p_adjusted == lower.claim.p
    assert (found["twin"].claim.p, found["twin"].difference.interval) == (1.0, (0.0, 0.0))
