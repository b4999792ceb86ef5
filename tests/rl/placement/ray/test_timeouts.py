"""Who is slow, or was not listened to, is not lost; who says nothing while somebody listens is."""

import math
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest
from actor_handles import ActorHandle
from ray_nodes import Run, simulated

from scalerl.errors import LearnerLostError
from scalerl.rl.algo.curriculum import Uniform
from scalerl.rl.algo.schedule import PipelineRL
from scalerl.rl.config.cluster import ClusterTimeouts
from scalerl.rl.placement.ray.learner import RayRanks, serve
from scalerl.rl.placement.rollouts import RolloutWorker
from scalerl.rl.workers.backend import PollClock, WorkerLostError
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.ray import backend
from scalerl.rl.workers.ray.backend import RayActors

LIMITS = 40.0, 30.0  # without progress, and to start
ACTORS = RayActors(cast(Any, None), "generators", 20.0)


def placed(name):
    """The process of an actor that has a place."""
    process = ACTORS.process(name, ActorHandle(Future))  # which has not answered yet
    process._placing, process.node, process.pid, process.placed_at = None, "node a", 1, time.monotonic()
    process._request()
    return process


@pytest.fixture
def worker():
    """A generator that takes part."""
    worker = RolloutWorker("generator 0", 0, *LIMITS, weights_timeout=10.0)
    worker.process, worker.started = placed("generator 0"), True
    worker.process.clock = worker.clock
    worker.note_progress()
    return worker


def later(worker, seconds):
    """So many seconds go by."""
    worker.clock._unpolled -= seconds


def receive(worker):
    """It sends something, that it decodes say."""
    worker.process._request()
    worker.note_progress()


def check(worker):
    """What a poll does."""
    worker.process.receive()
    worker.check()


def test_one_that_installs_version_after_version_may_be_behind_for_ever(worker):
    worker.offer("weights", 0)
    for version in range(6):
        later(worker, 6)
        worker.offer("weights", version + 1)  # before it has installed the last
        worker.has_installed(version)
        receive(worker)
        check(worker)
    later(worker, 12)
    receive(worker)
    with pytest.raises(WorkerLostError, match="version 6 of the weights was not installed in 10 s"):
        check(worker)


def test_weights_are_on_their_way_for_as_long_as_nothing_newer_is_installed(worker):
    for version in range(4):  # offered again and again, and none arrives
        worker.offer("weights", version)
        later(worker, 3)
    receive(worker)
    with pytest.raises(WorkerLostError, match="version 3 of the weights"):
        check(worker)


def test_weights_that_do_not_arrive_are_offered_again_after_ever_longer_pauses(worker):
    worker.offer("weights", 0)
    assert worker.offer_at == math.inf
    pauses = []
    for _ in range(6):
        before = time.monotonic()
        worker.missed()
        pauses.append(worker.offer_at - before)
        worker.offer("weights", 0)
        assert worker.offer_at == math.inf
    assert pauses == pytest.approx([0.5, 1.0, 1.25, 1.25, 1.25, 1.25], abs=0.2)  # an eighth of its time
    worker.has_installed(0)
    worker.missed()
    assert worker.offer_at - time.monotonic() < 0.6


def test_time_in_which_nobody_listened_is_no_silence(worker):
    worker.in_flight[0] = "group"
    worker.offer("weights", 0)
    later(worker, 1000)
    later(worker, -999)  # in which the driver did not poll
    check(worker)
    later(worker, 20)
    with pytest.raises(WorkerLostError, match="no heartbeat for 20 s"):
        check(worker)


def test_each_look_counts_for_no_more_than_looks_are_apart(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(backend.time, "monotonic", lambda: clock[0])
    poll_clock = PollClock()
    for gap, counted in ((0.02, 0.02), (1.0, 1.0), (61.5, 1.5), (1.0, 1.0)):
        before = poll_clock.now()
        clock[0] += gap
        poll_clock.poll()
        assert poll_clock.now() - before == pytest.approx(counted)


def test_one_without_a_timeout_may_be_idle_and_nothing_is_said(caplog):
    clock = PollClock()
    watched = [("the tracking process", math.inf), ("generator 0", 600.0)]
    workers = [PoolWorker(what, 0, timeout, clock=clock) for what, timeout in watched]
    for worker in workers:
        worker.note_progress()
    clock._unpolled -= 40.0
    for worker in workers:
        worker.check()
    assert caplog.messages == [
        "generator 0 has made no progress for 30 s; its process is replaced after 600 s"
    ]


def listen(calls, clock):
    for _ in range(10):
        clock[0] += 1.0
        calls.wait(0.0)


@pytest.fixture
def unanswered(monkeypatch):
    """A clock, where no call to an actor has returned yet."""
    clock = [100.0]

    def now():
        clock[0] += 1e-6  # else what waits until then would wait without end
        return clock[0]

    monkeypatch.setattr(backend.time, "monotonic", now)
    return clock


def test_a_ping_and_a_call_may_be_unanswered_for_as_long_as_nobody_looks(unanswered):
    ranks: Any = object.__new__(RayRanks)
    worker = PoolWorker("trainer 0", 0, process=placed("trainer 0"), started=True)
    WorkerPool.__init__(ranks, [worker], ACTORS, serve)
    ranks._timeouts, ranks._lock = ClusterTimeouts(step=30), threading.Lock()
    ranks._numbers, ranks._calls = count(), {}
    worker.process.clock = ranks._clock
    calls = ranks._start([()], "step", "stepped")
    assert not calls.wait(0.0)  # which asks for a heartbeat
    unanswered[0] += 1000.0
    assert not calls.wait(0.0)
    for _ in range(15):
        unanswered[0] += 1.0
        assert not calls.wait(0.0)
    unanswered[0] += 1.5
    assert not calls.wait(0.0)
    with pytest.raises(LearnerLostError, match="no heartbeat for 20 s"):
        listen(calls, unanswered)


@pytest.mark.slow
def test_a_driver_that_is_busy_loses_nobody(recipe, small_base):
    """It steps for longer than anybody may be silent, and a version is always on its way meanwhile."""
    timeouts = ClusterTimeouts(start=240, heartbeat=4, weights=5)
    cluster = replace(recipe.cluster, generators=1, timeouts=timeouts)
    recipe = replace(recipe, curriculum=Uniform(), schedule=PipelineRL(k=8), cluster=cluster)
    with simulated(2), ExitStack() as closing:
        run = Run(recipe, small_base, closing)
        step = run.learner.step

        def slow(batch):
            time.sleep(6.0 if run.learner.version < 2 else 2.0)
            return step(batch)

        run.learner.step = slow
        for done in run.pipeline.steps():
            print(f"step {done.index}: installed {run.generator.installed}, lost {run.generator.lost}")
            assert not run.generator.lost
            if done.index == 8:
                break
