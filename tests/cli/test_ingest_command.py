"""`scalerl ingest`, and the other commands given another trainer's log: from the file to the fit."""

import json
import math

import example_files
import numpy as np
import pytest

from scalerl import InputError, load_run
from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve
from scalerl.record.reader import RunRecord

TRUTH = Curve(LOG_LOGISTIC, 0.61, 1.9, 40.0, 0.35)
"""Over GPU-hours."""
METRIC = "val-core/math/acc/mean@16"


def verl_rows(seed=0, last=240):
    """What verl's file logger writes: 900 seconds a step on 8 devices, an evaluation every tenth."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(last + 1):
        data = {"timing_s/step": 900.0, "perf/time_per_step": 900.0, "critic/score/mean": 0.4}
        data |= {"actor/entropy": 0.5, "response_length/clip_ratio": 0.02 + step / 1e5}
        hours = step * 900 * 8 / 3600
        evaluation = {METRIC: float(TRUTH(np.array(hours))) + float(rng.normal(0, 0.004))}
        if step == 0:
            data = evaluation
        elif step % 10 == 0:
            data |= evaluation
        rows.append({"step": step, "data": data})
    return rows


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_log_becomes_a_run_that_fits_as_the_log_does(tmp_path, capsys):
    log = write(tmp_path / "verl.jsonl", verl_rows())
    assert main(["ingest", log, "-o", str(tmp_path / "run"), "--devices", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    shown = dict(line.split(maxsplit=2)[::2] for line in out.splitlines() if line.startswith("pass rate"))
    metric = "held-out pass rate of math (16 samples each)"
    assert shown == {"pass": f"{METRIC}, {metric}; 25 evaluations"}
    record = RunRecord.read(tmp_path / "run")
    assert record.config["source"]["trainer"] == "verl"
    assert record.compute("gpu_hours")[:3] == pytest.approx([0, 20, 40])
    assert [point.n_samples for point in record.evals] == [16] * 25
    assert record.evals[5].truncated == pytest.approx(0.0205)
    assert record.steps()[10]["reward_mean"] == 0.4
    answers = []
    for source in (["fit", str(tmp_path / "run")], ["fit", log, "--devices", "8"]):
        assert main([*source, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["fit"] == answers[1]["fit"]
    low, high = answers[0]["intervals"]["A"]
    assert low < 0.61 < high


def test_the_axis_that_is_taken_is_said_where_a_log_has_several_and_no_budget(tmp_path, capsys):
    log = write(tmp_path / "verl.jsonl", verl_rows(last=100))
    assert main(["fit", log, "--devices", "8"]) == 0
    assert "axis                   GPU-hours (the default); others: --x steps\n" in capsys.readouterr().out
    assert main(["fit", log, "--x", "steps"]) == 0
    assert "others: --x" not in capsys.readouterr().out
    assert main(["ingest", log, "-o", str(tmp_path / "run"), "--devices", "8"]) == 0
    assert "axes         gpu_hours, steps (fit uses gpu_hours; --x changes it)\n" in capsys.readouterr().out


def test_without_devices_the_compute_is_that_of_one_and_that_is_said(tmp_path, capsys):
    log = write(tmp_path / "verl.jsonl", verl_rows(last=100))
    assert main(["ingest", log, "-o", str(tmp_path / "run"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert any("number of devices is not logged" in text for text in run["warnings"])
    assert RunRecord.read(tmp_path / "run").compute("gpu_hours")[1] == pytest.approx(2.5)
    assert "pass rate" in run["taken"]


def test_several_runs_are_written_side_by_side_and_one_is_chosen_to_fit(tmp_path, capsys):
    header = f"Step,one/a - {METRIC},two - {METRIC}\n"
    lines = [f"{s},{0.3 + 0.2 * s / (s + 40)},{0.3 + 0.3 * s / (s + 40)}" for s in range(0, 400, 20)]
    export = tmp_path / "export.csv"
    export.write_text(header + "\n".join(lines))
    assert main(["ingest", str(export), "-o", str(tmp_path / "runs")]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["one_a", "two"]
    capsys.readouterr()
    assert main(["fit", str(export)]) == 2
    assert "holds 2 runs; choose one with --run: one/a, two" in capsys.readouterr().err
    assert main(["fit", str(export), "--run", "two", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axis"] == "steps"
    assert main(["fit", str(export), "--run", "three"]) == 2
    assert "no run 'three'; there are one/a, two" in capsys.readouterr().err
    both = [str(export), "--run", "two", "--run", "one/a"]
    assert main(["fit", *both]) == 2
    assert "--run is given 2 times, and this command reads one run" in capsys.readouterr().err
    assert main(["compare", *both]) == 0
    assert "\none/a against two" in capsys.readouterr().out


def test_a_run_that_is_chosen_may_lie_beside_one_without_a_pass_rate(tmp_path, capsys):
    export = tmp_path / "export.csv"
    lines = [f"{s},{0.3 + 0.2 * s / (s + 40)},{s / 100}" for s in range(0, 400, 20)]
    export.write_text("\n".join([f"Step,actor - {METRIC},trainer - {METRIC}", *lines]))
    assert main(["fit", str(export)]) == 0
    assert f"warning: left out: {export}, run 'trainer': " in capsys.readouterr().err
    assert main(["fit", str(export), "--run", "actor", "--json"]) == 0
    assert main(["fit", str(export), "--run", "trainer"]) == 2


def test_logs_are_compared_and_backtested_as_runs_are(tmp_path, capsys):
    logs = [write(tmp_path / f"{name}.jsonl", verl_rows(seed)) for seed, name in enumerate("abc")]
    groups = ["--group", f"old={logs[0]},{logs[1]}", "--group", f"new={logs[2]}", "--devices", "8"]
    assert main(["compare", *groups, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["ceiling"]["verdict"] == "not significant"
    assert main(["backtest", logs[0], "--devices", "8", "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "word"], "no format 'word'; there are wandb, "),
        (["--trainer", "mine"], "no trainer 'mine'; there are "),
        (["--y", "nothing"], "no metric 'nothing' with numbers; there are "),
        (["--model", "nowhere"], "nowhere: no such file"),
        (["--format", "tensorboard"], "not an event file"),
    ],
)
def test_what_is_asked_for_and_not_there_is_one_line(tmp_path, capsys, arguments, message):
    log = write(tmp_path / "verl.jsonl", verl_rows(last=20))
    assert main(["ingest", log, "-o", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_with_logs_of_two_formats_says_which_is_read(tmp_path, capsys):
    """As the output folder of a trainer that has its tracker's files in it."""
    rows = [{"step": n, "eval_reward": 0.2 + 0.02 * n} for n in range(1, 9)]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    write(tmp_path / "out" / "metrics.jsonl", [{"step": n, "eval/accuracy": 0.1} for n in range(4)])
    said = "holds logs of several formats; trainer-state is read, and not jsonl (--format jsonl)"
    words = ["ingest", str(tmp_path / "out"), "-o"]
    assert main([*words, str(tmp_path / "one")]) == 0
    out, err = capsys.readouterr()
    assert said in err
    assert "; 8 evaluations" in out
    assert said in RunRecord.read(tmp_path / "one").config["assumed"][0]
    assert main(["fit", str(tmp_path / "out"), "--x", "steps"]) == 0
    assert said in capsys.readouterr().err
    assert main([*words, str(tmp_path / "two"), "--format", "jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "several formats" not in err
    assert "; 4 evaluations" in out


COMMANDS = (["fit"], ["fit", "--paper"], ["backtest"], ["report", "-o", "p.html"], ["watch", "--once"])


@pytest.mark.parametrize("words", [*COMMANDS, ["compare", "runs/a-seed0"]], ids=" ".join)
@pytest.mark.parametrize(
    ("given", "option"),
    [
        (["--devices", "8"], "--devices"),
        (["--run", "a"], "--run"),
        (["--trainer", "verl", "--model", "m"], "--trainer, --model"),
    ],
)
def test_options_for_logs_are_refused_where_there_is_none(
    tmp_path, monkeypatch, capsys, words, given, option
):
    """They would be passed over in silence, and the user would think that they had been heard."""
    monkeypatch.chdir(example_files.write(tmp_path))
    for path in ("runs/mine", "log.csv"):
        if words[0] == "compare" and path == "log.csv":
            continue
        assert main([words[0], path, *words[1:], *given]) == 2
        err = capsys.readouterr().err
        which = f"{path} is not" if words[0] != "compare" else "none of runs/mine, runs/a-seed0 is"
        assert err == f"scalerl: {option}: only for the log of another trainer, which {which}\n"
    with pytest.raises(InputError, match="devices=: only for the log of another trainer"):
        load_run("runs/mine", devices=8)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01\x02", b"hello\n", b"[1, 2", b"\xff\xfea\x00", b'{"a": 1}\n', b"a,b\n1,2\n"]
)
def test_what_is_no_log_is_one_line(tmp_path, capsys, content):
    (tmp_path / "file").write_bytes(content)
    assert main(["ingest", str(tmp_path / "file"), "-o", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["ingest", str(tmp_path / "nowhere"), "-o", str(tmp_path / "run")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["ingest", str(tmp_path), "-o", str(tmp_path / "run")]) == 2
    assert not (tmp_path / "run").exists()


def test_flops_are_counted_from_the_config_of_the_model(tmp_path, capsys):
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "vocab_size": 100, "model_type": "llama"}))
    rows = verl_rows(last=30)
    for row in rows[1:]:
        row["data"] |= {"perf/total_num_tokens": 1000.0, "response_length/mean": 99.0}
    log = write(tmp_path / "verl.jsonl", rows)
    assert main(["ingest", log, "-o", str(tmp_path / "run"), "--model", str(tmp_path)]) == 0
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 176) + 64 * 100
    flops = RunRecord.read(tmp_path / "run").compute("flops")
    assert flops[0] == 0
    assert flops[1] == pytest.approx(10 * 1000 * 4 * (2 * weights + 4 * 2 * 64 * 50), rel=1e-9)
    assert math.isclose(flops[3], 3 * flops[1])
    capsys.readouterr()
    assert main(["fit", str(tmp_path / "run"), "--x", "flops"]) in (0, 3)
