"""Weights in buckets of some tensors, so that a process that passes them on never holds the whole model.

A bucket is sent as one array of bytes, in which each tensor has a place; `views` returns the tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from scalerl.rl.config.engine import BUCKET_MIB
from scalerl.rl.model.weights import bytes_of, dtype_of_spec, spec_of
from scalerl.rl.types import Plan

_ALIGN = 64  # bytes: a cache line, which vector units read whole, and at least the size of any dtype


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_mib: float = BUCKET_MIB
) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in mappings of at most `bucket_mib`, in their order; a larger tensor gets its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > bucket_mib * 2**20:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = weight
        size += weight.nbytes
    if bucket:
        yield bucket


def largest_bucket(plan: Plan, bucket_mib: float = BUCKET_MIB) -> int:
    """Return a number of bytes that is enough for any bucket of a plan."""
    sizes = [bytes_of(spec) for spec in plan]
    return max([min(sum(sizes), int(bucket_mib * 2**20)), *sizes])


def size_of(plan: Plan) -> int:
    """Return the size in bytes of an array that holds all tensors of a plan."""
    return sum(_room(bytes_of(spec)) for spec in plan)


def views(plan: Plan, flat: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a plan as views of an array of `size_of(plan)` bytes."""
    found, start = {}, 0
    for spec in plan:
        n = bytes_of(spec)
        found[spec.name] = flat[start : start + n].view(dtype_of_spec(spec)).view(spec.shape)
        start += _room(n)
    return found


def packed(bucket: Mapping[str, Tensor]) -> tuple[Plan, Tensor]:
    """Copy the tensors of a bucket into one array of bytes, on their device; return it with its plan."""
    plan = tuple(spec_of(*item) for item in bucket.items())
    flat = torch.zeros(size_of(plan), dtype=torch.uint8, device=next(iter(bucket.values())).device)
    for place, weight in zip(views(plan, flat).values(), bucket.values(), strict=True):
        place.copy_(weight)
    return plan, flat


@cache
def side_stream(gpu: int) -> torch.cuda.Stream:
    """Return the CUDA stream on which weights are sent while a GPU trains or decodes.

    The default stream runs in order: a copy there would wait for all queued work and delay work queued later.
    """
    # Cached, because PyTorch's allocator caches memory per stream.
    return torch.cuda.Stream(gpu)


def _room(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
