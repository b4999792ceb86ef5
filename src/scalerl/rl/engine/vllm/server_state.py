"""A vLLM server as the server pool keeps it, its completions in flight, and the events that it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scalerl.errors import ScalerlError
from scalerl.rl.engine.sampling import Request
from scalerl.rl.engine.vllm.completions import Completed
from scalerl.rl.engine.vllm.server import ServerProcess
from scalerl.rl.sync.vllm_client import Client, ServerLostError


@dataclass(frozen=True)
class Installed:
    """A server has installed these weights."""

    server: int
    version: int
    seconds: float


@dataclass(frozen=True)
class LostTokens:
    """A completion is sampled anew; when last seen, it had so many tokens after so many of its prompt."""

    prompt: int
    tokens: int


@dataclass(frozen=True)
class Restarted:
    """A server was lost, and with it the completions of the groups with these sequence numbers."""

    server: int
    seq_nos: set[int]
    why: str


Event = Completed | Installed | LostTokens | Restarted | ScalerlError
"""An event of the pool; after an error there are no more."""


@dataclass
class Flight:
    """A request on its way to a server, or being sampled there."""

    request: Request
    name: str
    marks: list[tuple[int, int]]
    """See `Completed`."""
    seen: int = 0
    """Tokens that it was last seen to have."""
    task: asyncio.Task[None] | None = None

    @property
    def loss(self) -> LostTokens:
        """The tokens that are lost where it is sampled anew."""
        return LostTokens(len(self.request.prompt_T), self.seen)


@dataclass(frozen=True)
class Times:
    """Seconds that a server worked, took part and was starting, until `at`, and which of these go on."""

    worked: float = 0.0
    held: float = 0.0
    startup: float = 0.0
    at: float = 0.0
    working: bool = False
    holding: bool = False
    starting: bool = False

    def until(self, now: float) -> Times:
        """Return the same until `now`."""
        seconds = now - self.at
        return replace(
            self,
            worked=self.worked + seconds * self.working,
            held=self.held + seconds * self.holding,
            startup=self.startup + seconds * self.starting,
            at=now,
        )


@dataclass
class ServerState:
    """A server: started here as a process, or reached by its client alone."""

    index: int
    client: Client
    process: ServerProcess | None
    model: str = ""
    seed: int | None = None
    """Of its sampler; None before it is known."""
    installed: int = -1
    open: bool = False
    """Completions are sent to it."""
    rejoining: bool = False
    """It was lost, and does not take part again yet."""
    proven: bool = False
    """It has completed something."""
    losses: int = 0
    """Times that it was lost since its last completion."""
    lost: ServerLostError | None = None
    flights: dict[str, Flight] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _times: Times = field(default_factory=Times)

    @property
    def times(self) -> Times:
        """Seconds until now, all at one instant; may be read by any thread."""
        while True:
            times = self._times
            now = time.perf_counter()
            if times is self._times:  # it has not changed before `now`
                return times.until(now)

    def count_time(self, *, working: bool = False, holding: bool = False, starting: bool = False) -> None:
        """Count the seconds from now on as these."""
        times = self._times.until(time.perf_counter())
        # One assignment of a new object: a reader in another thread sees the old or the new.
        self._times = replace(times, working=working, holding=holding, starting=starting)

    def count_work(self) -> None:
        """Count the seconds from now on as work where completions are in flight."""
        self.count_time(holding=True, working=bool(self.flights))

    def see(self, progress: Mapping[str, int]) -> None:
        """Record how many tokens completions have, by the names of their flights."""
        for name, flight in self.flights.items():
            # A completion that has ended is not in the progress any more, nor one that has not begun.
            flight.seen = progress.get(name, flight.seen)
