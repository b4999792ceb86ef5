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

    def __init__(self, cores: float = math.inf, together: float = 1.0, others: float = 0.0) -> None:
        """`together` is the speed of a core while all work, as a share of that of one alone; `others` are
        pieces of work that never end."""
        self.now = self.held = self.held_by_others = 0.0
        """The time, and the seconds of all cores that `work` and the others have held."""
        self._cores, self._together, self._others, self._worked = cores, together, others, 0.0
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
            time, _, act, args = heapq.heappop(self._events)
            if self._shared:
                self._go_to(time)
            self.now = time
            act(*args)

    def _next_of_work(self) -> bool:
        """The next piece of work ends, unless something else comes first."""
        ends, number, act, args = self._work[0]
        share, speed = self._share_and_speed()
        at = self.now + max(ends - self._worked, 0.0) / (share * speed)
        if self._events and self._events[0][0] <= at:
            return False
        heapq.heappop(self._work)
        self._go_to(at)
        self._worked = max(ends, self._worked)
        self._at_work.discard(number)
        act(*args)
        return True

    def _go_to(self, time: float) -> None:
        """All get on until then."""
        share, speed = self._share_and_speed()
        seconds = (time - self.now) * share
        self._worked += seconds * speed
        self.held += seconds * len(self._at_work)
        self.held_by_others += seconds * self._others
        self.now = time

    def _share_and_speed(self) -> tuple[float, float]:
        """What every piece of work has of a core, and how fast that is."""
        n = len(self._at_work) + self._others
        if n <= 1:
            return 1.0, 1.0
        busy = min(n, self._cores)
        slower = (1 - self._together) * (busy - 1) / (self._cores - 1) if self._cores > 1 else 0.0
        return busy / n, 1 - slower
