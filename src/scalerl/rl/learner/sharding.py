"""Sharding of a model: every block on its own, and embeddings and head as one more group.

Rank 0 reads the model; the others start with its shape. Tensors are sent one by one, and a block is sharded
as soon as it is complete, so that no other process ever holds more of the model than a block.

With tensor parallelism the matrices of each block are cut by the plan that transformers has for the model, by
output and then by input, so that heads and inner units are shared; everything between blocks is the same on
all processes of a row of the mesh. Embeddings and head stay whole.

`torch.compile` works on the same blocks, one by one.
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


T = TypeVar("T")
_HEADS = 2  # the dimension of heads in what the norms of queries and keys are given
_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_NORM = "replicated_with_grad_allreduce"


class Whole(nn.Module):
    """The root of a sharded model: what it is called with runs while embeddings and head are gathered.

    The blocks gather themselves. All computation with the head must be done in such a call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """Return what `compute` returns for the model; its tensors take part in the backward pass."""
        return compute(self.model)


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
    # After the blocks: the root takes the parameters that are not in a group yet.
    fully_shard(whole, mesh=mesh["data"], mp_policy=policy)
    # FSDP2 divides by the number of ranks by default; here the weights of all tokens sum to 1 already.
    for group in map(group_of, groups_of(whole)):
        group.set_force_sum_reduction_for_comms(True)
        group.set_gradient_divide_factor(1.0)
    return whole


def groups_of(whole: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are gathered together, the root first."""
    return [module for module in whole.modules() if isinstance(module, FSDPModule)]


def group_of(module: nn.Module) -> FSDPModule:
    """Return the same sharded module, with the type that has its methods."""
    assert isinstance(module, FSDPModule)
    return module


def plain_of(model: nn.Module) -> nn.Module:
    """Return the model itself, of a root that was sharded."""
    return model.model if isinstance(model, Whole) else model


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in its memory; all of one that is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(masters: Sequence[Tensor], most: float) -> float:
    """Scale the gradients so that the norm of all is at most `most`; return what it was; collective."""
    by_mesh: dict[Any, list[Any]] = {}  # what is shared by tensor has a mesh of its own
    for master in masters:
        if master.grad is not None:
            by_mesh.setdefault(getattr(master, "device_mesh", None), []).append(master)
    norms = [nn.utils.get_total_norm([m.grad for m in of_mesh]) for of_mesh in by_mesh.values()]
    # The norm of one norm is the same, to the last bit.
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for of_mesh in by_mesh.values():
        nn.utils.clip_grads_with_norm_(of_mesh, most, norm)
    return float(norm)


def gathered(whole: Whole) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the parameters of one group after another, each while it is gathered; collective.

    They are those of the plain model, whole, adapters merged, tied ones once, in the precision that the model
    computes in; their storage is freed with the group.
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


def full_of(weight: Tensor) -> Tensor:
    """Return the whole of a weight, also of a matrix that ranks share; then it is collective."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _from_first(value: Tensor, device: torch.device) -> Tensor:
    """Return the value of rank 0 on every rank."""
    whole = value.to(device) if dist.get_rank() == 0 else torch.empty_like(value, device=device)
    whole = whole.contiguous()
    dist.broadcast(whole, 0)
    return whole


def check_plan(model: Any, n: int) -> None:
    """Raise an InputError where `n` processes cannot share the blocks of `model`: `n` does not divide its
    heads, or transformers has no plan for it, or one that is not known here (as for mixtures of experts).
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
    """Return the style of every module of a block, by names below the base model with `*` for numbers."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    return {name: style for name, style in plan.items() if ".*." in name}
