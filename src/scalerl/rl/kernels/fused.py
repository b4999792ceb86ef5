"""The forward pass of Llama and similar families, with little overhead around the matrix products.

    hidden += attention(norm(hidden) Wqkv) Wo        RMSNorm (and q, k norm), RoPE, grouped-query attention
    hidden += (silu(gate) * up) Wdown                gate, up = norm(hidden) Wgate_up

Matrices that read the same input are stacked, and the modules of the model hold views of them, so that
weights copied into the modules are updated here too. Non-GEMM kernels are in native.c. Tokens of prompts and
completions take the same path, and each attends to itself and the tokens before it.

Shapes in names: A tokens of a pass, B prompts or slots, S decode slots, T tokens of a prompt, D hidden size.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.kernels.dense import LANES, DenseLayer, DenseModel, fits
from scalerl.rl.kernels.library import Pointer, load_library
from scalerl.rl.model.cache_blocks import BLOCK, BlockPool, BlockTable, blocks_for, offsets

MOST_TOKENS = 512
"""Most tokens of one pass, so that activations between two matrix products stay in the CPU's cache."""


class Shape(ctypes.Structure):
    """The shape of a model's attention, for C."""

    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim")),
        *((name, c_float) for name in ("scale", "eps")),
    )


class KernelStore(ctypes.Structure):
    """For C: keys and values of one layer, in blocks; and the blocks of every entry, `columns` for each."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("table", c_void_p), ("columns", c_int64))


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Return the functions of native.c; None if there is no C compiler, or it cannot compile them.

    All tensors are contiguous and on the CPU: offsets are int64, all others float32.

    rms_norm(x, weight, eps, out, *x.shape)    x / sqrt(mean(x^2) + eps) * weight, token by token
    swiglu(gate_up, out, *out.shape)           silu(gate) * up, from (A, 2 D) to (A, D)
    attend(shape, prompts, own, qkv, q_norm, k_norm, cos, sin, *offsets, score, out, A)
        Writes the keys and values of the tokens to the store `own`; each token attends to those before it and
        to itself. `qkv` is (A, heads + 2 kv_heads, head_dim); the norms are None if a model has none; `cos`
        and `sin` are (positions, head_dim). The four `offsets` have for each token (A,) the entry of its
        prompt, the number of prompt positions before it, its entry in `own`, and its position there. `score`
        is scratch memory (heads, both extents), `out` (A, heads, head_dim). Tokens of one entry are in order.
    """
    stores = [POINTER(Shape), POINTER(KernelStore), POINTER(KernelStore)]
    return load_library(
        "native.c",
        {
            "rms_norm": [Pointer, Pointer, c_float, Pointer, c_int64, c_int64],
            "swiglu": [Pointer, Pointer, c_int64, c_int64],
            "attend": [*stores, *[Pointer] * 11, c_int64],
        },
    )


class _Layer:
    def __init__(self, layer: DenseLayer) -> None:
        qkv = (layer.q, layer.k, layer.v)
        self.attention_norm = layer.norm.data
        self.qkv = _stack([linear.weight for linear in qkv])
        self.qkv_bias = None if layer.q.bias is None else _stack([linear.bias for linear in qkv])
        self.qk_norms = layer.q_norm, layer.k_norm
        self.out = layer.o.weight.data
        self.mlp_norm = layer.mlp_norm.data
        self.gate_up = _stack([layer.gate.weight, layer.up.weight])
        self.down = layer.down.weight.data


