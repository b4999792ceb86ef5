"""A stop while a run starts: what waits is interrupted, once, and nothing after it."""

import signal
import threading
import time

import pytest

from scalerl.rl.workers.signals import interrupted_by


@pytest.mark.parametrize("wait", [lambda: time.sleep(600), threading.Event().wait], ids=["sleep", "event"])
def test_a_stop_interrupts_what_is_waited_for(wait):
    stop, before = threading.Event(), signal.getsignal(signal.SIGURG)
    threading.Timer(0.1, stop.set).start()

    def wait_and_end():
        try:
            wait()
        finally:
            time.sleep(0.3)  # which is not interrupted again

    with interrupted_by(stop), pytest.raises(KeyboardInterrupt):
        wait_and_end()
    assert signal.getsignal(signal.SIGURG) == before


def test_a_stop_after_it_interrupts_nothing():
    stop = threading.Event()
    with interrupted_by(stop):
        pass
    stop.set()
    time.sleep(0.3)


def test_another_thread_is_left_alone():
    ended, stop = threading.Event(), threading.Event()
    stop.set()

    def work():
        with interrupted_by(stop):
            time.sleep(0.3)
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended.is_set()
