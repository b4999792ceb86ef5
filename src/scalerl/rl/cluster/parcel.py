"""Weights in Ray's object store: buckets of tensors, fetched by whoever needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import ray


class StoredWeights(Mapping[str, np.ndarray]):
    """A model's parameters by name, which are not here until they are asked for.

    They are kept for as long as anybody has these references, and the process that put them lives.
    """

    def __init__(self, buckets: Iterable[tuple[tuple[str, ...], Any]], seconds: float) -> None:
        """Names, and the reference to a mapping of them; a fetch may take so many `seconds`."""
        self.buckets, self._seconds = list(buckets), seconds
        self._at = {name: ref for names, ref in self.buckets for name in names}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._get(self._at[name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def fetch(self) -> dict[str, np.ndarray]:
        """All of them, as copies of this process's own.

        Raises:
            ray.exceptions.RayError: they did not come in time, or are gone with the process that put them.
        """
        copies: dict[str, np.ndarray] = {}
        for _, ref in self.buckets:
            copies |= {name: np.array(weight) for name, weight in self._get(ref).items()}
        return copies

    def _get(self, ref: Any) -> dict[str, np.ndarray]:
        return ray.get(ref, timeout=self._seconds)


def in_buckets(
    weights: Iterable[tuple[str, np.ndarray]], bucket_mib: float
) -> Iterator[dict[str, np.ndarray]]:
    """Tensors as they come, in mappings of so many MiB; a larger one is alone."""
    bucket: dict[str, np.ndarray] = {}
    size = 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > bucket_mib * 2**20:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = weight
        size += weight.nbytes
    if bucket:
        yield bucket


def store(weights: Iterable[tuple[str, np.ndarray]], bucket_mib: float, seconds: float) -> StoredWeights:
    """Put weights into the object store, bucket by bucket."""
    put = ((tuple(bucket), ray.put(bucket)) for bucket in in_buckets(weights, bucket_mib))
    return StoredWeights(put, seconds)
