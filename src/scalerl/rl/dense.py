"""The dense families whose forward pass is written out here: Llama, Mistral, Qwen2 and Qwen3.

A block of all four is  x + attention(norm(x)),  then  x + down(silu(gate(norm(x))) * up(norm(x))),  with RMS
norms and rotary positions; Qwen2 has biases, Qwen3 norms of queries and keys. `DenseModel.of` finds the
weights of such a model, and says None to every other, which then runs through its own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_CHANGING_ROPE = ("dynamic", "longrope")
"""Rotary positions whose frequencies depend on the length of the text."""


@dataclass(frozen=True)
class DenseLayer:
    """The weights of one block: those that the model itself has, so that an update of one is one of both."""

    norm: Tensor
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear


@dataclass(frozen=True)
class DenseModel:
    """The weights and the shape of a dense causal LM, without its head."""

    embedding: nn.Embedding
    layers: tuple[DenseLayer, ...]
    norm: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rotary: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> DenseModel | None:
        """The weights of `model`; None where its family, or what was done to it, is not written out here."""
        config: Any = model.config
        if getattr(config, "model_type", None) not in FAMILIES or config.hidden_act != "silu":
            return None
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
            return None
        base: Any = model.base_model
        rotary, head_dim = base.rotary_emb, base.layers[0].self_attn.head_dim
        if rotary.rope_type in _CHANGING_ROPE or 2 * rotary.inv_freq.numel() != head_dim:
            return None
        layers = tuple(_layer(block) for block in base.layers)
        if any(type(m) is not nn.Linear for layer in layers for m in _linears(layer)):
            return None  # an adapter, say
        return cls(
            base.embed_tokens,
            layers,
            base.norm.weight,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.rms_norm_eps,
            rotary,
        )

    @torch.no_grad()
    def rotation(self, n_positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine for every position and pair of dimensions, each (n_positions, head_dim / 2)."""
        device = self.norm.device
        positions_1P = torch.arange(n_positions, device=device)[None]
        cos_1PE, sin_1PE = self.rotary(torch.zeros(1, device=device), positions_1P)
        half = self.head_dim // 2
        return cos_1PE[0, :, :half].contiguous(), sin_1PE[0, :, :half].contiguous()


def _layer(block: Any) -> DenseLayer:
    attention, mlp = block.self_attn, block.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return DenseLayer(
        norm=block.input_layernorm.weight,
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        o=attention.o_proj,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        mlp_norm=block.post_attention_layernorm.weight,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
    )


def _linears(layer: DenseLayer) -> tuple[nn.Module, ...]:
    return (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
