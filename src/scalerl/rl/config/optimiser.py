"""The recipe's table `optimiser`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101) with a linear warm-up to a constant rate; no decay of biases and norms.

    `eps` is the paper's 1e-15: a step is lr m / (sqrt(v) + eps), which the usual 1e-8 makes smaller wherever
    gradients are not far above it. The learning rate has no part in that.
    `max_grad_norm` clips the norm of the whole gradient.
    """

    lr: float = 5e-7
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-15
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    kind: Literal["adamw"] = "adamw"

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 1000:
            raise ValueError("lr must be positive, and at most 1000")
        if not 0 < self.eps <= 1 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("eps must be positive and at most 1, and betas in [0, 1)")
        if self.warmup_steps < 0 or not 0 <= self.weight_decay <= 1000 or not self.max_grad_norm > 0:
            raise ValueError(
                "warmup_steps must not be negative, weight_decay must be in [0, 1000], and max_grad_norm "
                "positive"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of the step that makes version `step` + 1; skipped steps count in the warm-up."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.lr
