"""Runs on a cluster as commands, and whether their records add up."""

import subprocess
import sys
import threading

import numpy as np
import record_checker
from ray_nodes import until
from small_demo import small_demo

from scalerl.record.reader import RunRecord
from scalerl.rl.loop.prompt_pool import PromptPool

SMALL = small_demo(20, 4, "schedule.k=4", "checkpoint.steps=5")
"""The demonstration, small: 4 groups of 8 a step."""


def command(folder, *changes, resume=False):
    """`scalerl train` with these changes of the demonstration, or with them on with a run; a process."""
    words = [str(folder), "--resume"] if resume else ["demo", "-o", str(folder)]
    words += ["--json"] + [word for change in changes for word in ("--set", change)]
    start = [sys.executable, "-m", "scalerl", "train", *words]
    return subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_of(folder):
    """Steps on record."""
    file = folder / "steps.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def check(recipe, run, steps):
    """Every group in its order and once, the ledger balanced, and no token too old."""
    P = recipe.batch.prompts
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, 0)
    expected = [pool.draw() for _ in range(len(steps) * P)]
    found = [(g.prompt, g.rollouts[0].epoch) for step in steps for g in step.groups]
    assert found == expected
    fates = {"consumed": len(steps) * P}
    ledger = run.pipeline.ledger(fates)
    assert ledger["admitted"] == ledger["consumed"] + ledger["in_flight"]
    for step in steps:
        staleness = step.index - 1 - np.concatenate([r.version_T for g in step.groups for r in g.rollouts])
        assert staleness.min() >= 0
        assert staleness.max() <= recipe.schedule.max_staleness


def check_record(folder, n_steps):
    """The record of a run that has ended after so many steps is what docs/reference/run-folder.md says."""
    assert record_checker.check(folder) == []
    record = RunRecord.read(folder)
    assert not record.warnings
    assert len(record.steps()) == n_steps
    assert (folder / "checkpoints" / "final").is_dir()
    return record


def when_step(folder, n, do):
    """Do something in a thread once the record of a run has so many steps."""

    def wait():
        until(lambda: steps_of(folder) >= n, 900)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread
