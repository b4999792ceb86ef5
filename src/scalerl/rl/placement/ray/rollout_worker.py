"""A rollout worker on a cluster: what it was sent, and whether it keeps up."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from scalerl.rl.engine.ordered import Asked
from scalerl.rl.placement.rollouts import Assigned
from scalerl.rl.types import Counters
from scalerl.rl.workers.ray.actors import SupervisedActor
from scalerl.rl.workers.ray.pool import ActorWorker
from scalerl.rl.workers.supervision import backoff

_RECEIVE = 2.0  # seconds that an actor waits for a message to return
_ARRIVALS = count()


@dataclass(eq=False)
class RolloutWorker(Assigned, ActorWorker):
    """A place for a rollout worker, and the actor that has it."""

    arrival: int = -1
    """The actor's number among all that were requested: a process group is of these, not of the places."""
    offered: int = -1
    offered_at: float = 0.0
    offer_at: float = math.inf
    """When weights that it did not get are offered again."""
    misses: int = 0
    """Offers in a row that it did not get."""
    progressed_at: float = 0.0

    def request(self) -> SupervisedActor:
        """See `ActorWorker.request`."""
        self.arrival = next(_ARRIVALS)
        return super().request()

    def placed(self, where: tuple[str, int]) -> None:
        """See `ActorWorker.placed`."""
        super().placed(where)
        self.launched_at = self.placed_at

    def receive(self) -> None:
        """Request its next messages; without any it answers after `_RECEIVE` seconds, as a heartbeat."""
        assert self.actor is not None
        self.call = self.actor.handle.receive.remote(min(_RECEIVE, self.timeouts.heartbeat / 4))
        self.called_at = time.monotonic()

    def reported(self, counters: Counters) -> None:
        """Note what it has spent, and whether it makes progress."""
        if counters.ticks != self.counters.ticks or not self.in_flight:
            self.progressed_at = time.monotonic()
        super().reported(counters)

    def has_installed(self, version: int) -> None:
        """Note the version of its weights; newer ones have been on their way since now."""
        if version > self.installed:
            self.offered_at = time.monotonic()
        self.installed, self.misses = version, 0

    def excuse(self, seconds: float) -> None:
        """See `ActorWorker.excuse`."""
        super().excuse(seconds)
        self.progressed_at += seconds
        self.offered_at += seconds

    def offer(self, parcel: Any, version: int) -> None:
        """Send weights, once it has started."""
        if self.actor is not None and self.starting is None:
            self.actor.handle.offer.remote(parcel, version)
            if self.offered == self.installed:
                self.offered_at = time.monotonic()
            self.offered, self.offer_at = version, math.inf

    def missed(self) -> None:
        """Note that it did not get its weights. They are offered again after a pause: the cause may last."""
        self.offer_at = time.monotonic() + backoff(self.misses, self.timeouts.weights / 8)
        self.misses += 1

    def submit(self, groups: Mapping[int, Asked]) -> None:
        """Send it groups to sample, by sequence number."""
        assert self.actor is not None
        if not self.in_flight:
            self.progressed_at = time.monotonic()
        self.in_flight |= groups
        self.actor.handle.submit.remote(list(groups.items()))

    def check_work(self, actor: SupervisedActor) -> None:
        """See `ActorWorker.check_work`."""
        now, timeouts = time.monotonic(), self.timeouts
        if now - self.called_at > timeouts.heartbeat:  # `receive` is its heartbeat
            raise actor.lost(f"no heartbeat for {timeouts.heartbeat:g} s (pid {actor.pid})")
        if self.in_flight and now - self.progressed_at > timeouts.decode:
            raise actor.lost(f"it has decoded nothing for {timeouts.decode:g} s")
        if self.installed < self.offered and now - self.offered_at > timeouts.weights:
            version, seconds = self.offered, timeouts.weights
            raise actor.lost(f"version {version} of the weights was not installed in {seconds:g} s")

    def release(self) -> None:
        """See `ActorWorker.release`."""
        super().release()
        self.offered, self.offer_at, self.misses = -1, math.inf, 0
