"""The loop of a process that does nothing but sample, whoever it is told by.

It takes submissions, installs the newest weights between two decode steps, and decodes; threads of others
receive and send, so that decoding waits for nobody.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scalerl.rl.generator import TorchGenerator
from scalerl.rl.saved_rollouts import pack_rollouts
from scalerl.rl.types import Counters, Weights

CLOSED = object()
"""What is heard at the end."""
Say = Callable[[tuple[str, Any, Counters]], None]


def decode(
    generator: TorchGenerator,
    heard: queue.SimpleQueue[Any],
    say: Say,
    newer: Callable[[int], tuple[Weights, int] | None],
) -> None:
    """Decode what is heard, (place, prompt, draw, completions), until `CLOSED` is.

    `newer` gives the newest weights and their version where that is not the version it is told, and None is
    heard when it is to be asked. What is said is ("installed", version, counters) and
    ("complete", (places, sizes, packed rollouts), counters).
    """
    places, clock = deque[int](), _CpuClock()
    generator.version = -1
    while True:
        if (weights := newer(generator.version)) is not None:
            generator.update(*weights)
            say(("installed", generator.version, clock.add_to(generator.counters)))
        clock.other()
        while not (generator.busy and heard.empty()):
            message = heard.get()
            if message is CLOSED:
                return
            if message is None:
                break  # new weights
            place, *group = message
            places.append(place)
            generator.submit(*group)
        clock.messages()
        if generator.busy:
            generator.work()
        clock.other()
        if groups := generator.take(generator.ready):
            packed = pack_rollouts([rollout for rollouts in groups for rollout in rollouts])
            value = [places.popleft() for _ in groups], [len(rollouts) for rollouts in groups], packed
            say(("complete", value, clock.add_to(generator.counters)))
        clock.messages()


class _CpuClock:
    """CPU seconds of this process, and those of them that went to messages: what its other threads do is
    nothing else."""

    def __init__(self) -> None:
        self._process, self._thread = time.process_time(), time.thread_time()
        self._at, self._messages = self._thread, 0.0

    def messages(self) -> None:
        """Since the last call of either, this thread has handled messages."""
        before, self._at = self._at, time.thread_time()
        self._messages += self._at - before

    def other(self) -> None:
        """It has done something else."""
        self._at = time.thread_time()

    def add_to(self, counters: Counters) -> Counters:
        """A copy of them, with what has been spent."""
        cpu = time.process_time() - self._process
        aside = cpu - (time.thread_time() - self._thread)
        return replace(counters, cpu=cpu, messages_cpu=self._messages + aside)
