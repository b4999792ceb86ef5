"""The clock of a simulation: what happens next, at what time, on cores that are shared.

`Clock.at` is for what happens at a time, `Worker.work` for what takes a process so many seconds of a core.
Without a number of cores every worker has one of its own. With one they are given out as Linux does:

- a worker that begins goes back to its last core, unless another has fewer on it;
- those on a core share it evenly, and stay; a core that becomes idle takes one of those that share.

So a trainer that always works keeps a core, while generators that begin and end share the others. While all
cores are busy each may be slower than one that works alone.
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
        pieces of work that never end, an even part of them on each core."""
        self.now = self.held = self.held_by_others = 0.0
        """The time, and the seconds of all cores that workers and the others have held."""
        self.shared = cores < math.inf
        self._cores: list[list[SimulatedWorker]] = [[] for _ in range(int(cores))] if self.shared else []
        self._together, self._others = together, others / cores
        self._events: list[tuple[float, int, _Act, tuple[Any, ...]]] = []
        self._arriving: list[SimulatedWorker] = []
        self._asked = 0

    def worker(self) -> SimulatedWorker:
        """A process, which has nothing to do yet."""
        return SimulatedWorker(self)

    def at(self, time: float, act: _Act, *args: Any) -> None:
        """Call `act` with `args` at `time`."""
        heapq.heappush(self._events, (time, self.number(), act, args))

    def number(self) -> int:
        """Of what is asked for, in this order."""
        self._asked += 1
        return self._asked

    def begins(self, worker: SimulatedWorker) -> None:
        """It has something to do, and needs a core."""
        self._arriving.append(worker)

    def run(self, done: Callable[[], bool]) -> None:
        """Until nothing is left to happen, or `done` says so."""
        while not done():
            at, worker = self._next_of_work()
            if worker is not None and not (self._events and self._events[0][0] <= at):
                self._go_to(at)
                act, args = worker.next()
            elif self._events:
                time, _, act, args = heapq.heappop(self._events)
                self._go_to(time)
            else:
                return
            act(*args)

    def _next_of_work(self) -> tuple[float, SimulatedWorker | None]:
        """When the next piece of work ends, or a part of it, and whose that is."""
        self._give_out()
        speed = self._speed()
        found: tuple[float, SimulatedWorker | None] = math.inf, None
        for core in self._cores:
            for worker in core:
                at = self.now + max(worker.ends - worker.worked, 0.0) / (self._share(core) * speed)
                if at < found[0]:
                    found = at, worker
        return found

    def _go_to(self, time: float) -> None:
        """All get on until then."""
        speed = self._speed()
        for core in self._cores:
            seconds = (time - self.now) * self._share(core)
            for worker in core:
                worker.get_on(seconds * speed)
            self.held += seconds * len(core)
            self.held_by_others += seconds * self._others
        self.now = time

    def _share(self, core: list[SimulatedWorker]) -> float:
        """What each on a core has of it."""
        return 1 / max(len(core) + self._others, 1.0)

    def _speed(self) -> float:
        """Of every core, as a share of that of one that works alone."""
        if len(self._cores) < 2 or self._together == 1:
            return 1.0
        busy = sum(min(len(core) + self._others, 1.0) for core in self._cores)
        return 1 - (1 - self._together) * max(busy - 1, 0.0) / (len(self._cores) - 1)

    def _give_out(self) -> None:
        """Who has nothing to do leaves its core, who begins gets one, and idle ones take from the others."""
        for core in self._cores:
            core[:] = [worker for worker in core if worker.busy]
        for worker in self._arriving:
            if worker.busy and not any(worker in core for core in self._cores):
                core = self._core_for(worker)
                worker.last = core
                self._cores[core].append(worker)
        self._arriving = []
        for number, core in enumerate(self._cores):
            fullest = max(self._cores, key=len)
            if not core and len(fullest) > 1:
                worker = fullest.pop()
                worker.last = number
                core.append(worker)

    def _core_for(self, worker: SimulatedWorker) -> int:
        loads = [len(core) for core in self._cores]
        last = worker.last
        least = min(loads)
        return last if last is not None and loads[last] == least else loads.index(least)


class SimulatedWorker:
    """A process. What it is asked to do meanwhile is a part of what it does."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._worked = clock, 0.0
        self._calls: list[tuple[float, int, _Act, tuple[Any, ...]]] = []
        self._under_way: set[int] = set()
        self.last: int | None = None
        """The core that it is on, or was on."""

    @property
    def worked(self) -> float:
        """Seconds of a core that it has had so far; where every worker has a core, the time."""
        return self._worked if self._clock.shared else self._clock.now

    @property
    def busy(self) -> bool:
        """Whether it has something to do."""
        return bool(self._under_way)

    @property
    def ends(self) -> float:
        """What `worked` is when it next has something to call."""
        return self._calls[0][0]

    def work(self, seconds: float, act: _Act, *args: Any) -> int:
        """Call `act` when it has worked for so many seconds from now; returns what `cancel` takes."""
        if not self._clock.shared:
            self._clock.at(self._clock.now + seconds, act, *args)
            return 0
        if not self._under_way:
            self._clock.begins(self)
        number = self._clock.number()
        self._under_way.add(number)
        heapq.heappush(self._calls, (self._worked + seconds, number, act, args))
        return number

    def cancel(self, work: int) -> None:
        """It is not gone on with. What was to be called may still be called, as its caller knows better."""
        self._under_way.discard(work)

    def get_on(self, seconds: float) -> None:
        """It has had so much of a core."""
        self._worked += seconds

    def next(self) -> tuple[_Act, tuple[Any, ...]]:
        """What it is to call now."""
        ends, number, act, args = heapq.heappop(self._calls)
        self._worked = max(self._worked, ends)
        self._under_way.discard(number)
        return act, args