class _Blocks:
    """Keys, (places / LANES, kv_heads, dim, LANES), and values, (places, kv_heads, dim), of all layers."""

    def __init__(self, model: DenseModel, most: int) -> None:
        """Start empty; at most `most` blocks are needed."""
        shape = model.kv_heads, model.head_dim
        self.layers = [(torch.zeros(0, *shape, LANES), torch.zeros(0, *shape)) for _ in model.layers]
        self.pool = BlockPool(most, self._grow)

    def _grow(self, size: int) -> None:
        """Grow to `size` blocks, layer by layer: growing all at once would need a second cache."""
        places = size * BLOCK
        for i, (keys, values) in enumerate(self.layers):
            self.layers[i] = longer(keys, places // LANES), longer(values, places)


def longer(tensor: Tensor, length: int) -> Tensor:
    """Return a copy of a tensor, padded with zeros to this length."""
    # Zeros: blocks are read whole, and uninitialised memory may not be finite.
    new = tensor.new_zeros(length, *tensor.shape[1:])
    new[: len(tensor)] = tensor
    return new


class _Store:
    """Keys and values of `n` entries of up to `n_positions`, in blocks from a pool that stores share."""

    def __init__(self, blocks: _Blocks, n: int, n_positions: int) -> None:
        self.table, self._blocks = BlockTable(blocks.pool, n, n_positions), blocks

    def of_layers(self) -> list[KernelStore]:
        """Return the current addresses of keys and values of each layer; they change when the pool grows."""
        block_EN = self.table.block_EN
        where = block_EN.ctypes.data, block_EN.shape[1]
        return [KernelStore(k.data_ptr(), v.data_ptr(), *where) for k, v in self._blocks.layers]

    def save(self, entry_B: np.ndarray, length_B: np.ndarray) -> list[Tensor]:
        """Return copies of the first `length_B` positions of some entries, one after another, by layer.

        Keys are saved in whole runs of `LANES` positions."""
        run, place = self._where(entry_B, length_B)
        layers = self._blocks.layers
        return [torch.stack([keys[run] for keys, _ in layers]), torch.stack([v[place] for _, v in layers])]

    def load(self, entry_B: np.ndarray, length_B: np.ndarray, saved: Sequence[Tensor]) -> None:
        """Restore the result of `save` into empty entries."""
        self.table.hold(entry_B, length_B)
        run, place = self._where(entry_B, length_B)
        for (keys, values), old_keys, old_values in zip(self._blocks.layers, *saved, strict=True):
            keys[run], values[place] = old_keys, old_values

    def _where(self, entry_B: np.ndarray, length_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the runs of keys and the places of values, for entries of these lengths."""
        places = self.table.places(entry_B, length_B)
        starts = places[places % LANES == 0]  # a block consists of whole runs, so runs start at multiples
        return torch.from_numpy(starts // LANES), torch.from_numpy(places)


class FusedEngine:
    """An `Engine` (`scalerl.rl.engine.engine`) by C kernels and torch's matrix products.

    A prompt has one entry in a store of prompts, for all slots that continue it; the completion of a slot has
    its own entry in another store. So the slots of a group read the same keys and values, which stay in the
    CPU's cache. Both stores take blocks of one pool, as many as the actual lengths need.
    """

    def __init__(
        self, model: DenseModel, kernels: ctypes.CDLL, n_slots: int, prompt_tokens: int, new_tokens: int
    ) -> None:
        heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
        hidden, inner = model.norm.shape[0], model.layers[0].down.in_features
        self._kernels = kernels
        self._eps = model.eps
        self._shape = Shape(heads, kv_heads, dim, dim**-0.5, self._eps)
        self._layers = [_Layer(layer) for layer in model.layers]
        self._embedding: Tensor = model.embedding.weight
        self._norm: Tensor = model.norm
        self._rotation = model.rotation(prompt_tokens + new_tokens)
        of_slot = blocks_for(prompt_tokens), blocks_for(new_tokens)
        self._blocks = _Blocks(model, n_slots * sum(of_slot))
        self._prompts = _Store(self._blocks, n_slots, prompt_tokens)
        self._own = _Store(self._blocks, n_slots, new_tokens)
        self._prompt_S = np.full(n_slots, -1)  # the entry of each slot's prompt, and its length
        self._prefix_S = np.zeros(n_slots, dtype=np.int64)
        self._slots_P = np.zeros(n_slots, dtype=np.int64)  # number of slots that continue each prompt
        # In prefill both stores are that of prompts, with an empty prefix.
        self._score = torch.empty(heads, (of_slot[0] + max(of_slot)) * BLOCK)
        sizes = {"hidden": hidden, "normed": hidden, "mixed": heads * dim}
        sizes |= {"qkv": (heads + 2 * kv_heads) * dim, "gate_up": 2 * inner, "gated": inner}
        self._room = {name: torch.empty(MOST_TOKENS, size) for name, size in sizes.items()}

    @classmethod
    def of(cls, model: nn.Module, n_slots: int, prompt_tokens: int, new_tokens: int) -> Self | None:
        """Return the engine of a model; None if the kernels do not support it or there is no C compiler."""
        dense = DenseModel.of(model)
        if dense is None or not fits(dense):
            return None
        others = (linear for layer in dense.layers for linear in (layer.o, layer.gate, layer.up, layer.down))
        if any(linear.bias is not None for linear in others):  # the kernels have no such biases
            return None
        kernels = load_kernels()
        return None if kernels is None else cls(dense, kernels, n_slots, prompt_tokens, new_tokens)

    def prefill(self, groups: Sequence[np.ndarray], prompts: Sequence[np.ndarray]) -> Tensor:
        """Run all tokens of all prompts, packed without padding; see `Engine`."""
        self.free(np.concatenate(groups))
        # There are as many entries as slots, so enough are free.
        entry_B = np.flatnonzero(self._slots_P == 0)[: len(groups)]
        for slots, prompt_T, entry in zip(groups, prompts, entry_B, strict=True):
            self._prompt_S[slots], self._prefix_S[slots] = entry, len(prompt_T)
            self._slots_P[entry] = len(slots)
        length_B = np.array([len(prompt_T) for prompt_T in prompts])
        self._prompts.table.hold(entry_B, length_B)
        at_A = offsets(length_B)
        entry_A, nothing_A = np.repeat(entry_B, length_B), np.zeros_like(at_A)
        hidden_AD = self._run(self._prompts, np.concatenate(prompts), (nothing_A, nothing_A, entry_A, at_A))
        return hidden_AD[torch.from_numpy(length_B.cumsum() - 1)]

    def decode(self, slots_A: np.ndarray, tokens_A: np.ndarray, positions_A: np.ndarray) -> Tensor:
        """See `Engine`."""
        prefix_A = self._prefix_S[slots_A]
        at_A = positions_A - prefix_A
        self._own.table.hold(slots_A, at_A + 1)
        return self._run(self._own, tokens_A, (self._prompt_S[slots_A], prefix_A, slots_A, at_A))

    def free(self, slots_B: np.ndarray) -> None:
        """See `Engine`; a prompt is freed with the last slot that continues it."""
        self._own.table.free(slots_B)
        prompt_B = self._prompt_S[slots_B]
        prompt_B = prompt_B[prompt_B >= 0]
        self._prompt_S[slots_B] = -1
        np.subtract.at(self._slots_P, prompt_B, 1)
        if len(left := prompt_B[self._slots_P[prompt_B] == 0]):
            self._prompts.table.free(np.unique(left))

    def state(self, slots_B: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """Return keys and values of all layers, and the prompt that each slot continues; see `Engine`."""
        prompt_B, prefix_B = self._prompt_S[slots_B], self._prefix_S[slots_B]
        # A prompt that several slots share is saved once.
        entry_P, first_P = np.unique(prompt_B, return_index=True)
        own_B = length_B - prefix_B
        return {
            "prompt": prompt_B,
            "prefix": prefix_B,
            "length": own_B,
            "prompts": self._prompts.save(entry_P, prefix_B[first_P]),
            "own": self._own.save(slots_B, own_B),
        }

    def restore(self, slots_B: np.ndarray, state: Mapping[str, Any]) -> None:
        """See `Engine`."""
        prompt_B, prefix_B = state["prompt"], state["prefix"]
        self._prompt_S[slots_B], self._prefix_S[slots_B] = prompt_B, prefix_B
        np.add.at(self._slots_P, prompt_B, 1)
        entry_P, first_P = np.unique(prompt_B, return_index=True)
        self._prompts.load(entry_P, prefix_B[first_P], state["prompts"])
        self._own.load(slots_B, state["length"], state["own"])

    def _run(self, own: _Store, tokens_A: np.ndarray, where: Sequence[np.ndarray]) -> Tensor:
        """Run tokens in passes of at most `MOST_TOKENS`; write their keys and values to `own`."""
        inputs = [torch.from_numpy(array) for array in (tokens_A, *where)]
        stores = list(zip(self._prompts.of_layers(), own.of_layers(), strict=True))
        out_AD = torch.empty(len(tokens_A), self._embedding.shape[1])
        # A prompt may be cut: keys and values of its first part are in the store before the second part runs.
        for start in range(0, len(tokens_A), MOST_TOKENS):
            part = slice(start, start + MOST_TOKENS)
            token_part, *where_part = (tensor[part] for tensor in inputs)
            self._pass(stores, token_part, where_part, out_AD[part])
        return out_AD

    def _pass(
        self,
        stores: Sequence[tuple[KernelStore, KernelStore]],
        tokens_A: Tensor,
        where: Sequence[Tensor],
        out_AD: Tensor,
    ) -> None:
        kernels, eps = self._kernels, self._eps
        room = {name: buffer[: len(tokens_A)] for name, buffer in self._room.items()}
        hidden, normed, mixed, gated = room["hidden"], room["normed"], room["mixed"], room["gated"]
        torch.index_select(self._embedding, 0, tokens_A, out=hidden)
        for layer, (prompts, completions) in zip(self._layers, stores, strict=True):
            kernels.rms_norm(hidden, layer.attention_norm, eps, normed, *hidden.shape)
            qkv = _linear(normed, layer.qkv, layer.qkv_bias, room["qkv"])
            tensors = (qkv, *layer.qk_norms, *self._rotation, *where, self._score, mixed)
            kernels.attend(self._shape, prompts, completions, *tensors, len(qkv))
            hidden.addmm_(mixed, layer.out.t())
            kernels.rms_norm(hidden, layer.mlp_norm, eps, normed, *hidden.shape)
            kernels.swiglu(_linear(normed, layer.gate_up, None, room["gate_up"]), gated, *gated.shape)
            hidden.addmm_(gated, layer.down.t())
        kernels.rms_norm(hidden, self._norm, eps, out_AD, *hidden.shape)


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return a tensor of all parameters stacked, and turn the parameters into views of it."""
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        # A view, so that weights copied into the module later are updated here too.
        parameter.data = part
    return whole


def _linear(x_AD: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x_AD, weight.t(), out=out)
    return torch.addmm(bias, x_AD, weight.t(), out=out)
