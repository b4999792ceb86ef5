"""Weights in shared memory, in their own dtype.

    WeightTransport  the interface of weight sync to rollout workers, here or on a cluster
    hold             a copy of the current weights in memory that can be passed to other processes
    SharedWeights    the newest weights: one process writes them, and others read them, never a mixture of two
                     versions

    header    for each buffer, a count that is odd during a write, and its version; then the current buffer
    buffers   two of them: the next version is written while readers copy the current one

A reader copies the current buffer and then reads its count again. If the count has changed, the writer was in
the buffer, and the reader starts again with the buffer that is current by then (a seqlock). There is no lock,
so a reader that is slow or is killed during a copy delays no other process.

The memory is an unnamed file, freed with the last process that has it, however that process ends.
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
    """Memory that processes share; it can be sent to another process or passed at its start."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes.

        Raises:
            WorkerError: there is not enough room.
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
    """A copy of weights that does not change; see `scalerl.rl.types.Weights`."""

    def __init__(self, weights: Weights) -> None:
        self.plan = weights.plan
        self._memory = SharedBytes(size_of(self.plan))
        places = dict(self)
        # Tensor by tensor, because a stream makes each tensor only when it is read.
        for name, tensor in weights:
            places[name].copy_(tensor)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from views(self.plan, self._memory.flat).items()


def hold(weights: Weights) -> Weights:
    """Return weights that do not change: a copy of a stream, other weights as they are.

    Raises:
        WorkerError: there is not enough room for a copy.
    """
    return HeldWeights(weights) if isinstance(weights, WeightStream) else weights


class WeightTransport(ABC):
    """The interface of a transport of weights from the learner to rollout workers.

    By default workers read the weights by themselves, and messages only wake them.
    """

    @abstractmethod
    def publish(self, weights: Weights, version: int) -> None:
        """Make `weights` the latest weights."""

    def for_one(self) -> Any:
        """Return the message with which one worker fetches the latest weights by itself."""
        return None

    def for_all(self, receivers: Sequence[int], version: int) -> Sequence[Any]:
        """Return a message for each of all workers; `receivers` are their numbers, which are never reused."""
        return [self.for_one() for _ in receivers]

    def failed(self) -> None:  # noqa: B027
        """Handle that a worker was lost or did not receive the weights."""

    def close(self) -> None:  # noqa: B027
        """Free resources."""


class SharedWeights(WeightTransport):
    """The newest weights of a model in shared memory; can be passed to another process at its start."""

    def __init__(self, plan: Plan) -> None:
        """Allocate memory for the weights of a plan; only this process may publish them."""
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
        """The current version; -1 before the first."""
        return int(self._header[_VERSION][self._header[_CURRENT]])

    def publish(self, weights: Weights, version: int) -> None:
        """Write `weights` and make them current."""
        into = 1 - int(self._header[_CURRENT])
        # Odd before the first value changes, for a reader that is late and still copies this buffer.
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
        # Last, so that a reader of the current buffer finds it complete.
        self._header[_CURRENT] = into

    def read(self, into: Mapping[str, Tensor]) -> int:
        """Copy the current weights into tensors of their shapes; return their version."""
        # The writer never waits: a reader whose buffer was overwritten meanwhile starts again.
        while True:
            current = int(self._header[_CURRENT])
            # In this order, without reordering: the count, the values, and the count again.
            count = int(self._header[_COUNT][current])
            _fence()
            version = int(self._header[_VERSION][current])
            for name, place in self._buffers[current].items():
                into[name].copy_(place)
            _fence()
            if count % 2 == 0 and self._header[_COUNT][current] == count:
                return version


def _allocate(size: int) -> int:
    """Return the descriptor of an unnamed file in memory, or on disk if /dev/shm is too small."""
    memory = Path("/dev/shm")
    for folder in (memory, Path(tempfile.gettempdir())):
        with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size)
            # Allocated now: a later write without room would be a SIGBUS, which kills the process silently.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            return os.dup(file.fileno())
    raise WorkerError(
        f"no {size / 2**20:.0f} MiB for the weights that the processes share, neither in {memory} "
        f"(docker run --shm-size) nor in {tempfile.gettempdir()}"
    )


_BARRIERS = threading.Lock(), threading.Lock()


def _fence() -> None:
    """Order the writes before this call before those after it, and reads likewise.

    x86-64 keeps this order by itself; elsewhere taking two locks in turn is a full barrier.
    """
    for barrier in _BARRIERS:
        with barrier:
            pass
