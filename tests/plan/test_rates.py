"""Rates: from TOML, from the package, and as a run shows them."""

import json

import numpy as np
import pytest
from paced_runs import BASE, POSITION, PROMPT_TOKEN, ROW, write_run

from scalerl.errors import InputError
from scalerl.plan.lengths import Truncation
from scalerl.plan.measured import evaluated_every, rates_of
from scalerl.plan.rates import load_rates, names
from scalerl.record.reader import RunRecord


def test_a_run_shows_the_rates_it_was_made_with(tmp_path):
    record = write_run(tmp_path / "made")
    rates = rates_of(record)
    found = [rates.decode.base, rates.decode.row, rates.prefill.token, rates.decode.position]
    assert found == pytest.approx([BASE, ROW, PROMPT_TOKEN, POSITION], rel=1e-4)
    assert rates.trainer.fixed == pytest.approx(0.4)
    assert rates.trainer.used == 0.75
    # A step of the simulation has 64 completions of 25 tokens, of which three quarters are trained.
    trained = np.diff([row["tokens"]["trained"] for row in record.steps()[6:]]).mean()
    assert rates.trainer.token * 64 * 25 * 0.75 == pytest.approx(2e-3 * trained)
    assert rates.verify.completion == pytest.approx(1e-3)
    assert rates.driver.step == pytest.approx(0.1)
    assert rates.weights.install == pytest.approx(0.03)
    assert rates.evaluate.seconds == pytest.approx(10)
    assert (rates.lengths.prompt, rates.lengths.within) == (12, pytest.approx(0.6))
    assert rates.lengths.draw(np.random.default_rng(0), 512, 8, Truncation(99)).mean() == pytest.approx(
        25, rel=0.01
    )
    assert rates.source == "measured in made, steps 8 to 24"
    assert evaluated_every(record) == 8


def test_trainers_of_a_run_are_those_that_its_config_tells_of(tmp_path):
    """Of a cluster in the recipe, or as torchrun was told: seconds are those of all of them."""
    one = rates_of(write_run(tmp_path / "one"))
    for name, config in {
        "torchrun": {"devices": {"trainers": 2}},
        "cluster": {"recipe": {"cluster": {"trainers": 2}}},
    }.items():

        def of_two(row):
            row["device_seconds"]["train"] *= 2
            row["idle_seconds"]["train"] *= 2
            return row

        record = write_run(tmp_path / name, change=of_two)
        (record.path / "config.json").write_text(json.dumps({"name": "made", "seed": 0, **config}))
        record = RunRecord.read(record.path)
        assert record.trainers == 2
        rates = rates_of(record)
        assert rates.trainer.fixed == pytest.approx(one.trainer.fixed)
        assert rates.trainer.token == pytest.approx(2 * one.trainer.token)  # each has half of them
        assert rates.driver.step == pytest.approx(one.driver.step)


def test_processes_that_share_cores_are_rated_in_cpu_seconds(tmp_path):
    """Their clocks show how long they waited for a core, which the simulation finds out by itself."""
    share = 0.4

    def with_cpu(row):
        step, pace = row["step"], row["pace"]
        sum_FF = np.zeros((5, 5))
        sum_FF[np.triu_indices(5)] = pace["decode"]
        pace["decode_cpu"] = (share * sum_FF[:4, 4]).tolist()
        pace["cpu"] = {
            "hear": 0.032 * step,
            "admit": 0.016 * step,
            "verify": 0.0064 * step,
            "train": 0.4 * share * step + 2e-3 * share * row["tokens"]["trained"],
            "publish": 0.05 * step,
            "record": 0.02 * step,
            "install": 0.03 * share * step,
            "messages": 0.08 * step,
        }
        between = 1e-3 * sum_FF[0, 0]
        spent = pace["cpu"]["install"] + pace["cpu"]["messages"]
        pace["cpu"]["generate"] = float(share * sum_FF[0, 4] + spent + between)
        return row

    record = write_run(tmp_path / "shared", change=with_cpu)
    config = {"placement": "local", "devices": {"generate and train": "cpu", "cores": 2}}
    (record.path / "config.json").write_text(json.dumps({"name": "made", "seed": 0, **config}))
    rates = rates_of(RunRecord.read(record.path))
    assert (rates.machine.cores, rates.machine.others) == (2, 0)
    found = [rates.decode.base, rates.decode.row, rates.prefill.token, rates.decode.position]
    steps = [share * BASE + 1e-3, share * ROW, share * PROMPT_TOKEN, share * POSITION]
    assert found == pytest.approx(steps, rel=1e-4)
    assert rates.decode.group == pytest.approx(0.01)
    assert rates.trainer.fixed == pytest.approx(0.4 * share)
    assert rates.weights.install == pytest.approx(0.03 * share)
    driver = rates.driver
    assert (driver.completion, driver.group, driver.step) == pytest.approx((0.0005, 0.002, 0.02))
    assert (rates.verify.completion, rates.weights.publish) == pytest.approx((1e-4, 0.05))
    alone = rates_of(write_run(tmp_path / "apart", change=with_cpu))
    assert alone.decode.base == pytest.approx(BASE, rel=1e-4)  # not a local run: by the clock
    assert alone.machine.cores == np.inf


