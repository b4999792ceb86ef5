"""Runs that are killed with all of their processes, and resumed until they end."""

import multiprocessing
import subprocess
import time
from pathlib import Path

import psutil

LIMIT = 600.0
"""Seconds after which a run that neither ends nor reaches a step fails the test."""
_CONTEXT = multiprocessing.get_context("forkserver")  # what it has imported, its children have too
_CONTEXT.set_forkserver_preload(["scalerl.study.run.preload"])


def killed_and_resumed(start, folder, steps, kills, rng, check=lambda: None):
    """Kill a run of so many steps `kills` times, at random steps or as it starts, and resume it to its end.

    `start` begins or resumes the run and returns a process: of this module, or of subprocess. `check` is
    called after each kill. Returns after how many steps it was killed.
    """
    found = []
    for _ in range(kills):
        done = steps_of(folder)
        until = done + rng.randint(0, (steps - done) // 2)
        process = start()
        try:
            wait(
                lambda until=until, process=process: steps_of(folder) >= until or status(process) is not None
            )
            time.sleep(rng.uniform(0, 0.05))
        finally:
            ended = kill(process)
        assert not ended, f"the run ended with {ended}"
        found.append(steps_of(folder))
        check()
    process = start()
    try:
        wait(lambda: status(process) is not None)
    finally:
        kill(process)
    assert status(process) == 0, f"the last resume ended with {status(process)}"
    return found


def trains(recipe, folder, **options):
    """A process that begins this run or resumes it."""
    process = _CONTEXT.Process(target=_train, args=(recipe, Path(folder), options))
    process.start()
    return process


def status(process):
    """Its exit status; None while it is alive."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def kill(process):
    """SIGKILL to a process and to all that it has started; its status where it had ended before."""
    ended = status(process)
    if ended is None:
        family = psutil.Process(process.pid)
        family = [family, *family.children(recursive=True)]  # workers of torchrun are in groups of their own
        for member in family:
            member.kill()
        psutil.wait_procs(family[1:], timeout=LIMIT)
    process.wait() if isinstance(process, subprocess.Popen) else process.join()
    return ended


def steps_of(folder):
    """Whole lines of steps.jsonl."""
    path = Path(folder) / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(condition):
    """Poll for it, within the limit."""
    ends = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < ends, f"nothing happened within {LIMIT:g} s"
        time.sleep(0.005)


def _train(recipe, folder, options):
    import torch

    from scalerl.rl.train import train

    torch.set_num_threads(1)
    train(recipe, folder, recipe.model, resume=True, **options)
