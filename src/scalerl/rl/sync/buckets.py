"""Weights in buckets of some tensors: a process that passes them on never holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from scalerl.rl.types import Weights

BUCKET_MIB = 64.0
Bucket = Mapping[str, np.ndarray]


@runtime_checkable
class Elsewhere(Protocol):
    """Weights that stay in another process until they are fetched."""

    @property
    def layout(self) -> Iterable[Iterable[tuple[str, tuple[int, ...]]]]:
        """Names and shapes of the tensors of each bucket."""
        ...

    def mappings(self) -> Iterator[Bucket]:
        """Yield the buckets, which must not be written to.

        Raises:
            LearnerLostError: the learner that put them there is lost.
        """
        ...


def buckets_of(weights: Weights, bucket_mib: float = BUCKET_MIB) -> Iterator[Bucket]:
    """Yield the tensors of `weights` in buckets, each once; those elsewhere in the buckets that they have."""
    if isinstance(weights, Elsewhere):
        return weights.mappings()
    return in_buckets(weights.items(), bucket_mib)


def layout_of(weights: Weights) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes in the order of `buckets_of`, without fetching anything."""
    if isinstance(weights, Elsewhere):
        return [tensor for bucket in weights.layout for tensor in bucket]
    # A receiver allocates by this before the first bucket comes, so that the order of both must agree.
    return [(name, weight.shape) for name, weight in weights.items()]


def in_buckets(
    weights: Iterable[tuple[str, np.ndarray]], bucket_mib: float
) -> Iterator[dict[str, np.ndarray]]:
    """Yield tensors in mappings of at most `bucket_mib`, in their order; a larger tensor is alone."""
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
