"""Signals: the trainer handles them; the processes that it starts ignore them, and end with it."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import parent_process

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run with a checkpoint: Ctrl-C, a scheduler's end of a job, a closed terminal, and the
notice that Slurm sends before a preemption."""
_POKE, _LOOK = signal.SIGURG, 0.1  # by default it is ignored: one that comes late does nothing


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that any of `STOPPING` sets.

    The same signal again, or Ctrl-C, interrupts at once. Another one does not: a scheduler sends SIGTERM some
    time after its notice, while the checkpoint that the notice asked for is being made. Nor does a second
    SIGHUP: of a terminal that is closed one comes from the shell, and one from the kernel as the shell exits.
    """
    stop, received = threading.Event(), set[int]()

    def handle(number: int, frame: object) -> None:
        if (number in received and number != signal.SIGHUP) or (received and number == signal.SIGINT):
            raise KeyboardInterrupt
        first = not received
        received.add(number)
        stop.set()
        if first:
            with suppress(OSError):  # a terminal that was closed takes no line
                os.write(2, b"scalerl: stopping with a checkpoint; once more stops at once\n")

    # `nohup` starts a command with SIGHUP ignored, which must stay so.
    handled = [n for n in STOPPING if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_by(stop: threading.Event) -> Iterator[None]:
    """Raise a KeyboardInterrupt within, whatever is waited for, once `stop` is set.

    For the start of a run, which may take minutes and of which a checkpoint would have nothing. Other threads
    than the first do not receive signals: there nothing is raised.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.main_thread().ident or 0, threading.Event()

    def handle(number: int, frame: object) -> None:
        if not over.is_set():
            over.set()  # once: what it interrupts is to end its processes
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
    """Mask signals in processes that are started within, until they call `leave_signals`: these signals go
    to all processes of a job or a terminal, and would end one that has just been started.

    The mask is that of this thread, so that any thread may start a process; a signal that comes meanwhile is
    taken by another, or at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals() -> None:
    """Have no signal of `STOPPING` end this process, which was started with `masked_signals`: the trainer
    handles them, and stops its processes itself."""
    for number in STOPPING:
        # Neither SIG_IGN nor the mask, which processes that are started from here would inherit.
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def follow_the_parent(seconds: float = 0.0) -> None:
    """End this process so many seconds after its parent, a trainer that may be killed, and leave signals to
    that; called in a process that was started with `masked_signals`."""
    leave_signals()

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            time.sleep(seconds)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
