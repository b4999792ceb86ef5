"""Whole training runs that are well, and runs with a fault: what is on record, what is said, how they end."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_demo import small_demo

from scalerl.cli.main import main
from scalerl.curve import Points
from scalerl.errors import DivergedError, PausedError
from scalerl.record.reader import RunRecord
from scalerl.rl import training_run
from scalerl.rl.config.health import Health, Thresholds
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.engine.build import load_generator
from scalerl.rl.loop import parts
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.train import train
from scalerl.rl.types import Done, Reward


@pytest.fixture(scope="module")
def model(small_base):
    return small_base


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("demo", small_demo(30, 2))


def run(recipe, model, folder, **options):
    """The record of a run, how it ended, and what was said of its health."""
    said, ended = [], None
    try:
        options["progress"] = lambda progress: said.append(progress.finding)
        train(recipe, folder, model, evaluate_aside=False, **options)
    except (PausedError, DivergedError) as error:
        ended = error
    return RunRecord.read(folder), ended, [finding for finding in said if finding]


def alarms_of(record):
    return {alarm.metric for alarm in record.alarms if alarm.level == "alarm"}


def test_a_run_that_is_well_gives_no_alarm(recipe, model, tmp_path):
    record, ended, said = run(recipe, model, tmp_path / "run")
    assert ended is None
    assert record.alarms == ()
    assert said == []
    assert not (record.path / "alarms.jsonl").exists()
    steps = record.steps()
    assert all(0 < row["ess"] <= 1 + 1e-9 for row in steps if not row["skipped"])
    probed = [row for row in steps if "logp_gap" in row]
    assert len(probed) >= 8
    assert max(row["logp_gap_max"] for row in probed) < 1e-5
    assert max(row["logp_shift"] for row in steps if not row["skipped"]) > 1e-3
    assert not Points.from_record(record, "steps").warnings


def test_a_generator_with_another_temperature_pauses_the_run(recipe, model, tmp_path, monkeypatch):
    def at_09(recipe, folder, learner, version, devices):
        return load_generator(replace(recipe, temperature=0.9), folder, recipe.seed, recipe.decode_slots)

    monkeypatch.setattr(parts, "place_generator", at_09)
    pausing = replace(recipe, health=Health(on_alarm="pause"))
    record, ended, said = run(pausing, model, tmp_path / "run")
    assert isinstance(ended, PausedError)
    assert ended.exit_status == 4
    assert "gap between the log-probabilities of trainer and generator" in str(ended)
    steps = record.steps()
    assert steps[-1]["step"] == record.alarms[-1].first < 5  # the step is on record
    lines = (record.path / "alarms.jsonl").read_text().splitlines()
    assert said == [json.loads(line)["text"] for line in lines]
    assert (record.path / "checkpoints" / f"step-{steps[-1]['step']:05d}" / "model.safetensors").is_file()


def test_weights_corrupted_on_their_way_are_an_alarm_and_the_run_goes_on(
    recipe, model, tmp_path, monkeypatch
):
    def corrupting(recipe, folder, learner, version, devices):
        generator = load_generator(recipe, folder, recipe.seed, recipe.decode_slots)
        update = generator.update

        def corrupt(weights, version):
            scaled = {name: w * (1.02 if "layers.0" in name else 1.0) for name, w in weights}
            update(WeightStream.of(scaled), version)

        generator.update = corrupt
        return generator

    monkeypatch.setattr(parts, "place_generator", corrupting)
    record, ended, said = run(recipe, model, tmp_path / "run")
    assert ended is None
    assert record.steps()[-1]["step"] == 30
    assert alarms_of(record) == {"logp_gap"}
    assert len(said) == 1  # once
    (warning,) = Points.from_record(record, "steps").warnings
    assert warning.startswith("health alarm: logp_gap 0.0")
    assert warning.endswith("; the curve may not be the same before and after")


def test_budgets_that_are_too_short_are_an_alarm(recipe, model, tmp_path):
    short = replace(
        recipe,
        context=replace(recipe.context, answer=1),  # a digit, and no place for the end token
        health=Health(on_alarm="pause", truncated=Thresholds(0.05, 0.1, 3)),
    )
    record, ended, _ = run(short, model, tmp_path / "run")
    assert isinstance(ended, PausedError)
    assert "truncated" in alarms_of(record)
    assert record.steps()[-1]["step"] == 3
    assert record.alarms[0].worst == pytest.approx(np.mean([row["truncated"] for row in record.steps()]))


def test_rewards_that_collapse_are_an_alarm(recipe, model, tmp_path, monkeypatch):
    load, judged = parts.load_verifier, []

    def breaking(recipe, tokenizer):
        verifier = load(recipe, tokenizer)

        def judge(groups):
            judged.append(1)
            if len(judged) > 12:
                return Done([[Reward(-1.0, False) for _ in group] for group in groups])
            return Done([[Reward(1.0 if i else -1.0, bool(i)) for i, _ in enumerate(g)] for g in groups])

        verifier.start = judge
        return verifier

    monkeypatch.setattr(parts, "load_verifier", breaking)
    health = Health(reward_drop=Thresholds(0.25, 0.4, 4), zero_variance=Thresholds(0.8, 0.95, 4))
    record, _, _ = run(replace(recipe, health=health), model, tmp_path / "run")
    assert alarms_of(record) >= {"reward_drop", "zero_variance"}
    (drop,) = [alarm for alarm in record.alarms if (alarm.metric, alarm.level) == ("reward_drop", "alarm")]
    assert (
        drop.first == 14
    )  # 7/8 of the completions were right: two steps of four without any are a drop of .44


def test_a_learning_rate_that_is_too_large_is_an_alarm(recipe, model, tmp_path):
    fast = replace(recipe, optimiser=replace(recipe.optimiser, lr=0.05, warmup_steps=0))
    record, _, _ = run(fast, model, tmp_path / "run")
    assert "ess" in alarms_of(record)


def test_weights_that_are_not_finite_end_the_run_and_stay_in_the_forecast(
    recipe, model, tmp_path, monkeypatch
):
    class Poisoned(training_run.Pipeline):
        def steps(self):
            for step in super().steps():
                yield step
                if step.index == 20:
                    with torch.no_grad():
                        next(self._learner.model.parameters())[0, 0] = math.inf

    monkeypatch.setattr(training_run, "Pipeline", Poisoned)
    longer = replace(recipe, evaluation=replace(recipe.evaluation, count=15))
    record, ended, _ = run(longer, model, tmp_path / "run")
    assert isinstance(ended, DivergedError)
    assert record.steps()[-1]["step"] == 20
    assert [(alarm.metric, alarm.first) for alarm in record.alarms] == [("non_finite", 21)]


def test_a_forecast_across_an_alarm_says_so(recipe, model, tmp_path, capsys):
    eager = replace(
        recipe,
        evaluation=replace(recipe.evaluation, count=10),
        health=Health(truncated=Thresholds(1e-9, 1e-9, 3)),
    )
    from scalerl.forecast.freeze import freeze

    record, _, _ = run(eager, model, tmp_path / "run", forecaster=freeze)
    assert main(["fit", str(record.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (said,) = [warning for warning in answer["warnings"] if "health alarm: truncated" in warning]
    first = next(alarm.first for alarm in record.alarms if alarm.level == "alarm")
    assert f"step {first}" in said or f"steps {first}" in said
    made_after = [row for row in record.forecasts if row["made_at_step"] >= first]
    assert made_after
    assert all(any("health alarm" in w for w in row["fit_json"]["warnings"]) for row in made_after)
    before = replace(record, evals=tuple(point for point in record.evals if point.step < first))
    assert not [w for w in Points.from_record(before, "steps").warnings if "health" in w]


def test_a_resume_goes_on_through_the_alarm_and_says_what_an_uncut_run_says(recipe, model, tmp_path):
    """With a threshold that the run meets, and half of the completions scored: all figures are exercised."""
    told = replace(
        recipe,
        health=Health(
            probe=16,
            truncated=Thresholds(0.03, 0.06, 3),
            sampling=Thresholds(0.1, 0.2, 50),
        ),
    )
    whole, ended, _ = run(told, model, tmp_path / "whole")
    assert ended is None
    first = next(alarm.first for alarm in whole.alarms if alarm.level == "alarm")
    pausing = replace(told, health=replace(told.health, on_alarm="pause"))
    paused, ended, _ = run(pausing, model, tmp_path / "run")
    assert isinstance(ended, PausedError)
    assert paused.steps()[-1]["step"] == first
    resumed, ended, _ = run(told, model, tmp_path / "run", resume=True)  # what is watched may be changed
    assert ended is None
    assert resumed.alarms == whole.alarms
    assert len(whole.alarms) > 2
    for a, b in zip(resumed.steps(), whole.steps(), strict=True):
        names = ("logp_gap", "logp_gap_max", "rank", "rank_variance", "probe_tokens", "ess", "logp_shift")
        assert [a.get(name) for name in names] == [b.get(name) for name in names]


def train_command(recipe, model, folder, *changes):
    """The status of `scalerl train` of this recipe, changed."""
    toml = folder.with_suffix(".toml")
    toml.write_text('model = "x"\n[task]\nkind = "chain"\n[budget]\nkind = "steps"\namount = 1\n')
    values = {**recipe.to_dict(), "model": str(model)}
    sets = [f"{key}={json.dumps(value)}" for key, value in leaves(values) if value not in (None, [])]
    words = [word for change in (*sets, *changes) for word in ("--set", change)]
    return main(["train", str(toml), "-o", str(folder), *words])


def test_the_command_says_what_it_finds_and_ends_with_status_4(recipe, model, tmp_path, capsys):
    folder, pausing = tmp_path / "run", ("health.on_alarm=pause", "health.truncated.window=2")
    assert train_command(recipe, model, folder, *pausing, "context.answer=1") == 4
    told = capsys.readouterr().err.splitlines()
    said = "step 2: alarm: share of truncated completions"
    assert any(line.startswith(f"{recipe.name}  {said}") for line in told)
    ends = [line for line in told if line.startswith("scalerl: ")]
    assert len(ends) == 1
    assert ends[0].startswith(f"scalerl: paused at {said}")
    assert ends[0].endswith(f"; scalerl train {folder} --resume goes on")
    assert len(RunRecord.read(folder).steps()) == 2


def test_the_command_of_a_run_that_diverges_ends_with_status_1(recipe, model, tmp_path, capsys):
    folder = tmp_path / "run"
    wild = ("optimiser.lr=1000", "optimiser.weight_decay=1000", "optimiser.warmup_steps=0")
    assert train_command(recipe, model, folder, *wild) == 1
    ends = [line for line in capsys.readouterr().err.splitlines() if line.startswith("scalerl: ")]
    assert len(ends) == 1
    assert re.match(r"scalerl: step \d+: .*finite", ends[0]), ends
    assert (folder / "config.json").is_file()


def leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
