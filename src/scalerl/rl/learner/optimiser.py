"""AdamW over the masters, with its moments on the device or in CPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scalerl.rl.config.optimiser import AdamW


def new_adamw(settings: AdamW, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Return the optimiser of `parameters`; biases and norms have no weight decay."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # `fused`: one pass over weights, gradients and moments, which are far larger than a cache.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


class Optimiser:
    """AdamW whose moments exist, as zeros, before the first step, so that its state can always be saved."""

    def __init__(self, settings: AdamW, masters: list[Tensor], offload: bool) -> None:
        """Make the state of `masters`; with `offload` only one tensor's moments at a time leave the CPU."""
        self._masters, self._offload = masters, offload
        self.adamw = new_adamw(settings, masters)
        for master in masters:
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[master] = {"step": torch.zeros((), device=master.device), **zeros}
            self._to(master, "cpu")

    def moments(self, master: Tensor) -> dict[str, Tensor]:
        """Return the number of steps and both moments of a master; the caller may write to them."""
        return self.adamw.state[master]

    def step(self, lr: float) -> None:
        """Make one step from the masters' gradients, then drop the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if not self._offload:
            self.adamw.step()
        else:
            grads = [master.grad for master in self._masters]
            # None, not 0: it takes no memory, and AdamW skips masters without a gradient.
            self.adamw.zero_grad(set_to_none=True)
            for master, grad in zip(self._masters, grads, strict=True):
                master.grad = grad
                self._to(master, master.device)
                self.adamw.step()
                self._to(master, "cpu")
                master.grad = None
        self.adamw.zero_grad(set_to_none=True)

    def _to(self, master: Tensor, device: Any) -> None:
        """Move the moments of a master if they are offloaded; the fused step needs `step` on the device."""
        if self._offload:
            state = self.adamw.state[master]
            state |= {name: state[name].to(device) for name in ("exp_avg", "exp_avg_sq")}