def test_what_a_micro_batch_takes_is_told_apart(tmp_path):
    spent = 0.0

    def by_passes(row):
        nonlocal spent
        row["completions_used"] = 32 + 8 * (row["step"] * 7 % 5)  # 1 micro-batch of 48, or 2
        spent += 0.25 * (1 + (row["completions_used"] > 48))
        row["device_seconds"]["train"] += spent
        return row

    record = write_run(tmp_path / "passes", change=by_passes)
    (record.path / "config.json").write_text(
        json.dumps({"name": "made", "seed": 0, "recipe": {"batch": {"micro": 48}}})
    )
    trainer = rates_of(RunRecord.read(record.path)).trainer
    assert (trainer.fixed, trainer.micro) == pytest.approx((0.4, 0.25))


def test_steps_that_are_all_alike_are_all_by_the_token(tmp_path):
    def alike(row):
        row["tokens"]["trained"] = 1000 * row["step"]
        row["device_seconds"]["train"] = 3.0 * row["step"]
        return row

    rates = rates_of(write_run(tmp_path / "alike", change=alike))
    assert rates.trainer.fixed == 0
    assert rates.trainer.token * 64 * 25 * 0.75 == pytest.approx(3.0)


def test_runs_that_show_no_rates_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"steps\.jsonl: rates need 5 steps after the first quarter"):
        rates_of(write_run(tmp_path / "short", n=6))

    def old(row):
        del row["pace"]
        return row

    with pytest.raises(InputError, match="a step has no 'pace'"):
        rates_of(write_run(tmp_path / "old", change=old))

    def by_vllm(row):
        row["pace"]["decode"] = [0.0] * 15
        return row

    with pytest.raises(InputError, match="no decode steps are on record"):
        rates_of(write_run(tmp_path / "vllm", change=by_vllm))


def test_rates_are_written_by_hand(tmp_path):
    path = tmp_path / "rates.toml"
    path.write_text("[decode]\nbase = 0.01\n[trainer]\ntoken = 1e-4\n[lengths]\nmean = 100\np95 = 300\n")
    rates = load_rates(path, ["decode.row=0.5", "weights.way=tree"])
    assert (rates.decode.base, rates.decode.row, rates.weights.way) == (0.01, 0.5, "tree")
    assert load_rates(rates, ["trainer.fixed=3"]).trainer.fixed == 3
    assert load_rates(load_rates("h100-8b")) == load_rates("h100-8b")


@pytest.mark.parametrize("name", names())
def test_rates_of_the_package_say_that_they_are_assumed(name):
    rates = load_rates(name)
    assert "assumed" in rates.source
    assert "changed: decode.row=1" in load_rates(name, ["decode.row=1"]).source


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("[decode]\nbas = 1", [], "rates.toml: unknown key 'decode.bas'; did you mean 'decode.base'"),
        ("[decode]\nbase = -1", [], "base must not be negative"),
        ("[decode]\nbase = 0", [], "a decode step takes time"),
        ("[decode", [], "rates.toml: not TOML"),
        ("", [], "missing"),
        ("", ["decode.base"], "--rate decode.base: expected key=value"),
        ("[weights]\nway = 'post'", [], "weights.way"),
        ("[lengths]\nmean = 4", [], "give quantiles; or a mean above 0"),
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
