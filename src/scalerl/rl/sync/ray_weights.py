"""Weights from the learner to the generators of a cluster.

The weights are first put into Ray's object store, in buckets. From there

    ObjectStore   every generator fetches them by itself, from any node that has them; within a node they are
                  in shared memory
    Broadcast     one process fetches them, bucket by bucket, and broadcasts each to all generators at once in
                  a process group of PyTorch apart from the learner's own, by gloo, or by NCCL between GPUs. A
                  thread of each generator receives copies while it decodes

A generator that has joined since, or that missed a broadcast, fetches the latest weights from the object
store; the next version is broadcast in a new group of the generators that there are. A member that is lost in
the middle of a version makes the broadcast fail for the others: at once where its connections are closed,
else after the group's timeout. They abort the group, and live on.
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
"""The plan of some tensors, and the reference to the bytes that they are packed in."""


class StoredWeights:
    """A model's weights, fetched from the object store when they are read; see `scalerl.rl.types.Weights`.

    Ray keeps them as long as a process has these references, and the process that put them lives. A message
    has one reference to all of them, as Ray counts every reference of every message.

    Raises (as they are read):
        LearnerLostError: a bucket did not come in time, or was lost with the process that put it.
    """

    def __init__(self, buckets: Iterable[Bucket], seconds: float) -> None:
        """`seconds` is the timeout of the fetch of a bucket."""
        self._found: list[Bucket] | None = list(buckets)
        # Not as it is sent: to put an object in the middle of another would lose track of its references.
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
        """Return all weights in the memory of this process."""
        # Every node begins with another bucket: the same one for all would be sent to each of them by the
        # process that put it, as no node would have a copy yet to pass on.
        first = int(ray.get_runtime_context().get_node_id(), 16) % max(len(self._buckets), 1)
        found: dict[str, Tensor] = {}
        for plan, ref in [*self._buckets[first:], *self._buckets[:first]]:
            found |= views(plan, self._bytes(ref))
        return WeightStream.of(found)

    def _bytes(self, ref: Any) -> Tensor:
        # A copy: what Ray returns is a read-only view of its shared memory, and pins the bucket there.
        return torch.from_numpy(np.array(self._get(ref)))

    def _get(self, ref: Any) -> Any:
        try:
            # With a timeout, as the owner of an object may hang, for which Ray waits without end.
            return ray.get(ref, timeout=self._seconds)
        except RayError as error:
            raise LearnerLostError(f"weights do not come from the learner ({brief_error(error)})") from error


def put(bucket: dict[str, Tensor]) -> Bucket:
    """Put a bucket into the object store."""
    plan, flat = packed(bucket)
    # As an array: Ray has those of NumPy in shared memory without a copy more, and pickles tensors.
    return plan, ray.put(flat.cpu().numpy())


def store(weights: Weights, bucket_mib: float, seconds: float) -> StoredWeights:
    """Put weights into the object store bucket by bucket, unless they are there already."""
    # Weights of a learner on actors are in the store already, bucket by bucket from its ranks.
    if isinstance(weights, StoredWeights):
        return weights
    check()
    return StoredWeights(map(put, in_buckets(weights, bucket_mib)), seconds)


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
        """End what is under way in the group; it cannot be used any more."""
        self._group.abort()

    def aside(self) -> torch.cuda.StreamContext:
        """Return a context in which a GPU's work neither waits for what is queued, nor holds it up."""
        return torch.cuda.stream(self._stream)  # nothing on a CPU

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor from rank 0, in place; return when it has arrived.

        Raises:
            RuntimeError: a member is lost, or was silent for the group's timeout.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._stream is not None:
            # What makes the tensor, or used its memory before, was queued by now.
            self._stream.wait_stream(torch.cuda.current_stream())
        # Aside, as `wait` has the current stream wait for the slowest member, or for one that is lost. With a
        # time limit NCCL, too, waits here, and raises what went wrong: no other stream has to wait after it.
        with self.aside():
            self._group.broadcast([tensor], options).wait(self._limit)


