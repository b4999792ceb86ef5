"""Transports of weights from the learner to the generators of a cluster.

With either, the weights are first put into Ray's object store, in buckets. From there

    ObjectStore   every generator fetches them by itself, from any node that has them; within a node they are
                  in shared memory
    Broadcast     one process fetches them, bucket by bucket, and broadcasts them to all generators at once in
                  a process group of PyTorch (`scalerl.rl.sync.broadcast`), by gloo or by NCCL

A generator that has joined since, or that missed a broadcast, fetches the latest weights from the object
store; the next version is broadcast in a new group of the generators that there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ray

from scalerl.rl.sync.broadcast import BroadcastGroup, Incoming, WeightSender
from scalerl.rl.sync.object_store import Posted, StoredWeights, store
from scalerl.rl.types import Weights
from scalerl.rl.workers.ranks import free_port

Send = Callable[[BroadcastGroup, StoredWeights, int], None]


class ObjectStore:
    """Every generator fetches the weights by itself."""

    def __init__(self, bucket_mib: float, seconds: float) -> None:
        self._bucket_mib, self._seconds = bucket_mib, seconds

    def publish(self, weights: Weights, version: int) -> None:
        """Make these the latest weights."""
        self.current = store(weights, self._bucket_mib, self._seconds)
        # One reference for all buckets, as Ray counts every reference of every message.
        self._posted = Posted.of(self.current, self._seconds)

    def for_one(self) -> Any:
        """Return the message to one generator, which fetches the latest weights by itself."""
        return self._posted

    def for_all(self, receivers: Sequence[int], version: int) -> list[Any]:
        """Return the message to each of all generators, which have numbers that are never used again."""
        return [self._posted for _ in receivers]

    def failed(self) -> None:
        """Note that a generator did not receive the weights."""

    def close(self) -> None:
        """Do nothing: no thread or connection is held."""


class Broadcast(ObjectStore):
    """One process broadcasts to all generators."""

    def __init__(
        self,
        kind: str,
        bucket_mib: float,
        seconds: float,
        heartbeat: float,
        address: str,
        send: Send | None,
    ) -> None:
        """`send` broadcasts from another process, at `address`; without it this process does.

        The timeout of one bucket is `heartbeat` seconds, as one that hangs holds up all members.
        """
        super().__init__(bucket_mib, seconds)
        self._kind, self._address, self._heartbeat = kind, address, heartbeat
        self._here = None if send else WeightSender()
        self._send: Send = send or self._here.send  # pyright: ignore[reportOptionalMemberAccess]
        self._group: BroadcastGroup | None = None
        self._receivers: list[int] = []

    def for_all(self, receivers: Sequence[int], version: int) -> list[Any]:
        """Start a broadcast, and return the message that announces it to each generator."""
        if not receivers:
            return []
        # A collective needs exactly its members: one that has come or gone would leave all others waiting.
        if self._group is None or self._receivers != list(receivers):
            port = free_port(self._address)
            self._group = BroadcastGroup(self._kind, self._address, port, len(receivers) + 1, self._heartbeat)
            self._receivers = list(receivers)
        # Begun before the receivers are told: it waits for them elsewhere, in a thread or on an actor.
        self._send(self._group, self.current, version)
        layout = self.current.layout
        return [Incoming(self._group, rank + 1, layout, version) for rank in range(len(receivers))]

    def failed(self) -> None:
        """Have a new group for the next version: a member of this one is lost."""
        self._group = None

    def close(self) -> None:
        """Stop the thread."""
        if self._here is not None:
            self._here.close()


def transport_of(cluster: Any, learner: Any) -> ObjectStore:
    """Return the transport of `[cluster]`."""
    kind, bucket_mib, timeouts = cluster.transport.kind, cluster.transport.bucket_mib, cluster.timeouts
    if kind == "object_store":
        return ObjectStore(bucket_mib, timeouts.weights)
    send = getattr(learner, "send", None)
    # A learner on actors sends from its first rank, so that no weights go through the driver.
    address = learner.address if send else ray.util.get_node_ip_address()
    return Broadcast(kind, bucket_mib, timeouts.weights, timeouts.heartbeat, address, send)
