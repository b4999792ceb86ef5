"""The blocks of a model: the layers that are sharded, and compiled, one by one."""

from typing import Any

import torch
from torch import nn

from scalerl.errors import InputError
from scalerl.rl.model.routing import has_routers

_GRAPHS = 64
"""The most graphs of a function, of which PyTorch allows 8, and computes the rest without: a block has more
for lengths that vary, a single completion, passes without gradients, a base model, and pairs of these."""


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of a model, in order: the modules that transformers never splits over devices.

    Raises:
        InputError: the model does not name its blocks.
    """
    names = set(model._no_split_modules or ())
    # Of a class or one that it derives from: FSDP2 makes a subclass of a block's.
    blocks = [m for m in model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]
    if not blocks:
        kind = model.config.model_type
        raise InputError(f"a model of type {kind} can be neither sharded nor compiled: it names no blocks")
    return blocks


def check_compiled(model: Any, name: str) -> None:
    """Raise an InputError where the blocks of a model cannot be compiled."""
    if has_routers(model):  # each layer would be compiled apart, for the hook that reads its experts
        raise InputError(f"learner.compile: {name} is a mixture of experts: leave it false")
    blocks_of(model)


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward pass of every block, and so its backward pass; it is done by the first pass.

    For a model that is sharded already, and has its activations checkpointed: that is then within a compiled
    block, and FSDP2's gathering around it. An attention that PyTorch cannot trace (the packed one on a CPU)
    splits a block, and leaves one that is checkpointed as it was. Blocks of one class share their code; names
    of parameters stay as they are.
    """
    config: Any = torch._dynamo.config
    # Since PyTorch 2.7 it is recompile_limit, and this name another of it.
    config.cache_size_limit = max(config.cache_size_limit, _GRAPHS)
    for block in blocks_of(model):
        # `forward`, not the module: its hooks, as those of FSDP2, then stay outside of what is compiled, and
        # no module is put around it, which would change names.
        block.forward = torch.compile(block.forward, backend=backend)
