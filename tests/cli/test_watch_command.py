"""`scalerl watch`: runs and logs that grow while they are followed, by the command as it is installed."""

import contextlib
import json
import os
import re
import signal
import time

import numpy as np
import pytest
from growing import TRUTH, Growing
from watching import follower, watching

from scalerl.cli import watch
from scalerl.cli.main import main
from scalerl.ingest import load
from scalerl.record.reader import RunRecord
from scalerl.view.terminal.watch import view_rows


def once(capsys, *words):
    assert main(["watch", *map(str, words), "--once"]) == 0
    return capsys.readouterr()


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
    assert main(["watch", str(run.path), "--once"]) == 3
    assert "no evaluation yet (--wait waits for it)" in capsys.readouterr().err
    (run.path / "evals.jsonl").unlink()
    assert main(["watch", str(run.path), "--once"]) == 3
    assert "no evaluation yet (--wait waits for it)" in capsys.readouterr().err
    with watching(run.path) as process:
        assert process.stderr.readline() == f"waiting: {run.path}: the run has no evaluation yet\n"
        run.grow()
        assert "too early: 1 of 4 evaluations" in process.stdout.readline()


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
    fitted = followed.run.fit
    run.writer.step({"step": 200, "time": time.time(), "truncated": 0.2})
    assert followed.look()
    assert len(times) == 2
    assert followed.run.fit is fitted
    assert followed.run.health("truncated") == 0.2
    run.grow()
    assert followed.look()
    assert followed.run.fit is not fitted


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
