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
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import ray
import torch.distributed as dist

from scalerl.errors import LearnerLostError, ScalerlError, brief_error
from scalerl.rl.config.cluster import Cluster
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.group import LearnerGroup, LearnerRank
from scalerl.rl.sync.broadcast import BroadcastGroup, send
from scalerl.rl.sync.buckets import in_buckets
from scalerl.rl.sync.object_store import Bucket, StoredWeights, put
from scalerl.rl.types import Pending, Plan
from scalerl.rl.workers.backend import Channel, Message, WorkerProcess
from scalerl.rl.workers.pool import Events, PoolWorker, WorkerPool
from scalerl.rl.workers.ranks import free_port, meet, store_at
from scalerl.rl.workers.ray.backend import RayActors, WorkerActor
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.supervision import PollClock, WorkerLostError

STOP = "stop"
"""The call that has a step given up, while it is made."""
THREADS = ("first", "send")
"""Calls beside those that train, each in a thread of its own: of the disk, and of a broadcast."""
_AFTERMATH = 5.0  # seconds in which Ray reports which rank died first
_POLL = 1.0  # seconds between two polls, at most


class TrainerActor(WorkerActor):
    """The process of a rank."""


class RankServer:
    """A rank, which holds a shard of the learner, and takes part in what all ranks do."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def address_to_meet(self) -> str:
        """Return a free address of this node, at which the ranks find each other; called on the first."""
        address = ray.util.get_node_ip_address()
        return f"{address}:{free_port(address)}"

    def meet(self, rank: int, world: int, address: str, seconds: float) -> None:
        """Join the process group; no rank waits for another for more than `seconds`, now or later."""
        if address.startswith("127."):  # gloo would take another interface, which others may reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host, _, port = address.rpartition(":")
        store = store_at(host, int(port), world, rank == 0, seconds)
        meet(seconds, store=store, rank=rank, world_size=world)
        self._rank = LearnerRank()

    def all(self, name: str, arguments: Any) -> Any:
        """Call a method of `LearnerRank`, as all ranks do, with arguments from the object store.

        The first returns its result: what the others return would travel to the driver for nothing.
        """
        found = getattr(self._rank, name)(*ray.get(arguments))
        if name == "load":
            self._rank.learner.stop = self.stop
        return found if dist.get_rank() == 0 else None

    def first(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call a method that only the first rank calls, while all train."""
        return getattr(self._rank, name)(*arguments)

    def stored_weights(self, bucket_mib: float) -> list[tuple[int, Bucket]]:
        """Put buckets into the object store; return number and reference of those of this rank.

        The ranks take turns, so that none of them, and no node's store, has the whole model.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        buckets = enumerate(in_buckets(self._rank.learner.weights(), bucket_mib))
        return [(i, put(bucket)) for i, bucket in buckets if i % world == rank]

    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Broadcast weights to the generators, while training goes on."""
        send(group, weights, version)


def serve(channel: Channel) -> None:
    """Make the calls that come, (number, method, arguments): in order those that train, and beside them those
    of `THREADS`."""
    server = RankServer()
    queues = {name: queue.SimpleQueue[Any]() for name in ("train", *THREADS)}

    def work(calls: queue.SimpleQueue[Any]) -> None:
        while True:
            number, method, arguments = calls.get()
            try:
                channel.send("returned", (number, getattr(server, method)(*arguments)))
            except ScalerlError as error:
                channel.send("raised", error)
            except Exception as error:
                channel.send("lost", brief_error(error))

    for calls in queues.values():
        threading.Thread(target=work, args=[calls], daemon=True).start()
    channel.send("started")
    while True:
        call = channel.receive()
        if call[1] == STOP:
            server.stop.set()
            continue
        queues[call[1] if call[1] in THREADS else "train"].put(call)


