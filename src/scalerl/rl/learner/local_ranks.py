"""The ranks of a learner on this machine: this process is the first, and starts the others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from scalerl.rl.workers.ranks import free_port

_END = 30.0  # seconds in which ranks end by themselves once the first has told them to


@contextmanager
def local_ranks(n: int) -> Iterator[None]:
    """Start `n` - 1 more processes of this command; with this one they are as torchrun would start them.

    They have no terminal, so that signals reach the first alone, and they end with their connection to it.
    """
    port = str(free_port("127.0.0.1"))  # at this instant: the first rank listens at it next
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    where |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "TORCHELASTIC_RUN_ID": "scalerl"}

    def of(rank: int) -> dict[str, str]:
        return {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}

    command, quiet = [sys.executable, "-m", "scalerl", *sys.argv[1:]], subprocess.DEVNULL
    others = [
        subprocess.Popen(command, env=os.environ | of(i), stdin=quiet, start_new_session=True)
        for i in range(1, n)
    ]
    before = dict(os.environ)
    os.environ.update(of(0))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for process in others:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            process.kill()
            process.wait()
