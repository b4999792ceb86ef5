"""Forecasts need nothing that only Unix has: they run where its modules, flags and signals are missing."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent.parent / "examples" / "runs" / "scalerl-0.csv"
WITHOUT_UNIX = """
import os, signal, sys

for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"):
    sys.modules[name] = None
for module, names in {
    os: "O_NONBLOCK O_DIRECTORY O_NOFOLLOW O_CLOEXEC fork getuid geteuid killpg setsid mkfifo set_blocking "
        "sched_getaffinity statvfs getpgid pidfd_open",
    signal: "SIGHUP SIGUSR1 SIGKILL SIGPIPE SIGALRM SIGQUIT SIGTSTP SIGCONT pthread_sigmask",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

import scalerl, scalerl.ingest
from scalerl.cli.main import main

for name in scalerl.__all__:
    getattr(scalerl, name)
sys.exit(main(sys.argv[1:]))
"""


def run(folder, *words):
    command = [sys.executable, "-c", WITHOUT_UNIX, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [("fit", str(RUN), "--x", "flops"), ("report", str(RUN), "--x", "flops")])
def test_forecasts_and_pages_are_made(words, tmp_path):
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "ceiling A" in done.stdout or "<html" in (tmp_path / done.stdout.strip()).read_text()


def test_a_run_folder_is_refused_in_one_line(tmp_path):
    rows = [f'{{"step": {k}, "eval/accuracy": {0.3 + k / 100}}}' for k in range(8)]
    (tmp_path / "log.jsonl").write_text("\n".join(rows))
    done = run(tmp_path, "ingest", "log.jsonl", "-o", "run")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("run folders are written on Linux and macOS only")
