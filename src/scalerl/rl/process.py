"""Signals: a trainer answers them, and what it starts leaves them to it and ends with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, a scheduler's SIGTERM or a closed terminal; again they interrupt at once."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        os.write(2, b"scalerl: stopping after what is under way; once more stops at once\n")

    # `nohup` has the end of a terminal ignored, and means it.
    heard = [n for n in _STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def follow_the_parent() -> None:
    """Called in a process that was started: a trainer that was killed must not leave it behind, and a SIGTERM
    to all processes of a job, as schedulers send it, is for the trainer to answer."""
    signal.signal(signal.SIGTERM, _do_nothing)

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _do_nothing(number: int, frame: object) -> None:
    """Not SIG_IGN, which whatever is started from here would inherit."""
