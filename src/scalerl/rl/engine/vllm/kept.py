"""A server as the server pool keeps it: a process of ours, or only a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scalerl.rl.engine.vllm.client import Client
from scalerl.rl.engine.vllm.completions import Flight, Lost
from scalerl.rl.engine.vllm.server import Server
from scalerl.rl.sync.vllm_http import Gone


@dataclass(frozen=True)
class Times:
    """Seconds of a server until its last change, and since when it is in the state that it is in."""

    worked: float = 0.0
    held: float = 0.0
    startup: float = 0.0
    working_since: float | None = None
    held_since: float | None = None
    starting_since: float | None = None

    def until(self, now: float) -> Times:
        """The same until `now`."""
        return replace(
            self,
            worked=self.worked + (now - self.working_since if self.working_since else 0.0),
            held=self.held + (now - self.held_since if self.held_since else 0.0),
            startup=self.startup + (now - self.starting_since if self.starting_since else 0.0),
            working_since=self.working_since and now,
            held_since=self.held_since and now,
            starting_since=self.starting_since and now,
        )


@dataclass
class Kept:
    """What is known of it."""

    index: int
    client: Client
    process: Server | None
    model: str = ""
    installed: int = -1
    open: bool = False
    away: bool = False
    """It has died, and does not take part again yet."""
    ever: bool = False
    """It has completed something."""
    deaths: int = 0
    lost: Gone | None = None
    flights: dict[str, Flight] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _times: Times = field(default_factory=Times)

    @property
    def times(self) -> Times:
        """Seconds until now, all at one instant; from any thread."""
        while True:
            times = self._times
            now = time.perf_counter()
            if times is self._times:  # it has not changed before `now`
                return times.until(now)

    def count_start(self) -> None:
        """It is being started from now on."""
        now = time.perf_counter()
        self._times = replace(self._times.until(now), starting_since=now)

    def count_time(self, at_work: bool) -> None:
        """From now on it has something to do, or not; its start is over."""
        now = time.perf_counter()
        times = replace(self._times.until(now), starting_since=None, working_since=now if at_work else None)
        self._times = replace(times, held_since=now)

    def count_loss(self) -> None:
        """It is lost: neither it nor its work is there from now on."""
        times = self._times.until(time.perf_counter())
        self._times = replace(times, starting_since=None, working_since=None, held_since=None)

    def see(self, progress: Mapping[str, int]) -> None:
        """Take note of how many tokens completions have."""
        for name, flight in self.flights.items():
            flight.seen = progress.get(name, flight.seen)

    def losses(self) -> list[Lost]:
        """What is lost with it."""
        return [flight.loss for flight in self.flights.values() if flight.seen]
