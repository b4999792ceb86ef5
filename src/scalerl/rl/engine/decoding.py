"""The loop of a process that does nothing but sample, whoever starts it.

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

from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.saved_rollouts import pack_rollouts
from scalerl.rl.types import Counters, Weights

CLOSED = object()
"""The last message."""
BEAT = 0.25
"""Seconds between two reports of what has been spent, where nothing else is reported: a heartbeat, and how
far behind the counters of steps.jsonl may be."""
Say = Callable[[tuple[str, Any, Counters]], None]


def decode(
    generator: TorchGenerator,
    heard: queue.SimpleQueue[Any],
    say: Say,
    newer: Callable[[int], tuple[Weights, int] | None],
    began: float,
) -> None:
    """Decode what is received, (seq_no, prompt, epoch, completions), until `CLOSED` is.

    `newer` gives the newest weights and their version where that is not the version it is given, and None is
    received when it is to be called. What is sent is ("installed", version, counters), ("complete", (seq_nos,
    sizes, packed rollouts), counters) and ("decoding", None, counters). The process was started at `began`
    (`time.perf_counter`); it is starting until it has weights and is given something to do.
    """
    seq_nos, clock = deque[int](), _DecodingClock(began)
    generator.version = -1

    def report(what: str, value: Any = None) -> None:
        say((what, value, clock.add_to(generator.counters)))

    while True:
        if (weights := newer(generator.version)) is not None:
            install = generator.update if generator.version >= 0 else generator.start
            install(*weights)
            report("installed", generator.version)
        while not (generator.busy and heard.empty()):
            try:
                message = heard.get(timeout=BEAT)
            except queue.Empty:
                report("decoding")
                continue
            if message is CLOSED:
                return
            if generator.version >= 0:
                clock.begin()
            if message is None:
                break  # new weights
            seq_no, *group = message
            seq_nos.append(seq_no)
            generator.submit(*group)
        if generator.busy:
            generator.work()
        if groups := generator.take(generator.ready):
            packed = pack_rollouts([rollout for rollouts in groups for rollout in rollouts])
            value = [seq_nos.popleft() for _ in groups], [len(rollouts) for rollouts in groups], packed
            report("complete", value)
        elif clock.due():
            report("decoding")


class _DecodingClock:
    """Seconds of start-up, and those for which the process was held since.

    Read by the thread that decodes, between two decode steps: at that instant it is known how many of them it
    has worked. By another clock, or within a step, work would seem to be done before its time had passed.
    """

    def __init__(self, process_began: float) -> None:
        self._process_began, self._began = process_began, 0.0
        self._reported = 0.0

    def begin(self) -> None:
        """It is given something to do: start-up is over."""
        self._began = self._began or time.perf_counter()

    def due(self) -> bool:
        """Whether nothing was reported for `BEAT` seconds."""
        return time.perf_counter() - self._reported >= BEAT

    def add_to(self, counters: Counters) -> Counters:
        """A copy of them, with the seconds until now."""
        self._reported = now = time.perf_counter()
        if not self._began:
            return counters
        return replace(counters, held=now - self._began, startup=self._began - self._process_began)
