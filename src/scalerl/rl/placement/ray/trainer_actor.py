"""A rank of the learner that is sharded over Ray actors: `LearnerRank`, reached by remote calls.

All ranks do everything at once, but for heartbeats and the calls of the first rank alone.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
import torch
import torch.distributed as dist

from scalerl.rl.learner.fsdp.group import LearnerRank
from scalerl.rl.sync.broadcast import BroadcastGroup, send
from scalerl.rl.sync.buckets import in_buckets
from scalerl.rl.sync.object_store import Bucket, StoredWeights, put
from scalerl.rl.workers.ranks import meet, store_at
from scalerl.rl.workers.ray.actors import WorkerActor

THREADS = {"life": 1, "first": 1, "send": 1}
"""Threads beside the one that trains: for heartbeats, for the disk, and for a broadcast."""


class TrainerActor(WorkerActor):
    """Holds a shard of the learner, and takes part in what all ranks do."""

    def address_to_meet(self) -> str:
        """Return a free address of this node, at which the ranks find each other; called on the first."""
        address = ray.util.get_node_ip_address()
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
