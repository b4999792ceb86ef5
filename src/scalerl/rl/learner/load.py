"""Build the learner of a recipe: in this process, or sharded over the process group."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scalerl.errors import InputError
from scalerl.rl.config.memory import trainer_memory
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import check_training
from scalerl.rl.learner.learner import Learner
from scalerl.rl.learner.score import packs
from scalerl.rl.learner.sharding import blocks_of, check_plan, compile_blocks, plain_of, shard
from scalerl.rl.model.causal_lm import (
    checkpoint_activations,
    compute_device,
    dtype_of,
    empty_model,
    load_model,
    without_dropout,
)
from scalerl.rl.model.lora import add_adapters
from scalerl.rl.model.out_of_memory import within_memory
from scalerl.rl.model.packed_attention import HAS_KERNEL, register
from scalerl.rl.model.routing import check_replay, has_routers
from scalerl.rl.model.shape import shape_of
from scalerl.rl.workers.ranks import on_all_ranks


def load_learner(recipe: Recipe, model_folder: str | Path) -> Learner:
    """Return the learner of a recipe at version 0, over all processes of the default group, if there is one.

    With a group this is collective: rank 0 reads the model and sends it; the others need only its config at
    `model_folder`.

    Raises:
        InputError: on every rank; the model cannot be loaded or sharded, or is random during training.
        OutOfMemoryError: on a rank whose device is too small.
    """
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1

    def load() -> Learner:
        mesh = _mesh(compute_device(), recipe.learner.tensor_parallel) if dist.is_initialized() else None
        trained, packed = _placed(recipe, model_folder, mesh, True)
        base = _placed(recipe, model_folder, mesh, False)[0] if recipe.kl.coefficient else None
        return Learner(trained, recipe, base, mesh=mesh, packed=packed)

    return within_memory(
        load, "trainer", lambda: trainer_memory(recipe, shape_of(recipe, model_folder), n_ranks)
    )


def _placed(
    recipe: Recipe, model_folder: str | Path, mesh: DeviceMesh | None, trained: bool
) -> tuple[nn.Module, bool]:
    """Return a model on its device, or its shards, and whether its attention takes packed sequences."""
    device, read = compute_device(), partial(_model, recipe, model_folder, trained, mesh)
    attention = _attention(recipe, device)
    if mesh is None:
        model = read()
        packed = attention != "sdpa" and packs(model, attention)
    else:
        model = on_all_ranks(read)
        # Only rank 0 has weights to try packing with, and all ranks must decide alike. The weights are still
        # on the CPU, which has no flash attention, so this tries our own attention for packed sequences.
        found = torch.tensor(attention != "sdpa" and dist.get_rank() == 0 and packs(model, register())).int()
        dist.broadcast(found, 0)
        if packed := bool(found):
            model.set_attn_implementation(attention)
        model = shard(model, mesh, device, dtype_of(recipe.precision))
    if recipe.learner.compile:
        compile_blocks(plain_of(model))
    return model, packed


def _attention(recipe: Recipe, device: torch.device) -> str:
    """Return the name that transformers has for the attention to try."""
    chosen = recipe.learner.attention
    if chosen == "flash_attention_2" and not (device.type == "cuda" and find_spec("flash_attn")):
        raise InputError(
            "learner.attention: flash_attention_2 needs a GPU and the package flash_attn: use varlen, which "
            "is PyTorch's own"
        )
    kernel = device.type == "cuda" and recipe.precision == "bfloat16"
    if chosen == "auto":
        # Flash attention needs an Ampere GPU or later; a sharded model does not try it before the first step.
        able = kernel and HAS_KERNEL and torch.cuda.get_device_capability(device) >= (8, 0)
        chosen = "varlen" if able else "sdpa"
    if chosen == "varlen" and kernel and not HAS_KERNEL:
        raise InputError("learner.attention: varlen needs PyTorch 2.11 or later on a GPU: use sdpa")
    return register() if chosen == "varlen" else chosen


def _mesh(device: torch.device, n_tensor: int) -> DeviceMesh:
    n_ranks = dist.get_world_size()
    if n_ranks % n_tensor:
        raise InputError(
            f"learner.tensor_parallel: {n_ranks} processes cannot be cut into rows of {n_tensor}"
        )
    return init_device_mesh(device.type, (n_ranks // n_tensor, n_tensor), mesh_dim_names=("data", "tensor"))


def _model(recipe: Recipe, model_folder: str | Path, trained: bool, mesh: DeviceMesh | None) -> Any:
    """Return the model with its weights on rank 0, and empty on the other ranks."""
    precision = dtype_of(recipe.precision)
    if mesh is None or dist.get_rank() == 0:
        model: Any = load_model(model_folder, precision)
        if mesh is None:
            model = model.to(compute_device())
        if trained:
            check_training(model, recipe.model)
    else:
        model = empty_model(model_folder, precision)
        without_dropout(model)
    if recipe.learner.compile and has_routers(model):
        # The hook that reads a layer's experts would make PyTorch compile every layer on its own.
        raise InputError(f"learner.compile: {recipe.model} is a mixture of experts: leave it false")
    if recipe.learner.compile or mesh is not None:
        blocks_of(model)  # raises where there are none
    if mesh is not None and recipe.learner.tensor_parallel > 1:
        check_plan(model, recipe.learner.tensor_parallel)
        if recipe.lora.rank:
            raise InputError("learner.tensor_parallel: adapters cannot be shared so: leave it 1")
    if recipe.routing_replay:
        check_replay(model, recipe.model)
    if not trained:
        return model.requires_grad_(False)
    model = add_adapters(model, recipe.lora, recipe.seed)
    if recipe.learner.activation_checkpointing:
        checkpoint_activations(model)
    return model
