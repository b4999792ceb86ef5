"""The routers of a mixture of experts: what they choose, and choices that are given back to them.

A token whose router scores two experts nearly alike meets another one as soon as anything is rounded
otherwise, or the weights have moved, and its log-probability jumps. Routing Replay (R3, arXiv 2510.11370) has
the trainer use the experts that the generator chose. Their weights are still those of the trainer's own
router, the softmax over the given experts, so that it has a gradient.

Shapes in names: P places that a pass reads, L layers with experts, E experts, K experts of a place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.errors import InputError

_KNOWN = ("MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""Modules of transformers that return logits (P, E), and weights and experts (P, K) of a softmax over all."""


class Routers:
    """What the routers of a model choose in a pass: `start`, the pass, then what it was; `clear` after its
    backward pass, which may compute blocks again (activation checkpointing)."""

    def __init__(self, modules: list[Any], config: Any) -> None:
        self.n_experts, self.top_k = int(modules[0].num_experts), int(modules[0].top_k)
        self.n_layers = len(modules)
        asked = getattr(config, "output_router_logits", False)
        self.balance_coefficient = float(asked and getattr(config, "router_aux_loss_coef", 0.0))
        """Coefficient of `balance_loss`: `router_aux_loss_coef` of a config.json whose `output_router_logits`
        is true, else 0."""
        self.clear()
        # Hooks, as the choice of experts is no output of a model; they stay for its life.
        for layer, module in enumerate(modules):
            module.register_forward_hook(partial(self._route, layer))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, and experts of a place: those of a token are recorded in this shape."""
        return self.n_layers, self.top_k

    @property
    def dtype(self) -> type:
        """The type in which experts are recorded: a byte each up to 256 experts, else two."""
        return np.uint8 if self.n_experts <= 256 else np.int16

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of a model, by layer; None where it has none, or those of another form."""
        found = [module for module in model.modules() if type(module).__name__ in _KNOWN]
        return cls(found, model.config) if found else None

    def start(self, at_P: Tensor | None = None, given_PLK: Tensor | None = None) -> None:
        """Say that a pass begins: `at_P` is true at the places that are counted, by default at all, and
        `given_PLK` are experts to use in place of the routers' own choice."""
        self._at_P, self._given_PLK = at_P, given_PLK

    def clear(self) -> None:
        """Forget the pass, and what its backward pass holds."""
        self._at_P = self._given_PLK = None
        self._expert_LPK = list[Any]([None] * self.n_layers)
        self._logits_LPE = list[Any]([None] * self.n_layers)

    def chosen(self) -> Tensor:
        """Return the experts of every place, the best first: (P, L, K)."""
        return torch.stack(self._expert_LPK, 1)

    def load(self) -> Tensor:
        """Return at how many of the counted places each expert was met: (L, E)."""
        met = (expert_PK[self._at_P].flatten() for expert_PK in self._expert_LPK)
        return torch.stack([torch.bincount(expert, minlength=self.n_experts) for expert in met])

    def balance_loss(self) -> Tensor:
        """Return the load-balancing loss over the counted places, as transformers has it: E sum_e f_e p_e, by
        an expert's share f of the places and its mean probability p (arXiv 2101.03961, equations 4 to 6)."""
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        logits, mask = tuple(self._logits_LPE), None if self._at_P is None else self._at_P[None]
        found: Any = load_balancing_loss_func(logits, self.n_experts, self.top_k, mask)
        return found

    def _route(self, layer: int, module: Any, inputs: Any, output: Any) -> Any:
        logits_PE, weight_PK, expert_PK = output
        if self._given_PLK is not None:
            # The weights are anew those of the given experts, so that the router gets its gradient.
            expert_PK = self._given_PLK[:, layer]
            p_PK = torch.softmax(logits_PE.float(), -1).gather(-1, expert_PK)
            if getattr(module, "norm_topk_prob", True):  # Mixtral always does
                p_PK = p_PK / p_PK.sum(-1, keepdim=True)
            weight_PK = p_PK.to(weight_PK.dtype)
        self._expert_LPK[layer] = expert_PK.detach()
        # Logits hold the graph of the layer: kept for the loss alone, where there is one.
        if self.balance_coefficient:
            self._logits_LPE[layer] = logits_PE
        return logits_PE, weight_PK, expert_PK


def has_routers(model: nn.Module) -> bool:
    """Return whether `Routers.of` finds any."""
    return any(type(module).__name__ in _KNOWN for module in model.modules())


def check_replay(model: nn.Module, name: str) -> None:
    """Raise an InputError where the experts of a model cannot be recorded and given back."""
    if not has_routers(model):
        known = ", ".join(kind.removesuffix("TopKRouter") for kind in _KNOWN)
        raise InputError(
            f"routing_replay: {name} has no routers that can be replayed ({known} have): leave it false"
        )


def balance_of(load_LE: np.ndarray) -> tuple[float, float]:
    """Return how even the load of experts is, from their counts by layer.

    The largest over the mean, in the layer where that is the most; and the entropy over that of an even load,
    in the layer where it is the least. Both are 1 where all experts are met alike, and NaN without any token.
    """
    share_LE = load_LE / np.where(total := load_LE.sum(1, keepdims=True), total, np.nan)
    log_LE = np.log(np.where(share_LE > 0, share_LE, 1.0))
    entropy_L = -(share_LE * log_LE).sum(1) / np.log(load_LE.shape[1])
    return float((share_LE.max(1) * load_LE.shape[1]).max()), float(entropy_L.min())
