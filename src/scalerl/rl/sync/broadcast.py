"""Weights by PyTorch's broadcast, in a process group apart from the learner's own.

    sender      rank 0: fetches a bucket from the object store, broadcasts it, and goes on to the next
    receivers   the generators: a thread of each receives copies while it decodes

A new group is made when its members change. With NCCL the buckets travel between GPUs.

A member that is lost in the middle of a version makes the broadcast fail for the others: at once where its
connections are closed, else after the group's timeout. They abort the group and live on; the receivers fetch
this version from the object store, and the next one is broadcast in a group without the lost member.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from scalerl.errors import brief_error
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.buckets import size_of, views
from scalerl.rl.types import Plan
from scalerl.rl.workers.ranks import store_at

if TYPE_CHECKING:
    from scalerl.rl.sync.object_store import StoredWeights

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
        """Abort the group, and close its connections: the broadcasts that others wait for in it fail."""
        last, cls._last = cls._last, None
        if last is not None:
            last[1].abort()

    def __init__(self, group: BroadcastGroup, rank: int) -> None:
        limit = timedelta(seconds=group.seconds)
        c10d: Any = torch.distributed  # its stubs lack some of this
        self._store = store_at(group.address, group.port, group.size, rank == 0, group.seconds)
        self.device = torch.device("cuda" if group.kind == "nccl" else "cpu")
        self._limit = limit
        if group.kind == "nccl":
            with _errors_are_raised():
                self._group = c10d.ProcessGroupNCCL(self._store, rank, group.size, limit)
            return
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(group.address))]
        self._group = c10d.ProcessGroupGloo(self._store, rank, group.size, options)

    def abort(self) -> None:
        """End what is under way in the group; it cannot be used any more."""
        self._group.abort()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor from rank 0, in place; return when it has arrived.

        Raises:
            RuntimeError: a member is lost, or was silent for the group's timeout.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # With a time limit NCCL, too, waits here, and raises what went wrong.
        self._group.broadcast([tensor], options).wait(self._limit)


@contextmanager
def _errors_are_raised() -> Iterator[None]:
    """Have a group of NCCL that is made meanwhile abort on a lost member, and leave the process alone.

    By default PyTorch's watchdog ends the process: the trainer with a generator. 2 is `CleanUpOnly` of
    torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, read as a group is made. The learner's own group, whose
    ranks are lost together, keeps the default.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({name: before} if before is not None else {})


def _own_address(address: str) -> str:
    """Return the address of this machine by which it reaches another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect((address, 1))
        return probe.getsockname()[0]


class WeightSender:
    """Sends one version after another, in a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")

    def send(self, group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
        """Start to send; a receiver reports by itself what it did not receive."""
        self._thread.submit(send, group, weights, version)

    def close(self) -> None:
        """Stop the thread, and a broadcast under way."""
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
