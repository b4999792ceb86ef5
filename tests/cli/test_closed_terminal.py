"""A run outlives its terminal as far as a checkpoint, and under nohup altogether."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cut_runs import lines
from small_runs import small_recipe

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the terminals of Linux")


def command(model, folder):
    """Train for longer than any test lasts."""
    recipe = {**small_recipe(model).to_dict(), "model": str(model)}
    folder.parent.mkdir(exist_ok=True)
    toml = folder.parent / "long.toml"
    toml.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in leaves(recipe)))
    longer = ["--set", "budget.amount=1000000", "--set", "evaluation.count=500000"]
    longer += ["--set", "checkpoint.steps=0"]  # the end alone makes one
    return [sys.executable, "-m", "scalerl", "train", str(toml), "-o", str(folder), *longer]


def leaves(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def steps(folder):
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition, seconds=120):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def ended(pid):
    """Whether a process that is no child of this one has ended."""
    try:
        with Path(f"/proc/{pid}/stat").open() as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("term", ["xterm", pytest.param("dumb", marks=pytest.mark.slow)])  # a bar, and lines
def test_a_closed_terminal_leaves_a_checkpoint(guesser, tmp_path, term):
    """The shell of a terminal sends SIGHUP to its jobs, and the kernel sends it again as the shell ends;
    by then whatever is written to standard error fails."""
    folder, pid = tmp_path / "run", tmp_path / "pid"
    line = " ".join(command(guesser, folder))
    parent, child = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=child, stdout=child, stderr=child,
        env={**os.environ, "TERM": term},
        preexec_fn=lambda: os.login_tty(child),
    )  # fmt: skip
    os.close(child)
    os.write(parent, f"sh -c 'echo $$ > {pid}; exec {line}'; echo $? > {tmp_path}/status\n".encode())
    os.set_blocking(parent, False)
    try:
        wait_until(lambda: (drain(parent), steps(folder) > 5)[1])
        number = int(pid.read_text())
        os.close(parent)
        shell.wait(60)
        wait_until(lambda: ended(number))
    finally:
        shell.kill()
        if pid.exists() and not ended(int(pid.read_text())):
            os.kill(int(pid.read_text()), signal.SIGKILL)
    last = lines(folder / "steps.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step-{last:05d}" / "manifest.json").is_file()


def drain(terminal):
    """Read what is shown; a terminal that is not read holds up whoever writes to it."""
    try:
        while os.read(terminal, 65536):
            pass
    except BlockingIOError:
        pass


def test_standard_error_that_nobody_reads_ends_no_run(guesser, tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(command(guesser, folder), stderr=subprocess.PIPE)
    assert process.stderr
    process.stderr.close()
    try:
        wait_until(lambda: steps(folder) > 5 or process.poll() is not None)
        process.terminate()
        assert process.wait(60) == 130
    finally:
        process.kill()
    last = lines(folder / "steps.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step-{last:05d}" / "manifest.json").is_file()


def test_a_run_under_nohup_goes_on_after_its_terminal(guesser, tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        ["nohup", *command(guesser, folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: steps(folder) > 5)
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            before = steps(folder)
            wait_until(lambda before=before: steps(folder) > before + 5)
        process.terminate()
        assert process.wait(60) == 130
    finally:
        process.kill()
