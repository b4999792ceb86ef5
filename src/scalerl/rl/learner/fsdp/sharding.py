"""A model into shards: every block on its own, and what is around the blocks as one more group.

Rank 0 reads the model; the others begin with its shape. Tensors are sent one by one, and a block is sharded
as soon as it is there, so that no other process ever holds more of the model than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from scalerl.errors import InputError
from scalerl.rl.learner.fsdp.tensor_parallel import share_block
from scalerl.rl.model.lora import merged_parameters

T = TypeVar("T")


class Whole(nn.Module):
    """The root of a sharded model: what it is called with runs while embeddings and head are gathered.

    The blocks gather themselves. Whoever computes with the head has to do it in here.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """What `compute` makes of the model; tensors in it take part in the backward pass."""
        return compute(self.model)


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks of a model, in order: what transformers never splits over devices.

    Raises:
        InputError: it does not say what its blocks are.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise InputError(f"a model of type {model.config.model_type} cannot be sharded: it names no blocks")
    return blocks


def shard(model: nn.Module, mesh: DeviceMesh, device: torch.device, precision: torch.dtype) -> Whole:
    """Shard `model` over `mesh`, masters in float32 and computation in `precision`; collective.

    The dimension `tensor` of the mesh shares matrix products, the dimension `data` the rest. The values are
    those of rank 0; elsewhere the model may be empty (on the device `meta`). Gradients are summed over the
    processes, as the weights of the tokens are those of the whole batch.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    blocks = blocks_of(model)
    of_blocks = {id(module) for block in blocks for module in block.modules()}
    for block in blocks:
        _fill(list(block.modules()), device)
        if mesh["tensor"].size() > 1:
            share_block(model, block, mesh["tensor"])
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    _fill([module for module in model.modules() if id(module) not in of_blocks], device)
    whole = Whole(model)
    fully_shard(whole, mesh=mesh["data"], mp_policy=policy)
    for group in map(group_of, groups_of(whole)):
        group.set_force_sum_reduction_for_comms(True)
        group.set_gradient_divide_factor(1.0)
    return whole


def groups_of(whole: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered together, the root first."""
    return [module for module in whole.modules() if isinstance(module, FSDPModule)]


def group_of(module: nn.Module) -> FSDPModule:
    """The same module, which is sharded, as PyTorch has its methods."""
    assert isinstance(module, FSDPModule)
    return module


def tensors_of(whole: Whole) -> Iterator[tuple[str, Tensor]]:
    """A copy of every parameter of the plain model in turn, whole, tied ones once; collective.

    In the precision that the model computes in. No more than a group's are gathered at a time.
    """
    for tensors in gathered(whole):
        for name, weight in tensors:
            yield name, weight.detach().clone()  # its own storage is freed with its group


def gathered(whole: Whole) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """The parameters of one group after another, for as long as it is gathered; collective."""
    blocks = [module for module in groups_of(whole) if module is not whole]
    names = {id(module): f"{name}." for name, module in whole.model.named_modules()}
    prefixes = tuple(names[id(block)] for block in blocks)
    for group in (whole, *blocks):
        module, prefix, without = group, names.get(id(group), ""), ()
        if group is whole:
            module, without = whole.model, prefixes
        group_of(group).unshard()
        try:
            yield ((prefix + name, _full(weight)) for name, weight in merged_parameters(module, without))
        finally:
            group_of(group).reshard()


def _fill(modules: list[nn.Module], device: torch.device) -> None:
    """Give the tensors of some modules the values of rank 0, parameters as masters in float32."""
    filled: dict[int, tuple[Tensor, nn.Parameter]] = {}  # tied ones stay tied
    for module in modules:
        for name, value in module._parameters.items():
            if value is not None:
                if id(value) not in filled:
                    whole = _from_first(value.detach().float(), device)
                    filled[id(value)] = value, nn.Parameter(whole, requires_grad=value.requires_grad)
                module._parameters[name] = filled[id(value)][1]
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = _from_first(value, device)


def _full(weight: Tensor) -> Tensor:
    """Also of a matrix that is shared by processes."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _from_first(value: Tensor, device: torch.device) -> Tensor:
    """What rank 0 has, on every rank."""
    whole = value.to(device) if dist.get_rank() == 0 else torch.empty_like(value, device=device)
    whole = whole.contiguous()
    dist.broadcast(whole, 0)
    return whole
