"""A KV cache of fixed size in which every row is at a position of its own.

Transformers' own static cache advances all rows together, so that a batch ends with its longest completion.
Here position t of row r always stands at index t of row r: a finished row is refilled at once, and the
entries of a completion stay where they are when the weights change.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, shape (rows, heads, positions, head_dim)."""

    is_sliding = False
    is_compileable = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once the first states show heads, size and precision."""
        _, heads, _, dim = key_states.shape
        shape = (self.owner.n_rows, heads, self.owner.n_positions, dim)
        self.keys = key_states.new_zeros(shape)
        self.values = value_states.new_zeros(shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new entries where the owner points, and return what is to be attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows_B1, positions_BT = self.owner.target
        self.keys[rows_B1, :, positions_BT] = key_states.transpose(1, 2)
        self.values[rows_B1, :, positions_BT] = value_states.transpose(1, 2)
        if self.owner.prefilling:  # nothing came before: the new states are all there is
            return key_states, value_states
        extent = self.owner.extent
        return self.keys[:, :, :extent], self.values[:, :, :extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys, for models that build a mask of their own."""
        return (query_length if self.owner.prefilling else self.owner.extent), 0

    def get_seq_length(self) -> int:
        """Positions are always passed explicitly; the rows have no common length."""
        return 0

    def get_max_length(self) -> int:
        """Positions per row."""
        return self.owner.n_positions


class SlotCache(Cache):
    """The cache of a generator: `n_rows` rows of `n_positions` positions each."""

    def __init__(self, n_layers: int, n_rows: int, n_positions: int) -> None:
        self.n_rows = n_rows
        self.n_positions = n_positions
        self.prefilling = False
        self.extent = 0
        self.target: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.slots = [SlotLayer(self) for _ in range(n_layers)]
        super().__init__(layers=list(self.slots))

    def at(self, rows_B: Tensor, positions_BT: Tensor, prefilling: bool) -> SlotCache:
        """Point the next forward pass at `positions_BT` of `rows_B`.

        While prefilling, the rows are fresh and attend to themselves alone; else all rows take part, in
        order, and attend to everything up to the furthest position in use.
        """
        self.target = (rows_B[:, None], positions_BT)
        self.prefilling = prefilling
        self.extent = int(positions_BT.max()) + 1
        return self

    def copy(self, source: int, targets_B: Tensor, length: int) -> None:
        """Copy the first `length` positions from one row to others."""
        for slot in self.slots:
            assert slot.keys is not None
            assert slot.values is not None
            slot.keys[targets_B, :, :length] = slot.keys[source, :, :length]
            slot.values[targets_B, :, :length] = slot.values[source, :, :length]

    def save(self, rows_B: Tensor, extent: int) -> list[list[Tensor]]:
        """Copies of keys and values by layer, of `rows_B` up to `extent`; none before the first use."""
        pairs = [(slot.keys, slot.values) for slot in self.slots]
        return [
            [k[rows_B, :, :extent], v[rows_B, :, :extent]]
            for k, v in pairs
            if k is not None and v is not None
        ]

    def load(self, rows_B: Tensor, saved: list[list[Tensor]]) -> None:
        """Put back what `save` returned."""
        for slot, pair in zip(self.slots, saved, strict=False):
            keys, values = (tensor.to(rows_B.device) for tensor in pair)
            slot.lazy_initialization(keys, values)
            assert slot.keys is not None
            assert slot.values is not None
            slot.keys[rows_B, :, : keys.shape[2]] = keys
            slot.values[rows_B, :, : keys.shape[2]] = values
