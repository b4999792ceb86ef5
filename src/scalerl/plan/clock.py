"""The clock of a simulation: what happens next, at what time, on cores that are shared.

`at` is for what happens at a time, `work` for what takes so many seconds of a core. With n pieces of work on
c cores each gets min(1, c / n) seconds of a core in a second (processor sharing), so that all of them end in
the order of what `worked` will be then: the seconds of a core that each piece of work has been given so far,
had it been there from the start. While all cores are busy each may be slower than one that works alone.
Without a number of cores everybody has one, and `worked` is the time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

_Act = Callable[..., None]


class Clock:
    """Events in order of their time; those of one time in the order in which they were asked for."""

    def __init__(self, cores: float = math.inf, together: float = 1.0) -> None:
        """`together` is the speed of a core while all work, as a share of that of one alone."""
        self.now = self.worked_by_all = 0.0
        self._cores, self._together, self._worked = cores, together, 0.0
        self._events: list[tuple[float, int, _Act, tuple[Any, ...]]] = []
        self._work: list[tuple[float, int, _Act, tuple[Any, ...]]] = []
        self._at_work: set[int] = set()
        self._asked = 0

    @property
    def worked(self) -> float:
        """Seconds of a core, see above."""
        return self._worked if self._shared else self.now

    @property
    def _shared(self) -> bool:
        return self._cores < math.inf

    def at(self, time: float, act: _Act, *args: Any) -> None:
        """Call `act` with `args` at `time`."""
        self._asked += 1
        heapq.heappush(self._events, (time, self._asked, act, args))

    def work(self, seconds: float, act: _Act, *args: Any) -> int:
        """Call it when so many seconds of a core have been worked; returns what `cancel` takes."""
        if not self._shared:
            self.at(self.now + seconds, act, *args)
            return 0
        self.within(seconds, act, *args)
        self._at_work.add(self._asked)
        return self._asked

    def within(self, seconds: float, act: _Act, *args: Any) -> None:
        """The same for a part of some work that is under way."""
        if not self._shared:
            self.at(self.now + seconds, act, *args)
            return
        self._asked += 1
        heapq.heappush(self._work, (self._worked + seconds, self._asked, act, args))

    def cancel(self, work: int) -> None:
        """It is not gone on with. What was to be called then is called, as its caller knows better."""
        self._at_work.discard(work)

    def run(self, done: Callable[[], bool]) -> None:
        """Until nothing is left to happen, or `done` says so."""
        while (self._events or self._work) and not done():
            if self._work and self._next_of_work():
                continue
            self.now, _, act, args = heapq.heappop(self._events)
            act(*args)

    def _next_of_work(self) -> bool:
        """The next piece of work ends, unless something else comes first."""
        share = self._speed()
        ends, number, act, args = self._work[0]
        at = self.now + max(ends - self._worked, 0.0) / share
        if self._events and self._events[0][0] <= at:
            # Until then all get on.
            self._get_on((self._events[0][0] - self.now) * share)
            return False
        heapq.heappop(self._work)
        self._get_on(max(ends - self._worked, 0.0))
        self.now = at
        self._at_work.discard(number)
        act(*args)
        return True

    def _speed(self) -> float:
        """Of every piece of work."""
        n = len(self._at_work)
        if n <= 1:
            return 1.0
        busy = min(n, self._cores)
        slower = (1 - self._together) * (busy - 1) / (self._cores - 1) if self._cores > 1 else 0.0
        return busy / n * (1 - slower)

    def _get_on(self, seconds: float) -> None:
        self._worked += seconds
        self.worked_by_all += seconds * len(self._at_work)
