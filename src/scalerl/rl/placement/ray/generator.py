"""The placement on a cluster: generators in Ray actors, as many as there is room for at the time.

              submit                                    groups as they are complete, versions installed
    driver -------------> GeneratorActor  0 .. n-1  -----------------------------------------------> driver
              weights, by a transport

    submit     goes to the generator with the fewest groups in flight; to none that has no weights yet
    work       waits for a message of any of them, and not for ever
    update     gives the weights to the transport; waits for nothing. `installed` is the version that all that
               take part have installed

Who is lost (its process or its node died, it gave no heartbeat, it did not get its weights in time)
leaves: its groups in flight keep their seq_nos and are sampled anew by others. Its room is asked for again,
with a pause that doubles; whoever comes to it is first given the weights of the day, and takes part once it
has installed a version as new as the one that groups have been admitted by. So no token is older than the
schedule allows, whoever comes and goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from scalerl.errors import ScalerlError, WorkerError, counted
from scalerl.rl.config.cluster import ClusterTimeouts
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.ordered import Asked, OrderedGroups, sum_of
from scalerl.rl.placement.ray.generator_actor import GROUPS, GeneratorActor, Message
from scalerl.rl.placement.ray.rollout_worker import RolloutWorker
from scalerl.rl.sync.transport import ObjectStore
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.ray.actors import FIRST_PAUSE, LostError, gather, remote, value_of
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.ray.timeline import Timeline
from scalerl.rl.workers.supervision import Attention

_LOG = logging.getLogger("scalerl")
MOST_DEATHS = 5
"""Generators that may be lost for each there is, with no group complete in between, before the run ends."""
_WORK = 1.0  # seconds that the driver waits for something to be said


class RayGenerator(OrderedGroups):
    """Generators on a cluster, `recipe.decode_slots` each; see `scalerl.rl.types.Generator`.

    Raises:
        InputError: there is no room on the cluster, or a generator cannot load the model.
        WorkerError: a generator does not start; or all are lost, and none comes in their seq_no.
    """

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
        super().__init__()
        cluster = recipe.on_cluster
        self._timeouts: ClusterTimeouts = cluster.timeouts
        self._transport, self._timeline = transport, timeline or Timeline()
        ask = remote(GeneratorActor, GROUPS, cluster.generator, session.room["generators"])
        self._attention = Attention()
        self._unassigned: dict[int, Asked] = {}
        """Groups that nobody is there to sample, by seq_no."""
        self._floor = 0
        self._deaths = 0
        self.lost: list[str] = []
        """What was said of each generator that was lost."""

        def start(i: int) -> tuple[Any, Any]:
            handle = ask(i)
            return handle, handle.start.remote(recipe.without_prompts(), model_folder)

        self._workers = [
            RolloutWorker(f"generator {i}", self._timeouts, lambda i=i: start(i))
            for i in range(cluster.generators)
        ]
        self._transport.publish(weights, version)
        self._version = version
        self._begin()

    def _begin(self) -> None:
        """Start all, and wait until they have the first weights."""
        for worker in self._workers:
            worker.fill()
        starts = {worker.starting: worker.actor for worker in self._workers if worker.actor}
        places = {worker.placing: worker.actor for worker in self._workers if worker.actor}
        try:
            for worker, where in zip(
                self._workers, gather(places, self._timeouts.start, "come"), strict=True
            ):
                worker.placed(where)
            gather(starts, self._timeouts.start, "started")
            ends = time.monotonic() + self._timeouts.start
            while self.installed < self._version or any(not worker.taking_part for worker in self._workers):
                self._listen(_WORK)
                if time.monotonic() > ends or self.lost:
                    what = self.lost[-1] if self.lost else "the weights have not come"
                    raise WorkerError(f"the generators do not start: {what}")
        except ScalerlError:
            self.close()
            raise

    # -- the interface -------------------------------------------------------------------------------------

    def work(self) -> None:
        """Wait until a generator says something, but not for long; and take note."""
        self._listen(_WORK)

    def update(self, weights: Weights, version: int) -> None:
        """Offer new weights; completions in flight go on with them and their old KV cache."""
        self._listen(0)
        self._transport.publish(weights, version)
        self._version = version
        workers = [worker for worker in self._workers if worker.taking_part]
        parcels = self._transport.for_all([worker.arrival for worker in workers], version)
        for worker, parcel in zip(workers, parcels, strict=True):
            worker.offer(parcel, version)
        for worker in self._workers:
            if not worker.taking_part:
                worker.offer(self._transport.for_one(), version)
        self._listen(0)

    def wait_until_started(self) -> None:
        """It has: see `_begin`."""

    @property
    def installed(self) -> int:
        """The version that every generator which takes part has installed."""
        self._listen(0)
        least = min(
            (worker.installed for worker in self._workers if worker.taking_part), default=self._version
        )
        self._floor = max(self._floor, least)
        return self._floor

    @property
    def counters(self) -> Counters:
        """What all generators have spent, those that were lost included."""
        return sum_of(
            [self._before, *(c for worker in self._workers for c in (worker.counters, worker.buried))]
        )

    @property
    def alive(self) -> int:
        """Generators that take part."""
        return sum(worker.taking_part for worker in self._workers)

    def _assign(self, seq_no: int, group: Asked) -> None:
        workers = [worker for worker in self._workers if worker.taking_part]
        if not workers:
            self._unassigned[seq_no] = group
            return
        min(workers, key=lambda worker: len(worker.in_flight)).submit({seq_no: group})

    def _under_way(self) -> Mapping[int, Asked]:
        return self._unassigned | {
            seq_no: g for worker in self._workers for seq_no, g in worker.in_flight.items()
        }

    def _published(self) -> int:
        return self._version

    def close(self) -> None:
        """End the actors; what is in flight is lost."""
        for worker in self._workers:
            if worker.actor is not None:
                worker.actor.kill()
        self._transport.close()

    # -- who is there --------------------------------------------------------------------------------------

    def _listen(self, timeout: float) -> None:
        """Hear what was said within `timeout` seconds, and see to it that whoever is lost is replaced."""
        check()
        away = self._attention.away()
        self._alone_since += away
        for worker in self._workers:
            worker.excuse(away)
        calls = {ref: worker for worker in self._workers for ref in worker.calls()}
        done = ray.wait(list(calls), num_returns=1, timeout=timeout)[0] if calls else []
        if not calls and timeout:
            time.sleep(min(timeout, FIRST_PAUSE))  # until a place may be filled again
        if done:
            done = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]
        for ref in done:
            self._attempt(calls[ref], lambda worker, ref=ref: self._hear(worker, ref))
        for worker in self._workers:
            self._attempt(worker, RolloutWorker.check)
            if worker.actor is None and time.monotonic() >= worker.fill_at:
                worker.fill()
            elif time.monotonic() >= worker.offer_at:
                worker.offer(self._transport.for_one(), self._version)
        self._house()
        self._give_up_alone()

    def _attempt(self, worker: RolloutWorker, do: Callable[[RolloutWorker], None]) -> None:
        if worker.actor is None:
            return
        try:
            do(worker)
        except LostError as error:
            self._lose(worker, error)
        except ScalerlError as error:  # what it cannot load here, another node may have
            self._lose(worker, worker.actor.lost(str(error)))

    def _hear(self, worker: RolloutWorker, ref: Any) -> None:
        assert worker.actor is not None
        if ref is worker.placing:
            worker.placed(value_of(ref, worker.actor))
            return
        if ref is worker.starting:
            value_of(ref, worker.actor)
            worker.started()
            worker.offer(self._transport.for_one(), self._version)
            return
        for message in value_of(ref, worker.actor):
            self._take_note(worker, message)
        worker.listen()

    def _take_note(self, worker: RolloutWorker, message: Message) -> None:
        what, value, counters, at = message
        assert worker.actor is not None
        if what == "failed":
            raise worker.actor.lost(value)
        if what == "behind":
            _LOG.warning("%s on %s did not get its weights (%s)", worker.name, worker.actor.node, value)
            self._transport.failed()
            worker.missed()
            return
        self._timeline.generated(
            worker.name, worker.actor.node, at, counters.seconds - worker.counters.seconds
        )
        worker.spent(counters)
        if what == "decoding":
            return
        if what == "installed":
            worker.has_installed(value)
            if value >= self._floor and not worker.taking_part:
                worker.taking_part = True
                node, what = worker.actor.node, f"takes part from version {value}"
                arrived = f"{worker.name} on {node} {what}"
                self._timeline.event("arrived", "generate", worker.name, node, arrived)
            return
        seq_nos, sizes, packed = value
        self._keep(seq_nos, sizes, packed)
        for seq_no in seq_nos:
            del worker.in_flight[seq_no]
        self._deaths = worker.deaths = 0

    def _lose(self, worker: RolloutWorker, error: LostError) -> None:
        self.lost.append(why := str(error))
        self._deaths += 1
        self._timeline.event("lost", "generate", error.who, error.node, why, error.at)
        groups = worker.vacate()
        _LOG.warning("%s%s", why, _fate(len(groups), bool(self.alive)))
        self._unassigned |= groups
        self._transport.failed()
        if self._deaths > MOST_DEATHS * len(self._workers):
            raise WorkerError(f"{self._deaths} generators were lost with no group complete in between: {why}")

    def _house(self) -> None:
        """Give groups that lost their generator to those that are there, the first first."""
        if self._unassigned and any(worker.taking_part for worker in self._workers):
            unassigned, self._unassigned = sorted(self._unassigned.items()), {}
            for seq_no, group in unassigned:
                self._assign(seq_no, group)

    def _give_up_alone(self) -> None:
        """Not to wait for ever where nobody is left."""
        if any(worker.taking_part for worker in self._workers):
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > self._timeouts.start:
            why = self.lost[-1] if self.lost else "none has started"
            raise WorkerError(f"no generator is left, and none came within {self._timeouts.start:g} s: {why}")

    _alone_since = float("inf")


def _fate(groups: int, others: bool) -> str:
    """What becomes of the groups of a generator that is lost."""
    if not groups:
        return ""
    become = ("goes to others", "go to others") if others else ("waits for another", "wait for another")
    return f"; its {counted(groups, 'group')} {become[groups != 1]}"
