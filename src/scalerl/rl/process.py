"""What every process that a run starts has in common: it leaves Ctrl-C to the trainer, and ends with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started within inherit that they ignore Ctrl-C: the trainer hears it, and ends them."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set what a signal does
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_the_parent() -> None:
    """Called in a process that was started: a trainer that was killed must not leave it behind."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
