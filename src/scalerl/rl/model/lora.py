"""LoRA through peft: small adapters are trained, and merged weights are published.

Generators, evaluations and checkpoints get the merged weights, those of a plain model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scalerl.errors import InputError
from scalerl.rl.config.settings import Lora


def add_adapters(model: nn.Module, settings: Lora, seed: int) -> nn.Module:
    """Add adapters to `model`, in place, and freeze the rest; return it. `seed` initialises the matrices A.

    Raises:
        InputError: peft is not installed, or the rank exceeds the hidden size.
    """
    if not settings.rank:
        return model
    config: Any = model.config
    if settings.rank > config.hidden_size:
        raise InputError(f"lora.rank: {settings.rank} exceeds the model's hidden size ({config.hidden_size})")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise InputError("lora: needs peft: pip install 'scalerl[lora]'") from None
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    adapters = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=linear, lora_dropout=0.0)
    # Named, as `fork_rng` warns where a machine has several GPUs and none is.
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices):  # peft draws from the generator of the process
        torch.manual_seed(seed)
        inject_adapter_in_model(adapters, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the plain model by name, adapters left out and not merged."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


@torch.no_grad()
def merged_parameters(model: nn.Module, without: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the plain model by name, adapters merged.

    Names that start with one of `without` are left out.
    """
    adapted = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or name.startswith(without):
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if not owner:
            yield name, parameter
        elif leaf == "weight":
            layer: Any = adapted[owner]
            yield f"{owner}.weight", parameter + layer.get_delta_weight("default").to(parameter.dtype)
        else:
            yield f"{owner}.{leaf}", parameter


def has_adapters(model: nn.Module) -> bool:
    """Return whether `add_adapters` has added any."""
    return any(hasattr(module, "lora_A") for module in model.modules())
