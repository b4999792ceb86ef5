"""Forecasts inside real trainers: TRL's, the Trainer itself on a curve that is known, and two processes."""

import json
import math
import os
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve, Fit, fit
from scalerl.errors import InputError
from scalerl.ingest.load import read_data
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.vocabularies import ROLES, VOCABULARIES
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from scalerl.integrations import ForecastCallback  # noqa: E402
from scalerl.integrations.trainer_callback import VERDICTS, _row  # noqa: E402

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 20.0, 0.3)
END, EVERY = 100, 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_callback.py"


class Line(torch.nn.Module):
    """What the Trainer can train in no time."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        out = self.line(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


def simulated(step, scale=1.0, sd=0.004):
    """The pass rate at a step: the curve, and noise that is the same whenever it is asked for."""
    noise = np.random.default_rng(round(1000 * step)).normal(0, sd)
    return scale * float(TRUTH(np.array(float(step))) + noise)


def trainer_of(folder, callback, measure=simulated, cls=None, **settings):
    """The real Trainer, which evaluates a curve that is known."""
    rows = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=END,
        per_device_train_batch_size=4,
        logging_steps=EVERY,
        use_cpu=True,
        disable_tqdm=True,
        **{"eval_strategy": "steps", "eval_steps": EVERY, "save_strategy": "no", "report_to": []} | settings,
    )
    trainer = (cls or transformers.Trainer)(
        Line(),
        args,
        train_dataset=rows,
        eval_dataset=rows[:1],
        compute_metrics=lambda _: {"pass_rate": measure(trainer.state.global_step)},
        callbacks=[callback],
    )
    return trainer


def trained(trainer, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(**options)
    return trainer


def forecasts(trainer):
    """The rows of forecasts by their step, each step once."""
    rows = [row for row in trainer.state.log_history if "forecast/median" in row]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row for row in rows}


def imported(path, axis="steps", **source):
    return fit(read_data(path, axis, ReadOptions(**source), None).points)


def same(row, result: Fit, end, target):
    """A logged row, against what a fit says of the same moment, to the last digit."""
    said = _row(result, result.forecast(end), result.chance(target, end))
    assert {name: row[name] for name in row if name.startswith("forecast/")} == said
    return True


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """The example, with a tracker, a row for every step and checkpoints."""
    pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("grpo")
    text = EXAMPLE.read_text()
    for name, other in (
        ('"report_to": []', '"report_to": "tensorboard", "logging_steps": 1'),
        ('"save_strategy": "no"', '"save_steps": 10'),
        ('"out"', repr(str(folder / "out"))),
    ):
        assert name in text
        text = text.replace(name, other)
    names: dict[str, Any] = {"__name__": "example"}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "board"))
        exec(compile(text, str(EXAMPLE), "exec"), names)
    names["trainer"].save_state()
    return names["trainer"], names["callback"], folder


def test_in_grpo_a_forecast_is_what_the_importer_says(grpo, capsys):
    trainer, callback, folder = grpo
    rows = forecasts(trainer)
    assert list(rows) == list(range(6, 31, 2))
    rates = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert len(rates) == 16
    assert np.mean(rates[-3:]) > rates[0] + 0.4
    for step in (10, 20, 30):
        assert same(rows[step], imported(folder / "out" / f"checkpoint-{step}"), 30, 0.7)
    asked = ["--x", "steps", "--at", "30", "--target", "0.7", "--budget", "30", "--devices", "1", "--json"]
    capsys.readouterr()
    assert main(["fit", str(folder / "out"), *asked]) == 0
    answer = json.loads(capsys.readouterr().out)
    # The command forecasts at ten times the data, too.
    assert (
        json.loads(json.dumps(callback.forecaster.fit.to_json([30, 300], 0.7, 30), default=float)) == answer
    )


def test_trackers_show_it(grpo):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, _, folder = grpo
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    rows = forecasts(trainer)
    for name in ("median", "low", "high", "ceiling", "identified", "probability", "verdict"):
        shown = {event.step: event.value for event in board.Scalars(f"train/forecast/{name}")}
        logged = {step: row[f"forecast/{name}"] for step, row in rows.items() if f"forecast/{name}" in row}
        assert shown == pytest.approx(logged)
    assert len(board.Scalars("eval/reward")) == 16  # nothing is shown twice


@pytest.mark.parametrize(("axis", "end"), [("gpu_hours", 0.01), ("tokens", 1e5)])
def test_other_axes_of_grpo(grpo, axis, end):
    trainer, _, folder = grpo
    callback = ForecastCallback(axis=axis, end=end, target=0.7)
    state = replace(trainer.state, log_history=list(trainer.state.log_history))
    callback.on_evaluate(trainer.args, state, trainer.control)
    assert same(state.log_history[-1], imported(folder / "out", axis, devices=1.0), end, 0.7)


def test_what_is_out_of_reach_is_stopped(tmp_path, capsys):
    callback = ForecastCallback(target=0.75, stop_at="no-go")
    trainer = trained(trainer_of(tmp_path, callback, save_strategy="steps", save_steps=1000))
    rows, last = forecasts(trainer), trainer.state.global_step
    assert 20 < last < END
    assert [row["forecast/verdict"] for row in rows.values()] == [0.0] * (len(rows) - 1) + [-1.0]
    assert (
        rows[last]["forecast/identified"] == 0.0
    )  # what is asked is the pass rate at the end, not the ceiling
    assert rows[last]["forecast/ceiling_low"] < 0.61 < rows[last]["forecast/ceiling_high"]
    said = capsys.readouterr().err
    assert re.search(r"0\.75: NO-GO, (under 1|\d\.\d) %", said)
    assert (
        f"scalerl, step {last}: training is stopped: 0.75 is reached at 100 steps with probability " in said
    )
    assert "step 4: too early: 1 of 4 evaluations" in said
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{last}"]
    assert same(rows[last], imported(tmp_path), END, 0.75)


def test_what_is_in_reach_goes_on(tmp_path, capsys):
    callback = ForecastCallback(target=0.55, stop_at="no-go", end=400)
    trainer = trained(trainer_of(tmp_path, callback))
    assert trainer.state.global_step == END
    rows = forecasts(trainer)
    assert list(rows) == list(range(4 * EVERY, END + 1, EVERY))
    assert rows[END]["forecast/verdict"] == VERDICTS["go"] == 1.0
    assert rows[END]["forecast/low"] < float(TRUTH(np.array(400.0))) < rows[END]["forecast/high"]
    assert "training is stopped" not in capsys.readouterr().err


def test_too_early_never_stops(tmp_path):
    """The end is beyond ten times the compute, and the target beyond it: unlikely, but nothing is sure."""
    measure = lambda step: simulated(step / 10, sd=0.001)  # noqa: E731
    callback = ForecastCallback(target=0.99, stop_at="no-go", end=2000)
    trainer = trained(trainer_of(tmp_path, callback, measure))
    rows = forecasts(trainer)
    assert trainer.state.global_step == END
    assert {(row["forecast/identified"], row["forecast/verdict"]) for row in rows.values()} == {(0.0, 0.0)}
    assert rows[END]["forecast/probability"] < 0.05


def test_a_run_that_is_resumed_has_its_past(tmp_path, capsys):
    """Stopped by another callback after step 40, and gone on with by a new trainer."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 40

    out, run = tmp_path / "out", tmp_path / "run"
    saves = {"save_strategy": "steps", "save_steps": 20}
    first = trainer_of(out, ForecastCallback(run_folder=run), **saves)
    first.add_callback(Stop())
    trained(first)
    assert RunRecord.read(run).evals[-1].step == 40
    second = trained(trainer_of(out, ForecastCallback(run_folder=run), **saves), resume_from_checkpoint=True)
    assert forecasts(second).keys() == set(range(16, END + 1, EVERY))
    second.evaluate()
    record, result = RunRecord.read(run), imported(out)
    assert [point.step for point in record.evals] == list(range(EVERY, END + 1, EVERY))
    assert record.config["budget"] == {"kind": "steps", "amount": END}
    assert fit(record).to_json([END]) == result.to_json([END])
    assert len(record.steps()) == END // EVERY
    assert "exists already" not in capsys.readouterr().err


