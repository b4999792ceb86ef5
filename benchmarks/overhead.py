"""What recording, checkpoints (every 50 steps) and watching the health of a run cost, as shares of its time.

    python benchmarks/overhead.py

The demo's recipe for 400 steps, in this process, evaluations in theirs. Everything that is not generating or
training is timed where it is called. What the thread that writes checkpoints computes is counted apart: it
runs beside the training where a core is free, but for its part in Python.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from scalerl.record.writer import RunWriter
from scalerl.rl.checkpoint import store as checkpoint
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.health.watch import Watch
from scalerl.rl.learner.probe import Probe
from scalerl.rl.model.named import find_model
from scalerl.rl.training_run import TrainingRun

train = import_module("scalerl.rl.train")  # the module; scalerl.rl.train is a function of that name
STEPS = 400
THREAD = "the checkpoint's thread"
_spent: dict[str, float] = defaultdict(float)


def timed(what: str, function: Callable[..., Any], clock: Callable[[], float]) -> Callable[..., Any]:
    """Return `function` with its time added to that of `what`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = clock()
        try:
            return function(*args, **kwargs)
        finally:
            _spent[what] += clock() - started

    return call


def main() -> None:
    recipe = load_recipe("demo", ["budget.kind=steps", f"budget.amount={STEPS}", "checkpoint.steps=50"])
    model, _ = find_model(recipe, lambda progress: None)
    wall, process = time.perf_counter, time.thread_time
    for owner, name, what in PARTS:
        setattr(owner, name, timed(what, getattr(owner, name), wall))
    checkpoint.Checkpoints._write = timed(THREAD, checkpoint.Checkpoints._write, process)
    with tempfile.TemporaryDirectory() as folder:
        last = train.train(recipe, Path(folder) / "run", model).steps()[-1]
    total = last["wall_seconds"]
    print(f"{STEPS} steps in {total:.1f} s of training")
    for what, seconds in _spent.items():
        print(f"  {what:<24} {seconds:7.3f} s   {seconds / total:6.2%}")
    together = sum(_spent.values())
    held_up = together - _spent[THREAD]
    for what, seconds in (("what holds training up", held_up), ("with the thread", together)):
        print(f"  {what:<24} {seconds:7.3f} s   {seconds / total:6.2%}")


PARTS = [
    (train, "step_row", "recording"),
    (train, "groups_row", "recording"),
    (RunWriter, "step", "recording"),
    (RunWriter, "lengths", "checkpointing"),
    (TrainingRun, "state", "checkpointing"),
    (checkpoint.Checkpoints, "make", "checkpointing"),
    (Probe, "__call__", "health: the probe"),
    (Watch, "step", "health: the watch"),
]

if __name__ == "__main__":
    main()
