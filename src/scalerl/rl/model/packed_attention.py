"""Causal attention over packed sequences, as an attention implementation of transformers.

Padding is neither stored nor computed, and no mask is made: the cost is the sum of the squared lengths. On
a GPU in 16 bits PyTorch's kernel computes it; elsewhere each sequence is computed on its own.

Shapes in names: H query heads, X heads of keys and values, F tokens of all sequences, E head size.
"""

from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch before 2.10
    varlen_attn: Any = None
_TAKES = signature(varlen_attn).parameters if varlen_attn else {}
HAS_KERNEL = "window_size" in _TAKES
"""Whether PyTorch has the kernel with causal attention at any scale: from 2.11 on."""

NAME = "scalerl_varlen"
"""Its name in transformers."""
_OTHERS = ("sliding_window", "softcap", "s_aux", "position_bias")


def register() -> str:
    """Register this attention with transformers; return its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return NAME


def packed_inputs(token_MT: np.ndarray, read_M: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Return a model's arguments for the first `read_M` (at least one) tokens of each row, packed."""
    read_MT = np.arange(token_MT.shape[1]) < read_M[:, None]
    position_MT = np.broadcast_to(np.arange(token_MT.shape[1]), token_MT.shape)
    ends = torch.from_numpy(np.concatenate([[0], read_M.cumsum()]).astype(np.int32)).to(device)
    longest = int(read_M.max())
    return {
        "input_ids": torch.from_numpy(token_MT[read_MT][None]).to(device),
        "position_ids": torch.from_numpy(position_MT[read_MT][None]).to(device),
        # Transformers' names, which its flash attention uses too.
        **{"cu_seq_lens_q": ends, "cu_seq_lens_k": ends},
        **{"max_length_q": longest, "max_length_k": longest},
    }


def _attention(
    module: nn.Module,
    query_1HFE: Tensor,
    key_1XFE: Tensor,
    value_1XFE: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return the attention output in transformers' format: (1, F, H, E), and None for the weights."""
    if cu_seq_lens_q is None or any(more.get(name) is not None for name in _OTHERS):
        # Otherwise a model with more than causal attention would train on wrong log-probabilities.
        raise ValueError("this model's attention is not that of packed sequences")
    if query_1HFE.is_cuda and query_1HFE.dtype.itemsize == 2:
        how: Any = {"scale": scaling, "window_size": (-1, 0)}
        if "enable_gqa" in _TAKES:
            how["enable_gqa"] = True
        else:  # PyTorch 2.11 needs as many heads of keys and values as of queries
            times = query_1HFE.shape[1] // key_1XFE.shape[1]
            key_1XFE, value_1XFE = (of.repeat_interleave(times, 1) for of in (key_1XFE, value_1XFE))
        heads = (heads_1.transpose(1, 2)[0] for heads_1 in (query_1HFE, key_1XFE, value_1XFE))
        ends, most = cu_seq_lens_q, max_length_q
        return varlen_attn(*heads, ends, ends, most, most, **how)[None], None  # pyright: ignore
    heads = query_1HFE, key_1XFE, value_1XFE
    return _one_by_one(*heads, cu_seq_lens_q, scaling), None  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # sequence lengths are not constants of a graph
def _one_by_one(
    query_1HFE: Tensor, key_1XFE: Tensor, value_1XFE: Tensor, ends: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention output of each sequence, computed on its own, (1, F, H, E)."""
    # One product for all would need a mask of F^2, most of it between different sequences.
    cuts = ends.diff().tolist()
    each = (heads_1.split(cuts, 2) for heads_1 in (query_1HFE, key_1XFE, value_1XFE))
    parts = [
        scaled_dot_product_attention(*of_one, is_causal=True, scale=scaling, enable_gqa=True)
        for of_one in zip(*each, strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2)