@contextmanager
def _waits_raise_errors() -> Iterator[None]:
    """Have a group of NCCL that is made meanwhile abort on a lost member, and leave the process alone.

    By default PyTorch's watchdog ends the process: the trainer with a generator. With blocking waits a group
    has no watchdog, and `wait` itself aborts and raises (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
    which reads it as a group is made). TORCH_NCCL_ASYNC_ERROR_HANDLING=2 is not enough: the watchdog of any
    group has the monitor of the process's first one write a dump, and abort the process minutes later. The
    learner's own group, whose ranks are lost together, keeps the default.
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
    """Return the address of this machine by which it reaches another."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
        probe.connect((address, 1))
        return probe.getsockname()[0]


def send(group: BroadcastGroup, weights: StoredWeights, version: int) -> None:
    """Broadcast all buckets; a failure is logged, and the receivers fail too."""
    try:
        joined = Joined.of(group, 0)
        with joined.aside():  # the copies, too, would wait for the training that is queued
            # The version first: a receiver that was lost for one broadcast would else take the next for it.
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
    layout: Sequence[Plan]
    """The plan of each bucket."""
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
            # Not aside: the engine uses this memory on its own stream, of which it has to be.
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
    """Every generator fetches the weights by itself."""

    def __init__(self, bucket_mib: float, seconds: float) -> None:
        self._bucket_mib, self._seconds = bucket_mib, seconds

    def publish(self, weights: Weights, version: int) -> None:
        """See `WeightTransport`."""
        self.current = store(weights, self._bucket_mib, self._seconds)

    def for_one(self) -> StoredWeights:
        """See `WeightTransport`."""
        return self.current


class Broadcast(ObjectStore):
    """One process broadcasts to all generators."""

    def __init__(
        self,
        kind: str,
        bucket_mib: float,
        seconds: float,
        heartbeat: float,
        address: str,
        send_there: Send | None,
    ) -> None:
        """`send_there` broadcasts from another process, at `address`; without it a thread of this one does.

        The timeout of one bucket is `heartbeat` seconds, as one that hangs holds up all members.
        """
        super().__init__(bucket_mib, seconds)
        self._kind, self._address, self._heartbeat = kind, address, heartbeat
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._send: Send = send_there or partial(self._thread.submit, send)
        self._group: BroadcastGroup | None = None
        self._receivers: list[int] = []

    def for_all(self, receivers: Sequence[int], version: int) -> list[Incoming]:
        """Start a broadcast, and return the message that announces it to each generator."""
        if not receivers:
            return []
        # A collective needs exactly its members: one that has come or gone would leave all others waiting.
        if self._group is None or self._receivers != list(receivers):
            port = free_port(self._address)
            self._group = BroadcastGroup(self._kind, self._address, port, len(receivers) + 1, self._heartbeat)
            self._receivers = list(receivers)
        # The broadcast starts before its receivers know of it. It waits for them in its own thread or actor.
        self._send(self._group, self.current, version)
        layout = self.current.layout
        return [Incoming(self._group, rank + 1, layout, version) for rank in range(len(receivers))]

    def failed(self) -> None:
        """Have a new group for the next version: a member of this one is lost."""
        self._group = None

    def close(self) -> None:
        """Stop the thread, and a broadcast under way in it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        Joined.leave()


def transport_of(cluster: Any, learner: Any) -> ObjectStore:
    """Return the transport of `[cluster]`."""
    kind, bucket_mib, timeouts = cluster.transport.kind, cluster.transport.bucket_mib, cluster.timeouts
    if kind == "object_store":
        return ObjectStore(bucket_mib, timeouts.weights)
    send = getattr(learner, "send", None)
    # A learner on actors sends from its first rank, so that no weights go through the driver.
    address = learner.address if send else ray.util.get_node_ip_address()
    return Broadcast(kind, bucket_mib, timeouts.weights, timeouts.heartbeat, address, send)
