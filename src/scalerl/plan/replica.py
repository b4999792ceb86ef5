"""One generator with its rows: continuous batching, as `scalerl.rl.engine.generator` does it.

    waiting (in order of admission) -> rows -> done -> told to the driver (in order of admission)

Decode steps are not simulated one by one: between two events that matter (a completion ends, weights or
groups come) all rows go on alike, so that a stretch of steps is one event. Rows are refilled, weights are
installed and groups handed over between two steps only.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from scalerl.plan.clock import Clock
from scalerl.plan.rates import Rates


class SimulatedGroup:
    """The completions of one prompt, from their admission to the step that trains them."""

    __slots__ = ("left", "lengths", "place", "read", "started", "tokens")

    def __init__(self, place: int, lengths: list[int]) -> None:
        self.place, self.lengths = place, lengths
        self.started = 0
        self.left = len(lengths)
        self.read = False
        self.tokens: dict[int, int] = {}
        """Sampled tokens by the version of the weights."""


class Replica:
    """A generator. `tell` hears of what is done: groups that are complete, and the version installed."""

    __slots__ = (
        "_began",
        "_clock",
        "_debt",
        "_decoded",
        "_done",
        "_from",
        "_idle",
        "_offered",
        "_order",
        "_positions",
        "_prefill",
        "_rates",
        "_row_seconds",
        "_rows",
        "_running",
        "_stamp",
        "_started",
        "_step",
        "_steps",
        "_under_way",
        "_versions",
        "_waiting",
        "_worker",
        "busy",
        "index",
        "tell",
    )

    def __init__(
        self,
        index: int,
        rows: int,
        rates: Rates,
        clock: Clock,
        tell: Callable[[Replica, list[SimulatedGroup], int], None],
    ) -> None:
        self.index, self.tell = index, tell
        self._rows, self._rates, self._clock, self._worker = rows, rates, clock, clock.worker()
        self.busy = 0.0
        """Seconds in which it decoded, read prompts, or installed weights; stretches that have ended."""
        self._decoded = self._row_seconds = 0.0
        self._waiting = deque[SimulatedGroup]()
        self._order = deque[SimulatedGroup]()
        self._running: list[
            tuple[int, int, int, SimulatedGroup]
        ] = []  # last step, place in the heap, first step, group
        self._started = 0
        self._step = self._steps = self._positions = 0
        self._versions = [(0, 0)]  # from which step on, which version
        self._offered = 0
        self._idle, self._debt, self._stamp, self._under_way = True, 0.0, 0, 0
        # Of the stretch under way: when it began, and in seconds of a core when its first prompt is read.
        self._began = self._from = self._prefill = 0.0
        self._done: list[SimulatedGroup] = []  # to be told of

    def submit(self, group: SimulatedGroup) -> None:
        """Take a group; it starts as soon as there are rows."""
        self._waiting.append(group)
        self._order.append(group)
        if self._idle or len(self._running) < self._rows:
            self._interrupt()

    def offer(self, version: int) -> None:
        """New weights are here."""
        self._offered = version
        self._interrupt()

    def hold(self, seconds: float) -> None:
        """Do something else for so long, from the next step on."""
        self._debt += seconds
        self._interrupt()

    def spent(self, now: float) -> tuple[float, float]:
        """Seconds in which it was busy so far, and those summed over its rows in use."""
        under_way = 0.0 if self._idle else now - self._began
        return self.busy + under_way, self._row_seconds + under_way * len(self._running)

    @property
    def seconds_per_step(self) -> float:
        """Of decoding, prompts included, over the stretches that have ended; 0 where there was none."""
        return self._decoded / self._step if self._step else 0.0

    def _interrupt(self) -> None:
        """Let the step under way be the last one before the next look around."""
        n = len(self._running)
        if self._idle:
            self._stamp += 1
            self._idle, self._began = False, self._clock.now
            # The rest of what comes at this moment is taken with it.
            self._clock.at(self._clock.now, self._begin, self._stamp)
            return
        if not n:
            return  # it is about to begin
        into = self._worker.worked - self._from - self._prefill
        steps = self._rates.decode.steps_in(max(into, 0.0), n, self._positions)
        steps = max(math.ceil(steps - 1e-9), 1)
        if steps < self._steps:
            self._go_on(steps)

    def _begin(self, stamp: int) -> None:
        """Look around at the end of a stretch: send what is done, install weights, fill rows, go on."""
        if stamp != self._stamp:
            return
        before, self._debt = self._debt, 0.0
        if self._done:
            handling = self._rates.decode.group * len(self._done)
            self.busy -= handling  # it is no part of what a run counts as generating
            before += handling
            self._worker.work(before, self.tell, self, self._done, -1)
            self._done = []
        if self._offered > self._versions[-1][1]:
            before += self._rates.weights.install
            self._versions.append((self._step, self._offered))
            self._worker.work(before, self.tell, self, [], self._offered)
        self._began, self._from = self._clock.now, self._worker.worked + before
        self._prefill = self._rates.prefill.token * self._rates.lengths.prompt * self._refill()
        if self._running:
            self._go_on(self._running[0][0] - self._step)
        elif before:
            self._go_on(0)
        else:
            self._idle = True

    def _refill(self) -> int:
        """Start what waits in free rows; how many prompts must be read for it."""
        read, prompt, once = 0, self._rates.lengths.prompt, self._rates.prefill.once
        while self._waiting and len(self._running) < self._rows:
            group = self._waiting[0]
            free = self._rows - len(self._running)
            some = group.lengths[group.started : group.started + free]
            for length in some:
                self._started += 1
                heapq.heappush(self._running, (self._step + length, self._started, self._step, group))
            self._positions += prompt * len(some)
            read += not (once and group.read)
            group.read = True
            group.started += len(some)
            if group.started == len(group.lengths):
                self._waiting.popleft()
        return read

    def _go_on(self, steps: int) -> None:
        """Until so many steps have been made."""
        self._worker.cancel(self._under_way)
        self._steps = steps
        self._stamp += 1
        lasts = self._prefill + self._rates.decode.seconds(steps, len(self._running), self._positions)
        left = max(self._from + lasts - self._worker.worked, 0.0)
        self._under_way = self._worker.work(left, self._end, self._stamp)

    def _end(self, stamp: int) -> None:
        if stamp != self._stamp:
            return
        n, running = len(self._running), self._running
        took = self._clock.now - self._began
        self.busy += took
        self._row_seconds += took * n
        self._decoded += self._worker.worked - self._from if n else 0.0
        self._step += self._steps
        self._positions += n * self._steps
        while running and running[0][0] == self._step:
            last, _, first, group = heapq.heappop(running)
            self._positions -= self._rates.lengths.prompt + last - first
            self._finish(first, last, group)
        while self._order and not self._order[0].left:
            self._done.append(self._order.popleft())
        self._begin(stamp)

    def _finish(self, first: int, last: int, group: SimulatedGroup) -> None:
        """Count the tokens of a completion by their version."""
        group.left -= 1
        for since, version in reversed(self._versions):
            if since < last:
                group.tokens[version] = group.tokens.get(version, 0) + last - max(since, first)
                last = since
            if since <= first:
                return
