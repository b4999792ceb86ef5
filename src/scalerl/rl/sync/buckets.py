"""Weights in buckets of some tensors: a process that passes them on never holds the whole model.

A bucket that travels is one array of bytes, in which each tensor has a place; `views` gives the tensors back.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from scalerl.rl.config.engine import BUCKET_MIB
from scalerl.rl.model.weights import bytes_of, dtype_of_spec, spec_of
from scalerl.rl.types import Plan

_ALIGN = 64  # bytes: no dtype is larger, and vector units read whole lines


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], bucket_mib: float = BUCKET_MIB
) -> Iterator[dict[str, Tensor]]:
    """Yield tensors in mappings of at most `bucket_mib`, in their order; a larger tensor is alone."""
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
    """Return bytes that any bucket of a plan fits into."""
    sizes = [bytes_of(spec) for spec in plan]
    return max([min(sum(sizes), int(bucket_mib * 2**20)), *sizes])


def size_of(plan: Plan) -> int:
    """Return the bytes of an array that has places for all tensors of a plan."""
    return sum(_room(bytes_of(spec)) for spec in plan)


def views(plan: Plan, flat: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a plan, as views of an array of `size_of(plan)` bytes."""
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
    """Return the stream of a GPU on which weights travel while it trains or decodes.

    The default stream runs in order: a copy there begins when all that is queued has ended, and holds up what
    is queued after it.
    """
    # Kept, as the memory of each stream is cached apart.
    return torch.cuda.Stream(gpu)


def _room(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
