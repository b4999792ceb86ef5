"""A loss that asks for more memory than there is."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from scalerl.rl.algo.loss import Cispo

TOO_MUCH = 2**50
"""Bytes that no allocator has: the error is the allocator's own."""


def allocate() -> Any:
    """Fail."""
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


@dataclass(frozen=True)
class Greedy:
    """CISPO, which allocates too much in one of its calls."""

    max_ratio: float = 5.0
    fails_at: ClassVar[int] = 0
    calls: ClassVar[int] = 0

    def __call__(self, logp_NT: Any, behaviour_NT: Any, advantage_N: Any, sampled_NT: Any) -> Any:
        """See `scalerl.rl.algo.loss.Loss`."""
        if logp_NT.grad_fn is not None:  # of a model, and not where a recipe tries its loss
            Greedy.calls += 1
            if Greedy.calls == Greedy.fails_at:
                allocate()
        return Cispo(self.max_ratio)(logp_NT, behaviour_NT, advantage_N, sampled_NT)
