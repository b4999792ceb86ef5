"""A run whose learner is on the processes of torchrun, from the command line."""

import json
import os
import signal
import subprocess
import sys

import pytest
from record_checker import check
from small_demo import small_demo

from scalerl.record.reader import RunRecord

PATIENCE = 280


SMALL = small_demo(
    6,
    1,
    *("task.heldout_per_length=10", "evaluation.samples=1", "batch.micro=8", "checkpoint.steps=2"),
    *("kl.coefficient=0.01", "optimiser.lr=1e-4"),
)


@pytest.fixture(scope="module")
def small(small_base):
    """The demonstration at its smallest, six steps of it."""
    return ["demo", *(word for one in [f"model={small_base}", *SMALL] for word in ("--set", one))]


def train(n_ranks, *arguments):
    """`scalerl train` in one process, or on the ranks of torchrun; bounded in time, and killed with all it
    started."""
    start = [sys.executable, "-m"]
    if n_ranks > 1:
        port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1"]
        start += ["torch.distributed.run", *port, "--nproc-per-node", str(n_ranks), "-m"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [*start, "scalerl", "train", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


def steps_of(run):
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def check_seconds(run, n_ranks):
    """All ranks are held all the time, those that wait while the first generates included."""
    assert RunRecord.read(run).trainers == n_ranks
    for row in steps_of(run):
        spent, wall = row["device_seconds"], row["wall_seconds"]
        assert spent["generate"] + spent["train"] + spent["idle"] == pytest.approx(n_ranks * wall)
        assert spent["idle"] > (n_ranks - 1) * spent["generate"]
        assert spent["train"] < n_ranks * wall


@pytest.mark.slow
def test_a_run_on_ranks_is_that_of_one_process_also_when_it_is_resumed_on_more(small, tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    assert train(1, *small, "-o", str(one))[0] == 0
    status, output = train(2, *small, "-o", str(many), "--until", "4")
    assert status == 0, output
    assert "Warning" not in output
    assert (many / "checkpoints" / "step-00004" / "learner" / ".metadata").exists()
    check_seconds(many, 2)
    status, output = train(3, str(many), "--resume")
    assert status == 0, output
    assert RunRecord.read(many).trainers == 3
    assert check(one) == check(many) == []
    found, expected = steps_of(many), steps_of(one)
    assert len(found) == len(expected) == 6
    for row, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl"):
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (row["step"], name)
        assert "logp_gap" not in row or row["logp_gap"] < 1e-5
    assert any("logp_gap" in row for row in found)
    assert all(row["grad_norm"] > 0.01 for row in expected)  # there was something to learn


def test_what_is_wrong_is_told_once_and_nobody_is_waited_for(small, tmp_path):
    status, output = train(2, *small, "-o", str(tmp_path / "run"), "--set", "lora.rank=99")
    assert status == 1  # torchrun's own
    assert output.count("scalerl: lora.rank: 99 exceeds the model's hidden size (") == 1
