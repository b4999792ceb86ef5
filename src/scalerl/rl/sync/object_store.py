"""Weights in Ray's object store, in buckets of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from scalerl.errors import LearnerLostError, brief_error
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.buckets import in_buckets, packed, views
from scalerl.rl.types import Plan, Weights
from scalerl.rl.workers.ray.cluster_watch import check

Bucket = tuple[Plan, Any]
"""The plan of some tensors, and the reference to the bytes that they are packed in."""


class StoredWeights:
    """A model's weights, fetched from the object store when they are read; see `scalerl.rl.types.Weights`.

    Ray keeps them as long as a process has these references, and the process that put them lives.
    """

    def __init__(self, buckets: Iterable[Bucket], seconds: float) -> None:
        """`seconds` is the timeout of the fetch of a bucket."""
        self._buckets, self._seconds = list(buckets), seconds

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
        """Yield plan and bytes of each bucket.

        Raises:
            LearnerLostError: one did not come in time, or was lost with the process that put it.
        """
        for plan, ref in self._buckets:
            yield plan, self._get(ref)

    def fetch(self) -> WeightStream:
        """Return all weights in the memory of this process; errors as of `buckets`."""
        # Every node begins with another bucket: the same one for all would be sent to each of them by the
        # process that put it, as no node would have a copy yet to pass on.
        first = int(ray.get_runtime_context().get_node_id(), 16) % max(len(self._buckets), 1)
        found: dict[str, Tensor] = {}
        for plan, ref in [*self._buckets[first:], *self._buckets[:first]]:
            found |= views(plan, self._get(ref))
        return WeightStream.of(found)

    def _get(self, ref: Any) -> Tensor:
        try:
            # With a timeout, as the owner of an object may hang, for which Ray waits without end.
            flat = ray.get(ref, timeout=self._seconds)
        except RayError as error:
            raise LearnerLostError(f"weights do not come from the learner ({brief_error(error)})") from error
        # A copy: what Ray returns is a read-only view of its shared memory, and pins the bucket there.
        return torch.from_numpy(np.array(flat))


@dataclass(frozen=True)
class Posted:
    """Stored weights as they are sent to many: one reference instead of one for every bucket."""

    ref: Any
    seconds: float

    @classmethod
    def of(cls, weights: StoredWeights, seconds: float) -> Posted:
        """Put the references to the buckets into the object store, too."""
        return cls(ray.put(weights), seconds)

    def fetch(self) -> WeightStream:
        """See `StoredWeights.fetch`."""
        weights: Any = ray.get(self.ref, timeout=self.seconds)
        return weights.fetch()


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
