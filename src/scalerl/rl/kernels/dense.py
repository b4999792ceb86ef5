"""The dense families whose forward pass the kernels implement: Llama, Mistral, Qwen2 and Qwen3.

A block of all four is  x + attention(norm(x)),  then  x + down(silu(gate(norm(x))) * up(norm(x))),  with RMS
norms and rotary positions; Qwen2 has biases, Qwen3 norms of queries and keys. `DenseModel.of` finds the
weights of such a model and returns None for every other one, which then runs through its own modules, as does
any model without a C compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles depend only on the position."""


def attends_to_all(config: Any) -> bool:
    """Return whether every token attends to all tokens before it, without a sliding window or the like."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


class DenseLayer:
    """The weights of one block: the model's own tensors, so that a weight update changes them too."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.norm: Tensor = block.input_layernorm.weight
        self.q: nn.Linear = attention.q_proj
        self.k: nn.Linear = attention.k_proj
        self.v: nn.Linear = attention.v_proj
        self.o: nn.Linear = attention.o_proj
        self.q_norm: Tensor | None = getattr(getattr(attention, "q_norm", None), "weight", None)
        self.k_norm: Tensor | None = getattr(getattr(attention, "k_norm", None), "weight", None)
        self.mlp_norm: Tensor = block.post_attention_layernorm.weight
        self.gate: nn.Linear = mlp.gate_proj
        self.up: nn.Linear = mlp.up_proj
        self.down: nn.Linear = mlp.down_proj

    @property
    def linears(self) -> tuple[nn.Linear, ...]:
        """The linear layers: matrices with their biases."""
        return (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


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
        """Return the weights of `model`, or None if its family, or a change to it, is not supported."""
        config: Any = model.config
        if getattr(config, "model_type", None) not in FAMILIES or config.hidden_act not in ("silu", "swish"):
            return None
        if not attends_to_all(config):  # the kernels would ignore a window
            return None
        base: Any = model.base_model
        rotary, head_dim = base.rotary_emb, base.layers[0].self_attn.head_dim
        if rotary.rope_type not in STATIC_ROPE or 2 * rotary.inv_freq.numel() != head_dim:
            return None
        dense = cls(
            base.embed_tokens,
            tuple(map(DenseLayer, base.layers)),
            base.norm.weight,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            config.rms_norm_eps,
            rotary,
        )
        if any(type(m) is not nn.Linear for layer in dense.layers for m in layer.linears):
            return None  # such as an adapter
        # Any further parameter, such as another bias or norm, would silently be left out.
        known = {id(p) for p in dense.parameters()}
        return dense if known == {id(p) for p in base.parameters()} else None

    def parameters(self) -> Iterator[Tensor]:
        """Yield all parameters except those of the head."""
        yield from (self.embedding.weight, self.norm)
        for layer in self.layers:
            for linear in layer.linears:
                yield from linear.parameters()
            norms = (layer.norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
            yield from (norm for norm in norms if norm is not None)

    @torch.no_grad()
    def rotation(self, n_positions: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine by position, each (n_positions, head_dim), from the model's own module."""
        device = self.norm.device
        # The module reads only dtype and device of its first argument.
        cos, sin = self.rotary(torch.zeros(1, device=device), torch.arange(n_positions, device=device)[None])
        return cos[0].contiguous(), sin[0].contiguous()


LANES = 8
"""Floats in a vector; the sizes of heads, hidden states and gates must be multiples of it."""


def fits(model: DenseModel) -> bool:
    """Return whether the kernels can run a model: float32 on a CPU, with sizes in whole vectors."""
    sizes = (model.norm.shape[0], model.head_dim, model.layers[0].down.in_features)
    plain = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    return plain and all(size % LANES == 0 for size in sizes)
