"""Trackers: what they are told, that it is read back as the run, and that a run does not depend on them."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalerl.cli import main
from scalerl.curve import fit
from scalerl.curve.freeze import freeze
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.sources import read_source
from scalerl.record import RunRecord
from scalerl.rl.recipe import from_dict, load_recipe
from scalerl.rl.tracking import TrackedRun
from scalerl.rl.tracking.follow import Follower
from scalerl.rl.tracking.process import MOST_FAILURES, MOST_ROWS, Setup
from scalerl.rl.train import train
from trackers_of_tests import Fails, Keeps, NotEverySecond, OnAFullDisk

DOCS = Path(__file__).parents[2] / "docs"
AXES = ("gpu_hours", "flops", "tokens", "samples", "steps")
SETS = [
    *("task.k_max=2", "task.heldout_per_length=40", "context.prompt=6", "context.thinking=4"),
    *("length.low=3", "length.high=4", "batch.prompts=4", "batch.samples=8", "rows=96", "optimiser.lr=3e-4"),
    *("budget.kind=steps", "budget.amount=36", "evaluation.count=12", "evaluation.samples=2"),
    *("checkpoint.steps=4", "health.length_drift.alarm=1.01", "health.length_drift.warning=1.005"),
    "health.length_drift.window=2",
]
TO = ["wandb", "tensorboard", "mlflow"]


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("demo", SETS)


@pytest.fixture(scope="module")
def short(recipe):
    """For what needs no forecast."""
    budget, evaluation = replace(recipe.budget, amount=12), replace(recipe.evaluation, count=4)
    return replace(recipe, budget=budget, evaluation=evaluation)


@pytest.fixture(scope="module", autouse=True)
def nobody_outside(tmp_path_factory):
    """W&B is offline and keeps its settings here; MLflow's store is a folder."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(home))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("MLFLOW_TRACKING_URI", f"file:{home / 'mlruns'}")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield home


@pytest.fixture(scope="module")
def plain(recipe, small_base, tmp_path_factory):
    """The run without any tracker."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return train(recipe, folder, small_base, forecaster=freeze, evaluate_aside=False)


@pytest.fixture(scope="module")
def short_plain(short, small_base, tmp_path_factory):
    """The short run without any tracker."""
    return train(short, tmp_path_factory.mktemp("short") / "run", small_base, evaluate_aside=False)


def tracked_by(recipe, *to, **settings):
    return replace(recipe, tracking=replace(recipe.tracking, to=to, **settings))


@pytest.fixture(scope="module")
def run(recipe, small_base, tmp_path_factory):
    """The same with trackers of three kinds, and one that keeps everything."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    keeps = Keeps(folder.with_name("kept.jsonl"))
    followed = tracked_by(recipe, *TO)
    return train(followed, folder, small_base, forecaster=freeze, evaluate_aside=False, trackers=[keeps])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def kept_rows(run):
    return [row for row in lines(run.path.with_name("kept.jsonl")) if "step" in row]


def without_times(path):
    rows = lines(path)
    for row in rows:
        for key in ("time", "device_seconds", "wall_seconds", "idle_seconds"):
            row.pop(key, None)
    return rows


def check_same_run(one, other):
    """The same bytes, times apart."""
    files = {path.name for path in one.path.glob("*.jsonl")} - {"eval_prompts.jsonl", "lost.jsonl"}
    assert files >= {"evals.jsonl", "steps.jsonl"}
    for name in files:
        assert without_times(one.path / name) == without_times(other.path / name)
    for name in ("eval_prompts.jsonl", "groups.jsonl", "checkpoints/final/model.safetensors"):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def stores(run, home):
    """Where each tracker has put the run."""
    (mlflow,) = [
        folder.parent
        for folder in (home / "mlruns").glob("*/*/metrics")
        if (folder.parent / "tags" / "mlflow.runName").read_text() == run.path.name
        and folder.parent.name == json.loads((run.path / "tracking.json").read_text())["mlflow"]["id"]
    ]
    return {"wandb": run.path / "wandb", "tensorboard": run.path / "tensorboard", "mlflow": mlflow}


