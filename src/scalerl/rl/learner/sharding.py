"""Sharding of a model: each block is one FSDP2 group, and embeddings and head are one more.

Rank 0 reads the model; the other ranks start with an empty one. Tensors are sent one at a time, and a block
is sharded as soon as it is complete, so that no other rank ever holds more of the model than one block.

With tensor parallelism the matrices of each block are cut by transformers' plan for the model, by output and
then by input, so that heads and inner units are divided over the ranks; activations between blocks are the
same on all ranks of a row of the mesh. Embeddings and head are not cut.

`torch.compile` works on the same blocks, one at a time.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scalerl.errors import InputError
from scalerl.rl.model.lora import merged_parameters

_GRAPHS = 64
"""Most compiled graphs of a function. PyTorch allows 8 and runs further variants eagerly; a block has more:
for varying lengths, a single completion, passes without gradients, a base model, and their combinations."""


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of a model, in order: the modules that transformers never splits over devices.

    Raises:
        InputError: the model does not name its blocks.
    """
    names = set(model._no_split_modules or ())
    # By the class or its bases: FSDP2 replaces the class of a block by a subclass.
    blocks = [m for m in model.modules() if names & {kind.__name__ for kind in type(m).__mro__}]
    if not blocks:
        kind = model.config.model_type
        raise InputError(f"a model of type {kind} can be neither sharded nor compiled: it names no blocks")
    return blocks


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward pass of every block, and with it the backward pass, at the first pass.

    The model must already be sharded and have its activations checkpointed: checkpointing is then inside a
    compiled block, and FSDP2's gathering outside. An attention that PyTorch cannot trace (the packed one on a
    CPU) splits a block, and leaves a checkpointed block uncompiled. Blocks of one class share their code;
    parameter names do not change.
    """
    config: Any = torch._dynamo.config
    # An alias of recompile_limit since PyTorch 2.7.
    config.cache_size_limit = max(config.cache_size_limit, _GRAPHS)
    for block in blocks_of(model):
        # `forward`, not the module: its hooks, such as FSDP2's, then stay outside the compiled code, and no
        # wrapper module changes the names.
        block.forward = torch.compile(block.forward, backend=backend)


T = TypeVar("T")
_HEADS = 2  # the dimension of heads in the input of the norms of queries and keys
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_NORM = "replicated_with_grad_allreduce"


class Whole(nn.Module):
    """The root of a sharded model: it calls a function while embeddings and head are gathered.

    The blocks gather themselves. All computation with the head must be in such a call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """Return the result of `compute` for the model; its tensors take part in the backward pass."""
        return compute(self.model)


def shard(model: nn.Module, mesh: DeviceMesh, device: torch.device, precision: torch.dtype) -> Whole:
    """Shard `model` over `mesh`, with float32 masters and computation in `precision`; collective.

    The dimension `tensor` of the mesh is for tensor parallelism, `data` for FSDP2. All ranks get the values
    of rank 0; elsewhere the model may be empty (on the device `meta`). Gradients are summed over the
    processes, because token weights sum to 1 over the whole batch.
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
    # After the blocks: the root takes all parameters that are not in a group yet.
    fully_shard(whole, mesh=mesh["data"], mp_policy=policy)
    # FSDP2 divides by the number of ranks by default; here token weights already sum to 1 over all ranks.
    for group in map(group_of, groups_of(whole)):
        group.set_force_sum_reduction_for_comms(True)
        group.set_gradient_divide_factor(1.0)
    return whole


def groups_of(whole: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, the root first."""
    return [module for module in whole.modules() if isinstance(module, FSDPModule)]


def group_of(module: nn.Module) -> FSDPModule:
    """Return the same sharded module, typed as an FSDPModule."""
    assert isinstance(module, FSDPModule)
    return module


def plain_of(model: nn.Module) -> nn.Module:
    """Return the model itself if given the root of a sharded one."""
    return model.model if isinstance(model, Whole) else model


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory, or the tensor if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(masters: Sequence[Tensor], most: float) -> float:
    """Scale the gradients so that their total norm is at most `most`; return the norm before; collective."""
    by_mesh: dict[Any, list[Any]] = {}  # tensor-parallel parameters have another mesh than the rest
    for master in masters:
        if master.grad is not None:
            by_mesh.setdefault(getattr(master, "device_mesh", None), []).append(master)
    norms = [nn.utils.get_total_norm([m.grad for m in of_mesh]) for of_mesh in by_mesh.values()]
    # With a single mesh this is its norm, bit for bit.
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, most, norm)
    return float(norm)


def gathered(whole: Whole) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the parameters of one group after another, each while it is gathered; collective.

    Names are those of the plain model; parameters are unsharded, adapters are merged, tied ones occur once,
    all in the precision that the model computes in. Their storage is freed with the group.
    """
    blocks = [module for module in groups_of(whole) if module is not whole]
    names = {id(module): f"{name}." for name, module in whole.model.named_modules()}
    prefixes = tuple(names[id(block)] for block in blocks)
    for group in (whole, *blocks):
        module, prefix, without = group, names.get(id(group), ""), ()
        if group is whole:
            module, without = whole.model, prefixes
        group_of(group).unshard()
        try:
            yield ((prefix + name, full_of(weight)) for name, weight in merged_parameters(module, without))
        finally:
            group_of(group).reshard()


def _fill(modules: list[nn.Module], device: torch.device) -> None:
    """Give the tensors of some modules the values of rank 0, with parameters as float32 masters."""
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


def full_of(weight: Tensor) -> Tensor:
    """Return the unsharded weight; collective if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _from_first(value: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's value on every rank; collective."""
    whole = value.to(device) if dist.get_rank() == 0 else torch.empty_like(value, device=device)
    whole = whole.contiguous()
    dist.broadcast(whole, 0)
    return whole


def check_plan(model: Any, n: int) -> None:
    """Raise an InputError if `n` processes cannot divide the blocks of `model` by tensor parallelism.

    They cannot if `n` does not divide heads and inner units, or transformers has no plan for the model, or
    one with styles that are not supported here (as for mixtures of experts)."""
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
            # Each process has some of the heads, so gradients of the norm are summed over processes.
            styles[name] = SequenceParallel(sequence_dim=_HEADS, use_local_output=True)
        elif style is not None:
            styles[name] = _STYLES[style]()
    parallelize_module(block, mesh, styles)


def _plan(model: Any) -> dict[str, str]:
    """Return the style of every module of a block, by its name in the base model with `*` for numbers."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if ".*." in name}
