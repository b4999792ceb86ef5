"""Weights from the learner to the generators of a cluster.

The weights are first put into Ray's object store, in buckets. From there

    ObjectStore   every generator fetches them by itself, from any node that has them; within a node they are
                  in shared memory
    Broadcast     one process fetches them bucket by bucket and broadcasts each to all generators, in a group
                  other than the learner's, by gloo, or by NCCL between GPUs. A thread of each generator
                  receives copies while it decodes

A generator that joined later or missed a broadcast fetches the latest weights from the object store. The next
version is then broadcast in a new group of the current generators. If a member is lost during a broadcast,
this fails for the others: at once if the member's connections are closed, otherwise after the group's
timeout. They abort the group and continue.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from torch import Tensor

from scalerl.errors import LearnerLostError, brief_error
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.buckets import in_buckets, packed, side_stream, size_of, views
from scalerl.rl.sync.shared_weights import WeightTransport
from scalerl.rl.types import Plan, Weights
from scalerl.rl.workers.ranks import free_port, store_at
from scalerl.rl.workers.ray.cluster_watch import check

_LOG = logging.getLogger("scalerl")
Bucket = tuple[Plan, Any]
"""The plan of some tensors, and a reference to the bytes that they are packed in."""


class StoredWeights:
    """A model's weights, fetched from the object store when they are read; see `scalerl.rl.types.Weights`.

    Ray keeps them as long as a process has these references and the process that put them lives. A message
    has a single reference to all buckets, because Ray counts every reference in every message.

    Raises (when the weights are read):
        LearnerLostError: a bucket did not arrive in time, or was lost with the process that put it.
    """

    def __init__(self, buckets: Iterable[Bucket], seconds: float) -> None:
        """Put the list of buckets into the store; fetching a bucket times out after `seconds`."""
        self._found: list[Bucket] | None = list(buckets)
        # Put now, not in `__getstate__`: Ray loses track of references put while it serialises an object.
        self._posted, self._seconds = ray.put(self._found), seconds

    def __getstate__(self) -> tuple[Any, float]:
        return self._posted, self._seconds

    def __setstate__(self, state: tuple[Any, float]) -> None:
        self._posted, self._seconds = state
        self._found = None

    @property
    def _buckets(self) -> list[Bucket]:
        found = self._found = self._get(self._posted) if self._found is None else self._found
        return found

    @property
    def plan(self) -> Plan:
        """Names, shapes and dtypes, in the order of the buckets."""
        return tuple(spec for plan in self.layout for spec in plan)

    @property
    def layout(self) -> list[Plan]:
        """The plan of each bucket."""
        return [plan for plan, _ in self._buckets]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for plan, flat in self.buckets():
            yield from views(plan, flat).items()

    def buckets(self) -> Iterator[tuple[Plan, Tensor]]:
        """Yield plan and bytes of each bucket."""
        for plan, ref in self._buckets:
            yield plan, self._bytes(ref)

    def fetch(self) -> WeightStream:
        """Return all weights in this process's memory."""
        # Every node starts with another bucket: if all fetched the same one first, no other node would have
        # a copy to pass on, and the process that put it would send it to each of them.
        first = int(ray.get_runtime_context().get_node_id(), 16) % max(len(self._buckets), 1)
        found: dict[str, Tensor] = {}
        for plan, ref in [*self._buckets[first:], *self._buckets[:first]]:
            found |= views(plan, self._bytes(ref))
        return WeightStream.of(found)

    def _bytes(self, ref: Any) -> Tensor:
        # A copy: Ray returns a read-only view of its shared memory, which pins the bucket there.
        return torch.from_numpy(np.array(self._get(ref)))

    def _get(self, ref: Any) -> Any:
        try:
            # With a timeout: Ray waits forever for an object whose owner hangs.
            return ray.get(ref, timeout=self._seconds)
        except RayError as error:
            raise LearnerLostError(f"weights do not come from the learner ({brief_error(error)})") from error


