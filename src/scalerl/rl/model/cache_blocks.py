"""Which block of a KV cache a position is in: blocks are allocated as completions grow, and freed with them.

A block is that of some positions of one entry (a decode slot, or a prompt) in every layer, as in vLLM
(PagedAttention, arXiv 2309.06180). So a cache takes the lengths that there are, and not the longest that
there may be. Which block it is changes no result.

Shapes in names: B entries, E all entries, N blocks of the longest entry.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

BLOCK = 32
"""Positions of a block, as in native.c."""
_GROWTH = 1.25
"""A pool that is full grows by this factor at least: each time all of it is copied."""


class BlockPool:
    """The free blocks of a cache; it has as many blocks as were ever needed at once, and a few more."""

    def __init__(self, most: int, grow: Callable[[int], None]) -> None:
        """`most` are the blocks that are ever needed; `grow` allocates up to so many."""
        self._most, self._grow = most, grow
        self.size = 0
        """Blocks that are allocated."""
        self._free = np.zeros(0, dtype=np.int64)

    @property
    def used(self) -> int:
        """Blocks that an entry has."""
        return self.size - len(self._free)

    def take(self, n: int) -> np.ndarray:
        """Return the numbers of `n` blocks that are free now; the pool grows where there are too few."""
        if n > len(self._free):
            needed = self.used + n
            size = max(needed, min(int(self.size * _GROWTH), self._most))
            # Descending, as blocks are taken from the end: low numbers first.
            self._grow(size)
            self._free = np.concatenate([np.arange(size - 1, self.size - 1, -1), self._free])
            self.size = size
        # The last ones: those that were freed last are in the processor's cache.
        taken, self._free = self._free[len(self._free) - n :][::-1], self._free[: len(self._free) - n]
        return taken

    def give(self, blocks: np.ndarray) -> None:
        """Take blocks back."""
        self._free = np.concatenate([self._free, blocks])


class BlockTable:
    """The blocks of every entry, in the order of its positions."""

    def __init__(self, pool: BlockPool, n_entries: int, n_positions: int) -> None:
        self._pool = pool
        self.block_EN = np.zeros((n_entries, blocks_for(n_positions)), dtype=np.int64)
        self.count_E = np.zeros(n_entries, dtype=np.int64)

    def hold(self, entry_B: np.ndarray, length_B: np.ndarray) -> None:
        """Allocate what is missing for the first `length_B` positions of some entries, all different."""
        # Most steps need no block: the whole batch is looked at once, and only the short ones further.
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
        """Free all blocks of some entries, all different."""
        count_B = self.count_E[entry_B]
        if count_B.any():
            self._pool.give(self.block_EN[np.repeat(entry_B, count_B), offsets(count_B)])
            self.count_E[entry_B] = 0

    def places(self, entry_B: np.ndarray, length_B: np.ndarray) -> np.ndarray:
        """Return the places of the first `length_B` positions of some entries, one entry after the other.

        Place p is in block p // BLOCK.
        """
        at = offsets(length_B)
        return self.block_EN[np.repeat(entry_B, length_B), at // BLOCK] * BLOCK + at % BLOCK


def blocks_for(positions: Any) -> Any:
    """Return the blocks that so many positions need: of a number, or of an array of them."""
    return -(-positions // BLOCK)


def offsets(length_B: np.ndarray) -> np.ndarray:
    """Return 0, 1, ... length - 1 of every length, one after the other."""
    return np.arange(length_B.sum()) - np.repeat(np.cumsum(length_B) - length_B, length_B)
