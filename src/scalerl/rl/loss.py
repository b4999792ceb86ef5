"""Policy losses: pure functions of the log-probabilities, before any averaging.

A loss says what one token contributes; how tokens are weighed is `scalerl.rl.averaging`, so that the two vary
independently: loss = (per_token * weight).sum().

Shapes in names: N completions, T tokens (padded; what padding holds is weighed by 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Cispo:
    """Truncated importance sampling with a stop-gradient: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    per token = -sg(min(rho, max_ratio)) * A * log pi_train,    rho = pi_train / pi_gen

    `max_ratio` is the cap on the ratio itself (5.0 means rho <= 5), with no lower clip. Every token keeps its
    gradient, a clipped one as well: the cap limits its weight.
    """

    kind: Literal["cispo"] = "cispo"
    max_ratio: float = 5.0

    def __post_init__(self) -> None:
        if not self.max_ratio > 0:
            raise ValueError("max_ratio must be positive: it is the cap on the ratio itself")

    def __call__(self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor) -> Tensor:
        """Loss per token, shape (N, T). Gradient flows through `logp_NT` as a log-probability only."""
        ratio_NT = (logp_NT.detach() - behaviour_logp_NT).exp().clamp(max=self.max_ratio)
        return -ratio_NT * advantage_N[:, None] * logp_NT

    def clipped(self, ratio_NT: Tensor) -> Tensor:
        """Where the cap acts."""
        return ratio_NT > self.max_ratio
