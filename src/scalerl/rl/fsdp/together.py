"""Ranks that fail together: what one cannot do, all say, instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from scalerl.errors import InputError

T = TypeVar("T")
_LONGEST = 1000  # bytes of a complaint


def on_all_ranks(do: Callable[[], T]) -> T:
    """What `do` returns on this rank, once it has returned on all; collective.

    Raises:
        InputError: on every rank, with the words of the first on which `do` raised one.
    """
    result, words = None, b""
    try:
        result = do()
    except InputError as error:
        words = str(error).encode()[:_LONGEST]
    told = torch.zeros(dist.get_world_size(), _LONGEST, dtype=torch.uint8)
    if words:
        told[dist.get_rank(), : len(words)] = torch.tensor(list(words), dtype=torch.uint8)
    dist.all_reduce(told)
    for row in told:
        if row[0]:
            raise InputError(bytes(row.tolist()).rstrip(b"\0").decode(errors="replace"))
    assert result is not None
    return result