def test_a_folder_of_another_run_is_left_alone(tmp_path, capsys):
    run = tmp_path / "run"
    RunWriter(run, {"name": "another"}).close()
    trainer = trained(trainer_of(tmp_path / "out", ForecastCallback(run_folder=run)))
    assert sorted(path.name for path in run.iterdir()) == ["config.json"]
    assert len(forecasts(trainer)) == 22
    assert capsys.readouterr().err.count("exists already") == 1


class Rewarded(transformers.Trainer):
    """It logs the reward of training, as TRL's trainers do, and evaluates nothing."""

    def log(self, logs, start_time=None):
        extra = {} if "train_runtime" in logs else {"reward": simulated(self.state.global_step)}
        super().log({**logs, **extra}, start_time)


NOTHING_HELD_OUT = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 1000}


def test_without_evaluations_nothing_is_forecast(tmp_path, capsys):
    callback = ForecastCallback(target=0.75, stop_at="no-go")
    trainer = trained(trainer_of(tmp_path, callback, cls=Rewarded, **NOTHING_HELD_OUT))
    assert (trainer.state.global_step, forecasts(trainer)) == (END, {})
    said = "no metric is held out: 'reward' is a training reward"
    err = capsys.readouterr().err
    assert err.count(said) == 1
    assert "metric='reward' fits it" in err


