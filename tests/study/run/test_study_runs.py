"""Studies that are run for real: cut, killed, crashed and resumed, and what is common to their arms."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scalerl.errors import InputError, WriteError
from scalerl.files import lock
from scalerl.ingest.load import read_source
from scalerl.record.reader import RunRecord
from scalerl.rl.config.devices import Gpu
from scalerl.study.plan import make_plan
from scalerl.study.record import StudyRecord
from scalerl.study.run import runner
from scalerl.study.run.runner import run_study
from scalerl.study.spec import LearningRate, Study

SMALL = {
    "task": {"k_max": 2, "heldout_per_length": 12},
    "context": {"prompt": 6, "thinking": 4},
    "length": {"low": 3, "high": 4},
    "batch": {"prompts": 4, "samples": 8},
    "decode_slots": 96,
    "schedule": {"k": 2},
    "optimiser": {"lr": 2e-4, "warmup_steps": 1},
    "budget": {"kind": "steps", "amount": 16},
    "evaluation": {"count": 16, "samples": 2, "forecast_at": [0.5]},
    "checkpoint": {"steps": 2, "minutes": 0},
}


@pytest.fixture(scope="module")
def study(small_base):
    """Two arms of one seed, to two budgets."""
    arms = {"dapo": {"loss": {"kind": "dapo"}}}
    return Study("demo", seeds=1, arm=arms, budgets=(8.0, 16.0), set={**SMALL, "model": str(small_base)})


@pytest.fixture(scope="module")
def whole(study, tmp_path_factory):
    """The study, run without any trouble."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    return StudyRecord.read(folder)


def test_runs_have_gpus_of_those_that_the_study_may_use(study, tmp_path, monkeypatch):
    """Not the first ones of the machine, which may be those of another job."""
    gpus = tuple(Gpu(name, 80 * 2**30, 80 * 2**30) for name in ("5", "GPU-7f", "6"))
    monkeypatch.setattr(runner, "gpus_in_use", lambda: gpus)
    monkeypatch.setattr(runner, "compute_device", lambda: torch.device("cuda"))
    plan = make_plan(study)
    of = runner._Runner(plan, tmp_path, 64, lambda progress: None, threading.Event())
    assert of.cores == 3
    run, arm = plan.runs[0], plan.arms[0]
    job = of._job(0, runner.RunTask(run, plan.recipe(run, arm), 1.0))
    assert [job.arguments(cores)[-1] for cores in ([0], [1, 2])] == ["5", "GPU-7f,6"]


def table(folder):
    """What the study knows at its end, times apart."""
    study = StudyRecord.read(folder)
    evals = {
        run.plan.key: [(point.step, point.pass_rate, point.entropy) for point in run.record.evals]
        for run in study.runs
    }
    frozen = [(row["run"], row["at"], row["target_compute"], row["median"]) for row in study.forecasts]
    return evals, frozen, [run.outcome for run in study.runs]


@pytest.mark.slow
def test_runs_are_tracked_one_by_one_and_are_what_they_are_without(study, whole, tmp_path):
    tracked = replace(study, set=study.set | {"tracking": {"to": ["tensorboard"]}})
    run_study(make_plan(tracked), tmp_path / "study", cores=2, watch=lambda progress: None)
    assert table(tmp_path / "study") == table(whole.path)
    for run in StudyRecord.read(tmp_path / "study").runs:
        settings = run.record.config["recipe"]["tracking"]
        assert (settings["name"], settings["group"]) == (f"{run.plan.arm}-seed0", study.name)
        (log,) = read_source(run.record.path / "tensorboard").runs
        flops_N = run.record.compute("flops")
        np.testing.assert_allclose(log.compute("flops"), flops_N, rtol=1e-6)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_run_goes_to_every_budget_and_forecasts_are_frozen_between(whole):
    assert [run.outcome for run in whole.runs] == ["finished", "finished"]
    assert [(a.run, a.outcome, a.until) for a in sorted(whole.runs[0].attempts, key=lambda a: a.until)] == [
        ("base seed 0", "done", 8.0),
        ("base seed 0", "done", 16.0),
    ]
    assert [point.step for point in whole.runs[0].record.evals] == list(range(17))
    assert {row["run"] for row in whole.forecasts} == {"base seed 0", "dapo seed 0"}
    after = min(point.time for run in whole.runs for point in run.record.evals if point.step > 8)
    for row in whole.forecasts:
        assert (row["at"], row["target_compute"], row["compute"]) == (8.0, 16.0, 8.0)
        assert row["time"] < after


