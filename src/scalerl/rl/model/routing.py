"""The routers of a mixture of experts: recording their choices, and replaying given ones.

If a router scores two experts nearly alike, different rounding or slightly different weights change the
choice, and the token's log-probability jumps. With Routing Replay (R3, arXiv 2510.11370) the trainer uses the
experts that the generator chose. Their weights still come from the trainer's own router, as its probabilities
of the given experts, so that the router gets a gradient.

Shapes in names: P tokens that a pass reads, L layers with experts, E experts, K experts of a token.
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
    """The routers of a model, which record or replay the experts of a pass.

    Call `start` before a pass, and `clear` after its backward pass, which may recompute blocks."""

    def __init__(self, modules: list[Any], config: Any) -> None:
        self.n_experts, self.top_k = int(modules[0].num_experts), int(modules[0].top_k)
        self.n_layers = len(modules)
        asked = getattr(config, "output_router_logits", False)
        self.balance_coefficient = float(asked and getattr(config, "router_aux_loss_coef", 0.0))
        """Coefficient of `balance_loss`: `router_aux_loss_coef` of config.json if `output_router_logits` is
        true there, otherwise 0."""
        self.clear()
        # Hooks, because a model does not output its choice of experts; they are never removed.
        for layer, module in enumerate(modules):
            module.register_forward_hook(partial(self._route, layer))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape in which the experts of a token are recorded: layers, and experts in each."""
        return self.n_layers, self.top_k

    @property
    def dtype(self) -> type:
        """The type in which experts are recorded: one byte for up to 256 experts, otherwise two."""
        return np.uint8 if self.n_experts <= 256 else np.int16

    @classmethod
    def of(cls, model: nn.Module) -> Routers | None:
        """Return the routers of a model, by layer; None if it has none of a supported kind."""
        found = [module for module in model.modules() if type(module).__name__ in _KNOWN]
        return cls(found, model.config) if found else None

    def start(self, at_P: Tensor | None = None, given_PLK: Tensor | None = None) -> None:
        """Prepare for a pass: `at_P` is true at the tokens to count (default: all), and `given_PLK` are the
        experts that replace the routers' own choice."""
        self._at_P, self._given_PLK = at_P, given_PLK

    def clear(self) -> None:
        """Forget the pass, and free the logits that its backward pass needs."""
        self._at_P = self._given_PLK = None
        self._expert_LPK = list[Any]([None] * self.n_layers)
        self._logits_LPE = list[Any]([None] * self.n_layers)

    def chosen(self) -> Tensor:
        """Return the experts of every token, the best first: (P, L, K)."""
        return torch.stack(self._expert_LPK, 1)

    def load(self) -> Tensor:
        """Return the number of counted tokens that each expert got: (L, E)."""
        met = (expert_PK[self._at_P].flatten() for expert_PK in self._expert_LPK)
        return torch.stack([torch.bincount(expert, minlength=self.n_experts) for expert in met])

    def balance_loss(self) -> Tensor:
        """Return transformers' load-balancing loss over the counted tokens: E sum_e f_e p_e, with an expert's
        share f of the tokens and its mean probability p (arXiv 2101.03961, equations 4 to 6)."""
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        logits, mask = tuple(self._logits_LPE), None if self._at_P is None else self._at_P[None]
        found: Any = load_balancing_loss_func(logits, self.n_experts, self.top_k, mask)
        return found

    def _route(self, layer: int, module: Any, inputs: Any, output: Any) -> Any:
        logits_PE, weight_PK, expert_PK = output
        if self._given_PLK is not None:
            # Recompute the weights for the given experts, so that the router gets its gradient.
            expert_PK = self._given_PLK[:, layer]
            p_PK = torch.softmax(logits_PE.float(), -1).gather(-1, expert_PK)
            if getattr(module, "norm_topk_prob", True):  # Mixtral always does
                p_PK = p_PK / p_PK.sum(-1, keepdim=True)
            weight_PK = p_PK.to(weight_PK.dtype)
        self._expert_LPK[layer] = expert_PK.detach()
        # Logits keep the graph of the layer alive, so keep them only for a balance loss.
        if self.balance_coefficient:
            self._logits_LPE[layer] = logits_PE
        return logits_PE, weight_PK, expert_PK


def has_routers(model: nn.Module) -> bool:
    """Return whether a model has routers that `Routers` supports."""
    return any(type(module).__name__ in _KNOWN for module in model.modules())


def check_replay(model: nn.Module, name: str) -> None:
    """Raise an InputError if the experts of a model cannot be recorded and replayed."""
    if not has_routers(model):
        known = ", ".join(kind.removesuffix("TopKRouter") for kind in _KNOWN)
        raise InputError(
            f"routing_replay: {name} has no routers that can be replayed ({known} have): leave it false"
        )


def balance_of(load_LE: np.ndarray) -> tuple[float, float]:
    """Return two figures of how even the load of experts is, from their token counts by layer.

    The first is the largest load over the mean load, the largest of any layer. The second is the entropy over
    that of an even load, the smallest of any layer. Both are 1 for an even load, and NaN without tokens.
    """
    share_LE = load_LE / np.where(total := load_LE.sum(1, keepdims=True), total, np.nan)
    log_LE = np.log(np.where(share_LE > 0, share_LE, 1.0))
    entropy_L = -(share_LE * log_LE).sum(1) / np.log(load_LE.shape[1])
    return float((share_LE.max(1) * load_LE.shape[1]).max()), float(entropy_L.min())
