"""The learner of a run whose ranks are Ray actors: what the driver has in its place.

    begin      the batch goes into the object store once; all ranks fetch it from there, and return the same;
               the driver works meanwhile
    weights    every rank puts its share of the buckets into the object store; references come here
    saver      the ranks write, into a folder that all of them and the driver see

The driver holds the model's shape, and never its weights. Where a rank is lost, the others cannot go on: all
are ended, and the run goes back to its last checkpoint (`LearnerLostError`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError

from scalerl.errors import LearnerLostError
from scalerl.rl.config.cluster import Cluster, Fsdp2
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.fsdp.group import LearnerGroup
from scalerl.rl.placement.ray.trainer_actor import GROUPS, TrainerActor
from scalerl.rl.sync.broadcast import BroadcastGroup
from scalerl.rl.sync.object_store import StoredWeights
from scalerl.rl.types import Pending
from scalerl.rl.workers.ray.actors import Calls, LostError, SupervisedActor, remote
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import Session

_AFTERMATH = 5.0  # seconds in which Ray tells which rank died first
_LOOK = 1.0  # seconds between two looks at who still lives


class RayRanks:
    """The ranks as actors: see `scalerl.rl.learner.fsdp.group.Ranks`.

    Raises:
        LearnerLostError: (by any method) one of them was lost; none is left.
    """

    def __init__(self, cluster: Cluster, session: Session) -> None:
        self._timeouts, self.size = cluster.timeouts, cluster.trainers
        ask = remote(TrainerActor, GROUPS, cluster.trainer, session.room["trainers"])
        self.actors: list[SupervisedActor] = []
        self._looked = -math.inf
        for rank in range(cluster.trainers):
            self.actors.append(SupervisedActor(f"trainer {rank}", ask(rank), cluster.timeouts.heartbeat))
        self._meet(cluster)

    def _meet(self, cluster: Cluster) -> None:
        found = self._on(dict.fromkeys(self.actors, ()), "where", "started", cluster.timeouts.start)
        for actor, where in zip(self.actors, found, strict=True):
            actor.settled(where)
        first, world = self.actors[0], cluster.trainers
        (meeting,) = self._on({first: ()}, "meeting", "found a place to meet")
        seconds = getattr(cluster.learner, "timeout", cluster.timeouts.start)
        arguments = {m: (rank, world, meeting, seconds) for rank, m in enumerate(self.actors)}
        self._on(arguments, "meet", "met the others")

    def all(self, name: str, *args: Any) -> Any:
        """A method on every rank; what the first returns."""
        begun = self.begin(name, *args)
        begun.wait(math.inf)
        return begun.result()

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """The same, under way."""
        check()
        asked = dict.fromkeys(self.actors, (name, ray.put(args)))
        return _OfFirst(self._begin(asked, "all", f"done what it was asked ({name})"), self._losses)

    def first(self, name: str, *args: Any) -> Any:
        """A method on the first rank alone."""
        arguments = {self.actors[0]: (name, args)}
        return self._on(arguments, "first", f"done what it was asked ({name})")[0]

    def call(self, method: str, what: str, *args: Any) -> list[Any]:
        """A method of the actors on every rank; what each returns."""
        return self._on(dict.fromkeys(self.actors, args), method, what)

    def check_life(self) -> None:
        """Whether all live; waits for nothing."""
        if time.monotonic() - self._looked < _LOOK:
            return
        self._looked = time.monotonic()
        check()
        with self._losses():
            for actor in self.actors:
                actor.check_life()

    def close(self) -> None:
        """End the ranks."""
        for actor in self.actors:
            actor.kill()

    def _on(
        self,
        arguments: Mapping[SupervisedActor, Sequence[Any]],
        method: str,
        what: str,
        limit: float | None = None,
    ) -> list[Any]:
        calls = self._begin(arguments, method, what, limit)
        with self._losses():
            calls.wait(math.inf)
            return calls.result()

    def _begin(
        self,
        arguments: Mapping[SupervisedActor, Sequence[Any]],
        method: str,
        what: str,
        limit: float | None = None,
    ) -> Calls:
        calls = {getattr(m.handle, method).remote(*args): m for m, args in arguments.items()}
        return Calls(calls, limit or self._timeouts.step, what)

    @contextmanager
    def _losses(self) -> Iterator[None]:
        """Without one of them the others cannot go on."""
        try:
            yield
        except LostError as error:
            cause = self._dead_first() or error
            self.close()
            raise LearnerLostError(str(cause), cause.who, cause.node, error.at) from error

    def _dead_first(self) -> LostError | None:
        """Who died, where somebody did: the others complain of their connection to it."""
        ends = time.monotonic() + _AFTERMATH
        pings = {actor.handle.ping.remote(): actor for actor in self.actors}
        while pings and time.monotonic() < ends:
            for ref in ray.wait(list(pings), timeout=_AFTERMATH / 10)[0]:
                actor = pings.pop(ref)
                try:
                    ray.get(ref, timeout=_AFTERMATH)
                except RayActorError as error:
                    return actor.lost(error)
        return None


@dataclass
class _OfFirst:
    """What the first of all ranks returns; see `scalerl.rl.types.Pending`."""

    calls: Calls
    losses: Callable[[], AbstractContextManager[None]]

    def wait(self, seconds: float) -> bool:
        with self.losses():
            return self.calls.wait(seconds)

    def result(self) -> Any:
        with self.losses():
            return self.calls.result()[0]


class RayLearner(LearnerGroup):
    """The learner over actors; its weights stay in the object store until somebody wants them.

    Raises:
        InputError: the model cannot be loaded or sharded.
        LearnerLostError: (by any method) a rank was lost.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, settings: Fsdp2) -> None:
        cluster = recipe.on_cluster
        self._actors = RayRanks(cluster, session)
        self._bucket_mib, self._seconds = cluster.transport.bucket_mib, cluster.timeouts.weights
        self.address = self._actors.actors[0].node.split()[1]
        """Where the first rank can be reached."""
        super().__init__(self._actors, recipe, model_folder, settings)

    @property
    def ranks(self) -> list[tuple[str, str]]:
        """Name and node of each."""
        return [(actor.name, actor.node) for actor in self._actors.actors]

    def check_life(self) -> None:
        """Whether all ranks live, for a driver that waits for others; waits for nothing itself."""
        self._actors.check_life()

    def weights(self) -> StoredWeights:
        """The current weights, in the object store."""
        found = self._actors.call("stored_weights", "given its weights", self._bucket_mib)
        buckets = sorted((bucket for of_rank in found for bucket in of_rank), key=lambda bucket: bucket[0])
        return StoredWeights((bucket for _, bucket in buckets), self._seconds)

    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Have the first rank broadcast weights to the generators; waits for nothing."""
        self._actors.actors[0].handle.send.remote(group, weights, version)

    def close(self) -> None:
        """End the ranks."""
        self._actors.close()
