"""The loop of a process that does nothing but sample, on one machine or on a cluster.

It takes submissions, installs the newest weights between two decode steps, and decodes. Other threads receive
and send, so that decoding waits for neither.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scalerl.rl.engine.generator import TorchGenerator
from scalerl.rl.engine.saved_rollouts import pack_samples
from scalerl.rl.types import Counters, Weights

CLOSED = object()
"""The last message."""
BEAT = 0.25
"""Seconds between two reports of what has been spent, where nothing else is reported: a heartbeat, and how
far behind the counters of steps.jsonl may be."""
Report = Callable[[tuple[str, Any, Counters]], None]


def decode(
    generator: TorchGenerator,
    inbox: queue.SimpleQueue[Any],
    send: Report,
    newer: Callable[[int], tuple[Weights, int] | None],
    began: float,
) -> None:
    """Decode what is received, (seq_no, prompt, epoch, completions), until `CLOSED` is.

    `newer` returns the newest weights and their version, or None where that is the version it is passed; a
    None in the inbox has it called. Sent are ("installed", version, counters), ("complete", packed groups,
    counters) and ("decoding", None, counters). The process was started at `began` (`time.perf_counter`); it
    counts as starting until it has weights and its first group.
    """
    clock = _DecodingClock(began)
    generator.in_step = False  # a slow environment delays its own completions alone
    # Below every version, so that `newer` returns the first weights, of version 0 too.
    generator.version = -1

    def report(what: str, value: Any = None) -> None:
        send((what, value, clock.add_to(generator.counters)))

    while True:
        if (weights := newer(generator.version)) is not None:
            install = generator.update if generator.version >= 0 else generator.start
            install(*weights)
            report("installed", generator.version)
        # All messages first: completions of a group that start together share the pass over its prompt.
        while not (generator.busy and inbox.empty()):
            try:
                message = inbox.get(timeout=BEAT)
            except queue.Empty:
                report("decoding")
                continue
            if message is CLOSED:
                return
            if generator.version >= 0:
                clock.start()
            if message is None:
                break  # new weights
            seq_no, *group = message
            generator.admit(seq_no, tuple(group))
        if generator.busy:
            generator.work()
        if groups := generator.take_complete():
            report("complete", pack_samples(groups))
        elif clock.due():
            report("decoding")


class _DecodingClock:
    """Seconds of start-up, and those for which the process was held since.

    They are read by the thread that decodes, between two decode steps: at that instant `seconds`, the time
    worked, is complete. Read by another thread or within a step, work would seem to precede its time.
    """

    def __init__(self, process_began: float) -> None:
        self._process_began, self._began = process_began, 0.0
        self._reported = 0.0

    def start(self) -> None:
        """End the start-up: there is something to do."""
        self._began = self._began or time.perf_counter()

    def due(self) -> bool:
        """Return whether nothing was reported for `BEAT` seconds."""
        return time.perf_counter() - self._reported >= BEAT

    def add_to(self, counters: Counters) -> Counters:
        """Return a copy of the counters, with the seconds until now."""
        self._reported = now = time.perf_counter()
        if not self._began:
            return counters
        return replace(counters, held=now - self._began, startup=self._began - self._process_began)
