"""Runs in process groups of their own that are killed, all processes at once, and resumed until they end."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

LIMIT = 240.0
"""Seconds after which a run that neither ends nor reaches a step fails the test."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["scalerl.rl.train", "scalerl.rl.learner", "transformers.models.llama"])


def killed_and_resumed(recipe, folder, kills, rng, between=lambda: None):
    """Kill a run `kills` times with SIGKILL, at random steps or as it starts, and resume it to its end.

    `between` is called with the run killed, before each resume. Returns at how many steps it was killed.
    """
    steps, found = recipe.budget.amount, []
    for _ in range(kills):
        done = steps_of(folder)
        until = done + rng.randint(0, max(1, int(steps - done) // 2))
        process = start(recipe, folder)
        try:
            wait(lambda until=until, process=process: steps_of(folder) >= until or not process.is_alive())
            time.sleep(rng.uniform(0, 0.05))
        finally:
            alive = kill(process)
        assert alive or process.exitcode == 0, f"the run ended with {process.exitcode}"
        found.append(steps_of(folder))
        between()
    process = start(recipe, folder)
    try:
        process.join(LIMIT)
        assert process.exitcode == 0, f"the last resume ended with {process.exitcode}"
    finally:
        kill(process)
    return found


def start(recipe, folder):
    """A process that trains or resumes this run, with its group; it is that group's leader."""
    process = _CONTEXT.Process(target=_train, args=(recipe, Path(folder)))
    process.start()
    return process


def kill(process):
    """SIGKILL to all processes of its group, at once; whether it was alive."""
    alive = process.is_alive()
    if alive:
        wait(lambda: os.getpgid(process.pid) == process.pid or not process.is_alive())
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return alive


def steps_of(folder):
    """Whole lines of steps.jsonl."""
    path = Path(folder) / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if path.exists() else []


def wait(condition):
    ends = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < ends, f"nothing happened within {LIMIT:g} s"
        time.sleep(0.005)


def _train(recipe, folder):
    os.setpgid(0, 0)
    import torch

    from scalerl.rl.train import train

    torch.set_num_threads(1)
    train(recipe, folder, recipe.model, resume=True)
