"""`scalerl train` killed and resumed, in one process, under torchrun and under Ray.

The model is the demonstration's. The checks show that a run survives a SIGKILL with a sound record on this
device, not how fast it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_checks import SkippedError
from gpu_checks.lab import Lab
from scalerl.errors import InputError
from scalerl.rl.config.devices import use_first
from scalerl.rl.config.engine import Vllm
from scalerl.rl.engine.vllm.launch import find_python
from scalerl.rl.verify.proc import descendants

STEPS = 24
_SETTINGS = (
    "budget.kind=steps",
    f"budget.amount={STEPS}",
    "evaluation.count=4",
    "checkpoint.steps=4",
    "checkpoint.minutes=0",
    "engine.kind=transformers",
    "batch.prompts=4",
    "decode_slots=64",
)
_TINY = ("model=chain-base:hidden_size=32", "task.heldout_per_length=10", "batch.samples=4")


def killed_and_resumed(lab: Lab) -> dict[str, Any]:
    """Kill and resume a run of one process, and compare it with an uninterrupted run."""
    train = [sys.executable, "-m", "scalerl", "train"]
    figures = _kill_and_resume(lab, train, lab.folder / "killed")
    whole = lab.folder / "whole"
    subprocess.run([*train, *_arguments(lab, whole)], check=True, stdout=subprocess.DEVNULL)
    rates = [
        [line["pass_rate"] for line in _lines(run / "evals.jsonl")] for run in (lab.folder / "killed", whole)
    ]
    figures["pass_rates_equal"] = rates[0] == rates[1]
    figures["pass_rates_differ"] = max(abs(a - b) for a, b in zip(*rates, strict=True))
    if lab.device.type == "cpu":
        assert figures["pass_rates_equal"], figures
    assert figures["pass_rates_differ"] < 0.2, figures
    return figures


def sharded(lab: Lab) -> dict[str, Any]:
    """Kill and resume a run with sharded checkpoints under torchrun, one rank per GPU (two on a CPU)."""
    ranks = torch.cuda.device_count() or 2
    train = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    figures = _kill_and_resume(lab, [*train, "-m", "scalerl", "train"], lab.folder / "sharded")
    return figures | {"ranks": ranks}


def under_ray(lab: Lab) -> dict[str, Any]:
    """Run on a local Ray cluster; with fewer than three GPUs, generator and evaluation share one."""
    return _on_local_cluster(lab)


def vllm_under_ray(lab: Lab) -> dict[str, Any]:
    """Run three steps on a local Ray cluster with a vLLM worker that shares the learner's GPU.

    Weights stay in the GPU's memory. On a CPU they travel through the object store.
    """
    engine = Vllm()
    try:
        python = find_python(engine)
    except InputError as error:
        raise SkippedError(str(error)) from error
    if lab.device.type == "cuda":
        use_first(1)  # inherited by the run
    steps = 3
    figures = _on_local_cluster(
        lab,
        "model=chain-base:heads=2,hidden_size=64",  # vLLM has no kernels for heads of 16
        f"budget.amount={steps}",
        "evaluation.count=1",
        "engine.kind=vllm",
        f"engine.python={python}",
        "engine.gpu_memory=0.3",
        'engine.arguments=["--block-size", "32", "--enforce-eager"]',
    )
    assert figures["steps"] == steps, figures
    lines = _lines(lab.folder / "ray" / "timeline.jsonl")
    events = [line["event"] for line in lines if line.get("role") == "generate" and "event" in line]
    assert events == ["vLLM worker 0 takes part from version 0"], events
    return figures


def _on_local_cluster(lab: Lab, *changes: str) -> dict[str, Any]:
    run, started = lab.folder / "ray", time.monotonic()
    more = ["--cluster", "ray", *_set("cluster.address=local", *changes)]
    command = [sys.executable, "-m", "scalerl", "train", *_arguments(lab, run), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {"seconds": time.monotonic() - started, "steps": _steps(run), **_sound(run)}


def _kill_and_resume(lab: Lab, train: Sequence[str], run: Path) -> dict[str, Any]:
    command = [*train, *_arguments(lab, run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while _steps(run) < STEPS // 2:
            if process.poll() is not None:
                raise AssertionError(f"the run ended with {process.returncode} before it was killed")
            time.sleep(0.05)
    finally:
        for pid in [process.pid, *descendants(process.pid)]:  # torchrun's ranks have their own sessions
            os.kill(pid, signal.SIGKILL)
        process.wait()
    killed_at, started = _steps(run), time.monotonic()
    subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    figures = {"killed_at": killed_at, "resumed_seconds": time.monotonic() - started, "steps": _steps(run)}
    assert figures["steps"] == STEPS, figures
    return figures | _sound(run)


def _sound(run: Path) -> dict[str, Any]:
    """Check the run folder; return its last pass rate and largest `logp_shift`."""
    from record_checker import check

    faults = check(run)
    assert not faults, faults[:3]
    lines = _lines(run / "steps.jsonl")
    return {
        "pass_rate": _lines(run / "evals.jsonl")[-1]["pass_rate"],
        "logp_shift": max(line["logp_shift"] or 0.0 for line in lines),
    }


def _arguments(lab: Lab, run: Path) -> list[str]:
    return ["demo", "-o", str(run), *_set(*_SETTINGS, *(_TINY if lab.tiny else ()))]


def _set(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def _steps(run: Path) -> int:
    path = run / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
