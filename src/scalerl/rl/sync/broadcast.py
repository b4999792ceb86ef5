"""Weights by PyTorch's broadcast, in a process group apart from the learner's own.

    sender      rank 0: fetches a bucket from the object store, broadcasts it, and goes on to the next
    receivers   the generators: a thread of each receives copies while it decodes

A new group is made when its members change. With NCCL the buckets travel between GPUs.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from scalerl.errors import brief_error
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.buckets import size_of, views
from scalerl.rl.sync.object_store import StoredWeights
from scalerl.rl.types import Plan
from scalerl.rl.workers.ranks import store_at

_LOG = logging.getLogger("scalerl")
Layout = Sequence[Plan]
"""The plan of each bucket."""


@dataclass(frozen=True)
class BroadcastGroup:
    """The group of a broadcast: `size` members, of which the sender listens at `address` and `port`."""

    kind: str
    address: str
    port: int
    size: int
    seconds: float


class Joined:
    """Membership in a group; that of the group joined last is kept for the next broadcast."""

    _last: tuple[BroadcastGroup, Joined] | None = None

    @classmethod
    def of(cls, group: BroadcastGroup, rank: int) -> Joined:
        """Return the membership of this process in `group`, which it joins once."""
        if cls._last is None or cls._last[0] != group:
            cls._last = None  # leaves the old group first
            cls._last = group, cls(group, rank)
        return cls._last[1]

    @classmethod
    def leave(cls) -> None:
        """Leave the group: the broadcasts that others wait for in it fail."""
        cls._last = None

    def __init__(self, group: BroadcastGroup, rank: int) -> None:
        limit = timedelta(seconds=group.seconds)
        c10d: Any = torch.distributed  # its stubs lack some of this
        self._store = store_at(group.address, group.port, group.size, rank == 0, group.seconds)
        self.device = torch.device("cuda" if group.kind == "nccl" else "cpu")
        self._limit = limit
        if group.kind == "nccl":
            self._group = c10d.ProcessGroupNCCL(self._store, rank, group.size, limit)
            return
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=ray.util.get_node_ip_address())]
        self._group = c10d.ProcessGroupGloo(self._store, rank, group.size, options)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor from rank 0, in place; return when it has arrived."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait(self._limit)


class WeightSender:
    """Sends one version after another, in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._latest: Future[None] | None = None

    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Start to send; a receiver reports by itself what it did not receive."""
        self._latest = self._thread.submit(send, group, weights, version)

    def close(self) -> None:
        """Stop the thread without waiting for a broadcast under way, whose receivers are gone."""
        # A collective whose peers are gone returns only at its timeout.
        self._thread.shutdown(wait=False, cancel_futures=True)
        Joined.leave()


def send(group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
    """Broadcast all buckets; a failure is logged, and the receivers fail too."""
    try:
        joined = Joined.of(group, 0)
        # The version first: a receiver that was lost for one broadcast would else take the next one for it.
        joined.broadcast(torch.tensor([version], device=joined.device))
        for _, flat in weights.buckets():
            joined.broadcast(flat.to(joined.device))
    except Exception as error:
        Joined.leave()
        _LOG.warning("version %d of the weights was not broadcast (%s)", version, brief_error(error))


@dataclass(frozen=True)
class Incoming:
    """The message that announces a broadcast to a generator, in the place of weights."""

    group: BroadcastGroup
    rank: int
    layout: Layout
    version: int

    def fetch(self) -> WeightStream:
        """Receive the weights, which are on this process's device then.

        Raises:
            Exception: the broadcast failed; this process has left the group.
        """
        try:
            joined = Joined.of(self.group, self.rank)
            version = torch.zeros(1, dtype=torch.int64, device=joined.device)
            joined.broadcast(version)
            if int(version) != self.version:
                raise RuntimeError(f"version {int(version)} came in place of {self.version}")
            received: dict[str, torch.Tensor] = {}
            for plan in self.layout:
                flat = torch.empty(size_of(plan), dtype=torch.uint8, device=joined.device)
                joined.broadcast(flat)
                received |= views(plan, flat)
        except Exception:
            Joined.leave()
            raise
        return WeightStream.of(received)


def free_port(address: str) -> int:
    """Return a port that is free at this moment; for an address of another machine, one that is free here."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:  # the address is another machine's
            probe.bind(("", 0))
        return probe.getsockname()[1]
