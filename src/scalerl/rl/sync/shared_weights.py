"""Weights in shared memory, in their own dtype.

    WeightTransport  what brings weights to rollout workers, here or on a cluster
    hold             weights as they are now, in memory that other processes can be handed
    SharedWeights    the newest weights: one process writes them, others read them, and never a mixture of two
                     versions

    header    per buffer: a count that is odd while it is written, and the version in it; which one is current
    buffers   two of them: the next version is written while readers copy the current one

A reader copies the current buffer and then reads its count again: if that has changed, the writer was in the
buffer, and the reader starts again with the buffer that is current then (a seqlock). There is no lock: a
reader that is slow, or is killed in the middle, holds up no other process.

The memory is a file without a name, which is freed with the last process that has it, however that ends.
"""

import mmap
import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scalerl.errors import WorkerError
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.buckets import size_of, views
from scalerl.rl.types import Plan, Weights

_HEADER = 64  # bytes, five int64 of which are used
_COUNT, _VERSION, _CURRENT = slice(0, 2), slice(2, 4), 4


class SharedBytes:
    """Bytes that processes share; can be sent to another process, or be an argument of its start."""

    def __init__(self, size: int) -> None:
        """Allocate them.

        Raises:
            WorkerError: there is no room.
        """
        self._map(_allocate(max(size, 1)), size)

    def _map(self, fd: int, size: int) -> None:
        self._fd, self._size = fd, size
        weakref.finalize(self, os.close, fd)
        self.flat = torch.frombuffer(mmap.mmap(fd, max(size, 1)), dtype=torch.uint8)[:size]

    def __getstate__(self) -> tuple[Any, int]:
        return DupFd(self._fd), self._size

    def __setstate__(self, state: tuple[Any, int]) -> None:
        fd, size = state
        self._map(fd.detach(), size)


class HeldWeights:
    """A copy of weights, which stays as it is; see `scalerl.rl.types.Weights`."""

    def __init__(self, weights: Weights) -> None:
        self.plan = weights.plan
        self._memory = SharedBytes(size_of(self.plan))
        places = dict(self)
        # Tensor by tensor, as a stream makes each only when it is taken.
        for name, tensor in weights:
            places[name].copy_(tensor)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from views(self.plan, self._memory.flat).items()


def hold(weights: Weights) -> Weights:
    """Return the same weights for as long as they are referred to: a copy, unless they are one.

    Raises:
        WorkerError: there is no room for a copy.
    """
    return HeldWeights(weights) if isinstance(weights, WeightStream) else weights


class WeightTransport(ABC):
    """Brings weights from the learner to rollout workers.

    By default workers read the weights by themselves, and messages only wake them.
    """

    @abstractmethod
    def publish(self, weights: Weights, version: int) -> None:
        """Make these the latest weights."""

    def for_one(self) -> Any:
        """Return the message to one worker, which fetches the latest weights by itself."""
        return None

    def for_all(self, receivers: Sequence[int], version: int) -> Sequence[Any]:
        """Return the message to each of all workers, which have numbers that are never used again."""
        return [self.for_one() for _ in receivers]

    def failed(self) -> None:  # noqa: B027
        """Note that a worker did not receive the weights."""

    def close(self) -> None:  # noqa: B027
        """Free what is held."""


class SharedWeights(WeightTransport):
    """The newest weights of a model; can be passed to another process as an argument of its start."""

    def __init__(self, plan: Plan) -> None:
        """Allocate memory for weights of a plan. Only the process that does so may publish them."""
        self.plan, self._size = plan, size_of(plan)
        self._memory = SharedBytes(_HEADER + 2 * self._size)
        self._map()
        self._header[_VERSION] = -1

    def _map(self) -> None:
        header, *buffers = self._memory.flat.split([_HEADER, self._size, self._size])
        self._header = header.view(torch.int64).numpy()
        self._buffers = [views(self.plan, flat) for flat in buffers]

    def __getstate__(self) -> tuple[Plan, int, SharedBytes]:
        return self.plan, self._size, self._memory

    def __setstate__(self, state: tuple[Plan, int, SharedBytes]) -> None:
        self.plan, self._size, self._memory = state
        self._map()

    @property
    def version(self) -> int:
        """The version that is current; -1 before the first."""
        return int(self._header[_VERSION][self._header[_CURRENT]])

    def publish(self, weights: Weights, version: int) -> None:
        """Write `weights`, and make them current."""
        into = 1 - int(self._header[_CURRENT])
        # Odd before the first number changes, for a reader that is still in this buffer, a version late.
        self._header[_COUNT][into] += 1
        _fence()
        places = dict(self._buffers[into])
        for name, weight in weights:
            places.pop(name).copy_(weight)
        assert not places, f"{next(iter(places))} is not in the weights"
        self._header[_VERSION][into] = version
        _fence()
        self._header[_COUNT][into] += 1
        _fence()
        # Last: a reader that follows it finds a buffer that is whole.
        self._header[_CURRENT] = into

    def read(self, into: Mapping[str, Tensor]) -> int:
        """Copy the current weights into tensors of their shapes, and return their version."""
        # The writer never waits: a reader whose buffer was written to meanwhile starts again.
        while True:
            current = int(self._header[_CURRENT])
            # In this order: the count before the numbers and again after them, which must not be reordered.
            count = int(self._header[_COUNT][current])
            _fence()
            version = int(self._header[_VERSION][current])
            for name, place in self._buffers[current].items():
                into[name].copy_(place)
            _fence()
            if count % 2 == 0 and self._header[_COUNT][current] == count:
                return version


def _allocate(size: int) -> int:
    """Return a file without a name, in memory, or on the disk if that is too small, as in a container."""
    memory = Path("/dev/shm")
    for folder in (memory, Path(tempfile.gettempdir())):
        with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size)
            # Taken now: a later write to memory that is not there is a SIGBUS, which ends a process unheard.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    raise WorkerError(
        f"no {size / 2**20:.0f} MiB for the weights that the processes share, neither in {memory} "
        f"(docker run --shm-size) nor in {tempfile.gettempdir()}"
    )


_BARRIERS = threading.Lock(), threading.Lock()


def _fence() -> None:
    """What was written before is seen before what is written after, and read likewise.

    x86-64 orders stores and loads so by itself; elsewhere taking two locks in turn is a full barrier.
    """
    for barrier in _BARRIERS:
        with barrier:
            pass
