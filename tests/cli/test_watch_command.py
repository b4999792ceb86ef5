"""`scalerl watch`: runs and logs that grow while they are followed, by the command as it is installed."""

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from growing import TRUTH, Growing
from rich.console import Console

from scalerl.cli import watch
from scalerl.cli.main import main
from scalerl.cli.watch import Follower
from scalerl.ingest import load
from scalerl.ingest.options import ReadOptions
from scalerl.jsonl import dumps
from scalerl.record.activity import Activity, Count
from scalerl.record.reader import RunRecord
from scalerl.view.facts.standing import StandingQuery
from scalerl.view.terminal.watch import view, view_rows

COMMAND = [sys.executable, "-m", "scalerl", "watch"]
FAST = ["--interval", "0.05"]


@contextlib.contextmanager
def watching(*words):
    """The command in a process of its own, its output to be read line by line."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, words), *FAST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def once(capsys, *words):
    assert main(["watch", *map(str, words), "--once"]) == 0
    return capsys.readouterr()


def follower(path, **asked):
    return Follower(str(path), None, ReadOptions(), None, lambda data: StandingQuery(**asked))


def stood(path):
    """How a source stands at one look."""
    followed = follower(path)
    assert followed.look()
    assert followed.run is not None
    return followed.run


def state(path, steps):
    rows = [{"step": n, "eval_reward": round(float(TRUTH(20.0 * n)), 4)} for n in range(1, steps + 1)]
    path.write_text(json.dumps({"global_step": steps, "log_history": rows}))


def test_a_line_for_every_evaluation_until_the_run_has_ended(tmp_path):
    run = Growing(tmp_path / "run", 6)
    with watching(run.path) as process:
        assert process.stdout.readline().startswith("run  step 100  ")
        for step in (120, 140, 160):
            rate = run.grow()
            line = process.stdout.readline()
            assert line.startswith(f"run  step {step}  ")
            assert f"pass rate {rate:.3f}" in line
            assert "forecast of the end (1,200 steps): 0." in line
        run.alarm(140)
        run.grow()
        assert "1 alarm: truncated 0.14 (threshold 0.1), from step 100 on" in process.stdout.readline()
        run.end()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "run: alarm: truncated 0.14" in err
    assert "run: the run has ended" in err


def test_json_has_what_fit_says(tmp_path, capsys):
    run = Growing(tmp_path / "run", 40)
    found = json.loads(once(capsys, run.path, "--json", "--target", "0.58").out)
    assert main(["fit", str(run.path), "--json", "--at", "1200", "--target", "0.58", "--budget", "1200"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    assert found["forecast"] == fitted["forecast"][0]
    assert found["target"]["verdict"] == fitted["target"]["verdict"]
    assert found["ceiling"]["interval"] == fitted["intervals"]["A"]
    assert (found["step"], found["last_step"], found["truncated"]) == (780, 785, 0.031)
    # An evaluation a minute, 20 steps: 420 steps are left, less the 21 minutes since the last one.
    assert found["compute_per_second"] == pytest.approx(20 / 60)
    assert found["eta"] == pytest.approx(420 * 3 - 21 * 60, abs=60)


def test_lines_come_for_evaluations_that_came_together(tmp_path):
    """Each says what could be said then, whatever has come since."""
    path = tmp_path / "trainer_state.json"
    state(path, 8)
    with watching(path, "--json", "--budget", "60") as process:
        assert json.loads(process.stdout.readline())["evaluations"] == 8
        state(path, 11)
        rows = [json.loads(process.stdout.readline()) for _ in range(3)]
        alone = tmp_path / "alone.json"
        state(alone, 9)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    assert [row["step"] for row in rows] == [9, 10, 11]
    then = follower(alone, budget=60.0)
    assert then.look()
    assert rows[0]["forecast"] == then.run.to_json(0.0)["forecast"]


def test_a_torn_file_and_one_that_vanishes_leave_what_was_known(tmp_path):
    path = tmp_path / "trainer_state.json"
    state(path, 8)
    followed = follower(path)
    assert followed.look()
    before = followed.run
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert not followed.look()
    assert followed.run is before
    assert "not JSON" in followed.problem
    path.unlink()
    assert not followed.look()
    assert "no such file" in followed.problem
    state(path, 9)
    assert followed.look()
    assert followed.problem == ""
    assert len(followed.run.points) == 9


def test_what_heals_without_a_trace_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("scalerl.files._RETRY", 0.0)
    monkeypatch.setattr("scalerl.files._BACK_OFF", 0)
    path = tmp_path / "trainer_state.json"
    state(path, 8)
    whole, stat = path.read_bytes(), path.stat()
    path.write_bytes(b"]" + whole[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    followed = follower(path)
    assert not followed.look()
    assert followed.problem
    path.write_bytes(whole)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert followed.look()
    assert (followed.problem, len(followed.run.points)) == ("", 8)
    assert not followed.look()


def test_the_checkpoints_of_another_trainer_are_followed(tmp_path):
    """Whose folder has a config.json, too: that of the model."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    followed = follower(tmp_path)
    for steps in (8, 10):
        (tmp_path / f"checkpoint-{steps}").mkdir()
        state(tmp_path / f"checkpoint-{steps}" / "trainer_state.json", steps)
        assert followed.look()
        assert len(followed.run.points) == steps
    assert not followed.is_before_first_evaluation()


