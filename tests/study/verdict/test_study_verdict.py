"""Verdicts on simulated studies whose truth is known: base models and seeds differ, evaluations scatter."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from scalerl.curve import fit
from scalerl.forecast import Pair
from scalerl.forecast.comparison import Claim
from scalerl.forecast.freeze import freeze
from scalerl.forecast.measured import MeasuredDifference
from scalerl.record.evaluation import EvalPoint
from scalerl.study.page.page import study_document
from scalerl.study.record import StudyRecord
from scalerl.study.verdict.answers import answers
from scalerl.study.verdict.arm_fits import below_best, summarise
from scalerl.study.verdict.forecast_scores import JudgedForecast, score_forecasts
from scalerl.study.verdict.verdict import judge_study, kind_of
from scalerl.view.facts.frozen import FrozenForecast, Outcome


@pytest.fixture(scope="module")
def study(studies, tmp_path_factory):
    """The base, itself again, A .05 higher, and C_mid at two thirds."""
    truth = studies.Truth
    arms = {"base": truth(), "same": truth(), "higher": truth(A=0.66), "sooner": truth(C_mid=1600.0)}
    return StudyRecord.read(studies.write(tmp_path_factory.mktemp("study"), arms, seeds=4, draw=1))


@pytest.fixture(scope="module")
def verdict(study):
    return judge_study(study)


def made(claim):
    return claim.verdict not in ("not significant", "inconclusive")


def test_what_moved_is_told_from_what_did_not(verdict):
    pairs = verdict.pairs
    # To 4 C_mid: that the ceiling is higher too is beyond the data.
    assert pairs["higher"].seen.verdict == "higher at the compute seen"
    assert (made(pairs["higher"].ceiling), made(pairs["higher"].efficiency)) == (False, False)
    assert (made(pairs["sooner"].ceiling), pairs["sooner"].efficiency.verdict) == (False, "reaches it sooner")
    assert not any(map(made, pairs["same"].claims.values()))
    assert pairs["higher"].differences["A"].median == pytest.approx(0.05, abs=0.012)
    assert pairs["sooner"].differences["C_mid"].median == pytest.approx(0.64, abs=0.06)
    assert {pair.common_seeds for pair in pairs.values()} == {4}
    assert verdict.not_compared == {}
    assert kind_of(pairs["higher"]) == "higher at the compute seen"
    assert kind_of(pairs["sooner"]) == "reaches it sooner"


def test_the_plan_says_what_is_compared(study, verdict):
    assert (verdict.axis, verdict.budget, verdict.target) == ("flops", 10_000.0, None)
    assert "compute_to_target" not in verdict.arms[0].quantities
    other = judge_study(study, axis="tokens", target=0.5)
    assert other.budget == pytest.approx(20_000.0)  # two tokens are generated for a flop, to the end
    assert other.comparison.budget == other.budget
    assert other.pairs["sooner"].differences["compute_to_target"].median < 0.85
    for name in ("A", "compute_to_own"):  # ratios and pass rates do not know the unit
        there, here = other.pairs["higher"].differences[name], verdict.pairs["higher"].differences[name]
        assert there.median == pytest.approx(here.median, rel=0.02, abs=0.002)


def test_an_arm_is_summed_up_over_its_seeds(verdict):
    base = verdict.arms[0]
    assert [arm.name for arm in verdict.arms] == ["base", "same", "higher", "sooner"]
    assert [run.run.plan.seed for run in base.runs if run.fit] == [0, 1, 2, 3]
    own = [result.median.A for result in base.fits]
    estimate = base.quantities["A"]
    # The seeds share their family, which each alone leaves open.
    assert estimate.median == pytest.approx(np.mean(own), abs=0.02)
    # A new base model moves A: the interval is of four numbers with their spread; with one base model for
    # all, of runs that differ by their seeds.
    low, high = estimate.interval
    assert high - low > 1.5 * np.std(own, ddof=1)
    alike = [replace(run, run=replace(run.run, plan=replace(run.run.plan, model="one"))) for run in base.runs]
    (one,) = summarise({"base": tuple(alike)}, None, None, 0.95)
    assert one.quantities["A"].interval[1] - one.quantities["A"].interval[0] < 0.9 * (high - low)
    ends = [result.paper_curve(np.array(10_000.0)) for result in base.fits]
    assert base.quantities["pass_rate"].median == pytest.approx(np.mean(ends), abs=0.01)
    assert base.quantities["C_mid"].interval[0] < 2500 < base.quantities["C_mid"].interval[1]
    assert base.stability.outcomes == {"finished": 4}
    assert base.stability.truncated == pytest.approx(0.02)


@pytest.mark.slow
def test_rates_over_many_studies(studies, tmp_path):
    """Twelve studies of 3 comparisons: one in twenty may be wrong; A +.05 and C_mid -36 % are found.

    To 4 C_mid the former is found at the compute seen, of which the latter may differ too.
    """
    truth = studies.Truth
    arms = {"base": truth(), "same": truth(), "higher": truth(A=0.66), "sooner": truth(C_mid=1600.0)}
    false = higher = sooner = held = 0
    for draw in range(100, 112):
        found = judge_study(StudyRecord.read(studies.write(tmp_path / str(draw), arms, seeds=4, draw=draw)))
        claims = {name: list(map(made, pair.claims.values())) for name, pair in found.pairs.items()}
        false += any(claims["same"]) or claims["higher"][2] or claims["sooner"][1]
        higher += found.pairs["higher"].seen.verdict == "higher at the compute seen"
        sooner += found.pairs["sooner"].efficiency.verdict == "reaches it sooner"
        low, high = found.arms[0].quantities["A"].interval
        held += low <= 0.61 <= high
    assert false <= 2  # more with probability .02 at a rate of .05
    assert higher >= 9
    assert sooner >= 9
    assert held >= 9  # fewer with probability .002 at .95


def test_crashed_runs_are_counted_and_the_others_compared(studies, tmp_path):
    truth = studies.Truth
    early = {0: 48, 1: -1, 2: 32, 3: 48}  # three evaluations or so: no fit
    arms = {
        "base": truth(),
        "dead": truth(last=early),
        "hurt": truth(A=0.67, last={1: 48, 3: -1}),
        "late": truth(last={2: 240}),
    }
    verdict = judge_study(StudyRecord.read(studies.write(tmp_path, arms, draw=2)))
    assert list(verdict.not_compared) == ["dead"]
    assert "none of its 4 runs could be fitted" in verdict.not_compared["dead"]
    assert "evaluations; a curve needs" in verdict.not_compared["dead"]
    assert "out of memory" in verdict.not_compared["dead"]  # of the one that has no evaluation
    pairs = verdict.pairs
    assert {name: pair.common_seeds for name, pair in pairs.items()} == {"hurt": 2, "late": 4}
    assert pairs["hurt"].differences["A"].median == pytest.approx(0.06, abs=0.02)
    base, dead, hurt, late = verdict.arms
    assert dead.quantities == {}
    assert dead.stability.outcomes == {"failed": 4}
    assert dead.stability.retried == 4
    assert dead.stability.causes == ("out of memory",)
    assert hurt.stability.outcomes == {"finished": 2, "failed": 2}
    assert [run.run.plan.seed for run in hurt.runs if run.fit] == [0, 2]
    assert late.stability.outcomes == {"finished": 3, "failed": 1}
    assert len(late.fits) == 4
    assert base.stability.retried == 0
    few = next(text for text in verdict.cautions if text.startswith("Fewer than 3 seeds"))
    assert "dead (0) and hurt (2)" in few


def test_nothing_is_compared_with_a_base_that_cannot_be_fitted(studies, tmp_path):
    gone = studies.Truth(last=dict.fromkeys(range(3), -1))
    path = studies.write(tmp_path / "a", {"base": gone, "x": studies.Truth()}, seeds=3)
    verdict = judge_study(StudyRecord.read(path))
    assert verdict.comparison is None
    assert verdict.pairs == {}
    assert verdict.not_compared["x"] == "no run of base could be fitted"
    assert list(verdict.not_compared) == ["base", "x"]
    assert verdict.arms[1].quantities["A"].median > 0.5
    assert json.loads(json.dumps(verdict.to_json()))["comparison"] is None
    path = studies.write(tmp_path / "b", {"base": studies.Truth(), "x": gone}, seeds=3)
    verdict = judge_study(StudyRecord.read(path))
    assert verdict.comparison is None
    assert verdict.not_compared["base"] == "no other arm could be fitted"


def test_arms_below_the_best(studies, tmp_path):
    truth = studies.Truth
    arms = {
        "base": truth(),
        "best": truth(A=0.68),
        "near": truth(A=0.675),
        # Cut short, its ceiling is anybody's guess; and where nothing was run there is nothing to say.
        "short": truth(A=0.8, C_mid=9000.0, last=dict.fromkeys(range(4), 112)),
        "gone": truth(last=dict.fromkeys(range(4), -1)),
    }
    found = below_best(StudyRecord.read(studies.write(tmp_path, arms, draw=3)), "flops")
    assert list(found) == list(arms)
    assert found["base"] > 0.99
    assert 0.0 in (found["best"], found["near"])
    assert all(found[name] < 0.95 for name in ("best", "near"))
    assert found["short"] is None
    assert found["gone"] is None


def test_seeds_that_an_arm_lacks_do_not_make_it_best(studies, tmp_path):
    """An arm that ran on the best base models alone is compared on these."""
    truth = studies.Truth
    path = studies.write(tmp_path, {"base": truth(A=0.65), "lucky": truth()}, draw=4)
    runs = StudyRecord.read(path).of_arm("base")
    ceilings = [fit(run.record, x="flops").median.A for run in runs if run.record]
    poor = np.argsort(ceilings)[:2]
    last = dict.fromkeys(poor.tolist(), -1)
    path = studies.write(tmp_path / "less", {"base": truth(A=0.65), "lucky": truth(last=last)}, draw=4)
    found = judge_study(StudyRecord.read(path))
    base, lucky = found.arms
    assert lucky.quantities["A"].median > base.quantities["A"].median - 0.02
    assert found.pairs["lucky"].differences["A"].median == pytest.approx(-0.04, abs=0.015)
    assert below_best(StudyRecord.read(path), "flops")["lucky"] > 0.95


def forecast(median, low, high, share, measured, level=0.95, **rivals):
    """One judged forecast at a share of a target of 100."""
    one = FrozenForecast(
        10, "flops", 100 * share, 100.0, median, (low, high), fit={"intervals": {"level": level}}
    )
    inside = low <= measured <= high
    return JudgedForecast("a", 0, one, Outcome(EvalPoint(20, measured), inside, 1.0), rivals)


def test_scores_by_hand():
    judged = [
        forecast(0.60, 0.55, 0.65, 0.251, 0.62, **{"power law": 0.66}),  # inside; off by -.02, +.04
        forecast(0.64, 0.62, 0.66, 0.262, 0.60, **{"power law": 0.57, "last value": 0.5}),  # missed by .02
        forecast(0.58, 0.50, 0.70, 0.498, 0.61, level=0.9),
    ]
    nothing = FrozenForecast(10, "flops", 50.0, 100.0, 0.5, (0.4, 0.6))
    judged.append(JudgedForecast("a", 1, nothing, Outcome(None, None, 0.7), {}))
    quarter, half = score_forecasts(judged)
    assert (quarter.share, quarter.forecasts, half.share, half.forecasts) == (0.26, 2, 0.5, 1)
    assert quarter.coverage == 0.5
    assert quarter.width == pytest.approx((0.10 + 0.04) / 2)
    # The widths, and 2 / .05 times the .02 by which the second was missed.
    assert quarter.score == pytest.approx((0.10 + 0.04 + 40 * 0.02) / 2)
    assert quarter.bias == pytest.approx((-0.02 + 0.04) / 2)
    assert quarter.rms == pytest.approx(math.sqrt((0.0004 + 0.0016) / 2))
    assert quarter.rivals_rms == pytest.approx(
        {"power law": math.sqrt((0.0016 + 0.0009) / 2), "last value": 0.1}
    )
    assert half.score == pytest.approx(0.2)
    assert (quarter.open, half.open) == (0, 1)
    (nothing,) = score_forecasts(judged[-1:])
    assert (nothing.forecasts, nothing.open) == (0, 1)
    assert math.isnan(nothing.coverage)
    assert math.isnan(nothing.rms)


@pytest.fixture
def forecasting(studies, tmp_path):
    """A study of two arms with a forecast of every run at a quarter and at half; one of them twice."""
    path = studies.write(tmp_path, {"base": studies.Truth(), "x": studies.Truth()}, seeds=3, draw=5)
    rows = []
    for run in StudyRecord.read(path).runs:
        assert run.record
        for known in (7, 13):  # evaluations to a quarter and to half
            seen = replace(run.record, evals=run.record.evals[:known])
            rows.append({"run": run.plan.key, **freeze(seen, "flops", 10_000.0)})
        studies.lines(path / run.plan.folder / "forecasts.jsonl", [rows[-1]])
    studies.lines(path / "forecasts.jsonl", rows)
    return path


def test_forecasts_are_judged_once_and_against_rivals_of_their_time(studies, forecasting):
    study = StudyRecord.read(forecasting)
    verdict = judge_study(study)
    assert len(verdict.forecasts) == 12
    assert [(score.share, score.forecasts) for score in verdict.scores] == [(0.24, 6), (0.48, 6)]
    assert verdict.scores[1].coverage >= 4 / 6
    assert verdict.scores[1].width < verdict.scores[0].width
    for one in verdict.forecasts:
        run = next(r for r in study.runs if (r.plan.arm, r.plan.seed) == (one.arm, one.seed))
        then = next(p for p in run.record.evals if p.step == one.forecast.made_at_step)
        assert one.rivals["last value"] == then.pass_rate
        assert one.outcome.measured == run.record.evals[-1]
    # What comes after the forecast moves what was measured, and neither the forecast nor its rivals.
    run = study.runs[0]
    rows = studies.evaluations(forecasting / run.plan.folder)
    for row in rows[14:]:
        row["pass_rate"] -= 0.35
    studies.lines(forecasting / run.plan.folder / "evals.jsonl", rows)
    again = judge_study(StudyRecord.read(forecasting))
    before, after = ([f for f in v.forecasts if (f.arm, f.seed) == ("base", 0)] for v in (verdict, again))
    assert [f.rivals for f in before] == [f.rivals for f in after]
    assert [f.forecast.median for f in before] == [f.forecast.median for f in after]
    assert [f.outcome.inside for f in after] == [False, False]
    assert again.scores[1].coverage < verdict.scores[1].coverage


OPEN = Claim("not significant", 0.3, 0.6, 0.1, 7, "")
FAR = replace(OPEN, seeds=None)
HIGHER, SOONER = replace(OPEN, verdict="higher ceiling"), replace(OPEN, verdict="reaches it sooner")
AHEAD = replace(OPEN, verdict="higher at the compute seen")
VAGUE = replace(OPEN, verdict="inconclusive", why="A is open", seeds=2)
PEAKED = replace(OPEN, verdict="inconclusive", why="peaked")


@pytest.mark.parametrize(
    ("seen", "ceiling", "efficiency", "words"),
    [
        (OPEN, HIGHER, OPEN, "higher ceiling"),
        (AHEAD, OPEN, SOONER, "reaches it sooner"),
        (AHEAD, HIGHER, SOONER, "higher ceiling"),
        (OPEN, OPEN, FAR, "not significant"),
        (OPEN, VAGUE, SOONER, "reaches it sooner"),
        (AHEAD, VAGUE, OPEN, "higher at the compute seen"),
        (OPEN, VAGUE, OPEN, "inconclusive"),
        (PEAKED, PEAKED, PEAKED, "inconclusive"),
    ],
)
def test_words(seen, ceiling, efficiency, words):
    pair = Pair("x", "base", {}, 1.0, seen, ceiling, efficiency, 1.0, {}, None)
    assert kind_of(pair) == words
    # What was measured leads, and says which way.
    lower = MeasuredDifference(4, None, replace(OPEN, verdict="lower as measured"))  # type: ignore[arg-type]
    assert kind_of(pair, lower) == "lower as measured"
    assert kind_of(pair, replace(lower, claim=OPEN)) == words


def test_a_ceiling_above_what_is_known_to_be_possible_is_claimed_of_nobody(studies, tmp_path):
    # To 6.7 C_mid: at 4 the family decides the ceiling, and with it three quarters of which gain.
    base = studies.Truth(C_mid=1500)
    arms = {"base": base, "high": replace(base, A=0.75), "sooner": replace(base, C_mid=1000)}
    path = studies.write(tmp_path, arms, seeds=4)
    assert judge_study(StudyRecord.read(path)).pairs["high"].ceiling.verdict == "higher ceiling"
    for run in StudyRecord.read(path).runs:
        (path / run.plan.folder / "config.json").write_text('{"ceiling": {"value": 0.65}}')
    verdict = judge_study(StudyRecord.read(path))
    assert verdict.pairs["high"].ceiling.verdict == "inconclusive"
    assert "above the 0.650 that is known" in verdict.pairs["high"].ceiling.why
    assert verdict.pairs["sooner"].ceiling.verdict == "not significant"
    assert verdict.pairs["sooner"].efficiency.verdict == "reaches it sooner"
    assert any("above the one known beforehand in high (0.7" in text for text in verdict.cautions)


def test_an_arm_whose_change_never_acted_is_named(studies, tmp_path):
    names = "base", "twin", "third", "fourth"
    path = studies.write(tmp_path, dict.fromkeys(names, studies.Truth()), seeds=2)
    verdict = judge_study(StudyRecord.read(path))
    assert "never acted" not in {verdict.kind(name) for name in names[1:]}
    assert not any("evaluation for evaluation" in text for text in verdict.cautions)

    def repeat(arm, of):
        for seed in (0, 1):
            source = path / "runs" / of / f"seed{seed}" / "evals.jsonl"
            (path / "runs" / arm / f"seed{seed}" / "evals.jsonl").write_bytes(source.read_bytes())

    repeat("twin", "base")
    repeat("fourth", "third")
    verdict = judge_study(StudyRecord.read(path))
    assert verdict.kind("twin") == "never acted"
    assert verdict.kind("third") != "never acted"
    (said,) = [text for text in verdict.cautions if "for evaluation" in text]
    assert said.startswith("The runs of fourth and third are the same")

    # The same evaluations by other steps: what they differ in has acted.
    studies.lines(path / "runs" / "twin" / "seed1" / "steps.jsonl", [{"step": 1, "loss": 0.2}])
    assert judge_study(StudyRecord.read(path)).kind("twin") != "never acted"


def test_of_arms_that_stay_at_0_nothing_is_said_but_that(studies, tmp_path):
    steps = [({"step": 1, "reward_mean": -1.0, "loss": loss, "mean_length": 9.0},) for loss in (0.1, 0.2)]
    arms = {
        "base": studies.Truth(steps=steps[0]),
        "other loss": studies.Truth(steps=steps[1]),
        "as base": studies.Truth(steps=steps[0]),
        "learns": studies.Truth(),
    }
    path = studies.write(tmp_path, arms, seeds=2)
    for run in StudyRecord.read(path).runs:
        (path / run.plan.folder / "config.json").write_text('{"ceiling": {"value": 1.0}}')
        rows = studies.evaluations(path / run.plan.folder)
        if run.plan.arm != "learns":
            rows = [row | {"pass_rate": 0.0, "mean_p_1mp": 0.0} for row in rows]
        studies.lines(path / run.plan.folder / "evals.jsonl", rows)
    verdict = judge_study(StudyRecord.read(path))
    said = {one.arm: one.text for one in answers(verdict)}
    still = "no pass rate ever left 0.000"
    assert said["other loss"] == said["as base"] == f"{still}: the study says nothing of the arm."
    assert said["base"] == f"what the others are compared with: {still}."
    assert set(verdict.pairs) == {"learns"}
    assert verdict.kind("as base") == verdict.kind("other loss") == "not compared"
    assert verdict.measured["learns"].claim.verdict == "higher as measured"
    unsolved, *others = verdict.cautions
    assert unsolved.startswith("No held-out prompt was ever solved in base, other loss and as base: ")
    others = " ".join(others)
    assert "evaluation for evaluation" not in others
    assert not any(f"{name}: the runs reach" in others for name in ("base", "other loss", "as base"))
    assert "lies below the one known beforehand in learns (" in others

    # Without an arm that moved there is no comparison at all.
    plan = json.loads((path / "study.json").read_text())
    plan |= {"arms": plan["arms"][:3], "runs": [run for run in plan["runs"] if run["arm"] != "learns"]}
    (path / "study.json").write_text(json.dumps(plan))
    verdict = judge_study(StudyRecord.read(path))
    assert verdict.comparison is None
    assert verdict.not_compared == dict.fromkeys(("base", "other loss", "as base"), still)
    page = study_document(verdict, path, []).html()
    assert "No held-out prompt was ever solved" in page
    assert "C_mid, less than" not in page
