"""How weights get from the learner to the generators.

Whatever the transport, the weights are in Ray's object store first, in buckets. From there

    ObjectStore   every generator fetches them by itself, when it can, from any node that has them; within a
                  node that is shared memory
    Broadcast     one process fetches them, bucket by bucket, and broadcasts them to all generators at once in
                  a process group of PyTorch's (`scalerl.rl.sync.broadcast`), by gloo or by NCCL

A generator that has come since, or that a broadcast did not reach, fetches what is current from the object
store; the next version goes to a new group of those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from scalerl.rl.sync.broadcast import BroadcastGroup, Incoming, WeightSender, free_port
from scalerl.rl.sync.object_store import Posted, StoredWeights, store
from scalerl.rl.types import Weights

Send = Callable[[BroadcastGroup, StoredWeights, int], None]


class ObjectStore:
    """Every generator fetches for itself."""

    def __init__(self, bucket_mib: float, seconds: float) -> None:
        self._bucket_mib, self._seconds = bucket_mib, seconds

    def publish(self, weights: Weights, version: int) -> None:
        """These are the weights of the day."""
        self.current = store(weights, self._bucket_mib, self._seconds)
        # One reference for all buckets, as Ray counts every reference of every message.
        self._posted = Posted.of(self.current, self._seconds)

    def for_one(self) -> Any:
        """What a generator is sent that fetches for itself."""
        return self._posted

    def for_all(self, receivers: Sequence[int], version: int) -> list[Any]:
        """What each of all generators is sent; who they are is told by numbers that are never used again."""
        return [self._posted for _ in receivers]

    def failed(self) -> None:
        """A generator did not get what it was sent."""

    def close(self) -> None:
        """Nothing is held."""


class Broadcast(ObjectStore):
    """One process sends to all."""

    def __init__(
        self,
        kind: str,
        bucket_mib: float,
        seconds: float,
        heartbeat: float,
        address: str,
        send: Send | None,
    ) -> None:
        """`send` sends from elsewhere, which is at `address`; without it this process does.

        A broadcast of one bucket may take `heartbeat` seconds, so that nobody waits for long for who hangs.
        """
        super().__init__(bucket_mib, seconds)
        self._kind, self._address, self._heartbeat = kind, address, heartbeat
        self._here = None if send else WeightSender()
        self._send: Send = send or self._here_by_thread
        self._group: BroadcastGroup | None = None
        self._receivers: list[int] = []

    def for_all(self, receivers: Sequence[int], version: int) -> list[Any]:
        """What each is sent: that it is to receive a broadcast, which begins."""
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
        """The group has lost somebody: the next version has another."""
        self._group = None

    def close(self) -> None:
        """End the thread."""
        if self._here is not None:
            self._here.close()

    def _here_by_thread(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        assert self._here is not None
        self._here.send(group, weights, version)


def transport_of(cluster: Any, learner: Any) -> ObjectStore:
    """The transport of `[cluster]`; a learner on actors sends from its first rank."""
    kind, bucket_mib, timeouts = cluster.transport.kind, cluster.transport.bucket_mib, cluster.timeouts
    if kind == "object_store":
        return ObjectStore(bucket_mib, timeouts.weights)
    send = getattr(learner, "send", None)
    # A learner on actors sends from its first rank, so that no weights go through the driver.
    address = learner.address if send else ray.util.get_node_ip_address()
    return Broadcast(kind, bucket_mib, timeouts.weights, timeouts.heartbeat, address, send)
