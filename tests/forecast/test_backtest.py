import json
import tracemalloc
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from scalerl import EvalPoint, InputError, RunWriter
from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve, Points, fit
from scalerl.forecast.backtest import backtest
from scalerl.forecast.backtest_result import OURS
from scalerl.forecast.paper import paper_fit
from scalerl.record.left_out import LeftOut, Omitted

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40)


def a_run(n=25, top=10_000.0, sd=0.004, seed=0, truth=TRUTH, source="run"):
    compute_N = np.linspace(0, top, n)
    noise_N = np.random.default_rng(seed).normal(0, sd, n)
    return Points.from_arrays(compute_N, truth(compute_N) + noise_N, source=source)


def errors(test, *args, **kwargs):
    score = test.point_score(*args, **kwargs)
    assert score is not None
    return score


def intervals(test, fraction, **kwargs):
    score = test.interval_score(OURS, fraction, **kwargs)
    assert score is not None
    return score


def test_without_noise_the_rest_is_forecast_and_the_rivals_err_as_by_hand():
    exact = a_run(sd=0.0)
    test = backtest([exact], fractions=[0.75])
    assert errors(test, OURS, 0.75).median_abs < 5e-4
    (cut,) = test.cuts
    # 25 evaluations, one every 416.7: the cut at 7,500 sees 19, of which the last is right at the cut.
    assert (cut.n_fitted, cut.outcome) == (19, "forecast")
    last = errors(test, "last value", 0.75, end=True)
    assert last.bias == pytest.approx(float(TRUTH(7500.0) - TRUTH(10_000.0)), abs=1e-12)
    assert errors(test, "least squares (log-logistic)", 0.75).rms < 1e-6
    assert cut.later is not None
    seen = exact.compute_N[1:19]
    slope, level = np.polyfit(np.log(seen), TRUTH(seen), 1)
    np.testing.assert_allclose(cut.later.point_M["log-linear"], level + slope * np.log(exact.compute_N[19:]))


def test_nothing_after_the_cut_is_seen():
    run = a_run()
    changed = replace(run, pass_rate_N=np.where(run.compute_N > 5000, 0.9, run.pass_rate_N))
    plain, other = (backtest([points], fractions=[0.5]).cuts[0].later for points in (run, changed))
    assert plain is not None
    assert other is not None
    for name, point_M in plain.point_M.items():
        np.testing.assert_array_equal(point_M, other.point_M[name])
    np.testing.assert_array_equal(plain.high_M[OURS], other.high_M[OURS])


def test_a_run_is_counted_once():
    run = a_run()
    mixed = run.select(np.random.default_rng(3).permutation(len(run)))
    again = replace(mixed, source="again")
    one, three = backtest([run], fractions=[0.5]), backtest([run, run, again], fractions=[0.5])
    assert three.dropped == ("run", "again")
    assert three.to_json()["pooled"] == one.to_json()["pooled"]
    assert "again" in str(three)


def test_what_cannot_be_answered_is_counted():
    flat = Points.from_arrays(np.arange(20.0), np.full(20, 0.5) + 0.001 * (np.arange(20) % 2), source="flat")
    test = backtest([a_run(top=20_000.0, sd=0.002), flat], fractions=[1 / 10, 3 / 4])
    fates = [(cut.source, cut.fraction, cut.outcome) for cut in test.cuts]
    assert fates == [
        ("run", 1 / 10, "cannot answer"),
        ("run", 3 / 4, "forecast"),
        ("flat", 1 / 10, "cannot answer"),
        ("flat", 3 / 4, "too early"),
    ]
    assert test.point_score(OURS, 1 / 10) is None
    assert test.cuts[2].why.startswith("2 evaluations")
    text = str(test)
    assert "first 1/10 of the compute: 0 forecast, 0 too early, 2 cannot answer" in text
    assert "1 x cannot answer: 2 evaluations" in text
    json.dumps(test.to_json(), allow_nan=False)


