"""A worker of another Python, which may be without most packages."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def is_running(pid):
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ended(pid):
    """Whether a process ends within a minute."""
    until = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(pid)


# -- what runs in the worker -----------------------------------------------------------------------------


def echo(channel, greeting):
    """Send back what comes; "sleep" starts a process that outlives others, "exit" and "fail" do so."""
    channel.send("started", (greeting, sys.executable, os.environ.get("CUDA_VISIBLE_DEVICES")))
    while True:
        message = channel.receive()
        if message == "fail":
            raise ValueError("as asked")
        if message == "exit":
            os._exit(3)
        if message == "sleep":
            message = subprocess.Popen(["sleep", "600"]).pid
        channel.send("echo", message)


CACHE = 123_456_789


def answer(channel, folder, arguments):
    """Answer calls as a worker of vLLM does: all but "ignore". It has measured `CACHE` bytes, unless it was
    given a size."""
    channel.send("started", os.environ.get("CUDA_VISIBLE_DEVICES"))
    while True:
        number, method, values = channel.receive()
        if method == "exit":
            os._exit(3)
        if method == "refuse":
            channel.send("refused", (number, "as asked", *values))
        elif method == "cache_bytes":
            channel.send("answer", (number, 0 if "--kv-cache-memory-bytes" in arguments else CACHE))
        elif method != "ignore":
            channel.send("answer", (number, (method, *values, folder, arguments[2:])))


def load(channel, folder, arguments):
    """Never come to the end of a start."""
    time.sleep(600)


def stay(channel):
    """Do not end with the channel."""
    channel.send("started")
    while True:
        time.sleep(60)


def tell(channel):
    """Send the variables, the parent and the folder of this process, and whether torch was there already."""
    channel.send("started", (dict(os.environ), os.getppid(), Path.cwd(), "torch" in sys.modules))
    channel.receive()