class RayRanks(WorkerPool[PoolWorker]):
    """The ranks as actors: see `scalerl.rl.learner.group.Ranks`. They are lost together.

    Raises:
        LearnerLostError: (by any method) one of them was lost; all are killed.
    """

    noun, role = "trainer", "train"
    _stop: threading.Event | None = None

    def __init__(self, cluster: Cluster, session: Session, seconds: float, events: Events) -> None:
        """`seconds` is how long ranks wait for each other."""
        self._timeouts, self._transport = cluster.timeouts, cluster.transport
        self.size, start = cluster.trainers, cluster.timeouts.start
        actors = RayActors(TrainerActor, session, "trainers", cluster.timeouts.heartbeat)
        workers = [PoolWorker(f"trainer {rank}", rank, start_timeout=start) for rank in range(self.size)]
        super().__init__(workers, actors, serve, none_left=2 * start, events=events)
        self._lock = threading.Lock()
        """A checkpoint's thread waits for ranks while the driver does too."""
        self._numbers = count()
        self.returned: dict[tuple[int, int], Any] = {}
        """By number of the call, and rank."""
        self.start()
        self.wait_until_started()
        address = self._on_first("address_to_meet", "found a place to meet")
        arguments = [(rank, self.size, address, seconds) for rank in range(self.size)]
        self._result(self._start(arguments, "meet", "met the others"))

    @property
    def actors(self) -> list[WorkerProcess]:
        """The processes, by rank."""
        return [worker.process for worker in self._workers if worker.process]

    def all(self, name: str, *args: Any) -> Any:
        """Call a method on every rank; return what the first returns."""
        pending = self.begin(name, *args)
        pending.wait(math.inf)
        return pending.result()

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """Do the same, without waiting for it."""
        check()
        # `put` once: as arguments of each call the batch would be copied for every rank.
        arguments = [(name, ray.put(args))] * self.size
        return _OfFirst(self._start(arguments, "all", f"done its part of `{name}`"))

    def first(self, name: str, *args: Any) -> Any:
        """Call a method on the first rank alone."""
        return self._on_first("first", f"done its part of `{name}`", name, args)

    def weights(self, plan: Plan) -> StoredWeights:
        """Put the current weights into the object store, and return references to them."""
        what = "put its weights into the object store"
        found = self.call("stored_weights", what, self._transport.bucket_mib)
        # The ranks took turns with the buckets: by number they are in the order of the model again.
        buckets = sorted((bucket for of_rank in found for bucket in of_rank), key=lambda bucket: bucket[0])
        return StoredWeights((bucket for _, bucket in buckets), self._timeouts.weights)

    def call(self, method: str, what: str, *args: Any) -> list[Any]:
        """Call a method of `RankServer` on every rank; return what each returns."""
        return self._result(self._start([args] * self.size, method, what))

    def send(self, *args: Any) -> None:
        """Call `RankServer.send` on the first; waits for nothing."""
        self._start([args], "send", "sent the weights")

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """Stop all ranks once `stop` is set; what they report of a step stays with them."""
        self._stop = stop

    def stop_if_set(self) -> None:
        """Tell the ranks, once, that the run is to stop: they give up the step that they make."""
        if self._stop is not None and self._stop.is_set():
            self._stop = None
            for actor in self.actors:
                actor.send((next(self._numbers), STOP, ()))

    def check_life(self) -> None:
        """Check that all live; waits for nothing."""
        self.poll(0.0)

    def poll(self, timeout: float) -> None:
        """Receive what ranks return within `timeout` seconds."""
        with self._lock:
            super().poll(timeout)

    def check_deadline(self, calls: RankCalls) -> None:
        """Check the time limit of calls."""
        for rank in calls.missing():
            if time.monotonic() > calls.ends:
                why = f"it has not {calls.what} within {calls.limit:g} s"
                self._lose(self._workers[rank], self.actors[rank].lost(why))

    def close(self) -> None:
        """Kill them."""
        self.kill()

    def _send(self, worker: PoolWorker, number: int, work: Any) -> None:
        """Do nothing: what ranks do, all do together (`begin`)."""

    def _received(self, worker: PoolWorker, message: Message) -> None:
        if message.kind == "raised":
            raise message.value
        number, value = message.value
        self.returned[number, worker.number] = value

    def _lose(self, worker: PoolWorker, error: WorkerLostError) -> None:
        cause = self._first_loss() or error
        self.kill()  # without one of them the others cannot go on
        raise LearnerLostError(str(cause), cause.who, cause.node, error.at) from error

    def _on_first(self, method: str, what: str, *args: Any) -> Any:
        return self._result(self._start([args], method, what))[0]

    def _result(self, calls: RankCalls) -> list[Any]:
        calls.wait(math.inf)
        return calls.result()

    def _start(self, arguments: Sequence[Sequence[Any]], method: str, what: str) -> RankCalls:
        number = next(self._numbers)
        for actor, args in zip(self.actors, arguments, strict=False):
            actor.send((number, method, args))
        return RankCalls(self, number, len(arguments), self._timeouts.step, what)

    def _first_loss(self) -> WorkerLostError | None:
        """Return the loss of the rank that died, if one did: the others report their connection to it."""
        ends = time.monotonic() + _AFTERMATH
        while time.monotonic() < ends:
            for actor in self.actors:
                try:  # a rank that merely failed answers; one that died raises
                    actor.receive()
                except WorkerLostError as error:
                    return error
            time.sleep(_AFTERMATH / 50)
        return None


class RankCalls:
    """Calls under way on the first `n` ranks; see `scalerl.rl.types.Pending`."""

    def __init__(self, ranks: RayRanks, number: int, n: int, limit: float, what: str) -> None:
        self._ranks, self._number, self._n = ranks, number, n
        self.limit, self.what = limit, what
        self.ends = time.monotonic() + limit
        self._clock = PollClock()

    def missing(self) -> list[int]:
        """Return the ranks that have not returned."""
        return [rank for rank in range(self._n) if (self._number, rank) not in self._ranks.returned]

    def wait(self, seconds: float) -> bool:
        """Return whether all have returned; wait for that, and for no longer than `seconds`."""
        until = time.monotonic() + seconds
        while self.missing():
            self._ranks.stop_if_set()
            self._ranks.poll(max(0.0, min(_POLL, until - time.monotonic())))
            self.ends += self._clock.unpolled()
            self._ranks.check_deadline(self)
            if time.monotonic() >= until:
                break
        return not self.missing()

    def result(self) -> list[Any]:
        """Return what they returned, in order, once."""
        return [self._ranks.returned.pop((self._number, rank)) for rank in range(self._n)]


@dataclass
class _OfFirst:
    """What the first of all ranks returns; see `scalerl.rl.types.Pending`."""

    calls: RankCalls

    def wait(self, seconds: float) -> bool:
        return self.calls.wait(seconds)

    def result(self) -> Any:
        return self.calls.result()[0]


class RayLearner(LearnerGroup):
    """The learner over actors; its weights stay in the object store until they are fetched.

    Raises:
        InputError: the model cannot be loaded or sharded.
        LearnerLostError: (by any method) a rank was lost.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, events: Events) -> None:
        cluster = recipe.on_cluster
        self._actors = RayRanks(cluster, session, recipe.learner.timeout, events)
        self.address = self._actors.actors[0].node.split()[1]
        """Of the node of the first rank."""
        super().__init__(self._actors, recipe, model_folder)

    def check_life(self) -> None:
        """Check that all ranks live, for a driver that waits for other things."""
        self._actors.check_life()

    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Have the first rank broadcast weights to the generators; waits for nothing."""
        self._actors.send(group, weights, version)

    def close(self) -> None:
        """Kill the ranks."""
        self._actors.close()
