"""Weights on their way to the servers.

FileTransport    a folder of safetensors files in memory for each version, removed once all have read it
NcclTransport    vLLM's own transfer between GPUs, one group for each server (scalerl.rl.sync.vllm_nccl)

Either passes on weights bucket by bucket: what a sharded learner has put into an object store is never whole
in this process.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import save_file

from scalerl.errors import LearnerLostError, WorkerError
from scalerl.rl.sync.buckets import buckets_of
from scalerl.rl.types import Weights


class VllmServer(Protocol):
    """A vLLM server as weights are sent to it (`scalerl.rl.engine.vllm.client.Client`)."""

    name: str

    async def ask(self, path: str, body: Any = None, *, seconds: float) -> Any:
        """POST, or GET where there is no `body`; raises `Gone` where it does not answer within `seconds`."""
        ...

    async def progress(self, seconds: float) -> Any:
        """Return the tokens sampled so far of each completion in flight."""
        ...


class VllmTransport(Protocol):
    """Brings the newest weights to servers, several at a time."""

    version: int
    """The newest."""

    def offer(self, weights: Weights, version: int) -> None:
        """Take new weights; those before are of no use any more."""
        ...

    def newest(self) -> AbstractAsyncContextManager[tuple[int, Any]]:
        """The newest version, and what `load` needs of it, which stays until the end of the block."""
        ...

    async def load(self, server: VllmServer, source: Any, seconds: float) -> Any:
        """Have a server that is paused load them; what its worker extension says of its completions."""
        ...

    def forget(self, server: VllmServer) -> None:
        """The server has died."""
        ...


class FileTransport:
    """See `VllmTransport`; the files are written when the first server wants them."""

    def __init__(self, folder: Path, weights: Weights, version: int) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._readers: dict[int, int] = {}
        self._written: dict[int, Path] = {}
        self.offer(weights, version)

    def offer(self, weights: Weights, version: int) -> None:
        """See `VllmTransport`."""
        self._weights: Weights | None = weights
        self.version = version

    @asynccontextmanager
    async def newest(self) -> AsyncIterator[tuple[int, Path]]:
        """See `VllmTransport`."""
        async with self._lock:
            version, weights = self.version, self._weights
            if version not in self._written:
                assert weights is not None
                self._written[version] = await asyncio.to_thread(self._write, weights, version)
                del weights
                if version == self.version:
                    self._weights = None  # who comes later reads the files
            self._readers[version] = self._readers.get(version, 0) + 1
        try:
            yield version, self._written[version]
        finally:
            self._readers[version] -= 1
            for old in [v for v in self._written if v != self.version and not self._readers.get(v)]:
                shutil.rmtree(self._written.pop(old), ignore_errors=True)

    async def load(self, server: VllmServer, source: Path, seconds: float) -> Any:
        """See `VllmTransport`."""
        call = {"method": "scalerl_install", "args": [str(source)], "timeout": seconds}
        return await server.ask("/collective_rpc", call, seconds=2 * seconds)

    def forget(self, server: VllmServer) -> None:
        """See `VllmTransport`."""

    def _write(self, weights: Weights, version: int) -> Path:
        path = self._folder / f"version-{version}"
        aside = path.with_suffix(".part")
        try:
            aside.mkdir()
            for i, bucket in enumerate(buckets_of(weights)):
                tensors = {name: np.ascontiguousarray(weight) for name, weight in bucket.items()}
                save_file(tensors, aside / f"{i:05}.safetensors")
            aside.replace(path)  # whole, or not there
        except LearnerLostError:
            raise
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise WorkerError(
                f"the weights cannot be written to {self._folder} ({error}): more memory there (docker run "
                "--shm-size), or weights_folder names another place"
            ) from error
        return path


class Gone(Exception):  # noqa: N818 - it says so
    """The server does not answer any more."""
