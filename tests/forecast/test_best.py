"""The best evaluation of a run: by the smooth curve, on runs whose truth is known."""

import numpy as np
import pytest

from scalerl.errors import CannotAnswerError
from scalerl.forecast.best import SmoothedRun, rates_by_step, smoothed, smoothed_draws
from scalerl.record.evaluation import EvalPoint
from scalerl.record.reader import RunRecord

NOISE = np.geomspace(0.2, 2.0, 7) * 0.015
SHARE = np.linspace(0.0, 1.0, 16)


def rise(u):
    return 0.25 + 0.45 / (1 + (0.2 / np.maximum(u, 1e-9)) ** 1.5)


SHAPES = {
    "rises": rise(SHARE),
    "declines": rise(SHARE) - 0.25 * np.maximum(SHARE - 0.5, 0) / 0.5,
    "declines early": rise(SHARE) * np.exp(-0.8 * np.maximum(SHARE - 0.25, 0)),
    "collapses": rise(SHARE) - 0.4 / (1 + np.exp(-(SHARE - 0.8) / 0.02)),
}


def runs(shape, sd, n=6):
    draw = np.random.default_rng(3)
    for _ in range(n):
        rates = SHAPES[shape] + sd * draw.normal(size=len(SHARE))
        yield rates, SmoothedRun(np.arange(len(SHARE)), smoothed_draws(SHARE, rates, NOISE))


def test_a_run_that_rises_says_the_last():
    assert [found.best() for _, found in runs("rises", 0.008)] == [len(SHARE) - 1] * 6


@pytest.mark.parametrize("shape", ["declines", "declines early", "collapses"])
def test_a_run_that_fell_says_its_peak_and_is_sure_of_it(shape):
    truth, last = SHAPES[shape], len(SHARE) - 1
    lost, lucky = [], []
    for rates, found in runs(shape, 0.02):
        best = found.best()
        assert found.probability_better(best, last) > 0.95
        lost.append(truth.max() - truth[best])
        lucky.append(truth.max() - truth[rates.argmax()])
    # Measured: .001 to .006, and .003 to .008 of the luckiest evaluation; the last ones are .16 to .37 below.
    assert np.mean(lost) < 0.012
    assert np.mean(lost) <= np.mean(lucky) + 0.002


def test_the_rates_without_noise_are_nearer_to_the_truth_than_those_measured():
    for shape, truth in SHAPES.items():
        if shape == "collapses":  # a step between two evaluations: nothing to average over
            continue
        pairs = [
            (np.mean((found.rate_N - truth) ** 2), np.mean((y - truth) ** 2))
            for y, found in runs(shape, 0.02)
        ]
        smooth, measured = np.mean(pairs, axis=0)
        assert smooth < 0.75 * measured, shape


def test_intervals_hold_the_truth():
    inside = [
        low <= truth <= high
        for shape in ("rises", "declines")
        for _, found in runs(shape, 0.02)
        for place, truth in enumerate(SHAPES[shape])
        for low, high in [found.interval(place)]
    ]
    assert np.mean(inside) > 0.88


def record_of(rates, tmp_path, **more):
    evals = [EvalPoint(step=10 * i, pass_rate=rate, **more) for i, rate in enumerate(rates)]
    return RunRecord(tmp_path, {"name": "run"}, tuple(evals))


def test_only_steps_that_may_be_chosen_are(tmp_path):
    record = record_of(SHAPES["declines"], tmp_path, n_prompts=100, n_samples=4, mean_p_1mp=0.1)
    found = smoothed(record, "steps")
    peak = 10 * int(SHAPES["declines"].argmax())
    assert abs(found.step_N[found.best()] - peak) <= 10
    assert found.step_N[found.best({20, 150})] == 150
    with pytest.raises(CannotAnswerError, match="any of these steps"):
        found.best({7})


@pytest.mark.parametrize("rates", [[0.3], [0.3, 0.3], [0.0, 0.0, 0.0], [1.0] * 5, [0.2, 0.9, 0.1]])
def test_odd_runs_have_rates_too(rates, tmp_path):
    found = rates_by_step(record_of(rates, tmp_path))
    assert list(found) == [10 * i for i in range(len(rates))]
    assert all(0 <= rate <= 1 for rate in found.values())


def test_several_evaluations_of_one_model_have_rates(tmp_path):
    evals = tuple(EvalPoint(step=0, pass_rate=rate) for rate in (0.2, 0.3, 0.25))
    assert smoothed(RunRecord(tmp_path, {}, evals), "steps").rate_N == pytest.approx([0.25] * 3, abs=0.06)
