"""`scalerl serve` as a process, for tests."""

import contextlib
import os
import subprocess
import sys


@contextlib.contextmanager
def server(folder, *words, **environment):
    """The process, and the address that it prints."""
    command = [sys.executable, "-m", "scalerl", "serve", str(folder), "--port", "0", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()
