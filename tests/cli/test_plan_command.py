"""`scalerl plan`: what it prints, and what it refuses."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from paced_runs import write_run

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve

RATES = """
source = "by hand"
[decode]
base = 1.0
[trainer]
token = 0.0
fixed = 5.0
[lengths]
mean = 10
p95 = 10
"""
SMALL = ["--set", "batch.prompts=4", "--set", "batch.samples=2", "--set", "decode_slots=8", "--steps", "20"]


@pytest.fixture
def rates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.toml").write_text(RATES)
    return ["--rates", "rates.toml"]


def answer(capsys, *words):
    assert main(["plan", "demo", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_says_speed_idle_time_staleness_and_bounds(rates, capsys):
    words = [*SMALL, "--set", "schedule.k=0", "--generators", "1", "--trainers", "1", "--price", "2.5"]
    assert main(["plan", "demo", *rates, *words]) == 0
    out = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in out.splitlines()[:12])
    shown = {name: text.strip() for name, text in rows.items()}
    assert shown["rates"] == "by hand"
    assert shown["speed"] == "240 steps/hour, 15 s a step"
    assert shown["generators"] == "33 % idle; 67 % of 8 decode slots in use"
    assert shown["devices"] == "2: 1 generator, 1 trainer"
    assert shown["trainers"] == "train 33 %, wait 67 % for groups"
    assert shown["staleness"] == "mean 0.00, largest 0 (the bound is 0)"
    assert shown["evaluations"] == "left out: its budget is not in steps (see --evaluate-every)"
    assert shown["cost"] == "5.00 dollars an hour"
    assert "in order" in out
    assert "100 %" in out
    assert main(["plan", "demo", *rates, *words, "--evaluate-every", "20"]) == 0
    # Completions of 10 tokens, 1,000 at once.
    taken = "one of 4,000 completions every 20 steps takes 40 s, by one evaluator beside them"
    assert taken in capsys.readouterr().out


def test_rates_of_another_model_are_warned_of(rates, capsys, tmp_path):
    words = ["--generators", "1", "--trainers", "1", "--steps", "5"]
    run = write_run(tmp_path / "run").path
    config = json.loads((run / "config.json").read_text())
    config["recipe"]["model"] = "/models/8b"
    (run / "config.json").write_text(json.dumps(config))
    for source, of in (("--from", "/models/8b"), ("--rates", "a model of billions of weights")):
        what = str(run) if source == "--from" else "h100-8b"
        assert main(["plan", "demo", source, what, *SMALL, *words]) == 0
        said = f"warning: the rates of {what} are of {of}, and the recipe's model is chain-base\n"
        assert capsys.readouterr().err == said
    assert main(["plan", "demo", *rates, *SMALL, *words]) == 0
    assert capsys.readouterr().err == ""


def test_the_hub_is_asked_once_for_a_shape(rates, capsys, monkeypatch):
    asked = []

    def fetch(*what):
        asked.append(what)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    monkeypatch.setenv("SCALERL_GPUS", "1x80")
    assert main(["plan", "demo", *rates, *SMALL, "--set", "model=far/away", "--devices", "4"]) == 0
    assert "memory is not checked: model far/away" in capsys.readouterr().err
    assert asked == [("far/away", "config.json")]


def test_large_numbers_are_readable(rates, capsys):
    fast = ["--rate", "decode.base=1e-6", "--rate", "trainer.fixed=1e-6"]
    assert main(["plan", "demo", *rates, *fast, *SMALL, "--generators", "2", "--trainers", "1"]) == 0
    out = capsys.readouterr().out
    assert "e+" not in out
    assert "2 generators, 1 trainer\n" in out


def test_json_has_the_same(rates, capsys):
    found = answer(capsys, *rates, *SMALL, "--set", "schedule.k=0", "--generators", "1", "--trainers", "1")
    assert found["plan"]["steps_per_hour"] == pytest.approx(240)
    assert found["plan"]["at_least"]["in order"] == pytest.approx(15)
    assert found["rates"]["decode"]["base"] == 1.0
    assert (found["splits"], found["target"], found["dollars_per_hour"]) == ([], None, None)


def test_the_best_split_of_some_devices(rates, capsys):
    more = ["--rate", "trainer.token=0.5", "--rate", "trainer.fixed=0"]
    found = answer(capsys, *rates, *more, *SMALL, "--devices", "9")
    assert [one["trainers"] for one in found["splits"]] == list(range(1, 9))
    speeds = [one["steps_per_hour"] for one in found["splits"]]
    assert found["plan"]["steps_per_hour"] >= 0.99 * max(speeds)
    assert main(["plan", "demo", *rates, *more, *SMALL, "--devices", "9"]) == 0
    assert capsys.readouterr().out.count("<- best") == 1


def test_the_curve_of_a_run_says_the_hours_to_a_target(rates, capsys, tmp_path):
    run = write_run(tmp_path / "run").path
    curve, rng = Curve(LOG_LOGISTIC, 0.61, 1.9, 2500.0, 0.3), np.random.default_rng(0)
    noise = {"n_prompts": 256, "n_samples": 8, "mean_p_1mp": 0.08}
    lines = [
        {"step": i, "samples": 400 * i, "pass_rate": float(curve(400.0 * i) + rng.normal(0, 0.006)), **noise}
        for i in range(26)
    ]
    (run / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--from", str(run), *SMALL, "--generators", "2", "--trainers", "1"]
    found = answer(capsys, *words, "--target", "0.55", "--price", "2")
    (low, high), plan = found["target"]["samples"], found["plan"]
    truth = 2500 * ((0.61 - 0.3) / (0.61 - 0.55) - 1) ** (1 / 1.9)
    assert low < truth < high
    assert found["target"]["hours"] == pytest.approx([s / 8 / plan["steps_per_hour"] for s in (low, high)])
    assert found["target"]["dollars"] == pytest.approx([6 * h for h in found["target"]["hours"]])
    never = answer(capsys, *words, "--target", "0.9")["target"]
    assert never["hours"][1] is None
    assert main(["plan", "demo", *words, "--target", "0.9"]) == 0
    assert "never] hours" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--generators", "1", "--trainers", "1"], "give either --from RUN or --rates"),
        (["--rates", "h100-8b"], "give --generators and --trainers, or --devices"),
        (["--rates", "h100-8b", "--generators", "1"], "give --generators and --trainers"),
        (
            ["--rates", "h100-8b", "--devices", "4", "--trainers", "1"],
            "give either --devices, or --generators",
        ),
        (["--rates", "h100-8b", "--devices", "1"], "so 2 are needed"),
        (["--rates", "h100-8b", "--devices", "4", "--target", "0.5"], "--target needs the curve of a run"),
        (["--rates", "none.toml", "--devices", "4"], "none.toml: no such file"),
        (["--rates", "h100-8b", "--devices", "4", "--rate", "decode.slots=1"], "did you mean 'decode.slot'"),
        (["--from", "nowhere"], "--from nowhere: no such run folder"),
    ],
)
def test_bad_usage_is_said_in_a_line(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "demo", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["--devices", "0"], ["--devices", "x"], ["--generators", "1.5"], ["--seed", "-1"]]
)
def test_numbers_of_devices_are_whole(capsys, words):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "demo", "--rates", "h100-8b", *words])
    assert stop.value.code == 2
    assert "expected a whole number, " in capsys.readouterr().err


def test_a_bar_comes_once_a_second_has_passed(rates, capsys, monkeypatch):
    """The clock moves on by a quarter of a second at every look: the first steps are not shown."""
    shown = []

    class Bar:
        def __init__(self, name):
            shown.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            shown.append("end")

        def show(self, share, text):
            shown.append(share)

    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr("scalerl.cli.console.TrainingProgress", Bar)
    monkeypatch.setattr("scalerl.cli.console.time", SimpleNamespace(monotonic=lambda: next(clock)))
    answer(capsys, *rates, *SMALL, "--set", "schedule.k=0", "--generators", "1", "--trainers", "1")
    name, *shares, end = shown
    assert (name, end) == ("plan", "end")
    assert shares == pytest.approx([step / 22 for step in range(5, 23)])