def test_a_torn_last_line_is_told_when_it_is_whole(tmp_path):
    run = Growing(tmp_path / "run", 6)
    evals = run.path / "evals.jsonl"
    followed = follower(run.path)
    assert followed.look()
    run.grow()
    whole = evals.read_bytes()
    evals.write_bytes(whole[:-40])
    followed.look()
    assert len(followed.run.points) == 6
    evals.write_bytes(whole)
    assert followed.look()
    assert len(followed.run.points) == 7


def test_a_run_that_is_resumed_goes_on_from_where_it_was_cut(tmp_path):
    run = Growing(tmp_path / "run", 6)
    lengths = run.writer.lengths()
    run.grow()
    run.grow()
    with watching(run.path) as process:
        assert process.stdout.readline().startswith("run  step 140  ")
        run.writer.close()
        run.writer = type(run.writer).resume(run.path, lengths)
        run.n = 6
        assert process.stderr.readline().startswith("run: metric pass_rate, held-out pass rate (")
        assert process.stderr.readline() == "run: goes on from evaluation 6; what came after it is gone\n"
        run.grow()
        lines = [process.stdout.readline()]
        assert lines[0].startswith("run  step 120  ") or process.stdout.readline().startswith("run  step 120")
        assert process.poll() is None


def test_a_run_that_is_not_there_is_waited_for_where_that_is_asked(tmp_path, capsys):
    path = tmp_path / "run"
    assert main(["watch", str(path)]) == 2
    assert capsys.readouterr().err == f"scalerl: {path}: no such file (--wait waits for it)\n"
    with watching(path, "--wait") as process:
        assert process.stderr.readline() == f"waiting: {path}: no such file\n"
        run = Growing(path, 2)
        assert process.stdout.readline().startswith("run  step ")
        run.end()
        assert process.wait(60) == 0


def test_what_waiting_cannot_heal_is_said_at_once(tmp_path, capsys):
    run = Growing(tmp_path / "run", 6)
    assert main(["watch", str(run.path), "--x", "foo"]) == 2
    assert capsys.readouterr().err.startswith("scalerl: unknown compute axis 'foo': choose one of ")
    (tmp_path / "empty").mkdir()
    assert main(["watch", str(tmp_path / "empty")]) == 2
    err = capsys.readouterr().err
    assert "no evals.jsonl in it" in err
    assert "--wait" not in err


