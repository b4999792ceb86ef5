"""The engine of a generator: a model, and the KV cache of its decode slots.

    make_engine -> FusedEngine          Llama, Mistral, Qwen2 and Qwen3, float32, on a CPU with a C compiler
                   TransformersEngine   any other causal LM, precision or device

Both return the last hidden states of transformers' own forward pass, up to rounding. Weights are updated in
place, in the model's parameters, and the cache stays as it is. The cache is in blocks
(`scalerl.rl.model.cache_blocks`), so it takes memory for the actual lengths of completions, not the longest.

Shapes in names: A slots that decode, B slots that start or their prompts, S all slots, L positions of a slot,
T tokens of a prompt, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from scalerl.errors import InputError
from scalerl.rl.config.engine import EngineKind
from scalerl.rl.kernels.fused import FusedEngine, longer
from scalerl.rl.model.cache_blocks import BLOCK, BlockPool, BlockTable, blocks_for
from scalerl.rl.model.causal_lm import hidden_states
from scalerl.rl.model.routing import Routers


class Engine(Protocol):
    """A model with a KV cache: it runs tokens, each at its position in its slot."""

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Start each group of slots with its prompt; return the last hidden states, (B, D) by prompt.

        The earlier cache entries of these slots are freed first.
        """
        ...

    def decode(self, slots_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """Append one token to each slot at its position; return the last hidden states, (A, D)."""
        ...

    def free(self, slots_B: np.ndarray) -> None:
        """Free the cache entries of distinct slots whose completions have ended."""
        ...

    def state(self, slots_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Return copies of the first `length_B` cache entries of some slots."""
        ...

    def restore(self, slots_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """Restore the result of `state` into the same slots; the cache must be empty."""
        ...


def make_engine(
    model: nn.Module,
    n_slots: int,
    prompt_tokens: int,
    new_tokens: int,
    kind: EngineKind = "auto",
    experts: bool = False,
) -> Engine:
    """Return an engine of this kind for prompts and completions of at most these numbers of tokens.

    With `experts` it records the experts of a mixture of experts.

    Raises:
        InputError: the kind is `kernels`, and they do not support this model here.
    """
    if kind != "transformers":
        fused = FusedEngine.of(model, n_slots, prompt_tokens, new_tokens)
        if fused is not None:
            return fused
    if kind == "kernels":
        raise InputError(
            "engine.kind: 'kernels' computes Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU with a C "
            "compiler, and this is not the case here; use 'auto' or 'transformers'"
        )
    return TransformersEngine(model, n_slots, prompt_tokens + new_tokens, experts)


class TransformersEngine:
    """An engine for any causal LM that transformers loads, from the model's own modules and `SlotCache`."""

    def __init__(self, model: nn.Module, n_slots: int, n_positions: int, experts: bool = False) -> None:
        config: Any = model.config
        self._model = model
        self.routers = Routers.of(model) if experts else None
        self._read: Tensor | tuple[int, int] | None = None
        """The positions of the last pass: the slots that decoded, or the shape (prompts, longest prompt)."""
        self._device = next(model.parameters()).device
        self._cache = SlotCache(config.num_hidden_layers, n_slots, n_positions, self._device)

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Run right-padded prompts; padding is written to block 0, which no slot reads."""
        self.free(np.concatenate(groups))
        length_B = np.array([len(prompt_T) for prompt_T in prompts])
        first_B = np.array([slots[0] for slots in groups])
        longest = int(length_B.max())
        token_BT = np.zeros((len(prompts), longest), dtype=np.int64)
        for padded_T, prompt_T in zip(token_BT, prompts, strict=True):
            padded_T[: len(prompt_T)] = prompt_T
        position_BT = torch.arange(longest, device=self._device).expand(len(prompts), -1)
        self._read = len(prompts), longest
        # Made here: transformers would derive it from one cache length, but every slot has its own.
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()[None, None]
        hidden_BTD = hidden_states(
            self._model,
            input_ids=self._tensor(token_BT),
            position_ids=position_BT,
            attention_mask=causal.expand(len(prompts), 1, -1, -1),
            cache=self._cache.at_prompts(first_B, length_B),
        )
        for slots, prompt_T in zip(groups, prompts, strict=True):
            # The prompt was computed once, for the first slot of its group.
            if len(slots) > 1:
                self._cache.copy(int(slots[0]), slots[1:], len(prompt_T))
        return hidden_BTD[torch.arange(len(prompts), device=self._device), self._tensor(length_B - 1)]

    def decode(self, slots_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """Run all slots, so that shapes stay the same; slots that do not decode use block 0."""
        token_S1 = torch.zeros(self._cache.n_slots, 1, dtype=torch.int64, device=self._device)
        position_S1 = torch.zeros_like(token_S1)
        slot_A = self._read = self._tensor(slots_A)
        token_S1[slot_A, 0] = self._tensor(tokens_A)
        position_S1[slot_A, 0] = self._tensor(positions_A)
        cache = self._cache.at_next(slots_A, positions_A)
        reach_L = torch.arange(cache.extent, device=self._device)
        hidden_S1D = hidden_states(
            self._model,
            input_ids=token_S1,
            position_ids=position_S1,
            attention_mask=(reach_L <= position_S1)[:, None, None, :],
            cache=cache,
        )
        return hidden_S1D[slot_A, 0]

    def chosen(self) -> np.ndarray:
        """Return the K experts of each of L layers in the last pass; requires `routers`.

        Shape (A, L, K) after `decode`, (B, T, L, K) after `prefill`."""
        assert self.routers is not None
        expert_PLK = self.routers.chosen()
        if isinstance(self._read, tuple):
            return expert_PLK.unflatten(0, self._read).cpu().numpy()
        return expert_PLK[self._read].cpu().numpy()

    def free(self, slots_B: np.ndarray) -> None:
        """See `Engine`."""
        self._cache.table.free(slots_B)

    def state(self, slots_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Return keys and values of each layer; see `Engine`."""
        return {"layers": self._cache.save(slots_B, length_B), "length": length_B.tolist()}

    def restore(self, slots_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        self._cache.load(slots_B, state["layers"], np.array(state["length"], dtype=np.int64))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _CacheLayer(CacheLayerMixin):
    """Keys and values of one layer, block after block: shape (cache entries, heads, head_dim)."""

    is_sliding = False
    is_compileable = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the cache when the first states, (.., heads, .., dim), show its shape and dtype."""
        # Zeros, because masked entries have weight 0, and 0 times a NaN in fresh memory is NaN.
        n = self.owner.pool.size * BLOCK
        self.keys, self.values = (
            states.new_zeros(n, states.shape[1], states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def grow(self, n_blocks: int) -> None:
        if self.is_initialized:
            self.keys, self.values = (longer(tensor, n_blocks * BLOCK) for tensor in self.pair())

    def pair(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new entries where the owner points; return the keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.pair()
        place_BT = self.owner.target_BT
        keys[place_BT], values[place_BT] = key_states.transpose(1, 2), value_states.transpose(1, 2)
        if self.owner.prefilling:  # there are no earlier entries to attend to
            return key_states, value_states
        # Copies, one layer at a time: a slot's blocks are scattered, and attention needs contiguous rows.
        return self._read(keys), self._read(values)

    def _read(self, places: Tensor) -> Tensor:
        """Return (slots, heads, positions, dim); `index_select` takes half as long as indexing."""
        place_SL = self.owner.source_SL
        return places.index_select(0, place_SL.flatten()).unflatten(0, place_SL.shape).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys, for models that build their own mask."""
        return (query_length if self.owner.prefilling else self.owner.extent), 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always passed explicitly, because slots have no common length."""
        return 0

    def get_max_length(self) -> int:
        return self.owner.n_positions


class SlotCache(Cache):
    """A KV cache in blocks, in which every slot has its own position.

    Transformers' static cache advances all rows of a batch together, so a batch lasts as long as its longest
    completion. Here position t of a slot is entry t % BLOCK of its block t // BLOCK: a finished slot is
    refilled at once, and the entries of a completion stay in place when the weights change. Block 0 belongs
    to no slot: padding and slots that do not decode use it.
    """

    def __init__(self, n_layers: int, n_slots: int, n_positions: int, device: torch.device) -> None:
        self.n_slots, self.n_positions, self._device = n_slots, n_positions, device
        self.prefilling, self.extent = False, 0
        self.target_BT = self.source_SL = torch.empty(0, dtype=torch.int64)
        """Cache entries that the next pass writes, and those that it reads when decoding."""
        self.slot_layers = [_CacheLayer(self) for _ in range(n_layers)]
        self.pool = BlockPool(1 + n_slots * blocks_for(n_positions), self._grow)
        self.table = BlockTable(self.pool, n_slots, n_positions)
        self.pool.take(1)  # block 0
        super().__init__(layers=list(self.slot_layers))

    def at_prompts(self, slots_B: np.ndarray, length_B: np.ndarray) -> SlotCache:
        """Point the next forward pass at the first positions of slots; each attends only to itself."""
        self.table.hold(slots_B, length_B)
        self.target_BT, self.prefilling = self._places(slots_B, length_B), True
        self.extent = self.target_BT.shape[1]
        return self

    def at_next(self, slots_A: np.ndarray, positions_A: np.ndarray) -> SlotCache:
        """Point the next forward pass at one position of each of some slots.

        The pass runs all slots, in order, and attends up to the furthest position in use."""
        self.table.hold(slots_A, positions_A + 1)
        length_S = np.zeros(self.n_slots, dtype=np.int64)
        length_S[slots_A] = positions_A + 1
        # Attention is only over the positions in use, which are few early in a long context.
        self.source_SL, self.prefilling = self._places(np.arange(self.n_slots), length_S), False
        self.extent = self.source_SL.shape[1]
        last_S1 = torch.from_numpy(np.maximum(length_S - 1, 0)).to(self._device)[:, None]
        self.target_BT = self.source_SL.gather(1, last_S1)
        return self

    def copy(self, source: int, targets_B: np.ndarray, length: int) -> None:
        """Copy the first `length` positions from one slot to others."""
        length_B = np.full(len(targets_B), length)
        self.table.hold(targets_B, length_B)
        place_T = self._places(np.array([source]), length_B[:1])[0]
        place_BT = self._places(targets_B, length_B)
        for layer in self.slot_layers:
            for tensor in layer.pair():
                tensor[place_BT] = tensor[place_T]

    def save(self, slots_B: np.ndarray, length_B: np.ndarray) -> list[list[Tensor]]:
        """Return keys and values of slots by layer in CPU memory, padded: (slots, heads, positions, dim).

        The list is empty before the first use.
        """
        used = [layer for layer in self.slot_layers if layer.is_initialized]
        place_BT = self._places(slots_B, length_B)
        # Layer by layer: copies of all layers on the device would be a second cache.
        return [[tensor[place_BT].transpose(1, 2).cpu() for tensor in layer.pair()] for layer in used]

    def load(self, slots_B: np.ndarray, saved: list[list[Tensor]], length_B: np.ndarray) -> None:
        """Restore the result of `save` into empty slots."""
        if not saved:
            return
        self.table.hold(slots_B, length_B)
        place_BT = self._places(slots_B, length_B)
        for layer, pair in zip(self.slot_layers, saved, strict=True):
            keys, values = (tensor.to(self._device) for tensor in pair)
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            for tensor, old in zip(layer.pair(), (keys, values), strict=True):
                tensor[place_BT] = old.transpose(1, 2)

    def _places(self, slots_B: np.ndarray, length_B: np.ndarray) -> Tensor:
        """Return the cache entries of the first positions of slots, (B, T); block 0 after a slot's length."""
        longest = int(length_B.max(initial=1))
        n = blocks_for(longest)
        # The table has stale values after the last block that a slot uses.
        used_BN = np.arange(n) * BLOCK < length_B[:, None]
        block_BN = torch.from_numpy(np.where(used_BN, self.table.block_EN[slots_B, :n], 0)).to(self._device)
        place_BNP = block_BN[:, :, None] * BLOCK + torch.arange(BLOCK, device=self._device)
        return place_BNP.flatten(1)[:, :longest]

    def _grow(self, n_blocks: int) -> None:
        for layer in self.slot_layers:  # one at a time: growing all at once would need a second cache
            layer.grow(n_blocks)
