"""Rates: from TOML, from the package, and as a run shows them."""

import json

import pytest
from paced_runs import GENERATE, MADE, OTHER, TRAIN, write_run

from scalerl.errors import InputError
from scalerl.plan.job import PlannedJob
from scalerl.plan.measured import evaluated_every, rates_of
from scalerl.plan.rates import load_rates, names
from scalerl.plan.simulate import simulate
from scalerl.record.reader import RunRecord
from scalerl.rl.config.recipe import from_dict, load_recipe


def test_a_run_shows_the_throughput_of_its_roles(tmp_path):
    record = write_run(tmp_path / "made")
    rates = rates_of(record)
    assert rates.trainer.used == 0.75
    # A step of the simulation has 64 completions of 10 tokens, of which three quarters are trained.
    assert rates.trainer.token * 64 * 10 * 0.75 == pytest.approx(TRAIN)
    assert rates.driver.completion * 64 == pytest.approx(OTHER)
    assert rates.evaluate == pytest.approx(10)
    assert (rates.lengths.mean, rates.lengths.p95) == pytest.approx((10, 19))  # no more than the recipe's cut
    assert rates.source == "measured in made, steps 8 to 24"
    assert evaluated_every(record) == 8


def test_a_run_that_is_simulated_keeps_its_generators_as_busy(tmp_path):
    """With rows that run empty, a decode step is shorter than where all were in use."""
    rates = rates_of(write_run(tmp_path / "made"))
    found = simulate(PlannedJob.of(load_recipe("demo", MADE)), rates, 2, 1, steps=100)
    busy = (1 - found.generators_idle) * 2 * found.seconds_per_step
    per_token = busy / (found.tokens_per_second * found.seconds_per_step)
    assert per_token == pytest.approx(GENERATE / (64 * 10), rel=0.05)
    full = rates.decode.base / 32 + rates.decode.slot
    assert full < 0.9 * GENERATE / (64 * 10)
    assert rates.decode.base == pytest.approx(32 * rates.decode.slot)


def test_what_is_evaluated_is_known_without_the_data():
    far = {"kind": "dataset", "path": "far/away", "heldout": 300}
    near = {"kind": "chain", "heldout_per_length": 5, "k_max": 3, "skip": ()}
    recipe = load_recipe("demo", ["budget.kind=steps", "budget.amount=600", "evaluation.every=50"])
    task = {"kind": "mix", "tasks": {"far": far, "near": near}}
    found = PlannedJob.of(from_dict(recipe.to_dict() | {"task": task}, "mixed")).evaluations
    assert (found.prompts, found.samples, found.completions) == (315, 4, 1260)
    assert (found.every, found.slots, found.by_generators) == (50, 1000, False)


def test_trainers_of_a_run_are_those_that_its_config_tells_of(tmp_path):
    """Of a cluster in the recipe, or as torchrun was told: seconds are those of all of them."""
    one = rates_of(write_run(tmp_path / "one"))

    def of_two(row):
        row["device_seconds"]["train"] *= 2
        row["idle_seconds"]["train"] *= 2
        return row

    record = write_run(tmp_path / "two", change=of_two)
    config = json.loads((record.path / "config.json").read_text())
    (record.path / "config.json").write_text(json.dumps(config | {"devices": {"trainers": 2}}))
    rates = rates_of(RunRecord.read(record.path))
    assert rates.trainer.token == pytest.approx(2 * one.trainer.token)  # each has half of them
    assert rates.driver == one.driver


def test_what_an_overlapped_driver_takes_is_by_the_step(tmp_path):
    """With a learner sharded over a cluster completions are taken meanwhile: what is left is of the step."""
    record = write_run(tmp_path / "cluster", cluster={"learner": {"kind": "fsdp2"}, "generators": 2})
    driver = rates_of(record).driver
    assert (driver.completion, driver.step) == (0, pytest.approx(OTHER))


def test_older_records_with_fields_that_are_gone_are_read(tmp_path):
    rates = rates_of(write_run(tmp_path / "made"))
    older = write_run(tmp_path / "older", change=lambda row: row | {"pace": {"decode": [0.0] * 15}})
    assert rates_of(older).decode == rates.decode


def test_runs_that_show_no_rates_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"steps\.jsonl: rates need 5 steps after the first quarter"):
        rates_of(write_run(tmp_path / "short", n=6))

    def of_another_trainer(row):
        return {key: value for key, value in row.items() if key != "idle_seconds"}

    with pytest.raises(InputError, match="a step has no 'idle_seconds'"):
        rates_of(write_run(tmp_path / "other", change=of_another_trainer))
    record = write_run(tmp_path / "without")
    (record.path / "config.json").write_text('{"name": "made"}')
    with pytest.raises(InputError, match="has no recipe"):
        rates_of(RunRecord.read(record.path))


def test_rates_are_written_by_hand(tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text("[decode]\nbase = 0.01\n[trainer]\ntoken = 1e-4\n[lengths]\nmean = 100\np95 = 300\n")
    rates = load_rates(path, ["decode.slot=0.5", "weights.send=3"])
    assert (rates.decode.base, rates.decode.slot, rates.weights.send) == (0.01, 0.5, 3)
    assert load_rates(rates, ["trainer.fixed=3"]).trainer.fixed == 3
    assert load_rates(load_rates("h100-8b")) == load_rates("h100-8b")


@pytest.mark.parametrize("name", names())
def test_rates_of_the_package_say_that_they_are_assumed(name):
    rates = load_rates(name)
    assert "assumed" in rates.source
    assert "changed: decode.slot=1" in load_rates(name, ["decode.slot=1"]).source


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[decode]\nbas = 1", [], "rates.toml: unknown key 'decode.bas'; did you mean 'decode.base'"),
        ("[decode]\nbase = -1", [], "base must not be negative"),
        ("[decode]\nbase = 0", [], "a decode step takes time"),
        ("[decode", [], "rates.toml: not TOML"),
        ("", [], "missing"),
        ("", ["decode.base"], "--rate decode.base: expected key=value"),
        ("[verify]\nworkers = 0", [], "workers must be at least 1"),
        ("[lengths]\nmean = 4\np95 = 40", [], "p95 between it and 3.87 times it"),
    ],
)
def test_rates_that_cannot_be_are_refused_in_a_line(tmp_path, text, overrides, message):
    path = tmp_path / "rates.toml"
    whole = {"decode": "base = 1", "trainer": "token = 1", "lengths": "mean = 9\np95 = 20"}
    if text and text != "[decode":
        text += "".join(f"\n[{name}]\n{body}" for name, body in whole.items() if f"[{name}]" not in text)
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_rates(path, overrides)
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_said_with_what_is():
    with pytest.raises(InputError, match=r"no rates of that name \(there are: h100-8b\)"):
        load_rates("h100")
