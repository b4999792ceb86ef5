"""The learner whose ranks are Ray actors, as the driver sees it.

    begin      puts the batch into the object store once, from where all ranks fetch it; the driver works
               meanwhile
    weights    every rank puts its share of the buckets into the object store and returns references
    saver      the ranks write into a folder that all of them and the driver see

The driver has the model's shape but never its weights. If a rank is lost, the others cannot continue: all
are killed, and the run goes back to its last checkpoint (`LearnerLostError`).
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ray
import torch.distributed as dist

from scalerl.errors import LearnerLostError, ScalerlError, brief_error
from scalerl.rl.config.cluster import Cluster
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.learner.group import LearnerGroup, LearnerRank
from scalerl.rl.sync.buckets import in_buckets
from scalerl.rl.sync.ray_weights import Bucket, StoredWeights, put, send
from scalerl.rl.types import Pending, Plan
from scalerl.rl.workers.backend import Channel, Message, WorkerLostError, WorkerProcess
from scalerl.rl.workers.pool import PoolWorker, WorkerPool
from scalerl.rl.workers.ranks import free_port, meet, store_at
from scalerl.rl.workers.ray.backend import RayActors
from scalerl.rl.workers.ray.cluster_watch import check
from scalerl.rl.workers.ray.session import Session
from scalerl.rl.workers.timeline import Timeline

STOP = "stop"
"""The call that makes a rank abandon a step in progress."""
BESIDE = ("wait_saved", "send")
"""Calls that run beside those of training, each in its own thread: disk writes and broadcasts."""
_AFTERMATH = 5.0  # seconds to wait for Ray's report of the rank that died first


class RankServer(LearnerRank):
    """A rank on an actor, which holds a shard of the learner."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def address_to_meet(self) -> str:
        """Return a free address of this node, at which the ranks find each other; called on rank 0."""
        address = ray.util.get_node_ip_address()
        return f"{address}:{free_port(address)}"

    def meet(self, rank: int, world: int, address: str, seconds: float) -> None:
        """Join the process group; ranks wait for each other for at most `seconds`, now or later."""
        if address.startswith("127."):  # otherwise gloo would use an interface that other machines may reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host, _, port = address.rpartition(":")
        store = store_at(host, int(port), world, rank == 0, seconds)
        meet(seconds, store=store, rank=rank, world_size=world)

    def load(self, recipe: Mapping[str, Any], model_folder: str) -> str:
        """See `LearnerRank.load`."""
        device = super().load(recipe, model_folder)
        self.learner.stop = self.stop
        return device

    def stored_weights(self, bucket_mib: float) -> list[tuple[int, Bucket]]:
        """Put this rank's buckets into the object store; return their numbers and references.

        The ranks take turns with the buckets, so that no rank and no node's store has the whole model.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        buckets = enumerate(in_buckets(self.learner.weights(), bucket_mib))
        return [(i, put(bucket)) for i, bucket in buckets if i % world == rank]

    send = staticmethod(send)

    def call(self, method: str, arguments: Any) -> Any:
        """Call a method and return its result.

        If the arguments come from the object store, for all ranks, only rank 0 returns its result: the driver
        would not use the others.
        """
        if not isinstance(arguments, ray.ObjectRef):
            return getattr(self, method)(*arguments)
        found = getattr(self, method)(*ray.get(arguments))
        return found if dist.get_rank() == 0 else None


def serve(channel: Channel) -> None:
    """Execute the calls (number, method, arguments) that arrive: in order, except that those of `BESIDE` run
    beside the others."""
    server = RankServer()
    queues = {name: queue.SimpleQueue[Any]() for name in ("train", *BESIDE)}

    def work(calls: queue.SimpleQueue[Any]) -> None:
        while True:
            number, method, arguments = calls.get()
            try:
                channel.send("returned", (number, server.call(method, arguments)))
            except ScalerlError as error:
                channel.send("raised", (number, error))
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
        queues[call[1] if call[1] in BESIDE else "train"].put(call)


@dataclass(eq=False)
class RankCalls:
    """Calls in progress on the first `n` ranks, with a deadline on the pool's clock; see `Pending`."""

    ranks: RayRanks
    n: int
    what: str
    limit: float
    ends: float
    found: dict[int, Any] = field(default_factory=dict)
    """Results by rank."""

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait up to `seconds` for all ranks to return; return whether they have."""
        return self.ranks.wait_for(lambda: len(self.found) == self.n, seconds)

    def result(self) -> Any:
        """Return the result of rank 0."""
        return self.found[0]


class RayRanks(WorkerPool[PoolWorker]):
    """The ranks as actors, which are lost together; see `scalerl.rl.learner.group.Ranks`.

    Raises:
        LearnerLostError: (by any method) one of them was lost; all are killed.
    """

    noun, role = "trainer", "train"
    _stop: threading.Event | None = None

    def __init__(self, cluster: Cluster, session: Session, seconds: float, events: Timeline) -> None:
        """Start the actors; `seconds` is the longest that ranks wait for each other."""
        self._timeouts, self._transport = cluster.timeouts, cluster.transport
        self.size, start = cluster.trainers, cluster.timeouts.start
        actors = RayActors(session, "trainers", cluster.timeouts.heartbeat)
        workers = [PoolWorker(f"trainer {rank}", rank, start_timeout=start) for rank in range(self.size)]
        super().__init__(workers, actors, serve, none_left=2 * start, events=events)
        self._lock = threading.Lock()
        """Needed because a checkpoint's thread waits for ranks while the driver does too."""
        self._numbers = count()
        self._calls: dict[int, RankCalls] = {}
        """Calls in progress, by number."""
        self.start()
        self.wait_until_started()
        address = self._call([()], "address_to_meet", "found a place to meet").result()
        arguments = [(rank, self.size, address, seconds) for rank in range(self.size)]
        self._call(arguments, "meet", "met the others")

    @property
    def actors(self) -> list[WorkerProcess]:
        """The processes, by rank."""
        return [worker.process for worker in self._workers if worker.process]

    def all(self, name: str, *args: Any) -> Any:
        """Call a method on every rank; return rank 0's result."""
        pending = self.begin(name, *args)
        pending.wait(math.inf)
        return pending.result()

    def begin(self, name: str, *args: Any) -> Pending[Any]:
        """Start a call of a method on every rank."""
        check()
        # `put` once: as an argument of each call the batch would be copied for every rank.
        return self._start([ray.put(args)] * self.size, name, f"done its part of `{name}`")

    def first(self, name: str, *args: Any) -> Any:
        """Call a method on rank 0 alone."""
        return self._call([args], name, f"done its part of `{name}`").result()

    def weights(self, plan: Plan) -> StoredWeights:
        """Put the current weights into the object store, and return references to them."""
        arguments, what = [(self._transport.bucket_mib,)] * self.size, "put its weights into the object store"
        found = self._call(arguments, "stored_weights", what).found
        # The ranks took turns with the buckets: sorting by number restores the model's order.
        buckets = sorted((bucket for of_rank in found.values() for bucket in of_rank), key=lambda b: b[0])
        return StoredWeights((bucket for _, bucket in buckets), self._timeouts.weights)

    def send(self, *args: Any) -> None:
        """Make rank 0 broadcast weights to the generators (`ray_weights.Send`), without waiting for it."""
        self._start([args], "send", "sent the weights", math.inf)

    def watch(self, stop: threading.Event, report: Callable[[int, int], None]) -> None:
        """Stop all ranks once `stop` is set; `report` is never called, as micro-batches run elsewhere."""
        self._stop = stop

    def poll(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for messages of ranks, and handle them."""
        with self._lock:
            if self._stop is not None and self._stop.is_set():
                self._stop = None  # once
                for actor in self.actors:
                    actor.send((next(self._numbers), STOP, ()))
            super().poll(timeout)
            for calls in list(self._calls.values()):
                if self._clock.now() > calls.ends:
                    worker = next(worker for worker in self._workers if worker.number not in calls.found)
                    why = f"it has not {calls.what} within {calls.limit:g} s"
                    self._lose(worker, self.actors[worker.number].lost(why))

    def _received(self, worker: PoolWorker, message: Message) -> None:
        number, value = message.value
        if (calls := self._calls.get(number)) is None:  # another rank has already raised the same error
            return
        if message.kind == "raised":
            del self._calls[number]
            raise value
        calls.found[worker.number] = value
        if len(calls.found) == calls.n:
            del self._calls[number]

    def _lose(self, worker: PoolWorker, error: WorkerLostError) -> None:
        cause = self._first_loss() or error
        self.kill()  # the other ranks cannot continue without it
        raise LearnerLostError(str(cause), cause.who, cause.node, error.at) from error

    def _call(self, arguments: Sequence[Any], method: str, what: str) -> RankCalls:
        calls = self._start(arguments, method, what)
        calls.wait()
        return calls

    def _start(
        self, arguments: Sequence[Any], method: str, what: str, limit: float | None = None
    ) -> RankCalls:
        """Call a method on the first ranks, each with its `arguments`, within `limit` or `timeouts.step`."""
        number, limit = next(self._numbers), self._timeouts.step if limit is None else limit
        calls = RankCalls(self, len(arguments), what, limit, self._clock.now() + limit)
        self._calls[number] = calls
        for actor, args in zip(self.actors, arguments, strict=False):
            actor.send((number, method, args))
        return calls

    def _first_loss(self) -> WorkerLostError | None:
        """Return the loss of the rank that died, if one did; others report their lost connections to it."""
        ends = time.monotonic() + _AFTERMATH
        while time.monotonic() < ends:
            for actor in self.actors:
                try:  # raises only if the rank died, not if it failed
                    actor.receive()
                except WorkerLostError as error:
                    return error
            time.sleep(_AFTERMATH / 50)
        return None


class RayLearner(LearnerGroup):
    """The learner whose ranks are actors; published weights stay in the object store until they are fetched.

    Raises:
        InputError: the model cannot be loaded or sharded.
        LearnerLostError: (by any method) a rank was lost.
    """

    def __init__(self, recipe: Recipe, model_folder: str, session: Session, events: Timeline) -> None:
        cluster = recipe.on_cluster
        self._actors = RayRanks(cluster, session, recipe.learner.timeout, events)
        self.address = self._actors.actors[0].node.split()[1]
        """Address of the node of rank 0."""
        self.send = self._actors.send
        super().__init__(self._actors, recipe, model_folder)

    def check_life(self) -> None:
        """Check that all ranks are alive, for a driver that waits for something else."""
        self._actors.poll(0.0)

    def close(self) -> None:
        """Kill the ranks."""
        self._actors.kill()
