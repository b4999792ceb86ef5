"""Room for a generator on a cluster: who has it, what it was told, and whether it keeps up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from scalerl.rl.config.cluster import ClusterTimeouts
from scalerl.rl.engine.ordered import Asked, sum_of
from scalerl.rl.types import Counters
from scalerl.rl.workers.ray.actors import SupervisedActor, pause_after

_LISTEN = 2.0  # seconds that an actor waits for something to be said
_ARRIVALS = count()


@dataclass
class RolloutWorker:
    """Room for a generator, and who has it."""

    name: str
    timeouts: ClusterTimeouts
    start: Callable[[], tuple[Any, Any]]
    actor: SupervisedActor | None = None
    arrival: int = -1
    """Which of all that have come this one is."""
    placing: Any = None
    starting: Any = None
    listening: Any = None
    installed: int = -1
    offered: int = -1
    offered_at: float = 0.0
    offer_at: float = math.inf
    """When weights that it did not get are offered again."""
    misses: int = 0
    """Offers in a row that it did not get."""
    taking_part: bool = False
    in_flight: dict[int, Asked] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    buried: Counters = field(default_factory=Counters)
    """What those before had spent."""
    deaths: int = 0
    fill_at: float = 0.0
    placed_at: float = 0.0
    came_at: float = 0.0
    heard_at: float = 0.0
    listening_since: float = 0.0
    moved_at: float = 0.0

    def fill(self) -> None:
        """Ask for an actor; it comes when there is room."""
        handle, self.starting = self.start()
        self.placing = handle.where.remote()
        self.arrival = next(_ARRIVALS)
        self.actor = SupervisedActor(self.name, handle, self.timeouts.heartbeat)

    def placed(self, where: tuple[str, int]) -> None:
        """There was room, and it begins to load its model."""
        assert self.actor is not None
        self.actor.settled(where)
        self.placing, self.placed_at = None, time.monotonic()
        self.came_at = self.placed_at

    def started(self) -> None:
        """It has loaded its model."""
        self.starting = None
        self.listen()

    def listen(self) -> None:
        """Ask for what it has to say."""
        assert self.actor is not None
        self.listening = self.actor.handle.listen.remote(min(_LISTEN, self.timeouts.heartbeat / 4))
        self.listening_since = time.monotonic()

    def spent(self, counters: Counters) -> None:
        """Take note of what it has spent, and whether it gets on."""
        if counters.ticks != self.counters.ticks or not self.in_flight:
            self.moved_at = time.monotonic()
        self.counters, self.heard_at = counters, time.monotonic()

    def has_installed(self, version: int) -> None:
        """Take note of its weights. Where they are not the newest, those have been on their way since now."""
        if version > self.installed:
            self.offered_at = time.monotonic()
        self.installed, self.misses = version, 0

    def excuse(self, seconds: float) -> None:
        """Nobody listened for so long: it is no silence."""
        self.placed_at += seconds
        self.listening_since += seconds
        self.moved_at += seconds
        self.offered_at += seconds

    def calls(self) -> list[Any]:
        """What is waited for."""
        return [ref for ref in (self.placing, self.starting, self.listening) if ref is not None]

    def offer(self, parcel: Any, version: int) -> None:
        """Tell it of weights, once it has started."""
        if self.actor is not None and self.starting is None:
            self.actor.handle.offer.remote(parcel, version)
            if self.offered == self.installed:
                self.offered_at = time.monotonic()
            self.offered, self.offer_at = version, math.inf

    def missed(self) -> None:
        """It did not get its weights: they are offered again after a pause, as the cause may last."""
        self.offer_at = time.monotonic() + pause_after(self.misses, self.timeouts.weights / 8)
        self.misses += 1

    def submit(self, groups: Mapping[int, Asked]) -> None:
        """Give it groups to sample, by seq_no."""
        assert self.actor is not None
        if not self.in_flight:
            self.moved_at = time.monotonic()
        self.in_flight |= groups
        self.actor.handle.submit.remote(list(groups.items()))

    def check(self) -> None:
        """Whether it lives, and keeps up. One that waits for room is let be.

        Raises:
            LostError: it does not.
        """
        assert self.actor is not None
        now, timeouts = time.monotonic(), self.timeouts
        if self.placing is not None:
            return
        if self.starting is not None:
            self.actor.check_life()
            if now - self.placed_at > timeouts.start:
                raise self.actor.lost(f"it has not loaded its model within {timeouts.start:g} s")
            return
        if now - self.listening_since > timeouts.heartbeat:  # what was said before that has been heard
            raise self.actor.lost(f"no heartbeat for {timeouts.heartbeat:g} s (pid {self.actor.pid})")
        if self.in_flight and now - self.moved_at > timeouts.decode:
            raise self.actor.lost(f"it has decoded nothing for {timeouts.decode:g} s")
        if self.installed < self.offered and now - self.offered_at > timeouts.weights:
            version, seconds = self.offered, timeouts.weights
            raise self.actor.lost(f"version {version} of the weights was not installed in {seconds:g} s")

    def vacate(self) -> dict[int, Asked]:
        """End whoever has it, and keep it free for a while; the groups that were in flight."""
        assert self.actor is not None
        self.actor.kill()
        groups, self.in_flight = self.in_flight, {}
        self.buried, self.counters = sum_of([self.buried, self._all_spent()]), Counters()
        self.buried.restarted += len(groups)
        self.actor = self.placing = self.starting = self.listening = None
        self.came_at = 0.0
        self.installed = self.offered = -1
        self.offer_at, self.misses = math.inf, 0
        self.taking_part = False
        self.fill_at = time.monotonic() + pause_after(self.deaths)
        self.deaths += 1
        return groups

    def _all_spent(self) -> Counters:
        """What it has spent, with the time since its last message, in which what it has done is lost."""
        now = time.monotonic()
        if self.counters.held:
            return replace(self.counters, held=self.counters.held + now - self.heard_at)
        return replace(self.counters, startup=now - self.came_at if self.came_at else 0.0)
