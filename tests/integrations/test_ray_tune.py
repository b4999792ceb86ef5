"""The Ray Tune scheduler in real experiments: what is paused, resumed and stopped, and that all end."""

import logging
import os
from typing import Any, cast

import pytest

os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

import ray
from ray import tune
from ray.tune.experiment import Trial

from scalerl.errors import InputError
from scalerl.integrations import ForecastScheduler

LOGGER = "scalerl.integrations.ray_tune"
BUDGET = 300
CEILINGS = (0.70, 0.45, 0.50)
"""Of three trials; the first is the best. Each takes both CPUs, so that they start one after another."""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture
def said(caplog):
    """What the scheduler logged, as in "00001 is paused"; the numbers are those of the trials."""
    with caplog.at_level(logging.INFO, logger=LOGGER):
        yield lambda: [
            " ".join(record.getMessage().split()[1:4]).split("_")[1].rstrip(":")
            for record in caplog.records
            if record.name == LOGGER
        ]


class Mark(logging.Handler):
    """Makes a file when a trial is paused."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def emit(self, record):
        if "is paused" in record.getMessage():
            self.file.touch()


def function(checkpoints=True, fails=None, signals=""):
    """A function that reports a simulated trial, and goes on from its checkpoint if it has one.

    The trial whose ceiling is `fails` makes the file "reported" in the folder `signals` after 28 reports,
    waits until there is a file "paused", and raises. The others begin when there is "reported".
    """

    def train(config):
        import random
        import tempfile
        import time
        from pathlib import Path

        from ray import tune

        def wait(file):
            for _ in range(4800):  # four minutes
                if file.exists():
                    break
                time.sleep(0.05)

        if fails and config["ceiling"] != fails:
            wait(Path(signals) / "reported")
        start = tune.get_checkpoint()
        step = 0
        if start:
            with start.as_directory() as folder:
                step = int((Path(folder) / "step").read_text())
        while step < 30:
            step += 1
            compute = 10.0 * step
            noise = random.Random(1000 * config["ceiling"] + step).gauss(0, 0.004)
            pass_rate = 0.3 + (config["ceiling"] - 0.3) / (1 + (25 / compute) ** 2) + noise
            row = {"pass_rate": pass_rate, "compute": compute}
            if config["ceiling"] == fails and step == 29:
                (Path(signals) / "reported").touch()
                wait(Path(signals) / "paused")
                raise RuntimeError("a trial that fails")
            if not checkpoints:
                tune.report(row)
                continue
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step").write_text(str(step))
                tune.report(row, checkpoint=tune.Checkpoint.from_directory(folder))

    return train


def class_():
    """The same as a class."""

    class Train(tune.Trainable):
        def setup(self, config):
            self.ceiling, self.at = config["ceiling"], 0

        def step(self):
            import random

            self.at += 1
            noise = random.Random(1000 * self.ceiling + self.at).gauss(0, 0.004)
            pass_rate = 0.3 + (self.ceiling - 0.3) / (1 + (2.5 / self.at) ** 2) + noise
            return {"pass_rate": pass_rate, "compute": 10.0 * self.at, "done": self.at == 30}

        def save_checkpoint(self, checkpoint_dir):
            return {"at": self.at}

        def load_checkpoint(self, checkpoint):
            assert checkpoint
            self.at = checkpoint["at"]

        def reset_config(self, new_config):
            self.setup(new_config)
            return True

    return Train


def sweep(path, scheduler, trainable=None, ceilings=CEILINGS, cpus=2, errors=0, **config):
    """Run the trials; the compute that each got to, and in how many reports, by ceiling."""
    tuner = tune.Tuner(
        tune.with_resources(trainable or function(), {"cpu": cpus}),
        param_space={"ceiling": tune.grid_search(list(ceilings))},
        tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True, **config),
        run_config=tune.RunConfig(storage_path=str(path), verbose=0),
    )
    results = tuner.fit()
    assert results.num_errors == errors
    ends = [(result.config or {}, result.metrics or {}) for result in results]
    return {config["ceiling"]: (last["compute"], last["training_iteration"]) for config, last in ends}


@pytest.mark.parametrize("limit", [{}, pytest.param({"max_concurrent_trials": 1}, marks=pytest.mark.slow)])
def test_hopeless_trials_are_paused_and_ended_with_the_experiment(tmp_path, said, limit):
    scheduler = ForecastScheduler(BUDGET, time_attr="compute")
    ends = sweep(tmp_path, scheduler, metric="pass_rate", mode="max", **limit)
    assert ends[0.70][0] == BUDGET
    assert 80 <= ends[0.45][0] < BUDGET  # eight evaluations at least
    assert 80 <= ends[0.50][0] < BUDGET
    assert said() == ["00001 is paused", "00002 is paused"]


@pytest.mark.parametrize("make", [function, pytest.param(class_, marks=pytest.mark.slow)])
def test_paused_trials_go_on_where_they_were_when_nothing_else_waits(tmp_path, said, make):
    scheduler = ForecastScheduler(BUDGET, metric="pass_rate", time_attr="compute", resume_paused=True)
    ends = sweep(tmp_path, scheduler, make())
    # The more promising first.
    assert said() == ["00001 is paused", "00002 is paused", "00002 is resumed", "00001 is resumed"]
    assert set(ends.values()) == {(BUDGET, 30)}  # no evaluation is made twice


def test_when_the_best_fails_what_it_beat_goes_on(tmp_path, said):
    scheduler = ForecastScheduler(BUDGET, metric="pass_rate", time_attr="compute")
    logging.getLogger(LOGGER).addHandler(mark := Mark(tmp_path / "paused"))
    train = function(fails=0.70, signals=str(tmp_path))
    ends = sweep(tmp_path / "tune", scheduler, train, (0.70, 0.45), cpus=1, errors=1)
    logging.getLogger(LOGGER).removeHandler(mark)
    assert said() == ["00001 is paused", "00001 is resumed"]
    assert ends[0.45] == (BUDGET, 30)


def test_what_a_trial_reported_after_the_checkpoint_it_is_restored_from_is_dropped():
    scheduler = ForecastScheduler(BUDGET, metric="pass_rate", time_attr="compute")
    controller, trial = cast(Any, None), Trial("train", trial_id="00000", stub=True)

    def report(compute, pass_rate):
        return scheduler.on_trial_result(controller, trial, {"compute": compute, "pass_rate": pass_rate})

    for compute in range(10, 60, 10):
        assert report(compute, 0.3 + compute / 200) == "CONTINUE"
    report(30, 0.4)
    assert scheduler._values == {"00000": {10: 0.35, 20: 0.4, 30: 0.4}}
    report(40, 0.42)
    assert list(scheduler._values["00000"]) == [10, 20, 30, 40]


def test_a_report_without_an_evaluation_is_skipped():
    """A loop that reports every step has None, or no entry, between its evaluations."""
    scheduler = ForecastScheduler(BUDGET, metric="pass_rate", time_attr="compute")
    controller, trial = cast(Any, None), Trial("train", trial_id="00000", stub=True)
    for result in ({"compute": 10, "pass_rate": 0.3}, {"compute": 11, "pass_rate": None}, {"compute": 12}):
        assert scheduler.on_trial_result(controller, trial, result) == "CONTINUE"
    assert scheduler._values == {"00000": {10: 0.3}}


def test_what_has_no_checkpoint_is_stopped(tmp_path, said):
    scheduler = ForecastScheduler(BUDGET, metric="pass_rate", time_attr="compute")
    ends = sweep(tmp_path, scheduler, function(checkpoints=False))
    assert ends[0.70][0] == BUDGET
    assert max(ends[0.45][0], ends[0.50][0]) < BUDGET
    assert said() == ["00001 is stopped", "00002 is stopped"]


@pytest.mark.parametrize(
    ("config", "says"),
    [({"metric": "pass_rate", "mode": "min"}, "to be maximised"), ({}, "which metric is the pass rate")],
)
def test_bad_use_is_refused_before_anything_runs(tmp_path, config, says):
    with pytest.raises(InputError, match=says):
        sweep(tmp_path, ForecastScheduler(BUDGET), **config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metric": "pass_rate", "time_attr": "gpu_hours"}, "reports no 'gpu_hours', its compute"),
        ({"metric": "compute", "time_attr": "pass_rate"}, "pass rate .* is above 1"),
    ],
)
def test_what_a_trial_reports_wrongly_ends_the_experiment(tmp_path, options, says):
    with pytest.raises(
        tune.TuneError, match=f"InputError: trial .*{says}"
    ):  # Ray wraps what a scheduler raises
        sweep(tmp_path, ForecastScheduler(BUDGET, **options))
