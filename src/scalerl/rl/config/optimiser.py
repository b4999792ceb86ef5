"""The table `[optimiser]`, with the schedule of the learning rate."""

import math
from dataclasses import dataclass
from typing import Literal

from scalerl.rl.config.settings import AnyBudget


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101) with a linear warm-up; no weight decay of biases and norms.

    `eps` is 1e-15 as in ScaleRL (arXiv 2510.13786): a step is lr m / (sqrt(v) + eps), and the usual 1e-8
    would shrink it wherever gradients are not far above 1e-8, at any learning rate. `max_grad_norm` clips the
    norm of the whole gradient.
    """

    lr: float = 5e-7
    warmup_steps: int = 100
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a decay that is linear or half a cosine."""
    decay_steps: int = 0
    """Step at which a decay ends, warm-up included; 0 takes the steps of a budget in steps."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of a decay, as a share of `lr`."""
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
        if self.decay_steps < 0 or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("decay_steps must not be negative, and min_lr_ratio must be in [0, 1]")

    def lr_at(self, step: int, decay_steps: float = math.inf) -> float:
        """Return the learning rate of the step that makes version `step` + 1; skipped steps count too.

        A decay starts after the first step at `lr` and is complete from step `decay_steps` on. So the last of
        that many steps is above `min_lr_ratio`, as with the schedulers of transformers.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.lr_scheduler == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (decay_steps - self.warmup_steps))
        left = 1 - done if self.lr_scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)

    def check_decay(self, budget: AnyBudget) -> None:
        """Raise a ValueError unless a decay has an end, after the warm-up and not before the budget's."""
        if self.lr_scheduler == "constant":
            return
        steps = budget.amount if budget.kind == "steps" else math.inf
        end = self.decay_steps or steps
        if end == math.inf:
            raise ValueError(
                f"optimiser.decay_steps: a {self.lr_scheduler} decay ends at a step, and a budget in "
                f"{budget.kind} names none: set it"
            )
        if end <= self.warmup_steps:
            raise ValueError(
                f"optimiser.warmup_steps: {self.warmup_steps} leave nothing of the {end:g} steps of a decay"
            )
        if not self.min_lr_ratio and end < steps < math.inf:
            raise ValueError(
                f"optimiser.decay_steps: the learning rate is 0 from step {end:g} on, and the budget is "
                f"{steps:g} steps: set optimiser.min_lr_ratio, or as many decay_steps"
            )
