"""Trackers that fail, hang, die or are not there: a run does not depend on them."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from tracked_runs import SETS, check_read_back, check_same_run, lines, lines_so_far, tracked_by, wait_until
from trackers_of_tests import Fails, Keeps, NotEverySecond, OnAFullDisk, Returns, never

from scalerl.errors import InputError
from scalerl.ingest.load import read_source
from scalerl.record.evaluation import EvalPoint
from scalerl.record.reader import RunRecord
from scalerl.rl.tracking.process import MOST_FAILURES, MOST_ROWS, Setup
from scalerl.rl.tracking.sender import TrackingSender
from scalerl.rl.tracking.tracker import TrackedRun
from scalerl.rl.tracking.trackers import WandbTracker
from scalerl.rl.train import train

FAULTS = [
    *(Fails(at, how) for at in ("open", "log", "close") for how in ("raises", "exits", "hangs")),
    NotEverySecond("log", "sometimes raises"),
]


def test_trackers_that_fail_or_hang_leave_run_and_neighbours_alone(
    short, small_base, short_plain, tmp_path, caplog
):
    keeps = Keeps(tmp_path / "kept.jsonl")

    def wait(progress):
        """At the end, until the process of the trackers has begun and got everything."""
        if progress.share >= 1:
            wait_until(lambda: any(row.get("step") == 12 for row in lines_so_far(keeps.file)))

    quick = tracked_by(short, close_seconds=1.0)
    record = train(
        quick,
        tmp_path / "run",
        small_base,
        progress=wait,
        evaluate_aside=False,
        trackers=[*FAULTS, keeps],
    )
    check_same_run(record, short_plain)
    rows = lines(keeps.file)
    assert rows[-1] == {"close": "finished"}
    assert sum("eval/pass_rate" in row.get("metrics", {}) for row in rows) == len(record.evals)
    said = "\n".join(caplog.messages)
    count = sum("metrics" in row for row in rows)  # only `keeps` is given samples
    error = "(ConnectionError: no route to host); training goes on"
    for text in (
        f"raises at open was not opened, and is given up {error}",
        f"raises at open: {count} of {count} rows were not logged",
        "exits at open was not opened, and is given up (SystemExit: 3)",
        f"raises at log loses rows {error}",
        f"raises at log is given up after {MOST_FAILURES} rows that failed {error}",
        f"exits at log: {count} of {count} rows were not logged",
        f"raises at close was not closed {error}",
        f"hangs at open was not done 1 s after the end: {count + 1} rows waited",
        f"hangs at log was not done 1 s after the end: {count} rows waited",
        "hangs at close was not done 1 s after the end: 0 rows waited",
        f"sometimes raises at log: {math.ceil(count / 2)} of {count} rows were not logged",
    ):
        assert f"tracking: {text}" in said
    assert "sometimes raises at log is given up" not in said
    assert "keeps:" not in said


@pytest.mark.parametrize("how", ["kills", "stops"])
def test_a_process_of_trackers_that_dies_or_stands_still_leaves_the_run_alone(
    short, small_base, short_plain, tmp_path, caplog, how
):
    # The run may be over before the process has died a third time; one that stands still is not awaited.
    waits = tracked_by(short, close_seconds=60.0 if how == "kills" else 0.0)
    record = train(
        waits,
        tmp_path / "run",
        small_base,
        evaluate_aside=False,
        trackers=[Fails("open", how)],
    )
    check_same_run(record, short_plain)
    said = "3 times; nothing more is logged" if how == "kills" else "its process was killed; not all may be"
    assert said in "\n".join(caplog.messages)


def setup_of(folder, *trackers, close_seconds=30.0, forecaster=None):
    return Setup(trackers, TrackedRun(folder, "run"), forecaster, "steps", 10.0, close_seconds)


def rows_of_steps(short_plain, number):
    row = short_plain.steps()[-1]
    return (row | {"step": step} for step in range(number))


def test_rows_that_a_tracker_does_not_take_are_dropped_and_counted(short_plain, tmp_path, caplog):
    n = 3 * MOST_ROWS
    trackers = Fails("log", "hangs"), Keeps(tmp_path / "kept.jsonl")
    with TrackingSender(setup_of(tmp_path, *trackers, close_seconds=1.0)) as sender:
        for row in rows_of_steps(short_plain, n):
            sender.step(row)
            if sender._queue.qsize() > MOST_ROWS // 2:  # its own limit is another matter
                wait_until(lambda: sender._queue.qsize() < MOST_ROWS // 4)
    said = "\n".join(caplog.messages)
    lost = re.search(r"hangs at log: (\d+) of 3000 rows were not logged", said)
    assert lost
    assert int(lost[1]) == n - MOST_ROWS - 1  # one is under way


def test_what_the_process_does_not_take_is_dropped_and_counted(short_plain, tmp_path, caplog):
    with TrackingSender(setup_of(tmp_path, Fails("open", "stops"), close_seconds=0.0)) as sender:
        for row in rows_of_steps(short_plain, 4 * MOST_ROWS):
            sender.step(row)
        # Without a limit it would be all of them; and nobody takes them, so that it would wait here for ever.
        assert sender._queue.qsize() <= MOST_ROWS
    assert re.search(r"tracking: \d{3,} rows were not logged", "\n".join(caplog.messages))


def test_rows_for_a_process_that_has_died_are_dropped_and_counted(short_plain, tmp_path, caplog):
    with TrackingSender(setup_of(tmp_path, Fails("open", "kills"), close_seconds=0.0)) as sender:
        wait_until(lambda: not sender._thread.is_alive())
        for row in rows_of_steps(short_plain, 40):
            sender.step(row)
        sender.evaluation(EvalPoint(step=40, pass_rate=0.5))
    assert "tracking: 41 rows were not logged" in caplog.messages


def test_a_process_that_is_lost_is_replaced_and_logs_the_rest(short_plain, tmp_path, caplog):
    keeps = Keeps(tmp_path / "kept.jsonl")
    with TrackingSender(setup_of(tmp_path, keeps)) as sender:
        for row in rows_of_steps(short_plain, 5):
            sender.step(row)
        wait_until(lambda: any(row.get("step") == 4 for row in lines_so_far(keeps.file)))
        (worker,) = sender._pool._workers
        os.kill(worker.process.pid, signal.SIGKILL)
        sender.step({"step": 5, "time": 5.0, "loss": 1.0})
    rows = lines(keeps.file)
    assert [row["step"] for row in rows if "step" in row] == [0, 1, 2, 3, 4, 5]
    opened = [row["kept"] for row in rows if "open" in row]
    assert opened == [{}, {"opened": "1"}]  # the second goes on with what the first has kept
    assert rows[-1] == {"close": "finished"}
    said = "\n".join(caplog.messages)
    assert "the tracking process is lost: its process was killed by SIGKILL" in said
    assert "rows were not logged" not in said


def test_what_is_no_finite_number_hides_nothing_else_of_its_row(tmp_path, caplog):
    keeps = Keeps(tmp_path / "kept.jsonl")
    row = {"step": 1, "time": 1.0, "reward_mean": np.float32(0.5), "queue": {"generating": np.int64(3)}}
    with TrackingSender(setup_of(tmp_path, keeps)) as sender:
        sender.step(row | {"failed": {"x": None, "y": {"z": 1}}, "huge": 10**400, "flops": {"all": math.nan}})
        sender.step({"step": 4, "time": 4.0, "loss": 2})
    first, last = (row for row in lines(keeps.file) if "step" in row)
    assert first["metrics"] == {"train/reward_mean": 0.5, "train/queue_generating": 3.0}
    assert last["step"] == 4
    assert last["metrics"]["train/loss"] == 2
    assert lines(keeps.file)[-1] == {"close": "finished"}
    assert "rows were not logged" not in "\n".join(caplog.messages)


def test_forecasts_that_are_not_made_in_time_cost_no_tracker_its_end(short_plain, tmp_path, caplog):
    keeps = Keeps(tmp_path / "kept.jsonl")
    setup = setup_of(short_plain.path, keeps, close_seconds=1.0, forecaster=never)
    with TrackingSender(setup) as sender:
        for step in range(3):
            sender.evaluation(EvalPoint(step=step, pass_rate=0.25 * step))
        sender.step({"step": 5, "time": 5.0, "loss": 1.0})
        wait_until(lambda: any(row.get("step") == 5 for row in lines_so_far(keeps.file)))
        assert not any(row.get("step") == 0 for row in lines(keeps.file))
    rows = lines(keeps.file)
    assert [row["metrics"]["eval/pass_rate"] for row in rows[2:5]] == [0.0, 0.25, 0.5]
    assert rows[5:] == [{"close": "finished"}]
    assert "3 of the last forecasts were not made in time" in "\n".join(caplog.messages)


@pytest.mark.parametrize("fault", ["no JSON", "no file"])
def test_a_tracker_whose_id_cannot_be_kept_logs_and_is_closed(tmp_path, caplog, fault):
    odd = Returns(tmp_path / "odd.jsonl", "odd", value=1j if fault == "no JSON" else "1")
    if fault == "no file":
        (tmp_path / "tracking.json").mkdir()
    with TrackingSender(setup_of(tmp_path, odd, Keeps(tmp_path / "kept.jsonl"))) as sender:
        sender.step({"step": 1, "time": 1.0, "loss": 1.0})
    for rows in (lines(tmp_path / "odd.jsonl"), lines(tmp_path / "kept.jsonl")):
        assert [row.get("step") for row in rows] == [None, 1, None]
        assert rows[-1] == {"close": "finished"}
    assert "odd starts anew on a resume, as its data cannot be kept (" in "\n".join(caplog.messages)
    if fault == "no JSON":
        assert json.loads((tmp_path / "tracking.json").read_text()) == {"keeps": {"opened": "1"}}


def test_an_error_that_says_nothing_leaves_wandb_offline(tmp_path, nobody_outside, monkeypatch):
    wandb = pytest.importorskip("wandb")
    init = wandb.init

    def refused(**options):
        if options.get("mode") != "offline":
            raise ConnectionError
        return init(**options)

    monkeypatch.setattr(wandb, "init", refused)
    tracker = WandbTracker()
    opened = tracker.open(TrackedRun(tmp_path, "run"))
    tracker.close("finished")
    assert opened["where"].endswith("uploads it (ConnectionError)")


def test_a_full_disk_costs_a_warning(short, small_base, short_plain, tmp_path, caplog):
    record = train(
        short,
        tmp_path / "run",
        small_base,
        evaluate_aside=False,
        trackers=[OnAFullDisk()],
    )
    check_same_run(record, short_plain)
    said = "\n".join(caplog.messages)
    assert "tensorboard loses rows (OSError: [Errno 27] File too large); training goes on" in said
    (imported,) = read_source(record.path / "tensorboard").runs  # what fitted is sound
    assert 1 <= len(imported.evals) < len(record.evals)


def test_a_tracker_that_is_not_installed_is_said_before_anything_begins(
    short, small_base, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match=r"^tracking.to: mlflow is not installed: pip install mlflow$"):
        train(tracked_by(short, "tensorboard", "mlflow"), tmp_path / "run", small_base)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_cannot_go_to_another_process_is_refused(short, small_base, tmp_path):
    keeps = Keeps(tmp_path / "x")
    setattr(keeps, "extra", lambda: None)  # noqa: B010
    with pytest.raises(InputError, match="cannot go to another process"):
        train(short, tmp_path / "run", small_base, trackers=[keeps])
    assert not (tmp_path / "run").exists()


def test_a_server_of_wandb_that_never_answers_costs_the_wait_at_the_end(
    short, small_base, short_plain, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        quick = tracked_by(short, "wandb", close_seconds=2.0)
        record = train(quick, tmp_path / "run", small_base, evaluate_aside=False)
    check_same_run(record, short_plain)
    said = "wandb was not done 2 s after the end|its process was killed; not all may be logged"
    assert re.search(said, "\n".join(caplog.messages))


def test_wandb_without_credentials_is_offline(
    short, small_base, short_plain, tmp_path, nobody_outside, monkeypatch, caplog
):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    followed = tracked_by(short, "wandb")
    record = train(followed, tmp_path / "run", small_base, evaluate_aside=False)
    assert re.search(r"tracking: wandb: offline, wandb sync .* uploads it \(.*\)", "\n".join(caplog.messages))
    check_read_back(record, tmp_path / "run" / "wandb")


@pytest.mark.slow
def test_ctrl_c_ends_the_trackers_with_the_run(short, small_base, tmp_path):
    """It goes to the whole group, as a terminal sends it; what was logged is whole."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "scalerl", "train", "demo", "-o", str(folder)]
    more = ["budget.amount=100000", "evaluation.count=50000", f"model={small_base}"]
    for change in (*SETS, *more, 'tracking.to=["wandb", "tensorboard"]'):
        command += ["--set", change]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if (folder / "wandb").exists() and len(lines_so_far(folder / "evals.jsonl")) > 6:
                break
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    record = RunRecord.read(folder)
    check_read_back(record, folder / "wandb")
    check_read_back(record, folder / "tensorboard", exact=False)
