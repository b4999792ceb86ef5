"""A worker process of this machine, and the channel to it."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from typing import Any

from scalerl.rl.workers.process import masked_signals

_SPAWN = get_context("spawn")


class ChildProcess:
    """Runs `target(channel, *arguments)` in a process of its own.

    A pipe takes 64 KiB, and a process that is stopped or hangs takes nothing more. Messages are therefore
    sent by a thread: the driver never waits for a reader.
    """

    def __init__(
        self, name: str, target: Callable[..., None], *arguments: Any, device: str | None = None
    ) -> None:
        """`arguments` must be few: Python waits until a process has read them, even one that has exited.

        The process sees no GPU but `device`, which may name several; all that this one sees where it is None.

        Raises:
            OSError: no process can be started.
        """
        self.channel, theirs = _SPAWN.Pipe()
        run = target if device is None else partial(_run_on, device, target)
        self._process = _SPAWN.Process(target=run, name=name, args=(theirs, *arguments), daemon=True)
        with masked_signals():
            self._process.start()
        theirs.close()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._send_queued, name="outbox", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """What `multiprocessing.connection.wait` takes: it is ready once the process has exited."""
        return self._process.sentinel

    def send(self, message: Any) -> None:
        """Queue a message; to a process that has exited it is dropped."""
        self._messages.put(ForkingPickler.dumps(message))  # pickled here, where an error has a caller

    def close(self) -> None:
        """Close the channel once all is sent, or the process has exited."""
        self._messages.put(None)

    def kill(self) -> None:
        """Kill the process, and close the channel."""
        self._process.kill()
        self._process.join()
        self.close()

    def join(self, seconds: float) -> None:
        """Wait for the end of a process whose channel is closed, and kill it after `seconds`."""
        self._process.join(timeout=seconds)
        self.kill()

    def exit_cause(self) -> str:
        """Return how the process ended."""
        self._process.join(timeout=10)  # its channel is closed shortly before it has ended
        status = self._process.exitcode
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            return f"its process was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
        return f"its process exited with status {status}"

    def _send_queued(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self.channel.send_bytes(message)
            self.channel.close()
            return
        # The driver may be reading from this channel: it is closed only when the driver says so.
        while self._messages.get() is not None:
            pass
        self.channel.close()


def _run_on(device: str, target: Callable[..., None], *arguments: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = device  # read when CUDA is first used, which it was not yet
    target(*arguments)
