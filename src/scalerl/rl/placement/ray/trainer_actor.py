"""A rank of the learner that is sharded over Ray actors: `LearnerRank`, reached by remote calls.

All ranks do everything at once, but for `ping` and what is asked of the first alone.
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
from scalerl.rl.workers.ray.session import here

GROUPS = {"life": 1, "first": 1, "send": 1}
"""Threads beside the one that trains: for signs of life, for the disk, and for a broadcast."""


class TrainerActor:
    """Holds a shard of the learner, and takes part in what all ranks do."""

    def where(self) -> tuple[str, int]:
        """Node and process."""
        return here()

    def meeting(self) -> str:
        """Where the ranks meet, asked of the first: an address of its node that nobody listens at."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"{address}:{probe.getsockname()[1]}"

    def meet(self, rank: int, world: int, meeting: str, seconds: float) -> None:
        """Wait for the others; none waits for another for more than so many seconds, now or later."""
        torch.set_num_threads(1)
        if meeting.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        address, _, port = meeting.rpartition(":")
        store = store_at(address, int(port), world, rank == 0, seconds)
        meet(seconds, store=store, rank=rank, world_size=world)
        self._rank = LearnerRank()

    @ray.method(concurrency_group="life")
    def ping(self) -> None:
        """A heartbeat."""

    def all(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """A method of `LearnerRank`, which all ranks call; the first returns what it does."""
        found = getattr(self._rank, name)(*arguments)
        return found if dist.get_rank() == 0 else None

    @ray.method(concurrency_group="first")
    def first(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """A method that only the first rank calls, while all train."""
        return getattr(self._rank, name)(*arguments)

    def stored_weights(self, bucket_mib: float) -> list[tuple[int, Bucket]]:
        """The buckets that this rank has put into the object store: number of each, and where it is.

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
