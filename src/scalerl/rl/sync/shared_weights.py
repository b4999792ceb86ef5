"""Weights in shared memory: one process writes them, others read them, and never a mixture of two versions.

    header    per buffer: a count that is odd while it is written, and the version in it; which one is current
    buffers   two of them: the next version is written while readers copy the current one

A reader copies the current buffer and then reads its count again: if that has changed, the writer was in the
buffer, and the reader starts again with the buffer that is current then (a seqlock). There is no lock: a
reader that is slow, or is killed in the middle, holds up no other process.

The memory is a file without a name, which is freed with the last process that has it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import WorkerError
from scalerl.rl.types import Weights

_HEADER = 64  # bytes, five int64 of which are used
_COUNT, _VERSION, _CURRENT = slice(0, 2), slice(2, 4), 4
_ALIGN = 16  # float32 numbers


class SharedWeights:
    """The parameters of a model in float32; can be passed to another process as an argument of its start."""

    def __init__(self, weights: Weights, version: int = 0) -> None:
        """Allocate memory for such weights, and write these. Only the process that does so may write."""
        self._layout: list[tuple[str, tuple[int, ...], int]] = []
        self._size = 0
        for name, weight in weights.items():
            self._layout.append((name, weight.shape, self._size))
            self._size += -(-weight.size // _ALIGN) * _ALIGN
        self._map(_allocate(_HEADER + 2 * 4 * self._size))
        self._header[_VERSION] = -1
        self.write(weights, version)

    def _map(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        memory = mmap.mmap(fd, _HEADER + 2 * 4 * self._size)
        self._header = np.ndarray(5, dtype=np.int64, buffer=memory)
        self._buffers = np.ndarray((2, self._size), dtype=np.float32, buffer=memory, offset=_HEADER)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._layout, self._size, DupFd(self._fd)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._layout, self._size, fd = state
        self._map(fd.detach())

    @property
    def version(self) -> int:
        """The version that is current."""
        return int(self._header[_VERSION][self._header[_CURRENT]])

    def write(self, weights: Weights, version: int) -> None:
        """Write `weights`, and make them current."""
        into = 1 - int(self._header[_CURRENT])
        # Odd before the first number changes, for a reader that is still in this buffer, a version late.
        self._header[_COUNT][into] += 1
        _fence()
        for (name, _, _), place in zip(self._layout, self._places(into), strict=True):
            np.copyto(place, weights[name])
        self._header[_VERSION][into] = version
        _fence()
        self._header[_COUNT][into] += 1
        _fence()
        # Last: a reader that follows it finds a buffer that is whole.
        self._header[_CURRENT] = into

    def read(self, into: Mapping[str, np.ndarray]) -> int:
        """Copy the current weights into float32 arrays of their shapes, and return their version."""
        while True:
            current = int(self._header[_CURRENT])
            # In this order: the count before the numbers and again after them, which must not be reordered.
            count = int(self._header[_COUNT][current])
            _fence()
            version = int(self._header[_VERSION][current])
            for (name, _, _), place in zip(self._layout, self._places(current), strict=True):
                np.copyto(into[name], place)
            _fence()
            if count % 2 == 0 and self._header[_COUNT][current] == count:
                return version

    def _places(self, buffer: int) -> list[np.ndarray]:
        return [
            self._buffers[buffer, start : start + int(np.prod(shape))].reshape(shape)
            for _, shape, start in self._layout
        ]


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
