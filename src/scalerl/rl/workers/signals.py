"""Signals: the trainer handles them; processes that it starts ignore them and end with it."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run with a checkpoint: Ctrl-C, the end of a job by a scheduler, a closed terminal, and
Slurm's notice before a preemption."""
_POKE, _LOOK = signal.SIGURG, 0.1  # SIGURG is ignored by default, so a late one does nothing


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that any of `STOPPING` sets.

    The same signal again, or Ctrl-C, interrupts at once. A different one does not: a scheduler sends SIGTERM
    some time after its notice, perhaps while the checkpoint is being saved. Nor does a second SIGHUP: when a
    terminal closes, one comes from the shell, and one from the kernel as the shell exits.
    """
    stop, received = threading.Event(), set[int]()

    def handle(number: int, frame: object) -> None:
        if (number in received and number != signal.SIGHUP) or (received and number == signal.SIGINT):
            raise KeyboardInterrupt
        first = not received
        received.add(number)
        stop.set()
        if first:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"scalerl: stopping with a checkpoint; once more stops at once\n")

    # `nohup` starts a command with SIGHUP ignored, and it must stay ignored.
    handled = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_by(stop: threading.Event) -> Iterator[None]:
    """Raise a KeyboardInterrupt in the context, even during a wait, once `stop` is set.

    This is for the start of a run, which may take minutes and has nothing to save in a checkpoint. Only the
    main thread receives signals, so nothing is raised in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.main_thread().ident or 0, threading.Event()

    def handle(number: int, frame: object) -> None:
        if not over.is_set():
            over.set()  # only once: the interrupted code then ends its processes
            raise KeyboardInterrupt

    def watch() -> None:
        while not over.is_set():
            if stop.wait(_LOOK):
                signal.pthread_kill(main, _POKE)
                return

    before = signal.signal(_POKE, handle)
    threading.Thread(target=watch, name="stop", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(_POKE, before)


@contextmanager
def masked_signals(signals: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
    """Mask signals in processes that are started in the context, until they call `leave_signals`.

    These signals go to all processes of a job or terminal and would end one that has just started. Only this
    thread is masked, so any thread may start processes; other threads, or the end, take a pending signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals() -> None:
    """Ignore the signals of `STOPPING` in this process, which was started with `masked_signals`.

    The trainer handles them, and stops its processes itself."""
    for number in STOPPING:
        # Not by SIG_IGN or a mask, which processes started from here would inherit.
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def follow_the_parent(seconds: float = 0.0) -> None:
    """End this process `seconds` after its parent, a trainer that may be killed, and ignore signals.

    Call it in a process that was started with `masked_signals`."""
    leave_signals()

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            time.sleep(seconds)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
