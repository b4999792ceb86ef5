"""AdamW over the masters, with its moments on the device or in the memory of the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from scalerl.rl.config.optimiser import AdamW


def new_adamw(settings: AdamW, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Build the optimiser over `parameters`; biases and norms do not decay."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # `fused`: one pass over weights, gradients and moments, which are far larger than a cache.
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


class Optimiser:
    """AdamW with moments of 0 from the start, as its own are, so that a state is whole before a step."""

    def __init__(self, settings: AdamW, masters: list[Tensor], offload: bool) -> None:
        """With `offload` the moments are in the memory of the CPU but for those of one tensor at a time."""
        self._masters, self._offload = masters, offload
        self.adamw = new_adamw(settings, masters)
        for master in masters:
            zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[master] = {"step": torch.zeros((), device=master.device), **zeros}
            self._to(master, "cpu")

    def moments(self, master: Tensor) -> dict[str, Tensor]:
        """Return the number of steps and both moments of a master, which may be written to."""
        return self.adamw.state[master]

    def step(self, lr: float) -> None:
        """Make one step of the masters' gradients, and drop those."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if not self._offload:
            self.adamw.step()
        else:
            grads = [master.grad for master in self._masters]
            # None, not 0: gradients take no memory while nothing is trained, and AdamW passes them over.
            self.adamw.zero_grad(set_to_none=True)
            for master, grad in zip(self._masters, grads, strict=True):
                master.grad = grad
                self._to(master, master.device)
                self.adamw.step()
                self._to(master, "cpu")
                master.grad = None
        self.adamw.zero_grad(set_to_none=True)

    def _to(self, master: Tensor, device: Any) -> None:
        """Move the moments of a master; the number of steps is on the device, as the fused step needs it."""
        if self._offload:
            state = self.adamw.state[master]
            state |= {name: state[name].to(device) for name in ("exp_avg", "exp_avg_sq")}