def put(bucket: dict[str, Tensor]) -> Bucket:
    """Put a bucket into the object store."""
    plan, flat = packed(bucket)
    # As a NumPy array: Ray stores arrays in shared memory without another copy, but pickles tensors.
    return plan, ray.put(flat.cpu().numpy())


def store(weights: Weights, bucket_mib: float, seconds: float) -> StoredWeights:
    """Put weights into the object store bucket by bucket, unless they are already there."""
    # The ranks of a learner on actors have already put their weights into the store.
    if isinstance(weights, StoredWeights):
        return weights
    check()
    return StoredWeights(map(put, in_buckets(weights, bucket_mib)), seconds)


@dataclass(frozen=True)
class BroadcastGroup:
    """The process group of a broadcast, with `size` members; the sender listens at `address` and `port`."""

    kind: str
    address: str
    port: int
    size: int
    seconds: float


class Joined:
    """Membership in a group; the last one is kept for the next broadcast."""

    _last: tuple[BroadcastGroup, Joined] | None = None

    @classmethod
    def of(cls, group: BroadcastGroup, rank: int) -> Joined:
        """Return this process's membership in `group`; join the group unless it is the last one joined."""
        if cls._last is None or cls._last[0] != group:
            cls._last = None  # leaves the old group first
            cls._last = group, cls(group, rank)
        return cls._last[1]

    @classmethod
    def leave(cls) -> None:
        """Abort the group and close its connections, so that pending broadcasts of other members fail."""
        last, cls._last = cls._last, None
        if last is not None:
            last[1].abort()

    def __init__(self, group: BroadcastGroup, rank: int) -> None:
        self._limit = limit = timedelta(seconds=group.seconds)
        c10d: Any = dist  # its stubs lack some of this
        self._store = store_at(group.address, group.port, group.size, rank == 0, group.seconds)
        self.device = torch.device("cuda" if group.kind == "nccl" else "cpu")
        self._stream: torch.cuda.Stream | None = None
        if group.kind == "nccl":
            self._stream = side_stream(torch.cuda.current_device())
            with _waits_raise_errors():
                self._group = c10d.ProcessGroupNCCL(self._store, rank, group.size, limit)
            return
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(group.address))]
        self._group = c10d.ProcessGroupGloo(self._store, rank, group.size, options)

    def abort(self) -> None:
        """Abort pending broadcasts; the group cannot be used afterwards."""
        self._group.abort()

    def aside(self) -> torch.cuda.StreamContext:
        """Return a context whose GPU work neither waits for work on the default stream nor delays it."""
        return torch.cuda.stream(self._stream)  # does nothing on a CPU

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor from rank 0, in place; return when it has arrived.

        Raises:
            RuntimeError: a member is lost, or has not responded within the group's timeout.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._stream is not None:
            # Wait for queued work that makes the tensor or that used its memory before.
            self._stream.wait_stream(torch.cuda.current_stream())
        # Aside, as `wait` makes the current stream wait for the slowest member, or for a lost one. With a
        # limit NCCL also waits here and raises its error, so that no other stream has to wait for it.
        with self.aside():
            self._group.broadcast([tensor], options).wait(self._limit)