def test_what_the_arms_have_in_common_is_the_same(whole):
    one, other = (run.record.path for run in whole.runs)
    first = [rows(path / "groups.jsonl") for path in (one, other)]
    n = 3  # steps whose prompts were drawn before the first update
    assert [row["prompt"] for row in first[0][:n]] == [row["prompt"] for row in first[1][:n]]
    assert [row["correct"] for row in first[0][:1]] == [row["correct"] for row in first[1][:1]]
    before = [rows(path / "eval_prompts.jsonl")[0] for path in (one, other)]
    assert before[0] == before[1]  # prompt set, prompts, and every success before any training
    assert rows(one / "steps.jsonl")[-1]["loss"] != rows(other / "steps.jsonl")[-1]["loss"]


def test_a_study_that_is_killed_ends_with_the_same_table(whole, study, tmp_path):
    """The study's process and those of its runs, at once, after a budget; and lines that a kill tore."""
    code = (
        "import sys, pickle\nfrom pathlib import Path\nfrom scalerl.study.run.runner import run_study\n"
        "if __name__ == '__main__':\n"
        "    plan = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "    run_study(plan, Path(sys.argv[2]), cores=2, watch=lambda progress: None)\n"
    )
    (tmp_path / "plan").write_bytes(pickle.dumps(make_plan(study)))
    (tmp_path / "go.py").write_text(code)
    folder = tmp_path / "study"
    command = [sys.executable, str(tmp_path / "go.py"), str(tmp_path / "plan"), str(folder)]
    process = subprocess.Popen(command)
    wait_for(lambda: steps_of(folder / "runs" / "dapo" / "seed0") >= 11, process)
    process.kill()
    process.wait()
    for name in ("attempts.jsonl", "forecasts.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"run": "ba')
    wait_for(lambda: unlocked(folder / "runs" / "dapo" / "seed0"))  # its runs end with it
    assert StudyRecord.read(folder).runs[1].outcome == "under way"
    run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    assert table(folder) == table(whole.path)


def steps_of(folder):
    file = folder / "steps.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def unlocked(folder):
    try:
        os.close(lock(folder, ""))
    except InputError:
        return False
    return True


def wait_for(condition, process=None, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        assert process is None or process.poll() is None
        time.sleep(0.02)


def test_a_study_that_is_stopped_makes_checkpoints_and_goes_on(whole, study, tmp_path):
    stop = threading.Event()

    def watch(progress):
        if any(share > 0 for _, share, _ in progress.running):
            stop.set()

    folder = tmp_path / "study"
    with pytest.raises(KeyboardInterrupt):
        run_study(make_plan(study), folder, cores=2, watch=watch, stop=stop)
    cut = StudyRecord.read(folder)
    assert cut.runs[0].outcome != "finished"
    begun = [run for run in cut.runs if run.record]
    assert begun
    assert all([attempt.outcome for attempt in run.attempts] == ["cut"] for run in begun)
    run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    assert table(folder) == table(whole.path)
    assert not list(folder.glob("runs/*/*/lost.jsonl"))  # nothing was run twice


def test_checkpoints_that_a_kill_left_behind_are_tidied_up(whole, study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(whole.path, folder)
    checkpoints = folder / "runs" / "base" / "seed0" / "checkpoints"
    shutil.copytree(checkpoints / "final", checkpoints / "step-14")
    run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    assert [path.name for path in checkpoints.iterdir()] == ["final"]


def test_a_run_that_is_lost_is_run_again_and_one_that_lost_its_evaluations_is_named(whole, study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(whole.path, folder)
    lost = folder / "runs" / "base" / "seed0"
    (lost / "evals.jsonl").unlink()
    assert StudyRecord.read(folder).runs[0].outcome != "finished"
    with pytest.raises(
        InputError, match=r"seed0: its evals.jsonl is gone; put it back, or remove the folder"
    ):
        run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    shutil.rmtree(lost)
    assert StudyRecord.read(folder).runs[0].outcome == "not started"
    run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    assert table(folder) == table(whole.path)


def test_a_place_that_cannot_be_written_to_is_one_line(study, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match=r"file: (File exists|Not a directory)"):
        run_study(make_plan(study), tmp_path / "file", cores=2, watch=lambda progress: None)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_crashes_is_tried_again_and_what_fails_for_good_is_a_result(whole, study, tmp_path):
    """One run's process is killed once; one arm's alarm pauses it; one cannot begin at all."""
    arms = {
        "dapo": {"loss": {"kind": "dapo"}},
        "wild": {"optimiser": {"lr": 1000}},
        "no model": {"model": str(tmp_path / "nowhere")},
    }
    health = {"on_alarm": "pause", "pass_rate_drop": {"warning": 0.1, "alarm": 0.15}}
    study = replace(study, arm=arms, budgets=(16.0,), retries=1, set={**study.set, "health": health})
    plan = make_plan(study)
    folder = tmp_path / "study"
    killed, notices = [], []

    def watch(progress):
        notices.append(progress.notice)
        if not killed and any(name.startswith("dapo") and share > 0.1 for name, share, _ in progress.running):
            killed.extend(kill_worker(folder / "runs" / "dapo" / "seed0"))

    run_study(plan, folder, cores=2, watch=watch)
    study = StudyRecord.read(folder)
    by_arm = {run.plan.arm: run for run in study.runs}
    assert {arm: run.outcome for arm, run in by_arm.items()} == {
        "base": "finished",
        "dapo": "finished",
        "wild": "failed",
        "no model": "failed",
    }
    assert [attempt.outcome for attempt in by_arm["dapo"].attempts] == ["failed", "done"]
    assert by_arm["dapo"].attempts[0].cause.startswith("its process was killed")
    assert table_of(by_arm["dapo"]) == table_of(whole.runs[1])  # it is the run that was never killed
    assert [attempt.outcome for attempt in by_arm["wild"].attempts] == ["paused"]  # it would be again
    assert by_arm["wild"].cause.startswith("paused at step")
    assert by_arm["wild"].record.alarms
    assert by_arm["wild"].record.evals[0].pass_rate == by_arm["base"].record.evals[0].pass_rate
    assert len(by_arm["no model"].attempts) == 2
    assert by_arm["no model"].cause.startswith("model: no folder")
    said = [text for text in notices if "dapo seed 0: failed (its process was killed" in text]
    assert "tried again" in said[0]
    run_study(plan, folder, cores=2, watch=watch)  # what was given up stays so, its folder or none
    assert [len(run.attempts) for run in StudyRecord.read(folder).runs] == [
        len(r.attempts) for r in study.runs
    ]


def table_of(run):
    return [(point.step, point.pass_rate, point.entropy) for point in run.record.evals]


def kill_worker(folder):
    """Kill the process that writes a run folder, and return it; none, where it just stops writing."""
    for process in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            held = {str(handle.readlink()) for handle in (process / "fd").iterdir()}
        except OSError:
            continue  # of somebody else, or gone
        if str(folder) in held:
            os.kill(int(process.name), signal.SIGKILL)
            return [process]
    return []


def test_a_finished_study_is_left_as_it_is_and_a_second_process_is_refused(whole, study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(whole.path, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}
    run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")} == before
    handle = lock(folder, "")
    with pytest.raises(InputError, match="another process is running this study"):
        run_study(make_plan(study), folder, cores=2, watch=lambda progress: None)
    os.close(handle)
    assert RunRecord.read(folder / "runs" / "base" / "seed0").evals


@pytest.mark.slow
def test_learning_rates_are_tuned_by_one_rule_and_the_best_arms_combined(study, tmp_path):
    """Trials are runs of other seeds; what is chosen is what their record says, and stands in decisions."""
    tuned = replace(
        study,
        arm={"dapo": {"loss": {"kind": "dapo"}}, "sample": {"averaging": {"kind": "sample"}}},
        budgets=(16.0,),
        learning_rate=LearningRate(values=(1e-6, 2e-4), budget=8.0),
        combine=2,
    )
    folder = tmp_path / "study"
    run_study(make_plan(tuned), folder, cores=2, watch=lambda progress: None)
    decisions = rows(folder / "decisions.jsonl")
    chosen = {row["arm"]: row for row in decisions if row["decision"] == "learning rate"}
    for arm in ("base", "dapo", "sample"):
        late = {
            value: np.mean([p.pass_rate for p in RunRecord.read(trial).evals[-2:]])
            for value, trial in (
                (1e-6, folder / "tuning" / arm / "lr=1e-06" / "seed1000000"),
                (2e-4, folder / "tuning" / arm / "lr=0.0002" / "seed1000000"),
            )
        }
        assert chosen[arm]["value"] == max(late, key=lambda value: late[value])
        assert {float(value): rate for value, rate in chosen[arm]["tried"].items()} == pytest.approx(late)
        run = RunRecord.read(folder / "runs" / arm / "seed0")
        assert run.config["recipe"]["optimiser"]["lr"] == chosen[arm]["value"]
    (combined,) = [row for row in decisions if row["decision"] == "combined"]
    better = [arm for arm, gain in sorted(combined["gains"].items(), key=lambda item: -item[1]) if gain > 0]
    assert combined["of"] == better
    record = StudyRecord.read(folder)
    assert {run.outcome for run in record.runs} == {"finished"}
    names = ["base", "dapo", "sample"] + ([" + ".join(better)] if len(better) == 2 else [])
    assert [arm.name for arm in record.arms] == names
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")}
    run_study(make_plan(tuned), folder, cores=2, watch=lambda progress: None)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jsonl")} == before
    assert len(StudyRecord.read(folder).arms) == len(record.arms)


@pytest.mark.slow
def test_a_signal_to_the_whole_job_loses_nothing(whole, study, tmp_path):
    """As schedulers send it: to the study, to its runs, and to the process that they are forked from."""
    (tmp_path / "plan").write_bytes(pickle.dumps(make_plan(study)))
    (tmp_path / "go.py").write_text(
        "import sys, pickle\nfrom pathlib import Path\n"
        "from scalerl.rl.workers.signals import stopped_by_signals\n"
        "from scalerl.study.run.runner import run_study\n"
        "if __name__ == '__main__':\n"
        "    plan = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
        "    with stopped_by_signals() as stop:\n"
        "        run_study(plan, Path(sys.argv[2]), cores=2, watch=lambda progress: None, stop=stop)\n"
    )
    folder = tmp_path / "study"
    command = [sys.executable, str(tmp_path / "go.py"), str(tmp_path / "plan"), str(folder)]
    process = subprocess.Popen(command, start_new_session=True)
    wait_for(lambda: steps_of(folder / "runs" / "dapo" / "seed0") >= 3, process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(120) != 0
    assert not [a for run in StudyRecord.read(folder).runs for a in run.attempts if a.outcome == "failed"]
    subprocess.run(command, check=True)
    assert table(folder) == table(whole.path)
    assert not list(folder.glob("runs/*/*/lost.jsonl"))  # every run had made its checkpoint