def test_what_a_log_left_out_is_no_reason_at_a_cut_before_it():
    left_out = LeftOut.of([Omitted("superseded", 20)])
    (cut,) = backtest([replace(a_run(), left_out=left_out)], fractions=[1 / 10]).cuts
    assert (cut.outcome, cut.why) == ("cannot answer", "3 evaluations; a curve needs at least 4")


def test_too_early_is_apart_and_still_scored():
    test = backtest([a_run(seed=1)], fractions=[1 / 4])
    assert test.cuts[0].outcome == "too early"
    assert errors(test, OURS, 1 / 4, "too early", end=True).runs == 1
    assert test.point_score(OURS, 1 / 4, "forecast") is None


def test_every_run_weighs_alike_however_often_it_was_evaluated():
    runs = [a_run(n=13, seed=2), a_run(n=49, seed=3)]
    pooled = backtest(runs, fractions=[0.5])
    alone = [backtest([run], fractions=[0.5]) for run in runs]
    for end in (False, True):
        both = errors(pooled, OURS, 0.5, end=end)
        each = [errors(test, OURS, 0.5, end=end) for test in alone]
        assert both.bias == pytest.approx(np.mean([score.bias for score in each]))
        assert both.rms**2 == pytest.approx(np.mean([score.rms**2 for score in each]))
    widths = [intervals(test, 0.5).width for test in alone]
    assert intervals(pooled, 0.5).width == pytest.approx(np.mean(widths))


def test_repeated_evaluations_at_the_end_are_the_end():
    run = a_run()
    twice = Points.from_arrays(np.append(run.compute_N, 10_000.0), np.append(run.pass_rate_N, 0.59))
    score = errors(backtest([twice], fractions=[0.5]), "last value", 0.5, end=True)
    last = run.pass_rate_N[run.compute_N == 5000.0][0]
    assert score.bias == pytest.approx(last - (run.pass_rate_N[-1] + 0.59) / 2)
    assert score.median_abs == pytest.approx(np.mean(np.abs(last - np.array([run.pass_rate_N[-1], 0.59]))))


def test_intervals_of_simulated_runs_hold_what_they_say():
    """20 log-logistic runs to 3.9 C_mid, cut at half: at .95, 20 ends miss more than three with p = .016."""
    runs = [a_run(n=31, sd=0.006, seed=100 + seed) for seed in range(20)]
    score = intervals(backtest(runs, fractions=[0.5]), 0.5, end=True)
    assert score.coverage >= 17 / 20
    assert score.width < 0.15
    assert score.crps < 0.02


def test_the_crps_is_that_of_the_posterior_with_its_noise():
    """Against a sample: every node of the posterior, with 15 quantiles of the noise about it."""
    run = a_run(seed=4)
    later = backtest([run], fractions=[0.5]).cuts[0].later
    result, measured = fit(run.select(run.compute_N <= 5000)), run.pass_rate_N[-1]
    noise = [result.noise.sd * NormalDist().inv_cdf((i + 0.5) / 15) for i in range(15)]
    value = (result.posterior.curve_at(10_000.0).ravel()[:, None] + noise).ravel()
    weight, order = np.repeat(result.posterior.weight.ravel(), 15) / 15, np.argsort(value)
    # E|X - y| - E|X - X'| / 2, the latter the integral of F (1 - F), F constant between neighbours.
    below = np.cumsum(weight[order])[:-1]
    exact = weight @ np.abs(value - measured) - np.sum(below * (1 - below) * np.diff(value[order]))
    assert later.crps_M[OURS][-1] == pytest.approx(exact, rel=0.02)


def test_a_long_run_is_forecast_at_few_computes_and_scored_at_all():
    """5,000 later evaluations: each has the fit's own forecast, and all of them fit into little memory."""
    run = a_run(n=10_001, sd=0.006)
    tracemalloc.start()
    (cut,) = backtest([run], fractions=[0.5]).cuts
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150e6  # a curve of the posterior for every evaluation would take 330e6, some times over
    assert cut.later is not None
    assert len(cut.later.crps_M[OURS]) == 5000
    result = fit(run.select(run.compute_N <= 5000))
    for i in (0, 7, 1111, 4999):
        forecast = result.forecast(float(cut.later.compute_M[i]))
        assert cut.later.point_M[OURS][i] == pytest.approx(forecast.median, abs=2e-5)
        found = cut.later.low_M[OURS][i], cut.later.high_M[OURS][i]
        assert found == pytest.approx(forecast.prediction, abs=1e-4)
    exact = paper_fit(result.points, min_compute=0.0).curve(cut.later.compute_M)
    np.testing.assert_allclose(cut.later.point_M["paper's grid search"], exact, atol=0.002)


