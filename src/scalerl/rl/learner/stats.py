"""What a step shows: sums over its tokens, and the figures that are made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class StepSums(NamedTuple):
    """Sums over trained tokens: scalars, but for `load`. Those of micro-batches and ranks are added."""

    loss: Tensor
    entropy: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    log_ratio_abs: Tensor
    clipped: Tensor
    """Tokens on which a bound of the loss acts."""
    kl: Tensor
    load: Tensor
    """Tokens of each expert, layer after layer; none where the model is no mixture."""

    def packed(self) -> Tensor:
        """Return all sums as one tensor in float64, on the CPU."""
        return torch.cat([part.double().reshape(-1) for part in self]).cpu()

    @classmethod
    def unpacked(cls, packed: Tensor) -> StepSums:
        """Return the sums that `packed` has made one tensor of."""
        n_scalars = len(cls._fields) - 1
        scalars = list(packed[:n_scalars])
        return cls(*scalars, load=packed[n_scalars:])


@dataclass(frozen=True)
class StepStats:
    """What one step showed, over the trained tokens; NaN where the step was skipped."""

    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    entropy: float = math.nan
    """Mean entropy of the trainer's distribution, nats per token."""
    ratio_mean: float = math.nan
    ratio_max: float = math.nan
    ratio_clipped: float = math.nan
    """Share of tokens on which a bound of the loss on the importance ratio acts."""
    ess: float = math.nan
    """Effective sample size of the importance ratios, (sum rho)^2 / (n sum rho^2), in (0, 1]."""
    logp_shift: float = math.nan
    """Mean |log rho|, nats per token: how far trainer and generator are apart, staleness included."""
    kl: float = math.nan
    """Mean divergence from the base model by the recipe's estimator, nats per token; NaN where it is off."""
    router_load_max: float = math.nan
    """Of a mixture of experts: trained tokens that meet the expert of the largest load, over those of an even
    load, in the layer where that is the most. See `scalerl.rl.model.routing.balance_of`."""
    router_load_entropy: float = math.nan
    """Entropy of the load over that of an even load, in [0, 1], in the layer where it is the least."""
    flops: float = 0.0
    tokens: int = 0
