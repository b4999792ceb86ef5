"""A receiver of a broadcast is lost in the middle of a version: the others go on, and so does the sender."""

import logging
import os
import signal
import time
from multiprocessing import get_context

import pytest
import torch
from ray_nodes import until

from scalerl.rl.sync.buckets import packed
from scalerl.rl.sync.ray_weights import Broadcast, Joined

SECONDS = 20.0
"""The timeout of the group."""


class Stored:
    """Weights in three buckets; `between` is called after the first of them is sent."""

    def __init__(self, value, between=lambda: None):
        self._buckets = [packed({f"layer.{i}": torch.full((4096,), value)}) for i in range(3)]
        self._between = between
        self.layout = [plan for plan, _ in self._buckets]

    def buckets(self):
        for i, bucket in enumerate(self._buckets):
            yield bucket
            if i == 0:
                self._between()


def receive(connection):
    """Fetch what is announced, and send its version and sum, or the error."""
    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        incoming = connection.recv()
        try:
            total = sum(float(weight.sum()) for _, weight in incoming.fetch())
            connection.send((incoming.version, total))
        except Exception as error:
            connection.send((incoming.version, type(error).__name__))


class Receivers:
    """Processes, by their numbers, and a transport to them."""

    def __init__(self, n):
        self.transport = Broadcast("gloo", 1.0, SECONDS, SECONDS, "127.0.0.1", None)
        self.processes, self.ends = [], []
        for _ in range(n):
            ours, theirs = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=receive, args=[theirs], daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(ours)
        for end in self.ends:  # the timeout is for a broadcast, and not for imports
            assert end.poll(120)
            assert end.recv() == "ready"

    def send(self, receivers, weights, version):
        """Broadcast a version to these receivers."""
        self.transport.current = weights
        parcels = self.transport.for_all(receivers, version)
        for number, parcel in zip(receivers, parcels, strict=True):
            self.ends[number].send(parcel)

    def answer(self, number):
        """What a receiver made of the last version."""
        assert self.ends[number].poll(60)
        return self.ends[number].recv()

    def close(self):
        self.transport.close()
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def receivers():
    found = Receivers(3)
    yield found
    found.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_receiver_that_is_lost_in_the_middle_costs_the_others_one_version(receivers, caplog, how):
    receivers.send([0, 1, 2], Stored(1.0), 1)
    assert [receivers.answer(i) for i in range(3)] == [(1, 3 * 4096.0)] * 3

    def lose_one():
        os.kill(receivers.processes[1].pid, how)
        time.sleep(0.5)

    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="scalerl"):
        receivers.send([0, 1, 2], Stored(2.0, lose_one), 2)
        others = [receivers.answer(i) for i in (0, 2)]
        until(lambda: "version 2 of the weights was not broadcast" in caplog.text)
    # They have it, or know that they do not: then they fetch it from the object store.
    assert all(answer in ((2, 2 * 3 * 4096.0), (2, "RuntimeError")) for answer in others)
    assert time.monotonic() - began < 3 * SECONDS
    receivers.transport.failed()
    for version in (3, 4):  # by a group of the others, which is kept
        receivers.send([0, 2], Stored(float(version)), version)
        assert [receivers.answer(i) for i in (0, 2)] == [(version, version * 3 * 4096.0)] * 2
    assert Joined._last is not None
    assert Joined._last[0].size == 3
