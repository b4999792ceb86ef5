"""The learner of a run whose ranks are Ray actors, as the driver sees it.

    begin      the batch goes into the object store once, from where all ranks fetch it; the driver works
               meanwhile
    weights    every rank puts its share of the buckets into the object store; references come here
    saver      the ranks write, into a folder that all of them and the driver see

The driver holds the model's shape, and never its weights. Where a rank is lost, the others cannot go on: all
are killed, and the run goes back to its last checkpoint (`LearnerLostError`).
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError

from scalerl.errors import LearnerLostError
from scalerl.rl.config.cluster import Cluster, Fsdp2
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.fsdp.group import LearnerGroup, LearnerRank
from scalerl.rl.sync.broadcast import BroadcastGroup, send
from scalerl.rl.sync.buckets import in_buckets
from scalerl.rl.sync.object_store import Bucket, StoredWeights, put
from scalerl.rl.types import Pending
from scalerl.rl.workers.ranks import meet, store_at
from scalerl.rl.workers.ray.actors import Calls, LostError, SupervisedActor, WorkerActor, actors_of
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import Session

THREADS = {"life": 1, "first": 1, "send": 1}
"""Threads beside the one that trains: for heartbeats, for the disk, and for a broadcast."""
_AFTERMATH = 5.0  # seconds in which Ray reports which rank died first


class TrainerActor(WorkerActor):
    """Holds a shard of the learner, and takes part in what all ranks do."""

    def address_to_meet(self) -> str:
        """Return a free address of this node, at which the ranks find each other; called on the first."""
        address = ray.util.get_node_ip_address()
        # The port is free at this instant only: the store listens at it next.
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"{address}:{probe.getsockname()[1]}"

    def meet(self, rank: int, world: int, address: str, seconds: float) -> None:
        """Join the process group; no rank waits for another for more than `seconds`, now or later."""
        torch.set_num_threads(1)
        if address.startswith("127."):  # gloo would take another interface, which others may reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host, _, port = address.rpartition(":")
        store = store_at(host, int(port), world, rank == 0, seconds)
        meet(seconds, store=store, rank=rank, world_size=world)
        self._rank = LearnerRank()

    def all(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of `LearnerRank`, as all ranks do; the first returns its result."""
        found = getattr(self._rank, name)(*arguments)
        # What the others return would travel to the driver for nothing.
        return found if dist.get_rank() == 0 else None

    @ray.method(concurrency_group="first")
    def first(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method that only the first rank calls, while all train."""
        return getattr(self._rank, name)(*arguments)

    def stored_weights(self, bucket_mib: float) -> list[tuple[int, Bucket]]:
        """Put buckets into the object store; return number and reference of those of this rank.

        The ranks take turns, so that none of them, and no node's store, has the whole model.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        tensors = (
            (name, weight.float().cpu().numpy()) for name, weight in self._rank.learner.weights_by_tensor()
        )
        return [
            (i, put(bucket)) for i, bucket in enumerate(in_buckets(tensors, bucket_mib)) if i % world == rank
        ]

    @ray.method(concurrency_group="send")
    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Broadcast weights to the generators, while training goes on."""
        send(group, weights, version)


class RayRanks:
    """The ranks as actors: see `scalerl.rl.learner.fsdp.group.Ranks`.

    Raises:
        LearnerLostError: (by any method) one of them was lost; all are killed.
    """

    def __init__(self, cluster: Cluster, session: Session) -> None:
        self._timeouts, self.size = cluster.timeouts, cluster.trainers
        request = actors_of(TrainerActor, THREADS, cluster.trainer, session.room["trainers"])
        self.actors = [
            SupervisedActor(f"trainer {rank}", request(rank), cluster.timeouts.heartbeat)
            for rank in range(self.size)
        ]
        for actor, where in zip(
            self.actors, self.call("where", "started", limit=cluster.timeouts.start), strict=True
        ):
            actor.placed(where)
        address = self._on_first("address_to_meet", "found a place to meet")
        seconds = getattr(cluster.learner, "timeout", cluster.timeouts.start)
        arguments = {a: (rank, self.size, address, seconds) for rank, a in enumerate(self.actors)}
        self._wait(self._start(arguments, "meet", "met the others"))

    def all(self, name: str, *args: Any) -> Any:
        """Call a method on every rank; return what the first returns."""
        pending = self.begin(name, *args)
        pending.wait(math.inf)
        return pending.result()

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """Do the same, without waiting for it."""
        check()
        # `put` once: as arguments of each call the batch would be copied for every rank.
        arguments = dict.fromkeys(self.actors, (name, ray.put(args)))
        return _OfFirst(self._start(arguments, "all", f"done its part of `{name}`"), self._losses)

    def first(self, name: str, *args: Any) -> Any:
        """Call a method on the first rank alone."""
        return self._on_first("first", f"done its part of `{name}`", name, args)

    def call(self, method: str, what: str, *args: Any, limit: float | None = None) -> list[Any]:
        """Call a method of the actors on every rank; return what each returns."""
        return self._wait(self._start(dict.fromkeys(self.actors, args), method, what, limit))

    def check_life(self) -> None:
        """Check that all live; waits for nothing."""
        check()
        with self._losses():
            for actor in self.actors:
                actor.check_life()

    def close(self) -> None:
        """Kill them."""
        for actor in self.actors:
            actor.kill()

    def _on_first(self, method: str, what: str, *args: Any) -> Any:
        return self._wait(self._start({self.actors[0]: args}, method, what))[0]

    def _wait(self, calls: Calls) -> list[Any]:
        with self._losses():
            calls.wait(math.inf)
            return calls.result()

    def _start(
        self,
        arguments: Mapping[SupervisedActor, Sequence[Any]],
        method: str,
        what: str,
        limit: float | None = None,
    ) -> Calls:
        calls = {getattr(actor.handle, method).remote(*args): actor for actor, args in arguments.items()}
        return Calls(calls, limit or self._timeouts.step, what)

    @contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except LostError as error:
            cause = self._first_loss() or error
            self.close()  # without one of them the others cannot go on
            raise LearnerLostError(str(cause), cause.who, cause.node, error.at) from error

    def _first_loss(self) -> LostError | None:
        """Return the loss of the rank that died, if one did: the others report their connection to it."""
        ends = time.monotonic() + _AFTERMATH
        pings = {actor.handle.ping.remote(): actor for actor in self.actors}
        while pings and time.monotonic() < ends:
            for ref in ray.wait(list(pings), timeout=_AFTERMATH / 10)[0]:
                actor = pings.pop(ref)
                try:  # a rank that merely failed answers; one that died raises
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
    """The learner over actors; its weights stay in the object store until they are fetched.

    Raises:
        InputError: the model cannot be loaded or sharded.
        LearnerLostError: (by any method) a rank was lost.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, settings: Fsdp2) -> None:
        cluster = recipe.on_cluster
        self._actors = RayRanks(cluster, session)
        self._bucket_mib, self._seconds = cluster.transport.bucket_mib, cluster.timeouts.weights
        self.address = self._actors.actors[0].node.split()[1]
        """Of the node of the first rank."""
        super().__init__(self._actors, recipe, model_folder, settings)

    @property
    def ranks(self) -> list[tuple[str, str]]:
        """Name and node of each rank."""
        return [(actor.name, actor.node) for actor in self._actors.actors]

    def check_life(self) -> None:
        """Check that all ranks live, for a driver that waits for other things."""
        self._actors.check_life()

    def weights(self) -> StoredWeights:
        """Put the current weights into the object store, and return references to them."""
        found = self._actors.call("stored_weights", "put its weights into the object store", self._bucket_mib)
        # The ranks took turns with the buckets: by number they are in the order of the model again.
        buckets = sorted((bucket for of_rank in found for bucket in of_rank), key=lambda bucket: bucket[0])
        return StoredWeights((bucket for _, bucket in buckets), self._seconds)

    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Have the first rank broadcast weights to the generators; waits for nothing."""
        self._actors.actors[0].handle.send.remote(group, weights, version)

    def close(self) -> None:
        """Kill the ranks."""
        self._actors.close()
