"""The rule behind the pruner and the scheduler: when a trial is hopeless, and what is never stopped."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.curve.answers import MIN_EVALUATIONS
from scalerl.errors import InputError
from scalerl.integrations.rule import GROWTH, UNKNOWN, Rule, Sweep

BUDGET = 400
STEPS = np.arange(0, BUDGET + 1, 10)


def trial(A, C_mid=50.0, until=BUDGET, seed=0, sd=0.005):
    """Evaluations of a simulated trial, every 10 up to `until`."""
    curve = Curve(LOG_LOGISTIC, A, 1.8, C_mid, 0.3)
    noise_N = np.random.default_rng([seed, round(1000 * A)]).normal(0, sd, len(STEPS))
    value_N = np.clip(curve(STEPS) + noise_N, 0, 1)
    return {int(c): float(v) for c, v in zip(STEPS, value_N, strict=True) if c <= until}


BEST = trial(0.70)


def test_a_reach_holds_what_the_trial_will_reach():
    rule = Rule(BUDGET)
    end = Curve(LOG_LOGISTIC, 0.5, 1.8, 50.0, 0.3)(BUDGET)
    reach = rule.reach(rule.points(trial(0.5, until=200)))
    assert 0.3 < reach.low < end < reach.high < 0.6
    narrow = Rule(BUDGET, level=0.5)
    inner = narrow.reach(narrow.points(trial(0.5, until=200)))
    assert reach.low < inner.low < inner.high < reach.high
    result = fit(rule.points(trial(0.5, until=200)))
    assert result.forecast(BUDGET).interval == (reach.low, reach.high)


def test_it_is_hopeless_once_its_ceiling_is_identified_and_not_before():
    own, sweep = trial(0.5), Sweep(Rule(BUDGET))
    said = {c: sweep.hopeless(1, {k: v for k, v in own.items() if k <= c}, {0: BEST}) for c in own}
    first = min(c for c in said if said[c])
    why = str(said[first])
    assert why.startswith("at 400 it reaches at most 0.5")
    assert "trial 0 at least 0.6" in why
    for compute in (c for c in own if c >= 10 * MIN_EVALUATIONS):
        points = Points.from_arrays([c for c in own if c <= compute], [own[c] for c in own if c <= compute])
        if compute < first / GROWTH:
            assert not fit(points).identified
        if compute == first:
            assert fit(points).identified
    assert said[BUDGET] is None  # at its end there is nothing to save


def test_early_it_does_not_wait_for_the_ceiling():
    own = trial(0.5, C_mid=200, until=200)
    assert not fit(Rule(BUDGET).points(own)).identified
    assert Sweep(Rule(BUDGET)).hopeless(1, own, {0: BEST}) is None
    assert Sweep(Rule(BUDGET, early=True)).hopeless(1, own, {0: BEST})


def test_the_leader_is_never_hopeless_whatever_the_margin():
    others = {name: trial(A, until=300) for name, A in enumerate((0.5, 0.505, 0.51, 0.515))}
    for margin in (0.0, 0.05, 0.5):
        sweep = Sweep(Rule(BUDGET, margin))
        left = [name for name, values in others.items() if not sweep.hopeless(name, values, others)]
        assert left
        lows = {name: sweep.reach(name, values).low for name, values in others.items()}
        assert max(lows, key=lambda name: lows[name]) in left
        if margin == 0.5:
            assert len(left) == 1


def test_a_margin_stops_more_and_a_negative_one_fewer():
    own, best = trial(0.6, until=300), trial(0.62)
    verdicts = [bool(Sweep(Rule(BUDGET, m)).hopeless(1, own, {0: best})) for m in (-0.1, 0.0, 0.1)]
    assert verdicts == sorted(verdicts)
    assert verdicts[0] != verdicts[2]


@pytest.mark.parametrize(
    "values",
    [
        {c: 0.6 - c / 1000 for c in range(0, 300, 10)},  # falls
        {c: (0.45 + c / 2000 if c <= 150 else 0.6 - c / 2000) for c in range(0, 300, 10)},  # peaks
        trial(0.5, until=60),  # too few
    ],
)
def test_what_cannot_be_fitted_is_neither_stopped_nor_a_bar(values):
    sweep = Sweep(Rule(BUDGET, early=True))
    assert sweep.hopeless(1, values, {0: BEST}) is None
    assert sweep.reach(1, values) == UNKNOWN
    assert sweep.hopeless(0, trial(0.35, until=300), {1: values}) is None


def test_a_flat_trial_is_forecast_flat_and_its_ceiling_is_open():
    """So it is a bar, is stopped early, and is not stopped while the ceiling is waited for."""
    noise_N = np.random.default_rng(0).normal(0, 0.005, 30)
    flat = {10 * n: 0.4 + float(noise) for n, noise in enumerate(noise_N)}
    sweep, early = Sweep(Rule(BUDGET)), Sweep(Rule(BUDGET, early=True))
    assert sweep.reach(1, flat).high == math.inf
    assert 0.38 < early.reach(1, flat).low < 0.4 < early.reach(1, flat).high < 0.6
    assert sweep.hopeless(1, flat, {0: BEST}) is None
    assert early.hopeless(1, flat, {0: BEST})
    assert early.hopeless(0, trial(0.35, until=300), {1: flat})


def test_nan_is_skipped():
    own = trial(0.5, until=250)
    sweep = Sweep(Rule(BUDGET))
    assert sweep.hopeless(1, own | {15: math.nan, 255: math.nan}, {0: BEST}) == sweep.hopeless(
        2, own, {0: BEST}
    )
    assert sweep.hopeless(3, {10: math.nan}, {0: BEST}) is None
    assert sweep.hopeless(4, {}, {0: BEST}) is None


def test_a_fit_is_made_when_the_compute_has_grown():
    rule = Rule(BUDGET)
    assert max(rule.looked_at(BEST)) == BUDGET
    looks = [max(rule.looked_at({k: v for k, v in BEST.items() if k <= c})) for c in BEST if c]
    assert looks == sorted(looks)
    at = sorted(set(looks))
    assert len(at) < len(STEPS) / 2
    assert all(later / sooner < GROWTH**2 for sooner, later in itertools.pairwise(at) if sooner > 50)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": 0}, "above 0, found 0"),
        ({"budget": "x"}, "the budget must be a number, found 'x'"),
        ({"budget": 1, "margin": "x"}, "the margin must be a number, found 'x'"),
        ({"budget": 1, "noise_sd": "x"}, "the noise must be a number, found 'x'"),
        ({"budget": 1, "level": None}, "level of the intervals must be a number, found None"),
        ({"budget": math.inf}, "above 0, found inf"),
        ({"budget": 1, "margin": 1.5}, "found 1.5"),
        ({"budget": 1, "level": 95}, "between 0 and 1, found 95"),
        ({"budget": 1, "noise_sd": -1}, "of pass rates in .*; found -1"),
        ({"budget": 1, "noise_sd": math.nan}, "found nan"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        Rule(**options)


def test_percent_are_refused_at_the_first_evaluation():
    with pytest.raises(InputError, match=r"trial 7, point 1: .*divide by 100"):
        Sweep(Rule(BUDGET)).hopeless(7, {10: 45.0}, {})


def test_the_rule_loads_no_tool():
    code = (
        "import sys, scalerl.integrations, scalerl.integrations.rule\n"
        "assert not {'optuna', 'ray', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
