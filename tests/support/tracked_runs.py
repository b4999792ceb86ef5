"""What the tests of tracked runs share: the recipe's changes, and how runs and logs are compared."""

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
from small_demo import small_demo

from scalerl.ingest.load import read_source

AXES = ("gpu_hours", "flops", "tokens", "tokens_processed", "samples", "steps")
DRIFT = [f"health.length_drift.{one}" for one in ("alarm=1.01", "warning=1.005", "window=2")]
"""Thresholds that any run passes, so that there are alarms to be logged."""
SUITE = 'evaluation.downstream=[{name="other", task={kind="chain", k_max=1, seed=5}, samples=1, every=4}]'
SETS = small_demo(36, 12, "checkpoint.steps=4", "samples.every=6", SUITE, *DRIFT)
TO = ["wandb", "tensorboard", "mlflow"]


def tracked_by(recipe, *to, **settings):
    return replace(recipe, tracking=replace(recipe.tracking, to=to, **settings))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_so_far(path):
    return lines(path) if path.exists() else []


def kept_rows(run):
    return [row for row in lines(run.path.with_name("kept.jsonl")) if "step" in row]


def without_times(path):
    rows = lines(path)
    for row in rows:
        for key in ("time", "device_seconds", "wall_seconds", "idle_seconds", "weight_sync"):
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
    (found,) = read_source(source).runs
    assert found.config["source"]["trainer"] == "scalerl"
    assert found.default_axis == record.default_axis
    close: dict[str, Any] = {"rtol": 0 if exact else 1e-6}
    np.testing.assert_allclose(
        [p.pass_rate for p in found.evals], [p.pass_rate for p in record.evals], **close
    )
    for axis in AXES:
        np.testing.assert_allclose(found.compute(axis), record.compute(axis), **close)
    return found


def wait_until(true, seconds=120.0):
    """Look every tenth of a second, and fail after so many."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)
