"""The Optuna pruner in real studies of simulated trials."""

import functools
import math

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from scalerl.curve import LOG_LOGISTIC, Curve, Points, Weibull, fit
from scalerl.curve.answers import MIN_EVALUATIONS
from scalerl.errors import InputError
from scalerl.integrations import ForecastPruner
from scalerl.integrations.rule import Rule

BUDGET, TRIALS = 600, 16
STEPS = np.arange(0, BUDGET + 1, 20)


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def curves(seed=0):
    """Ceiling, C_mid and shape of every trial."""
    rng = np.random.default_rng(seed)
    return [
        Curve((LOG_LOGISTIC, Weibull())[i % 2], 0.3 + gain, 1.7, mid, 0.3)
        for i, (gain, mid) in enumerate(
            zip(rng.uniform(0.1, 0.4, TRIALS), rng.uniform(40, 250, TRIALS), strict=True)
        )
    ]


def objective(trial):
    """Stands for training: it reports after every evaluation, and gives up when told to."""
    curve = curves()[trial.number]
    rng = np.random.default_rng([1, trial.number])
    pass_rate = math.nan
    for step in STEPS:
        pass_rate = float(curve(step) + rng.normal(0, 0.004))
        trial.report(pass_rate, int(step))
        if trial.should_prune():
            raise optuna.TrialPruned
    return pass_rate


@functools.cache
def study_of(early=False):
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=ForecastPruner(BUDGET, early=early),
    )
    study.optimize(objective, n_trials=TRIALS)
    return study


def identified(values):
    return fit(Points.from_arrays(list(values), list(values.values()))).identified


def test_hopeless_trials_are_pruned_once_identified_and_the_best_never():
    study = study_of()
    end = [float(curve(BUDGET)) for curve in curves()]
    best = int(np.argmax(end))
    pruned = study.get_trials(states=(TrialState.PRUNED,))
    assert len(pruned) >= TRIALS // 4
    assert study.best_trial.number == best
    for trial in pruned:
        assert MIN_EVALUATIONS <= len(trial.intermediate_values) < len(STEPS)
        assert identified(Rule(BUDGET).looked_at(trial.intermediate_values))
        rivals = [t for t in study.get_trials(states=(TrialState.COMPLETE,)) if t.number < trial.number]
        assert end[trial.number] < max(end[t.number] for t in rivals)


def test_early_pruning_saves_more_and_keeps_the_best():
    def steps(study):
        return sum(max(t.intermediate_values) for t in study.trials)

    late, early = study_of(), study_of(early=True)
    assert steps(early) < 0.9 * steps(late) < 0.9 * TRIALS * BUDGET
    assert early.best_trial.number == late.best_trial.number


def ask_with(study, values):
    trial = study.ask()
    for step, value in values.items():
        trial.report(value, step)
    return trial


def rise(A, until=BUDGET):
    curve = Curve(LOG_LOGISTIC, A, 1.8, 60.0, 0.3)
    wiggle = 0.003 * np.cos(np.arange(len(STEPS)) ** 2)
    return {int(c): float(curve(float(c)) + w) for c, w in zip(STEPS, wiggle, strict=True) if c <= until}


@pytest.mark.parametrize(
    "state", [TrialState.COMPLETE, TrialState.RUNNING, TrialState.PRUNED, TrialState.FAIL]
)
def test_only_what_may_still_win_is_a_rival(state):
    study = optuna.create_study(direction="maximize", pruner=ForecastPruner(BUDGET))
    rival = ask_with(study, rise(0.7))
    if state == TrialState.COMPLETE:
        study.tell(rival, 0.7)
    elif state != TrialState.RUNNING:
        study.tell(rival, state=state)
    hopeless = ask_with(study, rise(0.5, until=300) | {310: math.nan})
    assert hopeless.should_prune() == (state in (TrialState.COMPLETE, TrialState.RUNNING))


def test_a_study_that_minimises_is_refused():
    study = optuna.create_study(direction="minimize", pruner=ForecastPruner(BUDGET))
    with pytest.raises(InputError, match="to be maximised"):
        ask_with(study, {0: 0.5}).should_prune()


def test_percent_are_refused():
    study = optuna.create_study(direction="maximize", pruner=ForecastPruner(BUDGET))
    with pytest.raises(InputError, match=r"trial 0, point 1: .*percent"):
        ask_with(study, {0: 35.0}).should_prune()


def test_bad_options_are_refused():
    with pytest.raises(InputError, match="the budget must be the compute of a whole trial"):
        ForecastPruner(budget=-1)
