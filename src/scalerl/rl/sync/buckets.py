"""Weights some tensors at a time, so that who passes them on never needs memory for the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from scalerl.rl.types import Weights

BUCKET_MIB = 64.0
Bucket = Mapping[str, np.ndarray]


@runtime_checkable
class Elsewhere(Protocol):
    """Weights that are in another process until they are asked for."""

    @property
    def layout(self) -> Iterable[Iterable[tuple[str, tuple[int, ...]]]]:
        """Names and shapes of the tensors of each bucket."""
        ...

    def mappings(self) -> Iterator[Bucket]:
        """The buckets one after another, not to be written to.

        Raises:
            LearnerLostError: they do not come: the learner that put them there is gone.
        """
        ...


def buckets_of(weights: Weights, bucket_mib: float = BUCKET_MIB) -> Iterator[Bucket]:
    """The tensors of `weights`, each once; those that are elsewhere as they come."""
    if isinstance(weights, Elsewhere):
        return weights.mappings()
    return in_buckets(weights.items(), bucket_mib)


def layout_of(weights: Weights) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of `buckets_of`; nothing is fetched for it."""
    if isinstance(weights, Elsewhere):
        return [tensor for bucket in weights.layout for tensor in bucket]
    # A receiver allocates by this before the first bucket comes, so that the order of both must agree.
    return [(name, weight.shape) for name, weight in weights.items()]


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