def test_a_reward_of_training_is_followed_by_its_name_and_never_stops(tmp_path, capsys):
    callback = ForecastCallback(target=0.75, stop_at="no-go", metric="reward")
    trainer = trained(trainer_of(tmp_path, callback, cls=Rewarded, **NOTHING_HELD_OUT))
    assert trainer.state.global_step == END
    last = forecasts(trainer)[END]
    assert same(last, imported(tmp_path, metric="reward"), END, 0.75)
    assert (last["forecast/identified"], last["forecast/verdict"]) == (0, 0)
    assert "metric: reward, training reward" in capsys.readouterr().err


def test_an_ambiguous_metric_is_watched_and_stops_nothing(tmp_path, capsys):
    """Two held-out pass rates: which of them is meant is for the user to say."""
    for metric, stops in ((None, False), ("eval_accuracy", True)):
        callback = ForecastCallback(target=0.75, stop_at="no-go", metric=metric)
        trainer = trainer_of(tmp_path / str(metric), callback)
        trainer.compute_metrics = lambda _, of=trainer: {
            name: simulated(of.state.global_step) for name in ("accuracy", "acc")
        }
        trained(trainer)
        assert (trainer.state.global_step < END) == stops
        assert forecasts(trainer)
        err = capsys.readouterr().err
        assert err.count("metric: eval_accuracy, held-out pass rate") == 1
        refused = (
            "no-go, but training is not stopped on eval_accuracy, held-out pass rate, and there are eval_acc"
        )
        assert err.count(refused) == (not stops)


def test_a_long_reward_is_not_fitted_at_every_row(tmp_path):
    """Of 300 rows those are fitted that are 2 % further than the last."""
    callback = ForecastCallback(metric="reward")
    settings = {"eval_strategy": "no", "max_steps": 300, "logging_steps": 1}
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
    state, control = transformers.TrainerState(max_steps=300), transformers.TrainerControl()
    for step in range(1, 301):
        state.global_step = step
        state.log_history.append({"reward": simulated(step), "step": step})
        if step > 250:
            callback.on_log(args, state, control, logs=state.log_history[-1])
    fitted = [row["step"] for row in state.log_history if "forecast/median" in row]
    assert fitted == [251, 256, 261, 266, 271, 276, 281, 286, 291, 296]


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (lambda step: 1000.0 * step, "goes up to"),
        (lambda step: 30.0, "percentages are divided by 100 with --percent (in Python, max_reward=100)"),
        (lambda step: 1.001, "goes up to 1.001, but"),
        (lambda step: math.nan, "no metric here is a known pass rate or reward; "),
    ],
)
def test_odd_metrics_end_no_training(tmp_path, capsys, measure, said):
    callback = ForecastCallback(target=0.5, stop_at="no-go")
    trainer = trained(trainer_of(tmp_path, callback, measure))
    assert trainer.state.global_step == END
    assert forecasts(trainer) == {}
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (lambda step: 0.5, "ceiling not identified yet; 0.5: TOO EARLY"),
        (lambda step: 0.9 - step / 200, "no curve describes the run: peaked; 0.5: TOO EARLY"),
    ],
)
def test_a_flat_run_or_a_falling_one_is_forecast_and_not_stopped_for_that(tmp_path, capsys, measure, said):
    trainer = trained(trainer_of(tmp_path, ForecastCallback(target=0.5, stop_at="no-go"), measure))
    assert trainer.state.global_step == END
    rows = forecasts(trainer)
    assert rows[END]["forecast/low"] < measure(END) + 1e-9 < rows[END]["forecast/high"] + 2e-9
    assert -1.0 not in {row["forecast/verdict"] for row in rows.values()}
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"step {END}: forecast of the end" in last
    assert said in last


