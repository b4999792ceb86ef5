"""Every figure of the run's health by hand, its thresholds, and what is said when."""

import json
import math
from dataclasses import replace

import pytest

from scalerl.errors import InputError
from scalerl.jsonl import dumps
from scalerl.record.evaluation import EvalPoint
from scalerl.rl.config.health import Health
from scalerl.rl.config.recipe import from_dict, load_recipe
from scalerl.rl.health.figures import FIGURES
from scalerl.rl.health.watch import Watch


def thresholds_of(name, **changes):
    """The default thresholds of a figure, but for `changes`."""
    return replace(FIGURES[name].thresholds, **changes)


def figure_of(name, precision="float32", **changes):
    return replace(FIGURES[name], thresholds=thresholds_of(name, **changes)).of(precision)


def rows_of(key, values):
    return [{key: value} for value in values]


# -- the figures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["truncated", "ratio_clipped", "zero_variance"])
def test_shares_are_means_over_the_window(key):
    figure = FIGURES[key]
    values = [1.0, *[0.1] * 5, *[0.3] * 5]
    assert math.isnan(figure(rows_of(key, values[:9])))  # the window is 10
    assert figure(rows_of(key, values)) == pytest.approx(0.2)
    gaps = [*rows_of(key, [*values[:4], math.nan, None, *values[4:]]), {}]
    assert figure(gaps) == pytest.approx(0.2)  # steps without the figure do not count


def test_the_gap_is_a_mean_over_the_tokens_of_the_latest_probes():
    probes = [(9.0, 50), (0.1, 10), (0.4, 20), (0.1, 10)]
    rows = [{"logp_gap": gap, "probe_tokens": n} for gap, n in probes] + [{}]
    assert FIGURES["logp_gap"](rows) == pytest.approx((1 + 8 + 1) / 40)
    assert math.isnan(FIGURES["logp_gap"]([{}]))


def test_the_thresholds_of_the_gap_follow_the_precision():
    def of(precision, **given):
        thresholds = figure_of("logp_gap", precision, **given).thresholds
        return thresholds.warning, thresholds.alarm

    assert of("float32") == (2e-5, 2e-4)
    assert of("tf32") == (2e-3, 2e-2)
    assert of("bfloat16") == (0.03, 0.1)
    assert of("bfloat16", alarm=0.01) == (0.01, 0.01)
    assert of("float32", warning=0.5) == (0.5, 0.5)
    assert of("float32", warning=0.01, alarm=0.2) == (0.01, 0.2)


def test_sampling_and_head_are_in_standard_errors():
    rows = [{"rank": 0.4, "rank_variance": 0.04, "probe_tokens": n} for n in (40, 60)]
    assert FIGURES["sampling"](rows) == pytest.approx(0.1 * 100 / math.sqrt(100 * 0.04))  # 5
    assert math.isnan(FIGURES["sampling"](rows[:1]))  # too few tokens that could have been others
    rows = [{"head_gap": gap, "head_gap_rms": 0.02, "probe_tokens": 50} for gap in (0.02, 0.01)]
    assert FIGURES["head"](rows) == pytest.approx((1.0 + 0.5) / (0.02 * math.sqrt(100)))
    assert FIGURES["head"](rows_of("logp_gap", [0.1])) != FIGURES["head"](rows)
    negative = [{"head_gap": -0.01, "head_gap_rms": 0.02, "probe_tokens": 50}]
    assert FIGURES["head"](negative) == 0


def test_lengths_are_compared_window_by_window():
    figure = figure_of("length_drift", window=2)
    assert figure(rows_of("mean_length", [9, 4, 6, 10, 15])) == pytest.approx(12.5 / 5)
    assert figure(rows_of("mean_length", [10, 15, 4, 6])) == pytest.approx(12.5 / 5)  # shorter is drift too
    assert figure(rows_of("mean_length", [5, 5, 0, 0])) == 5
    assert math.isnan(figure(rows_of("mean_length", [5, 5, 5])))


