"""A server as the fleet keeps it: a process of ours, or only a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from scalerl.rl.vllm.client import Client, Gone
from scalerl.rl.vllm.completions import Flight, Lost
from scalerl.rl.vllm.server import Server


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
    _worked: tuple[float, float | None] = (0.0, None)
    """Seconds with something to do until the last change, and since when it has something to do."""

    @property
    def busy(self) -> float:
        """Seconds with something to do; asked from any thread."""
        seconds, since = self._worked
        return seconds if since is None else seconds + time.perf_counter() - since

    def count_time(self, at_work: bool) -> None:
        """From now on it has something to do, or not."""
        self._worked = self.busy, time.perf_counter() if at_work else None

    def see(self, progress: Mapping[str, int]) -> None:
        """Take note of how many tokens completions have."""
        for name, flight in self.flights.items():
            flight.seen = progress.get(name, flight.seen)

    def losses(self) -> list[Lost]:
        """What is lost with it."""
        return [flight.loss for flight in self.flights.values() if flight.seen]
