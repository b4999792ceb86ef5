"""A worker of another Python, which may be without most packages."""

import os
import subprocess
import sys
import time


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


def stay(channel):
    """Do not end with the channel."""
    channel.send("started")
    while True:
        time.sleep(60)
