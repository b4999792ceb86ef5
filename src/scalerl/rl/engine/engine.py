"""What a generator decodes with: a model, and the KV cache of its rows.

    make_engine -> FusedEngine          Llama, Mistral, Qwen2 and Qwen3, float32, on a CPU with a C compiler
                   TransformersEngine   any other causal LM, precision or device

Both give the last hidden states of transformers' own forward pass, to rounding. Weights are exchanged in
place, in the model's parameters, and the cache stays as it is.

Shapes in names: A rows that take part, B rows that start, R rows, L positions of a row, T tokens of a prompt,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.errors import InputError
from scalerl.rl.config.settings import EngineKind
from scalerl.rl.engine.cache import SlotCache
from scalerl.rl.kernels.fused import FusedEngine
from scalerl.rl.model.causal_lm import hidden_states


class Engine(Protocol):
    """Runs tokens through a model, each at its position of its row."""

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Start rows with prompts, all rows of a group with one; returns the last hidden states: (B, D)."""
        ...

    def decode(self, rows_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """Append one token to each row, at its position; returns the last hidden states: (A, D)."""
        ...

    def state(self, rows_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Copies of what the cache holds of some rows, up to so many positions."""
        ...

    def restore(self, rows_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """Put back into the same rows what `state` returned, in an engine that is fresh."""
        ...


def make_engine(
    model: nn.Module, n_rows: int, prompt_tokens: int, new_tokens: int, kind: EngineKind = "auto"
) -> Engine:
    """An engine of this kind, for prompts and completions of at most so many tokens.

    Raises:
        InputError: the kind is `kernels`, and they do not compute this model here.
    """
    if kind != "transformers":
        fused = FusedEngine.of(model, n_rows, prompt_tokens, new_tokens)
        if fused is not None:
            return fused
    if kind == "kernels":
        raise InputError(
            "engine.kind: 'kernels' computes Llama, Mistral, Qwen2 and Qwen3 in float32 on a CPU with a C "
            "compiler, and this is not the case here; use 'auto' or 'transformers'"
        )
    return TransformersEngine(model, n_rows, prompt_tokens + new_tokens)


class TransformersEngine:
    """Any causal LM that transformers loads, through its own modules and `SlotCache`."""

    def __init__(self, model: nn.Module, n_rows: int, n_positions: int) -> None:
        config: Any = model.config
        self._model = model
        self._device = next(model.parameters()).device
        self._cache = SlotCache(config.num_hidden_layers, n_rows, n_positions)

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Prompts are padded on the right; what padding writes is overwritten before it is read."""
        length_B = np.array([len(prompt_T) for prompt_T in prompts])
        first_B = np.array([rows[0] for rows in groups])
        longest = int(length_B.max())
        token_BT = np.zeros((len(prompts), longest), dtype=np.int64)
        for padded_T, prompt_T in zip(token_BT, prompts, strict=True):
            padded_T[: len(prompt_T)] = prompt_T
        position_BT = torch.arange(longest, device=self._device).expand(len(prompts), -1)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()[None, None]
        hidden_BTD = hidden_states(
            self._model,
            input_ids=self._tensor(token_BT),
            position_ids=position_BT,
            attention_mask=causal.expand(len(prompts), 1, -1, -1),
            past_key_values=self._cache.at(self._tensor(first_B), position_BT, prefilling=True),
            use_cache=True,
        )
        for rows, prompt_T in zip(groups, prompts, strict=True):
            if len(rows) > 1:
                self._cache.copy(int(rows[0]), self._tensor(rows[1:]), len(prompt_T))
        return hidden_BTD[torch.arange(len(prompts), device=self._device), self._tensor(length_B - 1)]

    def decode(self, rows_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """All rows run; one that takes no part writes at position 0, which its next prompt overwrites."""
        token_R1 = torch.zeros(self._cache.n_rows, 1, dtype=torch.int64, device=self._device)
        position_R1 = torch.zeros_like(token_R1)
        rows = self._tensor(rows_A)
        token_R1[rows, 0] = self._tensor(tokens_A)
        position_R1[rows, 0] = self._tensor(positions_A)
        every_R = torch.arange(len(token_R1), device=self._device)
        cache = self._cache.at(every_R, position_R1, prefilling=False)
        reach_L = torch.arange(cache.extent, device=self._device)
        hidden_R1D = hidden_states(
            self._model,
            input_ids=token_R1,
            position_ids=position_R1,
            attention_mask=(reach_L <= position_R1)[:, None, None, :],
            past_key_values=cache,
            use_cache=True,
        )
        return hidden_R1D[rows, 0]

    def state(self, rows_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Keys and values of each layer; see `Engine`."""
        return {"layers": self._cache.save(self._tensor(rows_B), int(length_B.max(initial=0)))}

    def restore(self, rows_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        self._cache.load(self._tensor(rows_B), state["layers"])

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
