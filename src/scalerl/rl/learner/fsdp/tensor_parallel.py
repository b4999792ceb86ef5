"""Matrix products shared by processes, by the plan that transformers has for a model.

Of each block the matrices are cut, by output and then by input, so that heads and inner units are shared;
everything between blocks is the same on all processes of a row of the mesh. Embeddings and head stay whole.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scalerl.errors import InputError

_HEADS = 2  # the dimension of heads in what the norms of queries and keys are given
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_NORM = "replicated_with_grad_allreduce"


def check_plan(model: Any, n: int) -> None:
    """See that `n` processes can share the blocks of `model`.

    Raises:
        InputError: its heads cannot be shared so, or transformers has no plan for it, or one that is not
            known here (mixtures of experts have).
    """
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % n or config.intermediate_size % n:
        raise InputError(
            f"learner.tensor_parallel: {heads} heads of keys and values and {config.intermediate_size} inner "
            f"units cannot be shared by {n} processes"
        )
    styles = set(_plan(model).values())
    if not styles or not styles <= {*_STYLES, _NORM}:
        raise InputError(
            f"learner.tensor_parallel: models of type {config.model_type} cannot be shared so: leave it 1"
        )


def share_block(model: Any, block: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of one block over the processes of `mesh`, in place."""
    prefix = next(name for name, module in model.base_model.named_modules() if module is block)
    styles: dict[str, ParallelStyle] = {}
    for name, _ in block.named_modules():
        key = re.sub(r"\d+", "*", f"{prefix}.{name}")
        if (style := _plan(model).get(key)) == _NORM:
            # Each process has some of the heads: its part of the gradient is added to the others'.
            styles[name] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        elif style is not None:
            styles[name] = _STYLES[style]()
    parallelize_module(block, mesh, styles)


def _plan(model: Any) -> dict[str, str]:
    """The style of every module of a block, by names below the base model with `*` for numbers."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if ".*." in name}