def test_a_run_without_an_evaluation_is_waited_for(tmp_path, capsys):
    run = Growing(tmp_path / "run")
    (run.path / "evals.jsonl").touch()
    assert main(["watch", str(run.path), "--once"]) == 2
    assert "no evaluation yet (--wait waits for it)" in capsys.readouterr().err
    (run.path / "evals.jsonl").unlink()
    assert main(["watch", str(run.path), "--once"]) == 2
    assert "no evaluation yet (--wait waits for it)" in capsys.readouterr().err
    with watching(run.path) as process:
        assert process.stderr.readline() == f"waiting: {run.path}: the run has no evaluation yet\n"
        run.grow()
        assert "too early: 1 of 6 evaluations" in process.stdout.readline()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-"], "standard input is neither"),
        (["LOG", "--target", "0.5"], "--target needs a budget on the axis"),
        (["LOG", "--x", "nothing"], "nothing"),
        (["/dev/null"], "neither a file nor a folder"),
        (["LOG", "--interval", "0"], "expected a number above 0"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, words, said):
    log = tmp_path / "log.csv"
    log.write_text("gpu_hours,pass_rate\n1,.2\n2,.3\n")
    with contextlib.suppress(SystemExit):
        assert main(["watch", *(str(log) if word == "LOG" else word for word in words)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_table_is_followed_too(tmp_path, capsys):
    log = tmp_path / "log.csv"
    rows = [f"{c},{float(TRUTH(c)):.4f}" for c in np.linspace(20, 900, 20)]
    log.write_text("\n".join(["gpu_hours,pass_rate", *rows]))
    out = once(capsys, log, "--budget", "1200", "--target", ".4").out
    assert out.startswith("log.csv  evaluation 20  ")
    assert "GO, over 99 %" in out


def test_where_nobody_looks_for_alarms_that_there_are_none_is_not_said(tmp_path, capsys):
    path, run = tmp_path / "trainer_state.json", Growing(tmp_path / "run", 8)
    state(path, 8)
    assert json.loads(once(capsys, path, "--json").out)["alarms"] is None
    assert json.loads(once(capsys, run.path, "--json").out)["alarms"] == []
    assert dict(view_rows(stood(path), 0.0))["health"] == "not checked"
    assert dict(view_rows(stood(run.path), 0.0))["health"] == "no alarms"
    imported = RunRecord(tmp_path, {"recipe": {"name": "theirs"}, "source": {}}, ())
    assert not imported.health_is_watched


def test_an_end_that_nobody_knows_is_not_spoken_of(tmp_path, capsys):
    path = tmp_path / "trainer_state.json"
    state(path, 20)
    assert "forecast at twice the compute so far (40 steps): 0." in once(capsys, path).out
    assert "forecast of the end (60 steps): 0." in once(capsys, path, "--budget", "60").out
    assert "at twice the compute so far" in dict(view_rows(stood(path), 0.0))["forecast"]


def test_how_old_the_last_line_is_comes_from_the_files_where_the_log_has_no_times(tmp_path, capsys):
    path = tmp_path / "trainer_state.json"
    state(path, 8)
    then = time.time() - 7200
    os.utime(path, (then, then))
    assert re.search(r"  log written 2\.0 h ago$", once(capsys, path).out.strip())
    assert json.loads(once(capsys, path, "--json").out)["last_line"] == pytest.approx(then, abs=1)
    assert dict(view_rows(stood(path), then + 60))["last line"] == "log written 60 s ago"
    run = Growing(tmp_path / "run", 8)
    assert re.search(r"  last evaluation 53\.\d min ago$", once(capsys, run.path).out.strip())


def test_a_source_is_read_when_it_has_changed_and_fitted_when_it_has_an_evaluation(tmp_path, monkeypatch):
    run = Growing(tmp_path / "run", 8)
    read, times = load.read_data, []
    monkeypatch.setattr(load, "read_data", lambda *words: times.append(0) or read(*words))
    followed = follower(run.path)
    assert followed.look()
    assert [followed.look() for _ in range(3)] == [False] * 3
    assert len(times) == 1
    fitted = followed.run.found
    run.writer.step({"step": 200, "time": time.time(), "truncated": 0.2})
    assert followed.look()
    assert len(times) == 2
    assert followed.run.found is fitted
    assert followed.run.health("truncated") == 0.2
    run.grow()
    assert followed.look()
    assert followed.run.found is not fitted


def test_a_large_source_is_looked_at_less_often(tmp_path, monkeypatch):
    run = Growing(tmp_path / "run", 2)
    read, clock = load.read_data, [0.0]

    def slow(*words):
        clock[0] += 0.3
        return read(*words)

    monkeypatch.setattr(load, "read_data", slow)
    monkeypatch.setattr(watch, "monotonic", lambda: clock[0])
    followed = follower(run.path)
    followed.look()
    assert followed.pause(0.1) == pytest.approx(3.0)
    assert followed.pause(100.0) == 100.0
    followed.look()
    assert followed.pause(0.1) == 0.1


def shown(*words, seconds=60, until=None, number=signal.SIGINT, size="100x40", **environment):
    """What the command shows on a terminal, without colours; a signal once `until` is seen."""
    parent, child = pty.openpty()
    columns, lines = size.split("x")
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": columns, "LINES": lines, **environment}
    process = subprocess.Popen([*COMMAND, *map(str, words)], stdout=child, stderr=child, env=env)
    os.close(child)
    text, deadline, sent = "", time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        if not select.select([parent], [], [], 0.1)[0]:
            continue
        try:
            text += os.read(parent, 65536).decode(errors="replace")
        except OSError:  # its end
            break
        if until and until in text and not sent:
            process.send_signal(number)
            sent = True
    os.close(parent)
    return process.wait(20), text


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_view_of_a_terminal(tmp_path):
    run = Growing(tmp_path / "run", 45)
    run.alarm(100)
    status, text = shown(run.path, "--once", "--target", ".58")
    view = plain(text)
    assert status == 0
    lines = view.splitlines()
    assert lines[0].startswith("run  step 885  73 % of the budget")
    assert "●" in view
    assert "░" in view
    assert any("1,200 steps" in line and line.strip().startswith("0") for line in lines)
    for label in ("pass rate", "forecast", "ceiling A", "verdict", "health", "speed", "last line"):
        assert any(line.startswith(label) for line in lines), label
    assert "open: 1 alarm: truncated" in view
    assert "16 min ago" in view.replace("15.", "16.") or "min ago" in view
    assert max(map(len, lines)) <= 100
    assert "\x1b[" in text


def test_colours_and_signs_follow_the_terminal(tmp_path):
    run = Growing(tmp_path / "run", 45)
    _, text = shown(run.path, "--once", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    _, text = shown(run.path, "--once", PYTHONIOENCODING="ascii")
    assert text.isascii()
    assert "o" in plain(text).splitlines()[3]
    _, text = shown(run.path, "--once", TERM="dumb")
    assert plain(text).splitlines()[1].startswith("run  step 880  ")
    _, text = shown(run.path, "--once", size="60x24")
    assert max(len(line) for line in plain(text).splitlines()) <= 60


@pytest.mark.parametrize("size", ["40x12", "80x24", "60x30", "30x9"])
def test_a_small_terminal_gets_what_fits_and_no_entry_in_two(tmp_path, size):
    columns, lines = map(int, size.split("x"))
    run = Growing(tmp_path / "run", 45)
    run.alarm(100)
    followed = follower(run.path, target=0.58)
    assert followed.look()
    assert followed.run is not None
    page = io.StringIO()
    console = Console(width=columns, height=lines, file=page, color_system=None)
    console.print(view(followed.run, time.time(), console, "something is wrong"))
    shown = page.getvalue().splitlines()
    assert max(map(len, shown)) <= columns
    assert any("●" in line for line in shown) == (lines >= 24)  # the plot, or not
    if size != "30x9":  # which not even the least has room in
        assert len(shown) <= lines
    legend = [line for line in shown if "evaluation   " in line or "┄┄ ceiling A" in line]
    assert all(name in "\n".join(legend) for name in ("│ forecast", "┄┄ ceiling A")) or lines < 24
    assert not any(line.startswith("ceiling A   ╌") for line in shown)
    page = io.StringIO()
    whole = Console(width=columns, height=lines, file=page, color_system=None)
    whole.print(view(followed.run, time.time(), whole, is_whole=True))
    assert "speed" in page.getvalue()  # what stays on the screen leaves nothing out


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_view_ends_quietly(tmp_path, number, ends):
    run = Growing(tmp_path / "run", 12)
    status, text = shown(run.path, *FAST, until="last line", number=number)
    assert status == ends
    assert "Traceback" not in text
    assert plain(text).rstrip().splitlines()[-1].startswith("last line")
    # The alternate screen is left and the cursor shown; what was shown last comes after that.
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "last line" in text.partition("\x1b[?1049l")[2]
    run.end()
    status, text = shown(run.path, *FAST)
    assert status == 0
    assert "the run has ended" in plain(text)


def doing(path, ago=0.0, **changes):
    """What a run is doing, written into its folder as the trainer does."""
    now = time.time() - ago
    activity = Activity("generating", 4, Count(5, 16, "groups"), 12_400, now - 10, now)
    path.mkdir(exist_ok=True)
    (path / "progress.json").write_text(dumps(replace(activity, **changes).to_json()))


def test_a_run_before_its_first_evaluation_says_what_it_does(tmp_path):
    """As soon as its folder is there, before it has a config.json."""
    path = tmp_path / "run"
    count = Count(120, 400, "completions", time.time() - 10)
    doing(path, doing="evaluating", step=0, tokens=0, count=count)
    with watching(path) as process:
        assert process.stderr.readline().endswith("the run has no evaluation yet\n")
        assert process.stderr.readline() == "run: evaluating 120 of 400 completions  done in 23 s\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize(("ago", "age"), [(0.0, ""), (180.0, "(as of 3.0 min ago)")])
def test_the_view_says_what_the_run_does_and_shows_its_newest_completion(tmp_path, ago, age):
    run = Growing(tmp_path / "run", 6)
    doing(run.path, ago)
    text = "a | b\n\x1b[2J" + "x" * 2000
    row = {"source": "training", "step": 50, "prompt_text": "1+2=", "completion": text, "reward": -1.0}
    run.writer.samples([row | {"finish": "truncated", "length": 999}])
    followed = follower(run.path)
    assert followed.look()
    assert followed.run is not None
    file = io.StringIO()
    console = Console(file=file, width=80, height=60, force_terminal=True, color_system=None)
    console.print(view(followed.run, time.time(), console, activity=followed.activity()))
    drawn = file.getvalue()
    assert "now         step 4: generating 5 of 16 groups  1.2k tokens/s  12,400 tokens" in drawn
    assert age in " ".join(drawn.split())
    assert "sample      training at step 50  reward -1  truncated after 999 tokens" in drawn
    assert "completion  a | b " in drawn
    assert "\x1b[2J" not in drawn
    assert re.search(r"\[\.\.\. 1,\d{3} more characters\]", drawn)
    assert max(map(len, drawn.splitlines())) <= 80
    assert drawn.count("x") > 200  # several lines of it
