"""Imports; the LM head; the learner's step on the device against the CPU.

Shapes in names: W tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

import torch
from torch.cuda import nccl

from gpu_checks.lab import Lab, within
from gpu_checks.training import batch_of
from scalerl.rl.config.recipe import load_recipe
from scalerl.rl.learner.learner import Learner
from scalerl.rl.model.causal_lm import log_probs_TV

PACKAGES = ("torch", "transformers", "numpy", "ray", "vllm", "flash-attn", "triton", "peft", "tokenizers")


def imports(lab: Lab) -> dict[str, Any]:
    """Report the installed versions and the device."""
    import scalerl.rl
    import scalerl.rl.train  # noqa: F401

    found: dict[str, Any] = {name: _version(name) for name in PACKAGES}
    found |= {"device": str(lab.device), "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
    if lab.device.type == "cuda":
        about = torch.cuda.get_device_properties(lab.device)
        found |= {"name": about.name, "memory_gib": about.total_memory / 2**30}
        found |= {"capability": f"{about.major}.{about.minor}", "nccl": list(nccl.version())}
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def head(lab: Lab) -> dict[str, Any]:
    """Check the FP32 head on bf16 weights against float64, and time it against a bf16 head."""
    model = lab.model()
    weight_VD = model.get_output_embeddings().weight
    hidden_WD = torch.randn(lab.size(512, 16), weight_VD.shape[1], device=lab.device, dtype=torch.bfloat16)
    exact_WV = torch.log_softmax(hidden_WD.cpu().double() @ weight_VD.detach().cpu().double().T, -1)
    figures: dict[str, Any] = {}
    with torch.no_grad():
        for name, fp32 in (("fp32", True), ("bf16", False)):
            found_WV = log_probs_TV(model, hidden_WD, 1.0, fp32)
            figures[f"{name}_error"] = (found_WV.cpu().double() - exact_WV).abs().max().item()
            figures[f"{name}_ms"] = 1e3 * lab.best_seconds(
                lambda fp32=fp32: log_probs_TV(model, hidden_WD, 1.0, fp32)
            )
    # TF32 products in the head would be off by 1e-3, so this limit shows that they are not in use.
    within(figures, fp32_error=1e-4)
    assert figures["bf16_error"] > 3 * figures["fp32_error"], figures
    return figures


def learner(lab: Lab) -> dict[str, Any]:
    """Compare five float32 steps on the device and on the CPU from the same weights."""
    recipe = load_recipe("demo", ["batch.micro=4", "optimiser.lr=1e-3", "engine.kind=transformers"])
    here = lab.model(torch.float32, small=True)
    there = copy.deepcopy(here).cpu()
    learners = [Learner(here, recipe), Learner(there, recipe)]
    batch = batch_of(8, 32, here.config.vocab_size)
    losses = [[learner.step(batch).loss for _ in range(5)] for learner in learners]
    pairs = list(zip(here.parameters(), there.parameters(), strict=True))
    figures = {
        "weights_differ": max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs),
        "losses_differ": max(abs(a - b) for a, b in zip(*losses, strict=True)),
        "loss": losses[0][-1],
    }
    # Adam normalises the gradient: where a gradient is near 0, its sign may differ and a step is lr.
    return within(figures, weights_differ=2e-3, losses_differ=1e-3)