def test_a_spike_of_the_gradient_is_none_of_its_level():
    usual = [1.0, 2.0, 3.0] * 10
    assert FIGURES["grad_norm"](rows_of("grad_norm", [*usual, 90.0, 2.0, 2.0, 2.0, 2.0])) == 1
    assert FIGURES["grad_norm"](rows_of("grad_norm", [*usual, 90.0, 2.0, 70.0, 80.0, 2.0])) == 35
    assert math.isnan(FIGURES["grad_norm"](rows_of("grad_norm", usual[:14])))


def test_drops_are_from_the_best():
    figure = figure_of("reward_drop", window=2)
    assert figure(rows_of("correct", [0.1, 0.6, 0.8, 0.4, 0.2])) == pytest.approx(0.7 - 0.3)
    assert figure(rows_of("correct", [0.1, 0.6, 0.8])) == 0
    points = [{"pass_rate": p, "noise_sd": 0.003} for p in (0.5, 0.8, 0.7)]
    assert FIGURES["pass_rate_drop"](points) == pytest.approx(0.1 - 3 * math.hypot(0.003, 0.003))
    assert FIGURES["pass_rate_drop"](points[:2]) == 0
    assert math.isnan(FIGURES["pass_rate_drop"](points[:1]))


def test_failed_verifications_are_a_share_of_what_was_consumed():
    rows = [{"failed": {"timeout": 1, "died": 2}, "completions": 20}, {"failed": {}, "completions": 30}] * 3
    assert figure_of("failed", window=2)(rows) == pytest.approx(0.075)


def test_what_is_not_finite_is_counted():
    row = {
        "skipped": False,
        "loss": 1.0,
        "entropy": 0.1,
        "ratio_mean": math.inf,
        "ess": None,
        "grad_norm": 2.0,
    }
    assert FIGURES["non_finite"]([row]) == 2
    assert FIGURES["non_finite"]([row | {"ratio_mean": 1.0, "ess": 1.0}]) == 0
    assert FIGURES["non_finite"]([row | {"skipped": True, "loss": math.nan}]) == 0


# -- the recipe ---------------------------------------------------------------------------------------------


def test_thresholds_are_set_one_by_one():
    recipe = load_recipe("demo", ["health.truncated.alarm=0.2", "health.on_alarm=pause"])
    assert recipe.health == Health(on_alarm="pause", truncated=thresholds_of("truncated", alarm=0.2))
    assert recipe.health.truncated.warning == 0.05
    assert from_dict(json.loads(dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("health.trucated.alarm=0.2", "unknown key 'health.trucated'; did you mean 'health.truncated'"),
        ("health.truncated.allarm=0.2", "unknown key 'health.truncated.allarm'; did you mean"),
        ("health.on_alarm=stop", "health.on_alarm: found 'stop', expected 'warn' or 'pause'"),
        ("health.truncated.alarm=0.01", "health.truncated: thresholds must be .* alarm at or above warning"),
        ("health.ess.alarm=0.9", "health.ess: thresholds must be .* alarm at or below warning"),
        ("health.ess.alarm=inf", "health.ess: thresholds must be positive and finite"),
        ("health.zero_variance.window=0", "health.zero_variance: window must be 1 to 100 steps"),
        ("health.logp_gap.alarm=-1", "health.logp_gap: thresholds must not be negative"),
        ("health.probe=-1", "health: probe must not be negative"),
    ],
)
def test_a_wrong_threshold_is_one_line(override, message):
    with pytest.raises(InputError, match=message):
        load_recipe("demo", [override])


def test_a_wrong_threshold_is_refused_in_python_too():
    with pytest.raises(ValueError, match="alarm at or above warning"):
        Health(truncated=thresholds_of("truncated", alarm=0.01))


# -- what is said -------------------------------------------------------------------------------------------


def watch_of(precision="float32", **health):
    said = []
    return Watch(Health(**health), precision, said.append), said


def line(step, **figures):
    """A line of steps.jsonl of a run that is well, but for `figures`."""
    well = {"loss": 0.1, "entropy": 0.3, "ratio_mean": 1.0, "ess": 0.99, "grad_norm": 1.0}
    return {"step": step, "skipped": False, "truncated": 0.0, **well, **figures}


