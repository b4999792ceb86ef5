"""LoRA through peft: adapters are trained, and merged weights are published.

Generators, evaluations and checkpoints get the merged weights, as of a plain model. Checkpoints also have the
adapters in PEFT's format.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from scalerl.errors import InputError, brief
from scalerl.rl.config.settings import ALL_LINEAR, Lora


def add_adapters(model: nn.Module, settings: Lora, seed: int) -> nn.Module:
    """Add adapters to `model` in place, freeze the rest, and return it; `seed` initialises the matrices A.

    Raises:
        InputError: peft is not installed, the rank exceeds the hidden size, or no linear layer matches a name
            in `settings.targets`.
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
    adapters = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=_targets(model, settings.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # Devices are named because `fork_rng` otherwise warns on a machine with several GPUs.
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices):  # peft draws from the process's random generator
        torch.manual_seed(seed)
        inject_adapter_in_model(adapters, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def _targets(model: nn.Module, targets: Sequence[str]) -> list[str]:
    head: Any = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    # Not the head: its logits are computed in chunks from its weight alone, without an adapter.
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    found = {target: [n for n in linear if f".{n}".endswith(f".{target}")] for target in targets}
    found |= {ALL_LINEAR: linear} if ALL_LINEAR in targets else {}
    if missing := [target for target, names in found.items() if not names]:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise InputError(
            f"lora.targets: no linear layer {brief(missing[0])} can be adapted; there are {known}"
        )
    return sorted({name for names in found.values() for name in names})


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the adapters' parameters by their names in PEFT's files."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            yield "base_model.model." + name.replace(".default.", "."), parameter


def write_adapter(tensors: Mapping[str, Tensor], model: Any, folder: Path) -> None:
    """Write the tensors of `adapter_parameters`, on the CPU, as a folder that PEFT can load.

    Raises:
        OSError, SafetensorError: the files cannot be written.
    """
    folder.mkdir(exist_ok=True)  # without parents: a run folder that was removed must stay removed
    config = copy(model.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = model.name_or_path, True
    config.target_modules = _short_names(model)
    config.save_pretrained(folder)
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _short_names(model: nn.Module) -> list[str]:
    """Return short names like `q_proj`, which servers expect, unless they also match other layers."""
    modules = dict(model.named_modules())
    adapted = {name for name, module in modules.items() if hasattr(module, "lora_A")}
    short = {name.rpartition(".")[2] for name in adapted}
    means = {name for name in modules if name.rpartition(".")[2] in short}
    return sorted(short if means == adapted else adapted)


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the plain model by name, with adapters neither included nor merged."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), parameter


@torch.no_grad()
def merged_parameters(model: nn.Module, without: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the plain model by name, with adapters merged.

    Names that start with one of `without` are skipped.
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
