"""Weights in Ray's object store, in buckets of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from scalerl.errors import LearnerLostError, brief_error
from scalerl.rl.sync.buckets import in_buckets
from scalerl.rl.types import Weights
from scalerl.rl.workers.ray.cluster_watch import check

Bucket = tuple[tuple[tuple[str, tuple[int, ...]], ...], Any]
"""Names and shapes of some tensors, and the reference to a mapping of them."""


class StoredWeights(Mapping[str, np.ndarray]):
    """A model's parameters by name, fetched from the object store when they are read.

    Ray keeps them as long as a process has these references, and the process that put them lives.
    """

    def __init__(self, buckets: Iterable[Bucket], seconds: float) -> None:
        """`seconds` is the timeout of the fetch of a bucket."""
        self._buckets, self._seconds = list(buckets), seconds
        self._at = {name: ref for tensors, ref in self._buckets for name, _ in tensors}

    def __getitem__(self, name: str) -> np.ndarray:
        # A copy: what Ray returns is a read-only view of its shared memory, and pins the bucket there.
        return np.array(self._get(self._at[name])[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    @property
    def layout(self) -> list[tuple[tuple[str, tuple[int, ...]], ...]]:
        """Names and shapes of the tensors of each bucket."""
        return [tensors for tensors, _ in self._buckets]

    def mappings(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield the buckets, which must not be written to.

        Raises:
            LearnerLostError: one did not come in time, or was lost with the process that put it.
        """
        for _, ref in self._buckets:
            yield self._get(ref)

    def fetch(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters; errors as of `mappings`."""
        # Every node begins with another bucket: the same one for all would be sent to each of them by the
        # process that put it, as no node would have a copy yet to pass on.
        first = int(ray.get_runtime_context().get_node_id(), 16) % max(len(self._buckets), 1)
        order = [*self._buckets[first:], *self._buckets[:first]]
        return {name: np.array(weight) for _, ref in order for name, weight in self._get(ref).items()}

    def _get(self, ref: Any) -> dict[str, np.ndarray]:
        try:
            # With a timeout, as the owner of an object may hang, for which Ray waits without end.
            return ray.get(ref, timeout=self._seconds)
        except RayError as error:
            raise LearnerLostError(f"weights do not come from the learner ({brief_error(error)})") from error


@dataclass(frozen=True)
class Posted:
    """Stored weights as they are sent to many: one reference instead of one for every bucket."""

    ref: Any
    seconds: float

    @classmethod
    def of(cls, weights: StoredWeights, seconds: float) -> Posted:
        """Put the references to the buckets into the object store, too."""
        return cls(ray.put(weights), seconds)

    def fetch(self) -> dict[str, np.ndarray]:
        """See `StoredWeights.fetch`."""
        weights: Any = ray.get(self.ref, timeout=self.seconds)
        return weights.fetch()


def put(bucket: dict[str, np.ndarray]) -> Bucket:
    """Put a bucket into the object store."""
    return tuple((name, weight.shape) for name, weight in bucket.items()), ray.put(bucket)


def store(weights: Weights, bucket_mib: float, seconds: float) -> StoredWeights:
    """Put weights into the object store bucket by bucket, unless they are there already."""
    # Weights of a learner on actors are in the store already, bucket by bucket from its ranks.
    if isinstance(weights, StoredWeights):
        return weights
    check()
    return StoredWeights(map(put, in_buckets(weights.items(), bucket_mib)), seconds)
