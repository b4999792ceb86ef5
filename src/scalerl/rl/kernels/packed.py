"""The training pass of a dense model over packed tokens, with its gradient.

A micro-batch has no padding: every prompt once, then the tokens that are read of each completion.

    token_F     prompt prompt ... completion completion ...

The last token of a completion is predicted but never read; its first is predicted at the end of its prompt.

The mathematics is that of the model's own modules, in float32 on a CPU. Matrix products are torch's; the
norm, the gated activation and the attention are in packed.c, each with its own backward pass.

Shapes in names: M completions, U prompts, T positions, W wanted tokens, F tokens that are read, R of these
that predict a wanted token, D hidden size, I inner size of the MLP, H query heads, X heads of queries, keys
and values, E head size.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from scalerl.rl.kernels.dense import LANES, DenseLayer, DenseModel, fits
from scalerl.rl.kernels.library import Pointer, address, load_library


@dataclass(frozen=True)
class Packing:
    """The layout of a micro-batch; all arrays are int64."""

    token_F: np.ndarray
    prompt_start_U: np.ndarray
    """Flat offset of the first token of each prompt."""
    prompt_length_U: np.ndarray
    first_U: np.ndarray
    """The first completion of each prompt; the last entry is the number of completions."""
    start_M: np.ndarray
    """Flat offset of the first token of each completion, in the order of their prompts."""
    length_M: np.ndarray
    """Number of tokens of each completion that are read, 0 or more."""
    needed_R: np.ndarray
    """Flat offsets of the tokens that predict a wanted token, ascending."""
    row_W: np.ndarray
    """For each wanted token, in the order of `wanted_MT`, its index in `needed_R`."""

    @classmethod
    def of(
        cls, token_MT: np.ndarray, wanted_MT: np.ndarray, prompt_M: np.ndarray, group_M: np.ndarray
    ) -> Packing:
        """Pack right-padded sequences, whose tokens after the first are wanted where `wanted_MT` is true.

        `wanted_MT` is (M, T - 1). Sequences of a group start with the same `prompt_M` tokens, at least one.
        """
        _, first_U, group_M = np.unique(group_M, return_index=True, return_inverse=True)
        # If a row has no wanted token, argmax is 0 and the whole row is read, which only costs time.
        read_M = wanted_MT.shape[1] - wanted_MT[:, ::-1].argmax(1)  # up to the last that predicts a token
        length_M = np.maximum(read_M - prompt_M, 0)
        order_M = np.argsort(group_M, kind="stable")
        at_T = np.arange(wanted_MT.shape[1])
        prompt_UT = at_T < prompt_M[first_U, None]
        own_MT = (at_T >= prompt_M[:, None]) & (at_T < (prompt_M + length_M)[:, None])
        prompt_U = prompt_M[first_U]
        start_U, start_M = _starts(prompt_U), np.empty_like(length_M)
        start_M[order_M] = prompt_U.sum() + _starts(length_M[order_M])

        m_W, t_W = np.nonzero(wanted_MT)
        own_W = start_M[m_W] + t_W - prompt_M[m_W]
        at_W = np.where(t_W < prompt_M[m_W], start_U[group_M[m_W]] + t_W, own_W)
        # One hidden state at the end of a prompt predicts the first token of each of its completions.
        needed_R, row_W = np.unique(at_W, return_inverse=True)
        read_MT = token_MT[:, :-1]
        return cls(
            token_F=np.concatenate([read_MT[first_U][prompt_UT], read_MT[order_M][own_MT[order_M]]]),
            prompt_start_U=start_U,
            prompt_length_U=prompt_U,
            first_U=np.searchsorted(group_M[order_M], np.arange(len(prompt_U) + 1)),
            start_M=start_M[order_M],
            length_M=length_M[order_M],
            needed_R=needed_R,
            row_W=row_W,
        )

    @property
    def longest(self) -> int:
        """Number of positions of the longest sequence that is read."""
        prompt_M = np.repeat(self.prompt_length_U, np.diff(self.first_U))
        return int((prompt_M + self.length_M).max())


def _starts(length: np.ndarray) -> np.ndarray:
    return np.cumsum(length) - length


def can_pack(model: DenseModel) -> bool:
    """Return whether `packed_hidden_states` supports the model's sizes and there is a C compiler."""
    return fits(model) and load_kernels() is not None


def packed_hidden_states(model: DenseModel, packing: Packing) -> Tensor:
    """Return the last hidden states, before the LM head, of the tokens that predict a wanted one: (R, D)."""
    needed_R = torch.from_numpy(packing.needed_R)
    attention = _Attention.of(model, packing)
    x_FD = model.embedding(torch.from_numpy(packing.token_F))
    for layer in model.layers:
        qkv_FXE = _queries_keys_values(model, layer, rms_norm(x_FD, layer.norm, model.eps))
        mixed_FD: Any = _Attend.apply(qkv_FXE, attention)
        if layer is model.layers[-1]:  # other tokens were only needed for their keys and values
            mixed_FD, x_FD = mixed_FD.index_select(0, needed_R), x_FD.index_select(0, needed_R)
        x_FD = x_FD + linear(mixed_FD, layer.o.weight, layer.o.bias)
        x_FD = x_FD + _mlp(layer, rms_norm(x_FD, layer.mlp_norm, model.eps))
    return rms_norm(x_FD, model.norm, model.eps)