def check_read_back(record, source, exact=True):
    """Our importer takes the log for this run: its pass rates and its compute, which it returns."""
    (imported,) = read_source(source)
    found = imported.record
    assert imported.config["source"]["trainer"] == "scalerl"
    close: dict[str, Any] = {"rtol": 0 if exact else 1e-6}
    np.testing.assert_allclose(
        [p.pass_rate for p in found.evals], [p.pass_rate for p in record.evals], **close
    )
    for axis in AXES:
        np.testing.assert_allclose(found.compute(axis), record.compute(axis), **close)
    return found


def test_a_run_is_the_same_with_trackers_and_without(run, plain):
    check_same_run(run, plain)
    assert "tracking.json" not in {path.name for path in plain.path.iterdir()}


@pytest.mark.parametrize("name", TO)
def test_what_is_logged_is_read_back_as_the_run(run, nobody_outside, name):
    exact = name != "tensorboard"  # which keeps 32 bits
    found = check_read_back(run, stores(run, nobody_outside)[name], exact)
    if exact:
        before, after = (fit(one, x="flops").to_json([1e9]) for one in (run, found))
        assert before | {"warnings": []} == after | {"warnings": []}


def test_a_run_folder_with_logs_in_it_is_still_a_run(run, capsys):
    assert main(["fit", str(run.path), "--x", "flops", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["points"] == len(run.evals)


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_is_read_back_as_the_run(recipe, small_base, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    followed = tracked_by(recipe, "trackio", project="ours")
    cut = train(followed, tmp_path / "run", small_base, evaluate_aside=False, until=8)
    assert len(cut.evals) == 3
    record = train(followed, tmp_path / "run", small_base, evaluate_aside=False, resume=True)
    check_read_back(record, tmp_path / "trackio" / "ours.db")


def test_the_recipe_goes_to_the_tracker(run, nobody_outside):
    for place in stores(run, nobody_outside).values():
        config = read_source(place)[0].config["trainer_config"]
        assert config["recipe.optimiser.lr"] == 3e-4
        assert config["recipe.loss.kind"] == "cispo"
        assert config["seed"] == 0


def test_every_number_of_a_step_is_logged(run):
    rows = {row["step"]: row["metrics"] for row in kept_rows(run) if "train/reward_mean" in row["metrics"]}
    assert len(rows) == 36
    for step in run.steps():
        logged = rows[step["step"]]
        assert logged["train/reward_mean"] == step["reward_mean"]
        assert logged["train/queue_generating"] == step["queue"]["generating"]
        assert logged["compute/flops"] == sum(step["flops"].values())
        assert logged["compute/tokens_trained"] == step["tokens"]["trained"]
        assert logged.get("health/logp_gap") == step.get("logp_gap")
        numbers = {key for key, value in step.items() if isinstance(value, int | float)} - {"step", "time"}
        names = {name.partition("/")[2] for name in logged}
        assert numbers <= names


def test_alarms_are_logged_as_they_come_and_go(run):
    found = [
        (row["step"], row["metrics"]["health/alarm_length_drift"])
        for row in kept_rows(run)
        if "health/alarm_length_drift" in row["metrics"]
    ]
    said = [row for row in lines(run.path / "alarms.jsonl") if row["metric"] == "length_drift"]
    levels = {"warning": 1, "alarm": 2}
    assert found == [(row["step"], 0 if row["over"] else levels[row["level"]]) for row in said]
    assert 2 in [level for _, level in found]


def test_forecasts_are_those_of_a_fit_at_that_moment(run):
    rows = [row for row in kept_rows(run) if "eval/pass_rate" in row["metrics"]]
    assert [row["step"] for row in rows] == [point.step for point in run.evals]
    made = []
    for n, row in enumerate(rows, start=1):
        said = {k.partition("/")[2]: v for k, v in row["metrics"].items() if k.startswith("forecast/")}
        try:
            result = fit(replace(run, evals=run.evals[:n]), x="steps")
        except CannotAnswerError:
            assert said == {}
            continue
        made.append(row["step"])
        forecast, ceiling = result.forecast(36), result.intervals.A
        expected = {"mean": forecast.mean, "identified": float(result.identified)}
        expected |= {"low": forecast.prediction[0], "high": forecast.prediction[1]}
        if not result.misfit:
            expected |= {"ceiling": result.median.A, "ceiling_low": ceiling[0], "ceiling_high": ceiling[1]}
        assert said == expected
    assert 3 <= len(made) < len(rows)


def test_the_guide_names_what_is_logged_and_nothing_else(run):
    page = (DOCS / "trackers.md").read_text().partition("## What is logged")[2].partition("\n## ")[0]
    listed = {
        f"{head}{part.strip()}"
        for cell in re.findall(r"^\| (`.*?) \|", page, flags=re.M)
        for name in re.findall(r"`([^`]+)`", cell)
        for head, inside in [re.fullmatch(r"([^{]*)(?:\{(.*)\})?", name).groups()]
        for part in (inside.split(",") if inside else [""])
    }
    patterns = [re.compile(re.sub("FIELD|METRIC|KEY", r"\\w+", name)) for name in listed]
    logged = {name for row in kept_rows(run) for name in row["metrics"]}
    for name in logged:
        assert any(pattern.fullmatch(name) for pattern in patterns), name
    for pattern in patterns:
        if not re.search("ceiling|head_gap", pattern.pattern):  # withheld, and of another precision
            assert any(pattern.fullmatch(name) for name in logged), pattern.pattern


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
        while progress.share >= 1 and not any(row.get("step") == 12 for row in lines_so_far(keeps.file)):
            time.sleep(0.1)

    quick = tracked_by(short, close_seconds=1.0)
    record = train(
        quick,
        tmp_path / "run",
        small_base,
        watch=wait,
        evaluate_aside=False,
        trackers=[*FAULTS, keeps],
    )
    check_same_run(record, short_plain)
    rows = lines(keeps.file)
    assert rows[-1] == {"close": "finished"}
    assert sum("eval/pass_rate" in row.get("metrics", {}) for row in rows) == len(record.evals)
    said = "\n".join(caplog.messages)
    count = len(rows) - 2
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
    quick = tracked_by(short, close_seconds=0.0)
    record = train(
        quick,
        tmp_path / "run",
        small_base,
        evaluate_aside=False,
        trackers=[Fails("open", how)],
    )
    check_same_run(record, short_plain)
    said = "its process died; nothing more" if how == "kills" else "its process was ended; not all may be"
    assert said in "\n".join(caplog.messages)


def setup_of(folder, *trackers, close_seconds=30.0):
    return Setup(trackers, TrackedRun(folder, "run"), None, "steps", 10.0, (), close_seconds)


def rows_of_steps(short_plain, number):
    row = short_plain.steps()[-1]
    return (row | {"step": step} for step in range(number))


def test_rows_that_a_tracker_does_not_take_are_dropped_and_counted(short_plain, tmp_path, caplog):
    n = 3 * MOST_ROWS
    trackers = Fails("log", "hangs"), Keeps(tmp_path / "kept.jsonl")
    with Follower(setup_of(tmp_path, *trackers, close_seconds=1.0)) as follower:
        for row in rows_of_steps(short_plain, n):
            follower.step(row)
            while follower._queue.qsize() > MOST_ROWS // 2:  # its own limit is another matter
                time.sleep(0.01)
    said = "\n".join(caplog.messages)
    lost = re.search(r"hangs at log: (\d+) of 3000 rows were not logged", said)
    assert lost
    assert int(lost[1]) == n - MOST_ROWS - 1  # one is under way


def test_what_the_process_does_not_take_is_dropped_and_counted(short_plain, tmp_path, caplog):
    with Follower(setup_of(tmp_path, Fails("open", "stops"), close_seconds=0.0)) as follower:
        started = time.monotonic()
        for row in rows_of_steps(short_plain, 4 * MOST_ROWS):
            follower.step(row)
        # Without a limit it would be all of them.
        assert follower._queue.qsize() <= MOST_ROWS
        assert time.monotonic() - started < 60  # and it never waits for one that stands still
    assert re.search(r"tracking: \d{3,} rows were not logged", "\n".join(caplog.messages))


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
    (imported,) = read_source(record.path / "tensorboard")  # what fitted is sound
    assert 1 <= len(imported.record.evals) < len(record.evals)


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


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("wand", r"tracking.to: found 'wand', expected .*'wandb'"),
        (["wandb", "comet"], r"tracking.to: found 'comet', expected"),
        (3, "tracking.to: expected a list"),
    ],
)
def test_an_unknown_tracker_is_refused_by_its_name(to, message):
    with pytest.raises(InputError, match=message):
        from_dict(
            {
                "model": "m",
                "task": {"kind": "chain"},
                "budget": {"kind": "steps", "amount": 1},
                "tracking": {"to": to},
            }
        )


def test_one_name_is_a_list_of_one():
    assert load_recipe("demo", ["tracking.to=wandb"]).tracking.to == ("wandb",)
    assert load_recipe("demo", ['tracking.to=["wandb", "mlflow"]']).tracking.to == ("wandb", "mlflow")


class CrashError(Exception):
    pass


def test_a_resumed_run_goes_on_where_it_was_logged(short, small_base, short_plain, tmp_path, nobody_outside):
    """It crashes at step 7, and goes on from the checkpoint of step 4: three steps come twice."""

    def crash(progress):
        if progress.step == 7 and not progress.evaluated:
            raise CrashError

    keeps = Keeps(tmp_path / "kept.jsonl")
    options: dict[str, Any] = {"evaluate_aside": False, "trackers": [keeps]}
    followed = tracked_by(short, *TO)
    with pytest.raises(CrashError):
        train(followed, tmp_path / "run", small_base, watch=crash, **options)
    before = json.loads((tmp_path / "run" / "tracking.json").read_text())
    record = train(followed, tmp_path / "run", small_base, resume=True, **options)
    after = json.loads((tmp_path / "run" / "tracking.json").read_text())
    for name in ("wandb", "mlflow"):
        assert after[name]["id"] == before[name]["id"]
    check_same_run(record, short_plain)
    for name, place in stores(record, nobody_outside).items():
        check_read_back(record, place, exact=name != "tensorboard")
    rows = lines(keeps.file)
    begins = [row for row in rows if "open" in row]
    assert [(row["kept"], row["first"]) for row in begins] == [({}, 1), ({"opened": "1"}, 5)]
    assert [row["close"] for row in rows if "close" in row] == ["failed", "finished"]
    steps = [row["step"] for row in rows if "train/loss" in row.get("metrics", {})]
    assert steps == [*range(1, 8), *range(5, 13)]


def test_trackers_may_change_on_a_resume(short, small_base, short_plain, tmp_path):
    options: dict[str, Any] = {"evaluate_aside": False}
    train(short, tmp_path / "run", small_base, until=8, **options)
    (tmp_path / "run" / "tracking.json").write_text("{")  # and a damaged file costs no run
    record = train(tracked_by(short, "tensorboard"), tmp_path / "run", small_base, resume=True, **options)
    check_same_run(record, short_plain)
    assert record.config["recipe"]["tracking"]["to"] == ["tensorboard"]
    (imported,) = read_source(tmp_path / "run" / "tensorboard")
    assert [point.step for point in imported.record.evals] == [9, 12]


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
    said = "wandb was not done 2 s after the end|its process was ended; not all may be logged"
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


def test_ctrl_c_ends_the_trackers_with_the_run(short, small_base, tmp_path):
    """It goes to the whole group, as a terminal sends it; what was logged is whole."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "scalerl.cli", "train", "demo", "-o", str(folder)]
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


def lines_so_far(path):
    return lines(path) if path.exists() else []