def test_a_tracker_that_fails_ends_no_training(tmp_path, capsys):
    """The forecast is in the log all the same."""

    class Fragile(transformers.TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            if "forecast/median" in kwargs["logs"]:
                raise ConnectionError("the tracker is gone")

    trainer = trainer_of(tmp_path, ForecastCallback())
    trainer.add_callback(Fragile())
    assert trained(trainer).state.global_step == END
    assert len(forecasts(trainer)) == 22
    assert capsys.readouterr().err.count("ConnectionError: the tracker is gone") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": 60.0}, "the target must be a pass rate in"),
        ({"axis": "hours", "end": 1.0}, "unknown compute axis 'hours'"),
        ({"axis": "gpu_hours"}, "the end of a training is not known"),
        ({"target": "0.6"}, "the target must be a number, found '0.6'"),
        ({"end": "last"}, "the end must be a number, found 'last'"),
        ({"devices": "8", "end": 1.0}, "the number of devices must be a number, found '8'"),
        ({"axis": "dollars", "end": 1.0, "price": "2"}, "price of a GPU-hour must be a number, found '2'"),
        ({"r0": "none"}, "R_0, where it is not 'free', must be a number, found 'none'"),
        ({"end": -1.0}, "the end must be a number above 0"),
        ({"end": math.nan}, "the end must be a number above 0"),
        ({"devices": 0.0}, "the number of devices is a number above 0"),
        ({"stop_at": "no-go"}, "needs a target"),
        ({"stop_at": "too early", "target": 0.5}, "stop_at is 'no-go' or None"),
        ({"axis": "dollars", "end": 1.0}, "needs a price"),
        ({"axis": "flops", "end": 1.0}, "needs the model's folder"),
        ({"level": 1.0}, "the level of the intervals"),
        ({"r0": 2.0}, "R_0 must be a pass rate"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, said):
    with pytest.raises(InputError, match=said):
        ForecastCallback(**options)


def test_forecasts_are_taken_for_nothing_else():
    """They stand in the log that the next one is made from."""
    names = ("median", "low", "high", "ceiling", "ceiling_low", "ceiling_high", "identified", "probability")
    for name in (*names, "verdict"):
        for one in VOCABULARIES:
            for logged in (f"forecast/{name}", f"train/forecast/{name}"):
                assert not any(one.matches(role, [logged]) for role in ROLES)


PROCESSES = """
import sys
sys.path.insert(0, {tests!r})
import test_trainer_callback as t
callback = t.ForecastCallback(target=0.75, stop_at="no-go")
trainer = t.trained(t.trainer_of({out!r}, callback))
rank = trainer.args.process_index
open({out!r} + f"/rank{{rank}}", "w").write(f"{{trainer.state.global_step}} {{len(t.forecasts(trainer))}}")
"""


@pytest.mark.slow
def test_all_processes_stop_together(tmp_path):
    script = tmp_path / "processes.py"
    (tmp_path / "out").mkdir()
    script.write_text(
        PROCESSES.format(tests=str(Path(__file__).parents[1] / "support"), out=str(tmp_path / "out"))
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(script)], check=True, capture_output=True, timeout=120, env=environment)
    (last, n), (other, none) = (
        map(int, (tmp_path / "out" / f"rank{rank}").read_text().split()) for rank in range(2)
    )
    assert 20 < last == other < END
    assert n > 0
    assert none == 0