def _queries_keys_values(model: DenseModel, layer: DenseLayer, x_FD: Tensor) -> Tensor:
    """Return queries, keys and values, (F, X, E), the heads of queries first."""
    parts = (layer.q, layer.k, layer.v)
    bias = None if layer.q.bias is None else torch.cat([part.bias for part in parts])
    # One product for all heads; the backward pass of `cat` gives each matrix its part of the gradient.
    qkv = linear(x_FD, torch.cat([part.weight for part in parts]), bias)
    qkv_FXE = qkv.unflatten(1, (-1, model.head_dim))
    if layer.q_norm is None or layer.k_norm is None:
        return qkv_FXE
    qk_FXE, v_FXE = qkv_FXE.split([model.heads + model.kv_heads, model.kv_heads], dim=1)
    scale_XE = torch.cat([layer.q_norm.expand(model.heads, -1), layer.k_norm.expand(model.kv_heads, -1)])
    return torch.cat([rms_norm(qk_FXE, scale_XE, model.eps), v_FXE], dim=1)


def _mlp(layer: DenseLayer, x_FD: Tensor) -> Tensor:
    bias = None if layer.gate.bias is None else torch.cat([layer.gate.bias, layer.up.bias])
    gate_up = linear(x_FD, torch.cat([layer.gate.weight, layer.up.weight]), bias)
    inner_FI: Any = _Swiglu.apply(gate_up)
    return linear(inner_FI, layer.down.weight, layer.down.bias)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last dimension; `scale` may have one row per head."""
    out: Any = _RmsNorm.apply(x, scale, eps)
    return out


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        x, scale = x.contiguous(), scale.contiguous()
        out, rate = torch.empty_like(x), x.new_empty(x.shape[:-1])
        sizes = (rate.numel(), x.shape[-1], scale.numel() // x.shape[-1])
        _functions().rms_norm(x, scale, eps, out, rate, *sizes)
        ctx.save_for_backward(x, scale, rate)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        x, scale, rate = ctx.saved_tensors
        # Autograd may pass an expanded gradient, but C reads a contiguous array.
        grad, grad_x, grad_scale = grad.contiguous(), torch.empty_like(x), torch.zeros_like(scale)
        sizes = (rate.numel(), x.shape[-1], scale.numel() // x.shape[-1])
        _functions().rms_norm_backward(grad, x, scale, rate, grad_x, grad_scale, *sizes)
        return grad_x, grad_scale, None


class _Swiglu(Function):
    """silu(gate) * up, from (F, 2 I) to (F, I)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _functions().swiglu(gate_up, out, *out.shape)
        # Only the input is kept: recomputing silu is cheaper than holding it.
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        (gate_up,) = ctx.saved_tensors
        grad, grad_gate_up = grad.contiguous(), torch.empty_like(gate_up)
        _functions().swiglu_backward(grad, gate_up, grad_gate_up, *grad.shape)
        return grad_gate_up


class _Attend(Function):
    """Rotary positions and causal attention, from (F, X, E) to (F, H E).

    Gradients of a prompt's keys and values are summed over the completions that read them. Only the input is
    kept for the backward pass, which computes the scores again.
    """

    @staticmethod
    def forward(ctx: Any, qkv_FXE: Tensor, attention: _Attention) -> Tensor:
        ctx.save_for_backward(qkv_FXE)
        ctx.attention = attention
        out = qkv_FXE.new_empty(len(qkv_FXE), attention.heads * attention.head_dim)
        _functions().attention(attention, qkv_FXE, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        (qkv_FXE,) = ctx.saved_tensors
        grad, grad_qkv = grad.contiguous(), torch.empty_like(qkv_FXE)
        _functions().attention_backward(ctx.attention, grad, qkv_FXE, grad_qkv)
        return grad_qkv, None


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "n_prompts")),
        *((name, c_void_p) for name in ("prompt_start", "prompt_length", "first", "start", "length")),
        *((name, c_void_p) for name in ("cos", "sin", "room")),
        ("extent", c_int64),
        ("scale", c_float),
    )
    heads: int
    head_dim: int

    @classmethod
    def of(cls, model: DenseModel, packing: Packing) -> _Attention:
        extent = -(-packing.longest // LANES) * LANES
        cos, sin = model.rotation(extent)
        room = torch.empty(6 * extent * model.head_dim + 2 * extent + 2 * model.head_dim)
        prompts = [packing.prompt_start_U, packing.prompt_length_U]
        offsets = [*prompts, packing.first_U, packing.start_M, packing.length_M]
        arrays = [torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for array in offsets]
        tensors = [*arrays, cos, sin, room]
        shape = (model.heads, model.kv_heads, model.head_dim, len(packing.prompt_start_U))
        attention = cls(*shape, *map(address, tensors), extent, model.head_dim**-0.5)
        attention.owners = tensors  # keeps alive the memory that it points to
        return attention


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Return the functions of packed.c; None if there is no C compiler, or it cannot compile them."""
    return load_library(
        "packed.c",
        {
            "rms_norm": [Pointer, Pointer, c_float, Pointer, Pointer, *[c_int64] * 3],
            "rms_norm_backward": [*[Pointer] * 6, *[c_int64] * 3],
            "swiglu": [*[Pointer] * 2, *[c_int64] * 2],
            "swiglu_backward": [*[Pointer] * 3, *[c_int64] * 2],
            "attention": [POINTER(_Attention), *[Pointer] * 2],
            "attention_backward": [POINTER(_Attention), *[Pointer] * 3],
        },
    )


def _functions() -> ctypes.CDLL:
    library = load_kernels()
    assert library is not None
    return library