@contextmanager
def _waits_raise_errors() -> Iterator[None]:
    """Let an NCCL group made in this context abort when a member is lost, without ending the process.

    By default PyTorch's watchdog ends the process, so a lost generator would end the trainer. With blocking
    waits a group has no watchdog, and `wait` itself aborts and raises. The variable is read when a group is
    made (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). TORCH_NCCL_ASYNC_ERROR_HANDLING=2 is not enough:
    any group's watchdog makes the monitor of the process's first group write a dump and abort the process
    minutes later. The learner's own group, whose ranks are lost together, keeps the default.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        os.environ.update({name: before} if before is not None else {})


def _own_address(address: str) -> str:
    """Return the address of this machine from which it reaches `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((address, 1))
        return probe.getsockname()[0]


def send(group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
    """Broadcast all buckets; a failure is logged, and the receivers fail too."""
    try:
        joined = Joined.of(group, 0)
        with joined.aside():  # otherwise the copies would wait for queued training
            # The version first: a receiver that missed one broadcast would otherwise mistake the next for it.
            joined.broadcast(torch.tensor([version], device=joined.device))
            for _, flat in weights.buckets():
                joined.broadcast(flat.to(joined.device))
    except Exception as error:
        Joined.leave()
        _LOG.warning("version %d of the weights was not broadcast (%s)", version, brief_error(error))


@dataclass(frozen=True)
class Incoming:
    """The message that announces a broadcast to a generator, in place of weights."""

    group: BroadcastGroup
    rank: int
    layout: Sequence[Plan]
    """The plan of each bucket."""
    version: int

    def fetch(self) -> WeightStream:
        """Receive the weights onto this process's device.

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
            # Not aside: the engine's stream uses this memory, so it must be allocated on that stream.
            for plan in self.layout:
                flat = torch.empty(size_of(plan), dtype=torch.uint8, device=joined.device)
                joined.broadcast(flat)
                received |= views(plan, flat)
        except Exception:
            Joined.leave()
            raise
        return WeightStream.of(received)


Send = Callable[[BroadcastGroup, StoredWeights, int], Any]


class ObjectStore(WeightTransport):
    """The transport by which every generator fetches the weights from the object store by itself."""

    def __init__(self, bucket_mib: float, seconds: float) -> None:
        self._bucket_mib, self._seconds = bucket_mib, seconds

    def publish(self, weights: Weights, version: int) -> None:
        """See `WeightTransport`."""
        self.current = store(weights, self._bucket_mib, self._seconds)

    def for_one(self) -> StoredWeights:
        """See `WeightTransport`."""
        return self.current


class Broadcast(ObjectStore):
    """The transport by which one process broadcasts the weights to all generators."""

    def __init__(
        self,
        kind: str,
        bucket_mib: float,
        seconds: float,
        heartbeat: float,
        address: str,
        send_there: Send | None,
    ) -> None:
        """Broadcast by `send_there` from another process at `address`, or else by a thread of this process.

        A bucket times out after only `heartbeat` seconds, because a member that hangs delays all others.
        """
        super().__init__(bucket_mib, seconds)
        self._kind, self._address, self._heartbeat = kind, address, heartbeat
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._send: Send = send_there or partial(self._thread.submit, send)
        self._group: BroadcastGroup | None = None
        self._receivers: list[int] = []

    def for_all(self, receivers: Sequence[int], version: int) -> list[Incoming]:
        """Start a broadcast; return the message that announces it to each generator."""
        if not receivers:
            return []
        # A collective needs exactly its members: after a change of workers the others would wait forever.
        if self._group is None or self._receivers != list(receivers):
            port = free_port(self._address)
            self._group = BroadcastGroup(self._kind, self._address, port, len(receivers) + 1, self._heartbeat)
            self._receivers = list(receivers)
        # Sending first blocks nothing: another thread or actor waits there until the receivers join.
        self._send(self._group, self.current, version)
        layout = self.current.layout
        return [Incoming(self._group, rank + 1, layout, version) for rank in range(len(receivers))]

    def failed(self) -> None:
        """Make a new group for the next version, because a member of this one failed."""
        self._group = None

    def close(self) -> None:
        """Stop the thread and a broadcast in progress in it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        Joined.leave()


def transport_of(cluster: Any, learner: Any) -> ObjectStore:
    """Return the transport that `[cluster]` sets, for a learner in this process or on actors."""
    kind, bucket_mib, timeouts = cluster.transport.kind, cluster.transport.bucket_mib, cluster.timeouts
    if kind == "object_store":
        return ObjectStore(bucket_mib, timeouts.weights)
    send = getattr(learner, "send", None)
    # A learner on actors sends from its first rank, so that weights do not pass through the driver.
    address = learner.address if send else ray.util.get_node_ip_address()
    return Broadcast(kind, bucket_mib, timeouts.weights, timeouts.heartbeat, address, send)
