"""Weights on their way to the servers: one file in memory for each version, removed once all have read it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from scalerl.errors import WorkerError
from scalerl.rl.types import Weights


class WeightsFile:
    """The newest weights, written when the first server wants them."""

    def __init__(self, folder: Path, weights: Weights, version: int) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._readers: dict[int, int] = {}
        self._written: dict[int, Path] = {}
        self.offer(weights, version)

    def offer(self, weights: Weights, version: int) -> None:
        """Take new weights; those before are of no use any more."""
        self._weights, self.version = weights, version

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[tuple[int, Path]]:
        """The newest version and its file, which stays until the end of the block."""
        async with self._lock:
            version, weights = self.version, self._weights
            if version not in self._written:
                self._written[version] = await asyncio.to_thread(self._write, weights, version)
            self._readers[version] = self._readers.get(version, 0) + 1
        try:
            yield version, self._written[version]
        finally:
            self._readers[version] -= 1
            for old in [v for v in self._written if v != self.version and not self._readers.get(v)]:
                self._written.pop(old).unlink(missing_ok=True)

    def _write(self, weights: Weights, version: int) -> Path:
        path = self._folder / f"version-{version}.safetensors"
        aside = path.with_suffix(".part")
        try:
            save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, aside)
            aside.replace(path)  # whole, or not there
        except Exception as error:
            aside.unlink(missing_ok=True)
            raise WorkerError(
                f"the weights cannot be written to {self._folder} ({error}): more memory there (docker run "
                "--shm-size), or weights_folder names another place"
            ) from error
        return path


def remove(folder: Path) -> None:
    """The folder and what is left in it."""
    shutil.rmtree(folder, ignore_errors=True)
