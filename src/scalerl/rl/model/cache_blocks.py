"""Allocation of the blocks of a KV cache, which grow with completions and are freed when these end.

A block holds `BLOCK` consecutive positions of one entry (a decode slot or a prompt) in every layer, as in
vLLM (PagedAttention, arXiv 2309.06180). So a cache takes memory for actual lengths, not for the longest
possible ones. Results do not depend on which blocks an entry has.

Shapes in names: B entries, E all entries, N blocks of the longest entry.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK = 32
"""Positions in a block, as in native.c."""
_GROWTH = 1.25
"""Least growth factor of a full pool, because each growth copies all of it."""


class BlockPool:
    """The free blocks of a cache, which has about as many blocks as were ever needed at once."""

    def __init__(self, most: int, grow: Callable[[int], None]) -> None:
        """Start empty; at most `most` blocks are ever needed, and `grow` enlarges the cache to a size."""
        self._most, self._grow = most, grow
        self.size = 0
        """Number of allocated blocks."""
        self._free = np.zeros(0, dtype=np.int64)

    @property
    def used(self) -> int:
        """Number of blocks that belong to an entry."""
        return self.size - len(self._free)

    def take(self, n: int) -> np.ndarray:
        """Take `n` free blocks and return their numbers; the pool grows if there are too few."""
        if n > len(self._free):
            needed = self.used + n
            size = max(needed, min(int(self.size * _GROWTH), self._most))
            # Descending: blocks are taken from the end, so low numbers go first.
            self._grow(size)
            self._free = np.concatenate([np.arange(size - 1, self.size - 1, -1), self._free])
            self.size = size
        # From the end: the blocks freed last are likely in the CPU's cache.
        taken, self._free = self._free[len(self._free) - n :][::-1], self._free[: len(self._free) - n]
        return taken

    def give(self, blocks: np.ndarray) -> None:
        """Return blocks to the pool."""
        self._free = np.concatenate([self._free, blocks])


class BlockTable:
    """The blocks of every entry, in the order of its positions."""

    def __init__(self, pool: BlockPool, n_entries: int, n_positions: int) -> None:
        self._pool = pool
        self.block_EN = np.zeros((n_entries, blocks_for(n_positions)), dtype=np.int64)
        self.count_E = np.zeros(n_entries, dtype=np.int64)

    def hold(self, entry_B: np.ndarray, length_B: np.ndarray) -> None:
        """Allocate missing blocks for the first `length_B` positions of distinct entries."""
        # Most steps need no block: one check covers the batch, and only short entries go on.
        count_B = self.count_E[entry_B]
        short = np.flatnonzero(count_B * BLOCK < length_B)
        if not len(short):
            return
        entry_B, count_B = entry_B[short], count_B[short]
        missing_B = blocks_for(length_B[short]) - count_B
        at = np.repeat(count_B, missing_B) + offsets(missing_B)
        self.block_EN[np.repeat(entry_B, missing_B), at] = self._pool.take(len(at))
        self.count_E[entry_B] += missing_B

    def free(self, entry_B: np.ndarray) -> None:
        """Free all blocks of distinct entries."""
        count_B = self.count_E[entry_B]
        if count_B.any():
            self._pool.give(self.block_EN[np.repeat(entry_B, count_B), offsets(count_B)])
            self.count_E[entry_B] = 0

    def places(self, entry_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        """Return the cache places of the first `length_B` positions of some entries, one entry after another.

        Place p is in block p // BLOCK.
        """
        at = offsets(length_B)
        return self.block_EN[np.repeat(entry_B, length_B), at // BLOCK] * BLOCK + at % BLOCK


def blocks_for(positions: Any) -> Any:
    """Return the number of blocks for a number of positions, or for each of an array."""
    return -(-positions // BLOCK)


def offsets(length_B: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... length - 1 for every length, one after another."""
    return np.arange(length_B.sum()) - np.repeat(np.cumsum(length_B) - length_B, length_B)
