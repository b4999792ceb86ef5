import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scalerl.cli.main import main
from scalerl.curve import LOG_LOGISTIC, Curve

TRUTH, LAST = Curve(LOG_LOGISTIC, 0.61, 1.92, 2542.0, 0.40), 8000


@pytest.fixture
def log(tmp_path):
    compute_N = np.linspace(0, LAST, 16)
    y_N = TRUTH(compute_N) + np.random.default_rng(0).normal(0, 0.003, 16)
    lines = ["gpu_hours,pass_rate", *(f"{c},{y}" for c, y in zip(compute_N, y_N, strict=True))]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_json_is_one_object_and_nothing_else(log, capsys):
    assert main(["fit", str(log), "--json", "--at", "1e4,16000", "--target", ".5", "--budget", "16000"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == ""
    assert [f["compute"] for f in data["forecast"]] == [1e4, 16000, 10 * LAST]
    low, high = data["forecast"][1]["interval"]
    assert low < float(TRUTH(16000.0)) < high
    assert data["target"]["verdict"] in {"go", "no-go", "too close", "too early"}
    assert data["points"] == 16


def test_the_table_for_people_says_the_same_as_the_json(log, capsys):
    arguments = ["fit", str(log), "--at", "16000", "--target", ".9", "--budget", "16000"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert f"{data['fit']['A']:.3f}" in text
    rows = dict(line.split("  ", 1) for line in text.replace("\n\n", "\n").splitlines())
    (low, high), A = data["intervals"]["A"], data["median"]["A"]
    assert rows["ceiling A"].strip() == f"{A:.3f}   95 % [{low:.3f}, {high:.3f}]"
    for name in ("B", "C_mid"):
        low, high = data["intervals"][name]
        assert low < data["median"][name] < high
    fitted = data["fit"]
    assert (
        rows["least squares (paper)"].strip().startswith(f"A {fitted['A']:.3f}  B {fitted['B']:.3g}  C_mid ")
    )
    assert rows["R_0"].strip() == f"{data['r0']['value']:.3f}   measured"
    assert f"{data['forecast'][0]['median']:.3f}" in text
    assert data["target"]["verdict"].upper() in text
    assert "0.9 at 16,000 GPU-hours" in rows
    assert "\x1b" not in text


def test_what_is_not_asked_for_is_told_at_twice_and_at_ten_times_the_data(log, capsys):
    assert main(["fit", str(log)]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row.startswith("at ")] == [f"at {k * LAST:,g} GPU-hours" for k in (2, 10)]
    assert rows[-1] == "prior"


def test_the_answer_comes_before_what_it_rests_on(log, capsys):
    """The ceiling in the first line, the verdict and a stop before the blank line, statistics after it."""
    asked = ["--at", "12000", "--target", ".6", "--budget", "16000", "--worth", "1e-6"]
    assert main(["fit", str(log), *asked]) == 0
    answer, basis = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    labels = [line.split("  ")[0] for line in answer]
    assert labels[:2] == ["ceiling A", "ceiling identified"]
    assert {"at 12,000 GPU-hours", "0.6 at 16,000 GPU-hours", "because", "stop"} < set(labels)
    assert [line.split("  ")[0] for line in basis][:3] == ["metric", "points", "efficiency B"]


def test_a_verdict_has_the_colour_of_a_light(log, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for target, colour in ((".5", "32mGO, "), (".9", "31mNO-GO, ")):
        assert main(["fit", str(log), "--target", target, "--budget", "16000"]) == 0
        assert f"\x1b[{colour}" in capsys.readouterr().out


def test_auto_leaves_out_the_start_before_a_jump_for_all_that_is_printed(tmp_path, capsys):
    compute_N = np.linspace(0, 12_000, 49)
    y_N = TRUTH(compute_N) + np.random.default_rng(0).normal(0, 0.005, 49) - 0.08 * (compute_N < 3500)
    lines = ["gpu_hours,pass_rate", *(f"{c},{y}" for c, y in zip(compute_N, y_N, strict=True))]
    (tmp_path / "jump.csv").write_text("\n".join(lines) + "\n")
    arguments = ["fit", str(tmp_path / "jump.csv"), "--min-compute", "auto", "--sensitivity"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["min_compute"], data["points"], data["r0"]["source"]) == (3500, 35, "fitted")
    assert data["warnings"][0].startswith("left out: gpu_hours below 3500, as the pass rate jumps by ")
    assert data["sensitivity"]["rows"][0]["points"] == 35
    assert main(arguments) == 0
    assert "as the pass rate jumps by " in capsys.readouterr().err


def test_the_cross_check_answers_at_the_computes_asked_for(log, capsys):
    assert main(["fit", str(log), "--cross-check", "--at", "12000,16000", "--json"]) == 0
    check = json.loads(capsys.readouterr().out)["cross_check"]
    for curve in (check["curve"], check["bootstrap"]["curve"]):
        assert [compute for compute, _ in curve] == [12000, 16000]
    assert main(["fit", str(log), "--cross-check", "--at", "16000"]) == 0
    assert "curve at 16000: posterior [" in capsys.readouterr().out


def test_a_run_folder(tmp_path, capsys):
    rows = []
    for i in range(12):
        hours = 700.0 * i
        seconds = {"generate": 3000 * hours, "train": 600 * hours, "evaluate": 1e6, "idle": 0.0}
        rows.append({"step": 100 * i, "pass_rate": float(TRUTH(hours)), "device_seconds": seconds})
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "evals.jsonl").write_text("\n".join(lines) + '\n{"step": 12')
    assert main(["fit", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "0.610" in out
    assert "unfinished" in err
    assert main(["fit", str(tmp_path), "--x", "steps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["C_mid"] == pytest.approx(2542 / 7, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["fit", "missing.csv"], 2, "missing.csv: no such file"),
        (["fit", "{folder}"], 2, "a folder, not a run; give one of those in it: log.csv"),
        (["fit", "{folder}", "--y", "reward"], 2, "give one of those in it: log.csv"),
        (["fit", "{log}", "--x", "flop"], 2, "no column 'flop'"),
        (["fit", "{log}", "--target", ".5"], 2, "--target R and --budget C need each other"),
        (["report", "{log}", "--target", ".5"], 2, "--target needs --budget"),
        (["report", "{folder}/nothing"], 2, "nothing: no such file"),
        (["report", "{log}", "{folder}/nothing"], 2, "nothing: no such file"),
        (["fit", "{log}", "--min-compute", "7000"], 3, "a curve needs at least 4"),
        (
            ["fit", "{log}", "--min-compute", "auto", "--prior-from", "{log}"],
            2,
            "give the compute that it chose",
        ),
        (["fit", "{log}", "--min-compute", "auto", "--paper"], 2, "--paper needs a number"),
    ],
)
def test_errors_are_one_line_with_their_status(log, capsys, arguments, status, message):
    assert main([argument.format(log=log, folder=log.parent) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("scalerl: ")


@pytest.mark.parametrize("command", ["fit", "best", "report"])
def test_a_run_without_an_evaluation_does_not_suffice(tmp_path, capsys, command):
    """With an empty evals.jsonl, or before there is one: the input is valid in both."""
    (tmp_path / "config.json").write_text('{"schema": 1}')
    assert main([command, str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert said == f"scalerl: {tmp_path}: the run has no evaluation yet\n"
    (tmp_path / "evals.jsonl").touch()
    assert main([command, str(tmp_path)]) == 3
    expected = ": 0 evaluations, and 3 are needed to tell noise from a rise" if command == "best" else said
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit"], "RUN|FILE"),
        (["no"], "invalid choice: 'no'"),
        (["fit", "x", "--wrong"], "unrecognized arguments: --wrong"),
        (["fit", "x", "--r0", "half"], "--r0: expected a share in [0, 1], such as 0.7, found 'half'"),
        (["fit", "x", "--r0", "40"], "--r0: expected a share in [0, 1], such as 0.7, found '40'"),
        (["fit", "x", "--min-compute", "-1"], "--min-compute: expected compute of 0 or more, found '-1'"),
        (["fit", "x", "--min-compute", "nan"], "--min-compute: expected a number, found 'nan'"),
        (["compare", "x", "--min-compute", "auto"], "--min-compute: expected a number, found 'auto'"),
        (["fit", "x", "--at", "-5"], "--at: expected compute of 0 or more, found '-5'"),
        (["fit", "x", "--at=5,-5"], "--at: expected compute of 0 or more, found '-5'"),
        (["fit", "x", "--at", "1,inf"], "--at: expected a number, found 'inf'"),
        (["fit", "x", "--at", "1,"], "--at: expected a number, found ''"),
        (["fit", "x", "--budget=-1e4"], "--budget: expected compute of 0 or more, found '-1e4'"),
        (["fit", "x", "--budget", "nan"], "--budget: expected a number, found 'nan'"),
        (["fit", "x", "--target", "60"], "--target: expected a share in [0, 1], such as 0.7, found '60'"),
        (["fit", "x", "--target", "70%"], "--target: expected a share in [0, 1], such as 0.7, found '70%'"),
        (["fit", "x", "--price", "0"], "--price: expected a number above 0, found '0'"),
        (["fit", "x", "--price", "-2"], "--price: expected a number above 0, found '-2'"),
        (["fit", "x", "--price", "nan"], "--price: expected a number above 0, found 'nan'"),
        (["fit", "x", "--level", "95"], "--level: expected a level between 0 and 1, e.g. 0.95, found '95'"),
        (["fit", "x", "--level", "1"], "--level: expected a level between 0 and 1, e.g. 0.95, found '1'"),
        (["fit", "x", "--level", "nan"], "--level: expected a level between 0 and 1, e.g. 0.95, found 'nan'"),
        (["report", "x", "-o", "-"], "-o/--output: expected a path, found '-'"),
        (["report", "x", "--figure", "-"], "--figure: expected a path, found '-'"),
        (["report", "x", "--markdown", "-"], "--markdown: expected a path, found '-'"),
        (["report", "x", "--latex", "-"], "--latex: expected a path, found '-'"),
        (["ingest", "x", "-o", "-"], "-o/--output: expected a path, found '-'"),
        (["train", "x", "-o", "-"], "-o/--output: expected a path, found '-'"),
        (["study", "x", "-o", "-"], "-o/--output: expected a path, found '-'"),
        (["demo", "-o", "-"], "-o/--output: expected a path, found '-'"),
        (["model", "smollm2", "-o", "-"], "-o/--output: expected a path, found '-'"),
    ],
)
def test_usage_errors_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_names_all_that_can_be_read_in_it(log, capsys, monkeypatch):
    """Logs of every format, tables, and runs; no page that quotes a console, and nothing that is empty."""
    monkeypatch.chdir(log.parent)
    console = "".join(
        f"step:{step} - val-core/openai/gsm8k/reward/mean@1:0.{step + 10}\n" for step in range(0, 30, 5)
    )
    for name in ("verl.log", "notes.md"):
        Path(name).write_text(console)
    Path("empty.log").touch()
    Path("notes.txt").write_text("nothing of a run\n")
    Path("rows.jsonl").write_text('{"step": 1, "eval/pass_rate": 0.1}\n')
    Path("rows.json").write_text('[{"step": 1, "eval/pass_rate": 0.1}]')
    Path("settings.json").write_text('{"lr": 0.1, "stops": [1, 2]}')
    assert main(["fit", "."]) == 2
    named = "log.csv, rows.json, rows.jsonl, verl.log"
    assert capsys.readouterr().err.endswith(f"; give one of those in it: {named}\n")
    Path("mine").mkdir()
    Path("mine", "evals.jsonl").touch()
    Path("hf", "checkpoint-5").mkdir(parents=True)
    Path("hf", "checkpoint-5", "trainer_state.json").write_text('{"log_history": []}')
    assert main(["fit", "."]) == 2
    assert capsys.readouterr().err.endswith("in it: hf, log.csv, mine, rows.json, rows.jsonl, verl.log\n")


@pytest.mark.parametrize(
    ("axis", "label"),
    [("gpu_hours", "gain per GPU-hour"), ("flops", "gain per FLOP"), ("hours", "gain per unit of hours")],
)
def test_the_gain_is_per_unit_of_the_axis(log, capsys, axis, label):
    log.write_text(log.read_text().replace("gpu_hours", axis))
    assert main(["fit", str(log), "--x", axis, "--worth", "1e-6"]) == 0
    assert f"\n{label} " in capsys.readouterr().out


def test_standard_input(log, capsys, monkeypatch):
    assert main(["fit", str(log), "--json"]) == 0
    from_file = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert main(["fit", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == from_file
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["fit", "-"]) == 2
    assert "standard input: the file is empty" in capsys.readouterr().err


def test_the_default_axis_is_that_of_the_budget_and_is_stated(tmp_path, capsys):
    rows = [
        {"step": 10 * i, "pass_rate": float(TRUTH(700.0 * i)), "tokens": {"generated": 9 * i, "trained": i}}
        for i in range(12)
    ]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["fit", str(tmp_path)]) == 0
    assert "12 on tokens" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({"budget": {"kind": "steps", "amount": 200}}))
    assert main(["fit", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["axis"] == "steps"
    assert [forecast["compute"] for forecast in answer["forecast"]] == [200, 1100]  # its budget, ten times
    assert main(["fit", str(tmp_path), "--x", "gpu_hours"]) == 2
    assert (
        "no times of steps, so no GPU-hours: use --x tokens or tokens_processed or steps"
        in capsys.readouterr().err
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody who may not enter")
def test_a_folder_that_may_not_be_entered(log, capsys):
    log.parent.chmod(0o700)
    os.seteuid(65534)
    try:
        for arguments in (["fit", str(log)], ["fit", str(log.parent)], ["report", str(log.parent)]):
            assert main(arguments) == 2
            assert capsys.readouterr().err.endswith(": Permission denied\n")
    finally:
        os.seteuid(0)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("scalerl 0.")


def test_an_interrupt_is_one_line(log, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("scalerl.ingest.load.read_data", interrupt)
    assert main(["fit", str(log)]) == 130
    assert capsys.readouterr().err == "scalerl: interrupted\n"


def test_a_reader_that_leaves_is_no_error(log):
    command = f'"{sys.executable}" -m scalerl fit "{log}" --json | head -c 1'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "{"
    assert done.stderr == ""


def test_fit_imports_nothing_heavy(log):
    code = (
        "import sys; from scalerl.cli.main import main; "
        f"main(['fit', {str(log)!r}, '--json', '--at', '9e3']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'matplotlib', 'rich', 'scipy', 'jinja2'}; "
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forecast"]


@pytest.mark.parametrize("command", ["fit", "compare", "backtest"])
def test_commands_that_fit_take_the_same_options(log, capsys, command):
    """At a price compute is in dollars, R_0 may be free, and a level of 1 is none."""
    paths = [str(log)]
    if command == "compare":
        other = log.with_name("other.csv")
        other.write_text(log.read_text())
        paths.append(str(other))
    assert main([command, *paths, "--price", "2", "--r0", "free", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axis"] == "dollars"
    assert main([command, *paths, "--price", "2", "--x", "steps"]) == 2
    assert "--price measures compute in dollars" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command, *paths, "--level", "1"])
    assert "expected a level between 0 and 1" in capsys.readouterr().err


def test_standard_output_that_takes_nothing_is_one_line(log):
    command = [sys.executable, "-m", "scalerl", "fit", str(log)]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "scalerl: standard output: No space left on device\n")


@pytest.mark.parametrize(("closed", "says"), [(">&-", ""), (">&- 2>&-", ""), ("2>&-", "ceiling A")])
def test_a_stream_that_is_closed_takes_nothing_and_fails_nothing(log, closed, says):
    command = f'"{sys.executable}" -m scalerl fit "{log}" {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:9], done.stderr) == (0, says, "")


def test_a_folder_with_a_run_names_the_ways_to_go_on(tmp_path, capsys):
    """`remove it` would be bad advice: the run may be under way in another process."""
    (tmp_path / "evals.jsonl").write_text("")
    assert main(["train", "demo", "-o", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path} exists already: --resume continues this run, --restart starts over" in err
    assert "remove" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["evals.jsonl"]