def said_of(values, **health):
    """What is said of truncation, step by step, with a window of one step."""
    watch, said = watch_of(truncated=thresholds_of("truncated", window=1), **health)
    for step, value in enumerate(values, start=1):
        watch.step(line(step, truncated=value))
    return [(finding.step, finding.level, finding.over, finding.since) for finding in said]


def test_an_alarm_is_told_once_and_so_is_its_end():
    values = [0.0, 0.12, 0.2, 0.09, 0.11, 0.04, 0.0]
    assert said_of(values) == [(2, "alarm", False, 2), (6, "alarm", True, 2)]


def test_a_warning_becomes_an_alarm():
    values = [0.06, 0.07, 0.15, 0.06, 0.02]
    assert said_of(values) == [(1, "warning", False, 1), (3, "alarm", False, 3), (5, "alarm", True, 3)]


def test_a_value_at_the_threshold_does_not_come_and_go():
    values = [0.051, 0.049, 0.051, 0.045, 0.041, 0.051, 0.039, 0.049, 0.051]
    assert said_of(values) == [(1, "warning", False, 1), (7, "warning", True, 1), (9, "warning", False, 9)]


def test_what_is_low_can_be_bad():
    watch, said = watch_of(ess=thresholds_of("ess", window=1))
    for step, ess in enumerate([0.9, 0.45, 0.2, 0.1, 0.4, 0.55, 0.7], start=1):
        watch.step(line(step, ess=ess))
    assert [str(finding) for finding in said] == [
        "step 2: warning: effective sample size 0.45, threshold 0.5",
        "step 3: alarm: effective sample size 0.2, threshold 0.3",
        "step 6: alarm of step 3 is over: effective sample size 0.55",
    ]
    assert said[-1].worst == 0.1


def test_nothing_is_said_of_a_run_that_is_well_or_of_what_is_not_known():
    watch, said = watch_of()
    for step in range(1, 200):
        watch.step(line(step, mean_length=10 + step / 20, correct=step / 200, zero_variance=0.3))
    watch.step({"step": 200, "skipped": True})
    assert said == []


def test_a_figure_that_is_not_finite_is_an_alarm_of_one_step():
    watch, said = watch_of(on_alarm="pause")
    watch.step(line(1, ratio_mean=math.inf))
    watch.step(line(2))
    assert [str(finding) for finding in said] == [
        "step 1: alarm: number of figures that are not finite 1, threshold 1",
        "step 2: alarm of step 1 is over: number of figures that are not finite 0",
    ]
    assert watch.pause_for is said[0]


def test_a_warning_pauses_nothing():
    watch, said = watch_of(on_alarm="pause", truncated=thresholds_of("truncated", window=1))
    watch.step(line(1, truncated=0.07))
    assert len(said) == 1
    assert watch.pause_for is None


def test_evaluations_that_fall_by_more_than_their_noise():
    watch, said = watch_of()
    for step, rate in enumerate([0.3, 0.6, 0.59, 0.5]):
        watch.evaluation(EvalPoint(step, rate, n_prompts=1000, n_samples=4, mean_p_1mp=0.2))
    # One standard error of an evaluation is sqrt(.2 / 4000) = .00707: .1 - 3 sqrt(2) .00707 = .07.
    assert [str(finding) for finding in said] == [
        "step 3: alarm: drop of the held-out pass rate 0.07, threshold 0.05"
    ]


def test_a_restored_watch_goes_on_where_it_was():
    values = [0.0, 0.12, 0.2, 0.09, 0.3, 0.04, 0.15]
    whole, told = watch_of(truncated=thresholds_of("truncated", window=2))
    for step, value in enumerate(values, start=1):
        whole.step(line(step, truncated=value))
    first, before = watch_of(truncated=thresholds_of("truncated", window=2), on_alarm="pause")
    for step, value in enumerate(values[:3], start=1):
        first.step(line(step, truncated=value))
    assert first.pause_for is not None
    second, after = watch_of(truncated=thresholds_of("truncated", window=2), on_alarm="pause")
    second.restore(json.loads(dumps(first.state())))
    for step, value in enumerate(values[3:], start=4):
        second.step(line(step, truncated=value))
    assert before + after == told
    assert second.pause_for is None  # whoever resumed has seen the alarm
