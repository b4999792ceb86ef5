"""One simulated generator: continuous batching, as in `scalerl.rl.engine.generator`.

    waiting (in order of admission) -> decode slots -> done

All slots advance by one token per decode step, so `steps` counts decode steps as a real number, and the next
event is known: the slot that empties first. Until then the number of slots in use is constant, and with it
the seconds per step.
"""

import heapq
import math
from collections import deque


class SimulatedGroup:
    """The completions of one prompt, from their admission to the step that trains them."""

    __slots__ = ("left", "lengths", "tokens")

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.left = len(lengths)
        """Number of unfinished completions."""
        self.tokens: dict[int, float] = {}
        """Sampled tokens, by version of the weights."""


class SimulatedGenerator:
    """Decode slots of one generator; times are those of the simulation, in seconds."""

    def __init__(self, slots: int, base: float, slot: float, prompt: float) -> None:
        """A decode step takes `base` + `slot` per slot in use; a prefill takes `prompt` seconds."""
        self._slots, self._base, self._slot, self._prompt = slots, base, slot, prompt
        self.busy = self.slot_seconds = 0.0
        """Seconds spent decoding, in prefills or updating weights; and these times the slots in use."""
        self.stamp = 0
        """Number of the next event: events with other numbers are out of date."""
        self.ends = math.inf
        """Time at which the next completion ends; infinite if none is in progress."""
        self._now = self._held_until = self._steps = 0.0
        self._waiting = deque[tuple[int, SimulatedGroup, bool]]()  # tokens, group, the first of its group
        self._running: list[tuple[float, int, float, SimulatedGroup]] = []  # end, number, start, group
        self._started = 0
        self._versions = [(0.0, 0)]  # (first step, version)

    def submit(self, group: SimulatedGroup) -> None:
        """Queue the completions of a group; `go_on` starts them."""
        for i, length in enumerate(group.lengths):
            self._waiting.append((length, group, i == 0))

    def update(self, now: float, version: int, seconds: float) -> float:
        """Spend `seconds` on a weight update, then sample with `version`; return the time of the switch."""
        self.pause(now, seconds)
        self._versions.append((self._steps, version))
        return self._held_until

    def pause(self, now: float, seconds: float) -> None:
        """Stop decoding for `seconds`."""
        self._pass(now)
        self._hold(seconds)

    def go_on(self, now: float) -> list[SimulatedGroup]:
        """Decode until `now` and refill the slots; return the groups completed meanwhile."""
        self._pass(now)
        done, running = [], self._running
        if now >= self.ends:  # despite rounding errors in the steps, or the event would repeat for ever
            self._steps = max(self._steps, running[0][0])
        while running and running[0][0] <= self._steps:
            end, _, start, group = heapq.heappop(running)
            self._count(start, end, group)
            group.left -= 1
            if not group.left:
                done.append(group)
        while self._waiting and len(running) < self._slots:
            length, group, first = self._waiting.popleft()
            self._started += 1
            heapq.heappush(running, (self._steps + length, self._started, self._steps, group))
            if first:
                self._hold(self._prompt)
        self.ends = math.inf
        if running:
            self.ends = max(now, self._held_until) + (running[0][0] - self._steps) * self._seconds
        return done

    @property
    def _seconds(self) -> float:
        """Seconds of a decode step."""
        return self._base + self._slot * len(self._running)

    def _hold(self, seconds: float) -> None:
        self._held_until = max(self._held_until, self._now) + seconds

    def _pass(self, now: float) -> None:
        """Decode until `now`."""
        n, passed = len(self._running), now - self._now
        if n:
            self._steps += max(now - max(self._now, self._held_until), 0.0) / self._seconds
            self.busy += passed
            self.slot_seconds += passed * n
        else:
            self.busy += max(min(now, self._held_until) - self._now, 0.0)
        self._now = now

    def _count(self, start: float, end: float, group: SimulatedGroup) -> None:
        """Count the tokens of a completion by version."""
        for since, version in reversed(self._versions):
            if since < end:
                group.tokens[version] = group.tokens.get(version, 0.0) + end - max(since, start)
                end = since
            if since <= start:
                return
