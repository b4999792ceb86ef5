"""The placement on a cluster: rollout workers in Ray actors, as many as there is room for at the time.

              submit                                    groups as they are complete, versions installed
    driver -------------> GeneratorActor  0 .. n-1  -----------------------------------------------> driver
              weights, by a transport

    submit     goes to the worker with the fewest groups in flight; to none that has no weights yet
    work       waits for a message of any worker, and not for ever
    update     gives the weights to the transport; waits for nothing. `installed` is the version that all
               workers that take part have installed

A lost worker (its process or node died, it gave no heartbeat, it did not get its weights in time) leaves: its
groups in flight keep their sequence numbers and are sampled again by others. Another actor is requested in
its place, with back-off. It is first sent the latest weights, and takes part once it has installed a version
as new as the one by which groups have been admitted. So no token is older than the schedule allows, whichever
workers come and go.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from scalerl.errors import ScalerlError, WorkerError, counted
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.ordered import OrderedGroups
from scalerl.rl.engine.sampling import GroupRequest
from scalerl.rl.placement.ray.generator_actor import THREADS, GeneratorActor, Message
from scalerl.rl.placement.rollouts import Assigned, AssignedGroups
from scalerl.rl.sync.transport import ObjectStore
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.ray.actors import SupervisedActor, actors_of
from scalerl.rl.workers.ray.pool import ActorPool, ActorWorker
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import backoff

_LOG = logging.getLogger("scalerl")
_WORK = 1.0  # seconds that the driver waits for a message
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

    def submit(self, groups: Mapping[int, GroupRequest]) -> None:
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


class RayGenerator(ActorPool[RolloutWorker], AssignedGroups[RolloutWorker]):
    """Generators on a cluster, `recipe.decode_slots` each; see `scalerl.rl.types.Generator`.

    Raises:
        InputError: there is no room on the cluster, or a generator cannot load the model.
        WorkerError: a generator does not start; or all are lost, and none comes in their place.
    """

    noun, role = "generator", "generate"

    def __init__(
        self,
        recipe: Recipe,
        model_folder: str,
        weights: Weights,
        session: Session,
        transport: ObjectStore,
        version: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        OrderedGroups.__init__(self, version)
        cluster = recipe.on_cluster
        ActorPool.__init__(self, cluster.timeouts, timeline or Timeline())
        self._transport = transport
        request = actors_of(GeneratorActor, THREADS, cluster.generator, session.room["generators"])
        self._unassigned: dict[int, GroupRequest] = {}
        """Groups in flight of no worker, by sequence number."""
        self._floor = 0
        """The version by which groups have been admitted."""

        def start(i: int) -> tuple[Any, Any]:
            handle = request(i)
            return handle, handle.start.remote(recipe.without_prompts(), model_folder)

        self._workers = [
            RolloutWorker(f"generator {i}", self._timeouts, lambda i=i: start(i))
            for i in range(cluster.generators)
        ]
        self._transport.publish(weights, version)
        self._start()
        try:
            self._wait_for_weights()
        except ScalerlError:
            self.close()
            raise

    def _wait_for_weights(self) -> None:
        ends = time.monotonic() + self._timeouts.start
        while self.installed < self.version or self.alive < len(self._workers):
            self._poll(_WORK)
            self._none_since = math.inf  # that none takes part yet is no loss
            if time.monotonic() > ends or self.lost:
                what = self.lost[-1] if self.lost else "the weights have not come"
                raise WorkerError(f"the generators do not start: {what}")

    # -- the interface -------------------------------------------------------------------------------------

    def work(self) -> None:
        """Wait until a worker sends a message, but not for long; and receive it."""
        self._poll(_WORK)

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight go on with them and their old KV cache."""
        self._poll(0)
        self._transport.publish(weights, version)
        self.version = version
        workers = [worker for worker in self._workers if worker.taking_part]
        parcels = self._transport.for_all([worker.arrival for worker in workers], version)
        for worker, parcel in zip(workers, parcels, strict=True):
            worker.offer(parcel, version)
        for worker in self._workers:
            if not worker.taking_part:
                self._offer_to(worker)
        self._poll(0)

    def wait_until_started(self) -> None:
        """Return: the constructor has waited."""

    @property
    def installed(self) -> int:
        """The version that every worker which takes part has installed."""
        self._poll(0)
        # Without a worker it is the latest: one that comes installs that before it takes part.
        least = min((w.installed for w in self._workers if w.taking_part), default=self.version)
        self._floor = max(self._floor, least)
        return self._floor

    def _assign(self, seq_no: int, group: GroupRequest) -> None:
        workers = [worker for worker in self._workers if worker.taking_part]
        if not workers:
            self._unassigned[seq_no] = group
            return
        min(workers, key=lambda worker: len(worker.in_flight)).submit({seq_no: group})

    def close(self) -> None:
        """Kill the actors; what is in flight is lost."""
        super().close()
        self._transport.close()

    # -- the pool ------------------------------------------------------------------------------------------

    def _poll(self, timeout: float) -> None:
        super()._poll(timeout)
        for worker in self._workers:
            if time.monotonic() >= worker.offer_at:
                self._offer_to(worker)
        # In order of admission: training waits for the oldest group.
        if self._unassigned and self.alive:
            unassigned, self._unassigned = sorted(self._unassigned.items()), {}
            for seq_no, group in unassigned:
                self._assign(seq_no, group)

    def _offer_to(self, worker: RolloutWorker) -> None:
        worker.offer(self._transport.for_one(), self.version)

    def _started(self, worker: RolloutWorker) -> None:
        worker.receive()
        self._offer_to(worker)

    def _received(self, worker: RolloutWorker, value: list[Message]) -> None:
        for message in value:
            self._take_note(worker, message)
        worker.receive()

    def _take_note(self, worker: RolloutWorker, message: Message) -> None:
        what, value, counters, at = message
        assert worker.actor is not None
        name, node = worker.name, worker.actor.node
        if what == "failed":
            raise worker.actor.lost(value)
        if what == "behind":
            _LOG.warning("%s on %s did not get its weights (%s)", name, node, value)
            self._transport.failed()
            worker.missed()
            return
        self._timeline.generated(name, node, at, counters.seconds - worker.counters.seconds)
        worker.reported(counters)
        if what == "installed":
            worker.has_installed(value)
            # Behind the floor its tokens would be staler than those that were admitted for.
            if value >= self._floor and not worker.taking_part:
                worker.taking_part = True
                self._timeline.arrived(self.role, name, node, f"takes part from version {value}")
        elif what == "complete":
            self._complete_groups(worker, value)
            self._losses = worker.losses = 0

    def _release(self, worker: RolloutWorker) -> str:
        worker.release()
        groups = worker.take_back()
        self._unassigned |= groups
        self._transport.failed()
        if not groups:
            return ""
        fate = ("goes to others", "go to others") if self.alive else ("waits for another", "wait for another")
        return f"; its {counted(len(groups), 'group')} {fate[len(groups) != 1]}"
