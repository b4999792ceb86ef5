"""What two threads of a process on a cluster use: nothing is lost between them."""

import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, cast

import pytest

from scalerl.rl.checkpoint.store import Checkpoints
from scalerl.rl.config.settings import Checkpointing
from scalerl.rl.placement.rollout_worker import Parcels
from scalerl.rl.workers.pool import backoff
from scalerl.rl.workers.ray.backend import RayActors


def test_the_pause_before_a_retry_doubles_up_to_a_limit():
    assert [backoff(n) for n in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert backoff(3, longest=1.25) == 1.25
    assert backoff(5000) == 60.0  # a day of retries; 2.0**5000 is no float


class Handle:
    """An actor that answers at once; `answer` makes the future of each answer."""

    def __init__(self, answer):
        self.future = answer

    def __getattr__(self, name):
        return self

    def remote(self, *args):
        return self


def test_two_threads_may_look_whether_an_actor_lives():
    """A checkpoint's thread, and the driver."""
    answers, together, wrong = [], threading.Barrier(2), []

    class Answer(Future):
        def __init__(self):
            super().__init__()
            self.set_result(("node a", 1))
            answers.append(self)

        def done(self):
            with suppress(threading.BrokenBarrierError):
                together.wait(0.5)  # both come as far as this, where nothing keeps one of them out
            return super().done()

    actors = RayActors(cast(Any, None), "trainers", 20.0)
    actor = actors.process("trainer 0", Handle(Answer))

    def look():
        try:
            actor.receive()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(answers) == 4  # its place, each of two answers received once, and one that is awaited
    assert wait(actor.watched(), 0)


class Parcel:
    def fetch(self):
        return {}


_Parcels: Any = Parcels


class Watched(_Parcels):
    """Weights arrive as soon as those before have been looked at, if nothing keeps them out meanwhile."""

    offering = None

    @property
    def _newest(self):
        found = self.__dict__.get("newest")
        if found and found[1] == 1 and self.offering is None:
            self.offering = threading.Thread(target=self.fetch, args=(Parcel(), 2))
            self.offering.start()
            self.offering.join(0.5)
        return found

    @_newest.setter
    def _newest(self, newest):
        self.__dict__["newest"] = newest


def test_weights_that_arrive_as_others_are_taken_are_kept():
    parcels: Any = Watched(None)
    parcels.fetch(Parcel(), 1)
    taken = parcels.newer(0)
    assert taken is not None
    assert taken[1] == 1
    parcels.offering.join()
    taken = parcels.newer(1)
    assert taken is not None
    assert taken[1] == 2


def test_a_checkpoint_that_fails_keeps_no_thread(tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpointing(), Learnerless().saver, None)
    checkpoints.make(1, {})
    with pytest.raises(ZeroDivisionError):
        checkpoints.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


class Learnerless:
    """What cannot be saved."""

    def saver(self, near, resumable=True):
        def save(folder):
            raise ZeroDivisionError

        return save
