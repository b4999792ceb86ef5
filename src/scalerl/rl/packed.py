"""The forward pass of a dense model over packed tokens (`scalerl.rl.packing`), with its gradient.

The same mathematics as the model's own modules, in float32. Three pieces have a backward pass of their own,
as they are most of what is not a matrix product: the norm, the gated activation and the attention.

Shapes in names: F tokens that are read, R of them at which something is predicted, D hidden size, H query
heads, J key and value heads, E head size, U prompts, P positions of the longest, B and C completions of a
bucket and their positions, K keys of a bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from scalerl.rl.dense import DenseLayer, DenseModel
from scalerl.rl.packing import Bucket, Packing


def packed_hidden_states(model: DenseModel, packing: Packing) -> Tensor:
    """Last hidden states, before the LM head, where something is predicted: shape (R, D)."""
    turn_FXE = _turns(model, packing)
    x_FD = model.embedding(packing.token_F)
    for layer in model.layers:
        qkv_FXE = _queries_keys_values(model, layer, rms_norm(x_FD, layer.norm, model.eps))
        mixed_FD: Any = _Attention.apply(qkv_FXE, turn_FXE, packing, model.heads)
        if layer is model.layers[-1]:  # what nothing is predicted from has given its keys, and is done
            mixed_FD, x_FD = (x.index_select(0, packing.needed_R) for x in (mixed_FD, x_FD))
        x_FD = x_FD + linear(mixed_FD, layer.o.weight, layer.o.bias)
        x_FD = x_FD + _mlp(layer, rms_norm(x_FD, layer.mlp_norm, model.eps))
    return rms_norm(x_FD, model.norm, model.eps)


def _turns(model: DenseModel, packing: Packing) -> Tensor:
    """The rotation of every query and key, shape (F, X, E / 2), with the scale of the scores in the queries'.

    Values are turned by 1.
    """
    turn_TE = model.rotation(int(packing.position_F.max()) + 1)
    scaled_TE, ones_TE = turn_TE * model.head_dim**-0.5, torch.ones_like(turn_TE)
    turn_TXE = torch.stack(
        [scaled_TE] * model.heads + [turn_TE] * model.kv_heads + [ones_TE] * model.kv_heads, 1
    )
    return turn_TXE[packing.position_F]


def _queries_keys_values(model: DenseModel, layer: DenseLayer, x_FD: Tensor) -> Tensor:
    """Shape (F, X, E), the heads of queries first."""
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    weight = torch.cat([_paired(layer.q.weight, head_dim), _paired(layer.k.weight, head_dim), layer.v.weight])
    bias = None
    if layer.q.bias is not None:
        bias = torch.cat([_paired(layer.q.bias, head_dim), _paired(layer.k.bias, head_dim), layer.v.bias])
    qkv_FXE = linear(x_FD, weight, bias).unflatten(1, (-1, head_dim))
    if layer.q_norm is None or layer.k_norm is None:
        return qkv_FXE
    qk_FXE, v_FJE = qkv_FXE.split([heads + kv_heads, kv_heads], dim=1)
    scales = [_paired(layer.q_norm, head_dim).expand(heads, -1)]
    scales += [_paired(layer.k_norm, head_dim).expand(kv_heads, -1)]
    return torch.cat([rms_norm(qk_FXE, torch.cat(scales), model.eps), v_FJE], dim=1)


def _paired(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of each head in an order that puts the two that are turned together side by side.

    Queries and keys alike, so that their products are as before; a turn is then one complex product.
    """
    pairs = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _mlp(layer: DenseLayer, x_FD: Tensor) -> Tensor:
    gate, up = linear(x_FD, layer.gate.weight, layer.gate.bias), linear(x_FD, layer.up.weight, layer.up.bias)
    return linear(_GatedSilu.apply(gate, up), layer.down.weight, layer.down.bias)  # pyright: ignore


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension; `scale` may have one row per head."""
    return _RmsNorm.apply(x, scale, eps)  # pyright: ignore[reportReturnType]


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        rate = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(eps).rsqrt_()
        normed = x * rate
        ctx.save_for_backward(normed, scale, rate)
        return normed * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore
        normed, scale, rate = ctx.saved_tensors
        grad_scale = (grad * normed).sum(tuple(range(grad.ndim - scale.ndim)))
        grad = grad * scale
        along = (grad * normed).mean(-1, keepdim=True)
        return torch.addcmul(grad, normed, along, value=-1).mul_(rate), grad_scale, None


class _GatedSilu(Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        ctx.save_for_backward(sigmoid, silu, up)
        return silu * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        sigmoid, silu, up = ctx.saved_tensors
        # silu' = sigmoid (1 + gate (1 - sigmoid)) = sigmoid + silu (1 - sigmoid)
        slope = torch.addcmul(sigmoid + silu, sigmoid, silu, value=-1)
        return slope.mul_(up).mul_(grad), grad * silu


class _Attention(Function):
    """Rotary positions and causal attention, bucket by bucket: from (F, X, E) to (F, H E).

    Gradients of a prompt's keys and values are summed over the completions that read them.
    """

    @staticmethod
    def forward(ctx: Any, qkv_FXE: Tensor, turn_FXE: Tensor, packing: Packing, heads: int) -> Tensor:
        kv_heads, head_dim = (qkv_FXE.shape[1] - heads) // 2, qkv_FXE.shape[2]
        rows_GE = _turned(qkv_FXE, turn_FXE).view(-1, head_dim).index_select(0, packing.gather_G)
        out_GE = rows_GE.new_empty(len(packing.out_G), head_dim)
        shares = []
        for bucket in packing.buckets:
            q, k, v = _views(rows_GE, bucket, kv_heads)
            scores = torch.bmm(q, k.mT)
            scores.view(bucket.n, heads, bucket.length, -1).add_(bucket.bias_BCK[:, None])
            share = torch.softmax(scores, dim=-1)
            torch.bmm(share, v, out=out_GE[bucket.queries].view_as(q))
            shares.append(share)
        ctx.save_for_backward(rows_GE, turn_FXE, *shares)
        ctx.packing = packing
        scatter_FH = packing.scatter_FX.view(-1, qkv_FXE.shape[1])[:, :heads]
        return out_GE.index_select(0, scatter_FH.flatten()).view(-1, heads * head_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        rows_GE, turn_FXE, *shares = ctx.saved_tensors
        packing: Packing = ctx.packing
        n_tokens, width, head_dim = turn_FXE.shape[0], turn_FXE.shape[1], rows_GE.shape[1]
        heads = grad.shape[1] // head_dim
        kv_heads = (width - heads) // 2
        # One row of zeros for every head of padding, which asks for no gradient.
        padded = torch.cat([grad.view(-1, head_dim), grad.new_zeros(heads, head_dim)])
        out_GE, grad_GE = padded.index_select(0, packing.out_G), torch.empty_like(rows_GE)
        for bucket, share in zip(packing.buckets, shares, strict=True):
            q, k, v = _views(rows_GE, bucket, kv_heads)
            grad_q, grad_k, grad_v = _views(grad_GE, bucket, kv_heads)
            out = out_GE[bucket.queries].view_as(q)
            torch.bmm(share.mT, out, out=grad_v)
            scores = torch.ops.aten._softmax_backward_data(torch.bmm(out, v.mT), share, -1, share.dtype)
            torch.bmm(scores, k, out=grad_q)
            torch.bmm(scores.mT, q, out=grad_k)
        grad_FXE = grad_GE.index_select(0, packing.scatter_FX).view(n_tokens, width, head_dim)
        reread = packing.reread_2MJP
        if reread.numel():
            asked = grad_GE.index_select(0, reread.flatten()).view(2, reread.shape[1], -1)
            asked = (packing.group_UM @ asked).view(2, -1, *reread.shape[2:], head_dim)  # (2, U, J, P, E)
            asked = asked.permute(1, 3, 0, 2, 4).reshape(-1, 2 * kv_heads, head_dim)
            asked = asked.index_select(0, packing.prompt_place_F)
            grad_FXE[: len(asked), heads:] += asked
        return _turned(grad_FXE, turn_FXE.conj()), None, None, None


def _turned(x_FXE: Tensor, turn_FXE: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_FXE.contiguous().unflatten(2, (-1, 2)))
    return torch.view_as_real(pairs * turn_FXE).flatten(2)


def _views(rows_GE: Tensor, bucket: Bucket, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a bucket: shapes (B J, H / J C, E) and twice (B J, K, E)."""
    n, head_dim = bucket.n * kv_heads, rows_GE.shape[1]
    return (
        rows_GE[bucket.queries].view(n, -1, head_dim),
        rows_GE[bucket.keys].view(n, -1, head_dim),
        rows_GE[bucket.values].view(n, -1, head_dim),
    )
