"""What a generator decodes with: a model, and the KV cache of its slots.

    make_engine -> FusedEngine          Llama, Mistral, Qwen2 and Qwen3, float32, on a CPU with a C compiler
                   TransformersEngine   any other causal LM, precision or device

Both return the last hidden states of transformers' own forward pass, to rounding. Weights are exchanged in
place, in the model's parameters, and the cache stays as it is.

Shapes in names: A slots that take part, B slots that start or prompts, S all slots, L positions of a slot,
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
from scalerl.rl.config.settings import EngineKind
from scalerl.rl.kernels.fused import FusedEngine
from scalerl.rl.model.causal_lm import hidden_states


class Engine(Protocol):
    """Runs tokens through a model, each at its position of its slot."""

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Start slots with prompts, all slots of a group with one; return the last hidden states: (B, D)."""
        ...

    def decode(self, slots_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """Append one token to each slot, at its position; return the last hidden states: (A, D)."""
        ...

    def state(self, slots_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Return copies of what the cache holds of some slots, up to so many positions."""
        ...

    def restore(self, slots_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """Put back into the same slots what `state` returned, where nothing else is in any slot."""
        ...


def make_engine(
    model: nn.Module, n_slots: int, prompt_tokens: int, new_tokens: int, kind: EngineKind = "auto"
) -> Engine:
    """Return an engine of this kind, for prompts and completions of at most so many tokens.

    Raises:
        InputError: the kind is `kernels`, and they do not compute this model here.
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
    return TransformersEngine(model, n_slots, prompt_tokens + new_tokens)


class TransformersEngine:
    """Any causal LM that transformers loads, through its own modules and `SlotCache`."""

    def __init__(self, model: nn.Module, n_slots: int, n_positions: int) -> None:
        config: Any = model.config
        self._model = model
        self._device = next(model.parameters()).device
        self._cache = SlotCache(config.num_hidden_layers, n_slots, n_positions)

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Run prompts padded on the right; what padding writes is overwritten before it is read."""
        length_B = np.array([len(prompt_T) for prompt_T in prompts])
        first_B = np.array([slots[0] for slots in groups])
        longest = int(length_B.max())
        token_BT = np.zeros((len(prompts), longest), dtype=np.int64)
        for padded_T, prompt_T in zip(token_BT, prompts, strict=True):
            padded_T[: len(prompt_T)] = prompt_T
        position_BT = torch.arange(longest, device=self._device).expand(len(prompts), -1)
        # Made here, as transformers would derive it from the length of a cache, of which slots have many.
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()[None, None]
        hidden_BTD = hidden_states(
            self._model,
            input_ids=self._tensor(token_BT),
            position_ids=position_BT,
            attention_mask=causal.expand(len(prompts), 1, -1, -1),
            cache=self._cache.at(self._tensor(first_B), position_BT, prefilling=True),
        )
        for slots, prompt_T in zip(groups, prompts, strict=True):
            # Computed once, for the first slot of a group.
            if len(slots) > 1:
                self._cache.copy(int(slots[0]), self._tensor(slots[1:]), len(prompt_T))
        return hidden_BTD[torch.arange(len(prompts), device=self._device), self._tensor(length_B - 1)]

    def decode(self, slots_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """Run all slots; one that takes no part writes at position 0, which its next prompt overwrites."""
        token_S1 = torch.zeros(self._cache.n_slots, 1, dtype=torch.int64, device=self._device)
        position_S1 = torch.zeros_like(token_S1)
        slot_A = self._tensor(slots_A)
        token_S1[slot_A, 0] = self._tensor(tokens_A)
        position_S1[slot_A, 0] = self._tensor(positions_A)
        # All slots, as to select those that take part would copy their keys and values in every step.
        every_S = torch.arange(len(token_S1), device=self._device)
        cache = self._cache.at(every_S, position_S1, prefilling=False)
        reach_L = torch.arange(cache.extent, device=self._device)
        hidden_S1D = hidden_states(
            self._model,
            input_ids=token_S1,
            position_ids=position_S1,
            attention_mask=(reach_L <= position_S1)[:, None, None, :],
            cache=cache,
        )
        return hidden_S1D[slot_A, 0]

    def state(self, slots_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Return keys and values of each layer; see `Engine`."""
        return {"layers": self._cache.save(self._tensor(slots_B), int(length_B.max(initial=0)))}

    def restore(self, slots_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        self._cache.load(self._tensor(slots_B), state["layers"])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _CacheLayer(CacheLayerMixin):
    """Keys and values of one layer, shape (slots, heads, positions, head_dim)."""

    is_sliding = False
    is_compileable = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once the first states show heads, size and precision."""
        _, heads, _, dim = key_states.shape
        shape = (self.owner.n_slots, heads, self.owner.n_positions, dim)
        # Zeros: what is masked has weight 0, and 0 times a NaN of fresh memory is NaN.
        self.keys = key_states.new_zeros(shape)
        self.values = value_states.new_zeros(shape)
        self.is_initialized = True

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, once they are there."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new entries where the owner points, and return what is to be attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.pair()
        slots_B1, positions_BT = self.owner.target
        # Two index arrays around a slice: their axes come first, (B, T, heads, head_dim).
        keys[slots_B1, :, positions_BT] = key_states.transpose(1, 2)
        values[slots_B1, :, positions_BT] = value_states.transpose(1, 2)
        if self.owner.prefilling:  # nothing came before: the new states are all there is
            return key_states, value_states
        return keys[:, :, : self.owner.extent], values[:, :, : self.owner.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys, for models that build a mask of their own."""
        return (query_length if self.owner.prefilling else self.owner.extent), 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always passed explicitly, as the slots have no common length."""
        return 0

    def get_max_length(self) -> int:
        """Return the positions of a slot."""
        return self.owner.n_positions


class SlotCache(Cache):
    """A KV cache of fixed size in which every slot is at a position of its own.

    Transformers' own static cache advances all rows of a batch together, so that it ends with its longest
    completion. Here position t of slot s is always at index t of slot s: a finished slot is refilled at once,
    and the entries of a completion stay where they are when the weights change.
    """

    def __init__(self, n_layers: int, n_slots: int, n_positions: int) -> None:
        self.n_slots = n_slots
        self.n_positions = n_positions
        self.prefilling = False
        self.extent = 0
        self.target: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self.slot_layers = [_CacheLayer(self) for _ in range(n_layers)]
        super().__init__(layers=list(self.slot_layers))

    def at(self, slots_B: Tensor, positions_BT: Tensor, prefilling: bool) -> SlotCache:
        """Point the next forward pass at `positions_BT` of `slots_B`.

        While prefilling, the slots are fresh and attend to themselves alone; else all slots take part, in
        order, and attend to everything up to the furthest position in use.
        """
        self.target = (slots_B[:, None], positions_BT)
        self.prefilling = prefilling
        # Attention is over this much alone: early in a long context most of a slot is empty.
        self.extent = int(positions_BT.max()) + 1
        return self

    def copy(self, source: int, targets_B: Tensor, length: int) -> None:
        """Copy the first `length` positions from one slot to others."""
        for layer in self.slot_layers:
            for tensor in layer.pair():
                tensor[targets_B, :, :length] = tensor[source, :, :length]

    def save(self, slots_B: Tensor, extent: int) -> list[list[Tensor]]:
        """Return keys and values of slots by layer, up to `extent`, in the memory of the CPU.

        None before the first use.
        """
        used = [layer for layer in self.slot_layers if layer.is_initialized]
        # Layer by layer: all copies on the device would be the cache once more.
        return [[tensor[slots_B, :, :extent].cpu() for tensor in layer.pair()] for layer in used]

    def load(self, slots_B: Tensor, saved: list[list[Tensor]]) -> None:
        """Put back what `save` returned."""
        # Not strict: before the first use there is nothing to save.
        for layer, pair in zip(self.slot_layers, saved, strict=False):
            keys, values = (tensor.to(slots_B.device) for tensor in pair)
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            for tensor, old in zip(layer.pair(), (keys, values), strict=True):
                tensor[slots_B, :, : old.shape[2]] = old
