"""The clock of a simulation: what happens next, at what time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Events in order of their time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` with `args` at `time`."""
        self._asked += 1
        heapq.heappush(self._events, (time, self._asked, act, args))

    def run(self, done: Callable[[], bool]) -> None:
        """Until nothing is left to happen, or `done` says so."""
        while self._events and not done():
            self.now, _, act, args = heapq.heappop(self._events)
            act(*args)
