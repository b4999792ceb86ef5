"""SIGTERM to runs that are in the middle of something long: they stop there, and a resume makes the rest."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cut_runs import record_and_weights
from record_checker import check
from small_demo import small_demo

from scalerl.record.activity import read_activity
from scalerl.rl.loop.resume import find_checkpoint

INTERRUPTED = 130
STEPS = 3
LONG_EVALUATION = small_demo(STEPS, 1, "evaluation.samples=400")
"""Several times as long as a run needs to write what it is doing."""
LONG_STEPS = small_demo(
    STEPS,
    1,
    *("task.heldout_per_length=10", "evaluation.samples=1", "optimiser.lr=1e-4"),
    *("batch.prompts=16", "batch.samples=16", "batch.micro=1", "decode_slots=256", "zero_variance=keep"),
)
"""Of 256 micro-batches, shared by the trainers."""
LONG_GENERATION = small_demo(
    STEPS,
    1,
    *("task.heldout_per_length=10", "evaluation.samples=1", "schedule.k=0"),
    *("batch.samples=20000", "decode_slots=4"),
)
"""Of 80,000 completions in four slots: a minute and more before the first step."""
NOTICE = 20
"""Seconds to a checkpoint: the notice of a spot machine is 30 to 120."""


def command(folder, model, changes, *words, resume=False):
    start = [str(folder), "--resume"] if resume else ["demo", "-o", str(folder), *words]
    start += [word for change in (f"model={model}", *changes) for word in ("--set", change)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    what = [sys.executable, "-m", "scalerl", "train", *start]
    return subprocess.Popen(what, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def whole(process):
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out


def stopped_when(folder, process, condition, seconds=60):
    """Send SIGTERM once the run says that it does this, which ends it in so many seconds; return its standard
    error."""
    deadline = time.monotonic() + 180
    try:
        while not ((now := read_activity(folder)) and condition(now)):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    return err


def stopped_within(folder):
    """Steps of checkpoints that were made within a step."""
    return [path.name for path in (folder / "checkpoints").glob("step-*.*")]


@pytest.mark.parametrize("step", [1, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_an_evaluation_in_the_trainers_process_is_made_by_the_resume(small_base, tmp_path, monkeypatch, step):
    """On the GPU that it shares with the generator; of the first evaluation, and of the last."""
    monkeypatch.setenv("SCALERL_GPUS", "1x80")
    folder = tmp_path / "cut"

    def is_under_way(now):
        last = now.step >= STEPS
        return now.doing == "evaluating" and now.count.done and last == (step == STEPS)

    stopped_when(folder, command(folder, small_base, LONG_EVALUATION), is_under_way)
    assert len(lines(folder / "evals.jsonl")) == (0 if step == 1 else 1)
    assert lines(folder / "steps.jsonl") if step == STEPS else stopped_within(folder)
    whole(command(folder, small_base, LONG_EVALUATION, resume=True))
    whole(command(tmp_path / "whole", small_base, LONG_EVALUATION))
    assert check(folder) == []
    assert record_and_weights(folder) == record_and_weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_long_step_is_left_between_two_decode_ticks_with_what_it_has_sampled(small_base, tmp_path):
    """Two signals to one step, which would take far longer than either has."""
    folder, sampled = tmp_path / "run", [0]
    for again in (False, True):
        process = command(folder, small_base, () if again else LONG_GENERATION, resume=again)
        stopped_when(folder, process, lambda now: now.doing == "generating" and now.tokens > 500, NOTICE)
        checkpoint = find_checkpoint(folder)
        assert checkpoint is not None
        sampled.append(checkpoint["generator"]["counters"]["tokens"])
    assert not lines(folder / "steps.jsonl")
    assert sampled[2] > sampled[1] + 500 > 1000
    assert len(stopped_within(folder)) == 2


ON = {
    "ranks of this machine": ("--generators", "1", "--trainers", "2"),
    "Ray": ("--cluster", "ray", "--generators", "1", "--trainers", "2", "--set", "cluster.address=local"),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ON)
def test_a_step_of_several_trainers_is_given_up_by_all(small_base, tmp_path, place):
    folder = tmp_path / "run"
    started = command(folder, small_base, LONG_STEPS, *ON[place])
    stopped_when(folder, started, lambda now: now.doing == "training" and now.step >= 2)
    assert stopped_within(folder)
    assert 1 <= len(lines(folder / "steps.jsonl")) < STEPS
    whole(command(folder, small_base, (), resume=True))
    assert check(folder) == []
    assert len(lines(folder / "steps.jsonl")) == STEPS


STUCK = """
import time
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from scalerl.rl.tasks.chain import Chain

def wait():
    Path(__file__).with_name("waiting").touch()
    time.sleep(600)

@dataclass(frozen=True)
class verifier(Chain):
    def prepare(self):
        wait()

@dataclass(frozen=True)
class generator(Chain):
    def __setstate__(self, state):
        self.__dict__.update(state)
        if parent_process() is not None:
            wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is left is found by /proc")
@pytest.mark.parametrize("part", [pytest.param("verifier", marks=pytest.mark.slow), "generator"])
def test_a_run_that_waits_for_its_processes_to_start_ends_with_them(small_base, tmp_path, monkeypatch, part):
    """They take ten minutes to load the task."""
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.setenv("SCALERL_TEST", str(tmp_path))
    kind = f"task.kind={tmp_path}/stuck.py:{part}"
    where = ["--generators", "1"] if part == "generator" else []
    process = command(tmp_path / "run", small_base, [*small_demo(STEPS, 1), kind], *where)
    try:
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.02)
        assert len(marked(tmp_path)) >= 2
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, err
    assert err.splitlines()[-1].startswith("scalerl: interrupted")
    deadline = time.monotonic() + 30
    while marked(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "run" / "checkpoints").exists()


def marked(path):
    """The processes that were started with $SCALERL_TEST."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"SCALERL_TEST={path}".encode() in entry.read_bytes().split(b"\0"):
                found.append(entry.parent.name)
    return found


def lines(path):
    return path.read_text().splitlines() if path.exists() else []
