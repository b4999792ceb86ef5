"""The placement on a cluster: generators in Ray actors, as many as there is room for at the time.

              submit                                    groups as they are complete, versions installed
    driver -------------> GeneratorActor  0 .. n-1  -----------------------------------------------> driver
              weights, by a transport

    submit     goes to the generator with the fewest groups in flight; to none that has no weights yet
    work       waits for a message of any of them, and not for ever
    update     gives the weights to the transport; waits for nothing. `installed` is the version that all that
               take part have installed

Who is lost (its process or its node died, it gave no sign of life, it did not get its weights in time)
leaves: its groups in flight keep their places and are sampled anew by others. Its room is asked for again,
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
from scalerl.rl.config.cluster import Patience
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.ordered import Asked, OrderedGroups, sum_of
from scalerl.rl.placement.ray.generator_actor import GROUPS, GeneratorActor, Message
from scalerl.rl.placement.ray.seat import Seat
from scalerl.rl.sync.transport import ObjectStore
from scalerl.rl.types import Counters, Weights
from scalerl.rl.workers.ray.contact import check
from scalerl.rl.workers.ray.members import FIRST_PAUSE, LostError, gather, remote, value_of
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
        WorkerError: a generator does not start; or all are lost, and none comes in their place.
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
        self._patience: Patience = cluster.patience
        self._transport, self._timeline = transport, timeline or Timeline()
        ask = remote(GeneratorActor, GROUPS, cluster.generator, session.room["generators"])
        self._attention = Attention()
        self._homeless: dict[int, Asked] = {}
        """Groups that nobody is there to sample, by place."""
        self._floor = 0
        self._deaths = 0
        self.lost: list[str] = []
        """What was said of each generator that was lost."""

        def start(i: int) -> tuple[Any, Any]:
            handle = ask(i)
            return handle, handle.start.remote(recipe.without_prompts(), model_folder)

        self._seats = [
            Seat(f"generator {i}", self._patience, lambda i=i: start(i)) for i in range(cluster.generators)
        ]
        self._transport.publish(weights, version)
        self._version = version
        self._begin()

    def _begin(self) -> None:
        """Start all, and wait until they have the first weights."""
        for seat in self._seats:
            seat.fill()
        starts = {seat.starting: seat.member for seat in self._seats if seat.member}
        places = {seat.placing: seat.member for seat in self._seats if seat.member}
        try:
            for seat, where in zip(self._seats, gather(places, self._patience.start, "come"), strict=True):
                seat.placed(where)
            gather(starts, self._patience.start, "started")
            ends = time.monotonic() + self._patience.start
            while self.installed < self._version or any(not seat.taking_part for seat in self._seats):
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
        seats = [seat for seat in self._seats if seat.taking_part]
        parcels = self._transport.for_all([seat.arrival for seat in seats], version)
        for seat, parcel in zip(seats, parcels, strict=True):
            seat.offer(parcel, version)
        for seat in self._seats:
            if not seat.taking_part:
                seat.offer(self._transport.for_one(), version)
        self._listen(0)

    def wait_until_started(self) -> None:
        """It has: see `_begin`."""

    @property
    def installed(self) -> int:
        """The version that every generator which takes part has installed."""
        self._listen(0)
        least = min((seat.installed for seat in self._seats if seat.taking_part), default=self._version)
        self._floor = max(self._floor, least)
        return self._floor

    @property
    def counters(self) -> Counters:
        """What all generators have spent, those that were lost included."""
        return sum_of([self._before, *(c for seat in self._seats for c in (seat.counters, seat.buried))])

    @property
    def alive(self) -> int:
        """Generators that take part."""
        return sum(seat.taking_part for seat in self._seats)

    def _place(self, place: int, group: Asked) -> None:
        seats = [seat for seat in self._seats if seat.taking_part]
        if not seats:
            self._homeless[place] = group
            return
        min(seats, key=lambda seat: len(seat.in_flight)).submit({place: group})

    def _under_way(self) -> Mapping[int, Asked]:
        return self._homeless | {place: g for seat in self._seats for place, g in seat.in_flight.items()}

    def _published(self) -> int:
        return self._version

    def close(self) -> None:
        """End the actors; what is in flight is lost."""
        for seat in self._seats:
            if seat.member is not None:
                seat.member.kill()
        self._transport.close()

    # -- who is there --------------------------------------------------------------------------------------

    def _listen(self, timeout: float) -> None:
        """Hear what was said within `timeout` seconds, and see to it that whoever is lost is replaced."""
        check()
        away = self._attention.away()
        self._alone_since += away
        for seat in self._seats:
            seat.excuse(away)
        calls = {ref: seat for seat in self._seats for ref in seat.calls()}
        done = ray.wait(list(calls), num_returns=1, timeout=timeout)[0] if calls else []
        if not calls and timeout:
            time.sleep(min(timeout, FIRST_PAUSE))  # until a place may be filled again
        if done:
            done = ray.wait(list(calls), num_returns=len(calls), timeout=0)[0]
        for ref in done:
            self._attempt(calls[ref], lambda seat, ref=ref: self._hear(seat, ref))
        for seat in self._seats:
            self._attempt(seat, Seat.check)
            if seat.member is None and time.monotonic() >= seat.fill_at:
                seat.fill()
            elif time.monotonic() >= seat.offer_at:
                seat.offer(self._transport.for_one(), self._version)
        self._house()
        self._give_up_alone()

    def _attempt(self, seat: Seat, do: Callable[[Seat], None]) -> None:
        if seat.member is None:
            return
        try:
            do(seat)
        except LostError as error:
            self._lose(seat, error)
        except ScalerlError as error:  # what it cannot load here, another node may have
            self._lose(seat, seat.member.lost(str(error)))

    def _hear(self, seat: Seat, ref: Any) -> None:
        assert seat.member is not None
        if ref is seat.placing:
            seat.placed(value_of(ref, seat.member))
            return
        if ref is seat.starting:
            value_of(ref, seat.member)
            seat.started()
            seat.offer(self._transport.for_one(), self._version)
            return
        for message in value_of(ref, seat.member):
            self._take_note(seat, message)
        seat.listen()

    def _take_note(self, seat: Seat, message: Message) -> None:
        what, value, counters, at = message
        assert seat.member is not None
        if what == "failed":
            raise seat.member.lost(value)
        if what == "behind":
            _LOG.warning("%s on %s did not get its weights (%s)", seat.name, seat.member.node, value)
            self._transport.failed()
            seat.missed()
            return
        self._timeline.generated(seat.name, seat.member.node, at, counters.seconds - seat.counters.seconds)
        seat.spent(counters)
        if what == "decoding":
            return
        if what == "installed":
            seat.has_installed(value)
            if value >= self._floor and not seat.taking_part:
                seat.taking_part = True
                node, what = seat.member.node, f"takes part from version {value}"
                arrived = f"{seat.name} on {node} {what}"
                self._timeline.event("arrived", "generate", seat.name, node, arrived)
            return
        places, sizes, packed = value
        self._keep(places, sizes, packed)
        for place in places:
            del seat.in_flight[place]
        self._deaths = seat.deaths = 0

    def _lose(self, seat: Seat, error: LostError) -> None:
        self.lost.append(why := str(error))
        self._deaths += 1
        self._timeline.event("lost", "generate", error.who, error.node, why, error.at)
        groups = seat.vacate()
        _LOG.warning("%s%s", why, _fate(len(groups), bool(self.alive)))
        self._homeless |= groups
        self._transport.failed()
        if self._deaths > MOST_DEATHS * len(self._seats):
            raise WorkerError(f"{self._deaths} generators were lost with no group complete in between: {why}")

    def _house(self) -> None:
        """Give groups that lost their generator to those that are there, the first first."""
        if self._homeless and any(seat.taking_part for seat in self._seats):
            homeless, self._homeless = sorted(self._homeless.items()), {}
            for place, group in homeless:
                self._place(place, group)

    def _give_up_alone(self) -> None:
        """Not to wait for ever where nobody is left."""
        if any(seat.taking_part for seat in self._seats):
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > self._patience.start:
            why = self.lost[-1] if self.lost else "none has started"
            raise WorkerError(f"no generator is left, and none came within {self._patience.start:g} s: {why}")

    _alone_since = float("inf")


def _fate(groups: int, others: bool) -> str:
    """What becomes of the groups of a generator that is lost."""
    if not groups:
        return ""
    become = ("goes to others", "go to others") if others else ("waits for another", "wait for another")
    return f"; its {counted(groups, 'group')} {become[groups != 1]}"