@pytest.mark.parametrize("fractions", [[], [0.0], [1.0], [0.5, 2.0], [float("nan")]])
def test_cuts_are_fractions(fractions):
    with pytest.raises(InputError, match="between 0 and 1"):
        backtest([a_run()], fractions=fractions)


def test_one_run_and_a_generator_of_runs_are_tested():
    whole = backtest([a_run()], fractions=[0.5]).to_json()
    assert backtest(a_run(), fractions=0.5).to_json() == whole
    assert backtest((run for run in [a_run()]), fractions=[0.5]).to_json() == whole


def test_no_run():
    with pytest.raises(InputError, match="no run"):
        backtest([])
    with pytest.raises(InputError, match="no run"):
        backtest(run for run in [])
    with pytest.raises(InputError, match=r"takes runs \(scalerl.load_run.* and points .*, found str"):
        backtest(["a.csv"])  # type: ignore[list-item]


def table(path, run):
    rows = [f"{c},{y}" for c, y in zip(run.compute_N, run.pass_rate_N, strict=True)]
    path.write_text("\n".join(["hours,score", *rows]))
    return str(path)


def test_the_command(tmp_path, capsys):
    one, two = table(tmp_path / "one.csv", a_run()), table(tmp_path / "two.csv", a_run(seed=5))
    columns = ["--x", "hours", "--y", "score"]
    assert main(["backtest", one, two, one, *columns, "--at", "1/2,.75", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["dropped"], found["frozen"]) == ([one, two], [one], None)
    assert [row["fraction"] for row in found["pooled"]] == [0.5, 0.75]
    assert found["pooled"][1]["end"]["errors"][OURS]["runs"] == 2
    assert main(["backtest", one, *columns, "--at", "1/2"]) == 0
    assert "first 1/2 of the compute: " in capsys.readouterr().out
    assert main(["backtest", one, *columns, "--at", "1/20"]) == 3
    out, err = capsys.readouterr()
    assert "0 forecast, 0 too early, 1 cannot answer" in out
    assert err.count("\n") == 1
    assert "a curve needs at least 4" in err


@pytest.mark.parametrize("at", ["2", "0", "1/0", "half", "", "1/2,1"])
def test_the_command_names_a_wrong_fraction(at, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["backtest", "runs/none", "--at", at])
    assert stop.value.code == 2
    assert "expected fractions between 0 and 1" in capsys.readouterr().err


def test_the_command_judges_frozen_forecasts(tmp_path, capsys):
    writer = RunWriter(tmp_path / "run", {"budget": {"kind": "steps", "amount": 24}})
    run = a_run()
    for step, pass_rate in enumerate(run.pass_rate_N):
        writer.evaluation(EvalPoint(step, float(pass_rate)), "set", [], np.array([]))
    row = {"axis": "steps", "compute": 12.0, "target_compute": 24.0}
    last = float(run.pass_rate_N[-1])
    writer.forecast({**row, "median": last + 0.03, "prediction": [last - 0.01, last + 0.07]})
    writer.forecast({**row, "median": last - 0.04, "prediction": [last - 0.05, last - 0.03]})
    writer.forecast({**row, "target_compute": 48.0, "median": 0.6, "prediction": [0.5, 0.7]})  # not reached
    folder = str(tmp_path / "run")
    assert main(["backtest", folder, folder, "--at", "1/2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axis"] == "steps"  # the run's budget
    frozen = found["frozen"]
    assert (frozen["judged"], frozen["inside"]) == (2, 1)
    assert frozen["rms"] == pytest.approx(np.sqrt((0.03**2 + 0.04**2) / 2))
    assert frozen["bias"] == pytest.approx(-0.005)
