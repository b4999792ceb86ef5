"""`scalerl watch` in a process of its own, and what it does at one look."""

import contextlib
import subprocess
import sys
from pathlib import Path

from scalerl.cli.watch import Follower
from scalerl.ingest import load
from scalerl.ingest.options import ReadOptions
from scalerl.view.facts.standing import StandingQuery, stand

COMMAND = [sys.executable, "-m", "scalerl", "watch"]
FAST = ["--interval", "0.05"]


@contextlib.contextmanager
def watching(*words):
    """The command in a process of its own, its output to be read line by line."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, words), *FAST], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def follower(path, **asked):
    def read():
        data = load.read_data(Path(path), None, ReadOptions(), None)
        return stand(data.points, data.record, StandingQuery(**asked))

    return Follower(Path(path), read)
