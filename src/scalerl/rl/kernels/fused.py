"""The forward pass of Llama and its kin, with as little around the matrix products as can be.

    hidden += attention(norm(hidden) Wqkv) Wo        RMSNorm (and q, k norm), RoPE, grouped-query attention
    hidden += (silu(gate) * up) Wdown                gate, up = norm(hidden) Wgate_up

Matrices that read the same input are stored one below the other, and the modules of the model hold views of
them: what is installed in the modules is installed here. What is no matrix product is in native.c. Tokens of
prompts and of completions take the same path, and each attends over exactly what stands before it.

Shapes in names: A tokens of a pass, B prompts, R rows, T tokens of a prompt, S slots,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.kernels.compiled import LANES, fits
from scalerl.rl.kernels.dense import DenseLayer, DenseModel
from scalerl.rl.kernels.native import Kernels, KernelStore, Shape, load_kernels

MOST_TOKENS = 512
"""Of one pass, so that what lies between two matrix products stays in the processor's cache."""


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor | None, Tensor | None]
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class _Slots:
    """Keys and values of `n` slots of `extent` positions each, in every layer; see native.c."""

    def __init__(self, model: DenseModel, n: int, n_positions: int) -> None:
        layers, kv_heads, dim = len(model.layers), model.kv_heads, model.head_dim
        self.extent = -(-n_positions // LANES) * LANES
        self.keys = torch.zeros(layers, n, self.extent // LANES, kv_heads, dim, LANES)
        self.values = torch.zeros(layers, n, self.extent, kv_heads, dim)
        pairs = zip(self.keys, self.values, strict=True)
        self.stores = [KernelStore(keys.data_ptr(), values.data_ptr(), self.extent) for keys, values in pairs]

    def save(self, slot_B: np.ndarray, length_B: np.ndarray) -> list[Tensor]:
        """Copies of the first `length_B` positions of some slots, one after the other."""
        blocks, positions = _ragged(slot_B, -(-length_B // LANES)), _ragged(slot_B, length_B)
        return [self.keys[:, *blocks], self.values[:, *positions]]

    def load(self, slot_B: np.ndarray, length_B: np.ndarray, saved: Sequence[Tensor]) -> None:
        """Put back what `save` returned."""
        self.keys[:, *_ragged(slot_B, -(-length_B // LANES))] = saved[0]
        self.values[:, *_ragged(slot_B, length_B)] = saved[1]


def _ragged(slot_B: np.ndarray, length_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """Slot and place of everything that stands in slots of these lengths."""
    place_A = np.concatenate([np.arange(length) for length in length_B]) if len(length_B) else length_B
    return torch.from_numpy(np.repeat(slot_B, length_B)), torch.from_numpy(place_A)


class FusedEngine:
    """See `scalerl.rl.engine.engine.Engine`.

    A prompt stands in one slot for all rows that go on from it, and a row's own slot holds its completion:
    the rows of a group read the same keys and values, which stay near the processor meanwhile.
    """

    def __init__(
        self, model: DenseModel, kernels: Kernels, n_rows: int, prompt_tokens: int, new_tokens: int
    ) -> None:
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        hidden, inner = model.norm.shape[0], model.layers[0].down.in_features
        self._kernels = kernels
        self._eps = model.eps
        self._shape = Shape(heads, kv_heads, dim, dim**-0.5, self._eps)
        self._layers = [_fuse(layer) for layer in model.layers]
        self._embedding: Tensor = model.embedding.weight
        self._norm: Tensor = model.norm
        self._turns = model.rotation(prompt_tokens + new_tokens)
        self._prompts, self._own = _Slots(model, n_rows, prompt_tokens), _Slots(model, n_rows, new_tokens)
        self._prompt_R = np.full(n_rows, -1)  # the slot of each row's prompt, and its length
        self._prefix_R = np.zeros(n_rows, dtype=np.int64)
        longer = max(self._prompts.extent, self._own.extent)
        self._score = torch.empty(
            heads, self._prompts.extent + longer
        )  # prompts go on from nothing, in prompts
        sizes = {"hidden": hidden, "normed": hidden, "mixed": heads * dim}
        sizes |= {"qkv": (heads + 2 * kv_heads) * dim, "gate_up": 2 * inner, "gated": inner}
        self._room = {name: torch.empty(MOST_TOKENS, size) for name, size in sizes.items()}

    @classmethod
    def of(cls, model: nn.Module, n_rows: int, prompt_tokens: int, new_tokens: int) -> Self | None:
        """The engine of a model; None where the model is not one that it knows, or there is no C compiler."""
        dense = DenseModel.of(model)
        if dense is None or not fits(dense) or any(map(_has_other_biases, dense.layers)):
            return None
        kernels = load_kernels()
        return None if kernels is None else cls(dense, kernels, n_rows, prompt_tokens, new_tokens)

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """All tokens of all prompts, one after the other and without padding."""
        self._prompt_R[np.concatenate(groups)] = -1
        taken_S = np.zeros(len(self._prompt_R) + 1, dtype=bool)
        taken_S[self._prompt_R] = True  # -1 is the last, which is no slot
        slot_B = np.flatnonzero(~taken_S[:-1])[: len(groups)]
        for rows, prompt_T, slot in zip(groups, prompts, slot_B, strict=True):
            self._prompt_R[rows], self._prefix_R[rows] = slot, len(prompt_T)
        length_B = np.array([len(prompt_T) for prompt_T in prompts])
        at_A = np.concatenate([np.arange(length) for length in length_B])
        slot_A, nothing_A = np.repeat(slot_B, length_B), np.zeros_like(at_A)
        hidden_AD = self._run(self._prompts, np.concatenate(prompts), (nothing_A, nothing_A, slot_A, at_A))
        return hidden_AD[torch.from_numpy(length_B.cumsum() - 1)]

    def decode(self, rows_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """See `Engine`."""
        prefix_A = self._prefix_R[rows_A]
        places = (self._prompt_R[rows_A], prefix_A, rows_A, positions_A - prefix_A)
        return self._run(self._own, tokens_A, places)

    def state(self, rows_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Keys and values of all layers, and which prompt each row goes on from; see `Engine`."""
        prompt_B, prefix_B = self._prompt_R[rows_B], self._prefix_R[rows_B]
        slot_S, first_S = np.unique(prompt_B, return_index=True)
        own_B = length_B - prefix_B
        return {
            "prompt": prompt_B,
            "prefix": prefix_B,
            "length": own_B,
            "prompts": self._prompts.save(slot_S, prefix_B[first_S]),
            "own": self._own.save(rows_B, own_B),
        }

    def restore(self, rows_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        prompt_B, prefix_B = state["prompt"], state["prefix"]
        self._prompt_R[rows_B], self._prefix_R[rows_B] = prompt_B, prefix_B
        slot_S, first_S = np.unique(prompt_B, return_index=True)
        self._prompts.load(slot_S, prefix_B[first_S], state["prompts"])
        self._own.load(rows_B, state["length"], state["own"])

    def _run(self, own: _Slots, tokens_A: np.ndarray, places: Sequence[np.ndarray]) -> Tensor:
        """The tokens in passes of `MOST_TOKENS`; their keys and values go to `own`."""
        inputs = [torch.from_numpy(array) for array in (tokens_A, *places)]
        out_AD = torch.empty(len(tokens_A), self._embedding.shape[1])
        for start in range(0, len(tokens_A), MOST_TOKENS):
            part = slice(start, start + MOST_TOKENS)
            token_part, *place_parts = (tensor[part] for tensor in inputs)
            self._pass(own, token_part, place_parts, out_AD[part])
        return out_AD

    def _pass(self, own: _Slots, tokens_A: Tensor, places: Sequence[Tensor], out_AD: Tensor) -> None:
        kernels, eps = self._kernels, self._eps
        room = {name: buffer[: len(tokens_A)] for name, buffer in self._room.items()}
        hidden, normed, mixed, gated = room["hidden"], room["normed"], room["mixed"], room["gated"]
        torch.index_select(self._embedding, 0, tokens_A, out=hidden)
        for layer, prompts, completions in zip(self._layers, self._prompts.stores, own.stores, strict=True):
            kernels.rms_norm(hidden, layer.attention_norm, eps, normed)
            qkv = _linear(normed, layer.qkv, layer.qkv_bias, room["qkv"])
            kernels.attend(
                self._shape,
                prompts,
                completions,
                qkv,
                layer.qk_norms,
                self._turns,
                places,
                self._score,
                mixed,
            )
            hidden.addmm_(mixed, layer.out.t())
            kernels.rms_norm(hidden, layer.mlp_norm, eps, normed)
            kernels.swiglu(_linear(normed, layer.gate_up, None, room["gate_up"]), gated)
            hidden.addmm_(gated, layer.down.t())
        kernels.rms_norm(hidden, self._norm, eps, out_AD)


def _has_other_biases(layer: DenseLayer) -> bool:
    """Whether there are biases that the formulas above have no place for."""
    return any(linear.bias is not None for linear in (layer.o, layer.gate, layer.up, layer.down))


def _fuse(layer: DenseLayer) -> _Layer:
    qkv = (layer.q, layer.k, layer.v)
    return _Layer(
        layer.norm.data,
        _stack([linear.weight for linear in qkv]),
        None if layer.q.bias is None else _stack([linear.bias for linear in qkv]),
        (None, None)
        if layer.q_norm is None or layer.k_norm is None
        else (layer.q_norm.data, layer.k_norm.data),
        layer.o.weight.data,
        layer.mlp_norm.data,
        _stack([layer.gate.weight, layer.up.weight]),
        layer.down.weight.data,
    )


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor with all of them, of which they become parts."""
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


def _linear(x_AD: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x_AD, weight.t(), out=out)
    return torch.addmm(bias, x_AD, weight.t(), out=out)
