"""Policy losses: pure functions of the log-probabilities, before any averaging.

A loss defines the value of each token, and `scalerl.rl.algo.averaging` its weight, so that the two vary
independently: loss = (value * weight).sum(). All bounds are on the importance ratio itself: 1.26, not an
offset of .26 from one.

    rho_t = pi_train(y_t) / pi_gen(y_t)        sg: no gradient flows through it

`comes_with` names the averaging and the advantage of a loss's paper if they are not the recipe's defaults. A
recipe that names the loss but not these gets them.

Shapes in names: N completions, T tokens (padded; padding has weight 0).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """The loss of every token, and whether a bound on the ratio acts on it; both (N, T)."""

    value_NT: Tensor
    clipped_NT: Tensor


class Loss(Protocol):
    """A policy loss.

    A loss with an attribute `updates` above 1 takes a fifth argument with a default: the log-probabilities
    under the weights before the first of every `updates` steps, passed in all others; see `Decoupled`.
    """

    def __call__(
        self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor, sampled_NT: Tensor
    ) -> TokenLoss:
        """Return the loss from the trainer's log-probabilities (with gradient), the behaviour
        log-probabilities, the advantages, and which tokens were sampled (elsewhere both are 0)."""
        ...


@dataclass(frozen=True)
class Cispo:
    """Truncated importance sampling with a stop-gradient: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    per token = -sg(min(rho, max_ratio)) * A * log pi_train

    `max_ratio` is the cap on the ratio itself (5.0 means rho <= 5), with no lower clip. Every token keeps its
    gradient, even a clipped one, whose weight the cap limits.
    """

    max_ratio: float = 5.0
    kind: Literal["cispo"] = "cispo"

    def __post_init__(self) -> None:
        _check_bounds(0.0, self.max_ratio)

    def __call__(
        self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor, sampled_NT: Tensor
    ) -> TokenLoss:
        """See `Loss`; gradient flows through `logp_NT` as a log-probability only."""
        # Detached: with a gradient through the ratio, a clipped token would lose its own.
        ratio_NT = (logp_NT.detach() - behaviour_logp_NT).exp()
        weight_NT = ratio_NT.clamp(max=self.max_ratio)
        return TokenLoss(-weight_NT * advantage_N[:, None] * logp_NT, ratio_NT > self.max_ratio)


@dataclass(frozen=True)
class Reinforce:
    """REINFORCE with a truncated importance weight of the whole completion.

    per token = -sg(min(rho_1 rho_2 ... rho_|y|, max_ratio)) * A * log pi_train

    As in the policy gradient, one completion is one action, so its weight is the product over its tokens
    (Ionides, 2008). V-trace (arXiv 1802.01561) truncates by token: for that, use CISPO with max_ratio = 1.
    """

    max_ratio: float = 5.0
    kind: Literal["reinforce"] = "reinforce"

    def __post_init__(self) -> None:
        _check_bounds(0.0, self.max_ratio)

    def __call__(
        self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor, sampled_NT: Tensor
    ) -> TokenLoss:
        """See `Loss`."""
        log_ratio_N = ((logp_NT.detach() - behaviour_logp_NT) * sampled_NT).sum(1)
        # Clamp the logarithm: over thousands of tokens the product itself overflows float32, at e^88.
        weight_N = log_ratio_N.clamp(max=math.log(self.max_ratio)).exp()
        clipped_N = log_ratio_N > math.log(self.max_ratio)
        value_NT = -(weight_N * advantage_N)[:, None] * logp_NT
        return TokenLoss(value_NT, clipped_N[:, None].expand_as(value_NT))


@dataclass(frozen=True)
class _TokenClip:
    """PPO's clipped surrogate by token (arXiv 1707.06347, eq. 7).

    per token = -min(rho A, clip(rho, min_ratio, max_ratio) A)

    A token whose ratio is beyond the bound that its advantage pushes it towards loses its gradient.
    """

    min_ratio: float = 0.8
    max_ratio: float = 1.2
    comes_with: ClassVar[Mapping[str, str]] = {"averaging": "sample", "advantage": "prompt_std"}

    def __post_init__(self) -> None:
        _check_bounds(self.min_ratio, self.max_ratio)

    def __call__(
        self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor, sampled_NT: Tensor
    ) -> TokenLoss:
        """See `Loss`; gradient flows through the ratio."""
        ratio_NT = (logp_NT - behaviour_logp_NT).exp()
        return _surrogate(ratio_NT, advantage_N[:, None], self.min_ratio, self.max_ratio)


@dataclass(frozen=True)
class Grpo(_TokenClip):
    """The clipped surrogate as in GRPO (arXiv 2402.03300, eq. 3): -min(rho A, clip(rho, .8, 1.2) A)."""

    kind: Literal["grpo"] = "grpo"


@dataclass(frozen=True)
class Dapo(_TokenClip):
    """GRPO's loss with a higher upper bound (DAPO, arXiv 2503.14476, eq. 8), here that of arXiv 2510.13786.

    DAPO's own bound is 1.28. Its dynamic sampling is a separate choice here. Its eq. 8 divides by the tokens
    of a prompt's completions, as averaging `prompt`; its code divides by those of the batch, as `token`.
    """

    max_ratio: float = 1.26
    comes_with: ClassVar[Mapping[str, str]] = {"averaging": "prompt", "advantage": "prompt_std"}
    kind: Literal["dapo"] = "dapo"


@dataclass(frozen=True)
class Decoupled:
    """PPO with a proximal policy other than the behaviour policy (arXiv 2110.00641), as in AReaL.

    w = pi_prox(y_t) / pi_gen(y_t)        r = pi_train(y_t) / pi_prox(y_t)
    per token = -sg(w) * min(r A, clip(r, min_ratio, max_ratio) A), and 0 where w > max_weight

    The proximal policy is the trainer's before the first of every `updates` steps: a copy of its weights
    scores the batches of the other steps. AReaL trains like this on a batch split into `updates` mini-batches
    (arXiv 2505.24298). With `updates` = 1 both policies are the same: r is 1, and only carries the gradient.
    """

    min_ratio: float = 0.8
    max_ratio: float = 1.2
    max_weight: float = 5.0
    updates: int = 4
    comes_with: ClassVar[Mapping[str, str]] = {"averaging": "token"}
    kind: Literal["decoupled"] = "decoupled"

    def __post_init__(self) -> None:
        _check_bounds(self.min_ratio, self.max_ratio)
        if not self.max_weight >= 1:
            raise ValueError("max_weight must be 1 or more: tokens with a larger weight are left out")
        if self.updates < 1:
            raise ValueError("updates must be at least 1")

    def __call__(
        self,
        logp_NT: Tensor,
        behaviour_logp_NT: Tensor,
        advantage_N: Tensor,
        sampled_NT: Tensor,
        proximal_logp_NT: Tensor | None = None,
    ) -> TokenLoss:
        """See `Loss`; without `proximal_logp_NT` the proximal policy is the one being trained."""
        proximal_NT = logp_NT.detach() if proximal_logp_NT is None else proximal_logp_NT
        weight_NT = (proximal_NT - behaviour_logp_NT).exp()
        ratio_NT = (logp_NT - proximal_NT).exp()
        value_NT, clipped_NT = _surrogate(ratio_NT, advantage_N[:, None], self.min_ratio, self.max_ratio)
        out_NT = weight_NT > self.max_weight
        return TokenLoss(value_NT * weight_NT.masked_fill(out_NT, 0.0), clipped_NT | out_NT)


@dataclass(frozen=True)
class Gspo:
    """One ratio for the whole completion: GSPO (arXiv 2507.18071, eq. 5-7).

    s = (rho_1 rho_2 ... rho_|y|)^(1 / |y|)        every token of the completion = -min(s A, clip(s) A)

    With `length_normalised` off, s is the product itself. With averaging by `sample`, its default, the loss
    is GSPO's own; with another, the weight of a completion is the sum of its tokens' weights. The bounds are
    those that did best in arXiv 2510.13786 (offsets of 3e-3 and 5e-3); GSPO's own are .9997 and 1.0004.
    """

    min_ratio: float = 0.997
    max_ratio: float = 1.005
    length_normalised: bool = True
    comes_with: ClassVar[Mapping[str, str]] = {"averaging": "sample", "advantage": "prompt_std"}
    kind: Literal["gspo"] = "gspo"

    def __post_init__(self) -> None:
        _check_bounds(self.min_ratio, self.max_ratio)

    def __call__(
        self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor, sampled_NT: Tensor
    ) -> TokenLoss:
        """See `Loss`; gradient flows through the ratio, and so equally to every token."""
        log_ratio_N1 = ((logp_NT - behaviour_logp_NT) * sampled_NT).sum(1, keepdim=True)
        if self.length_normalised:
            # A rank without completions scores one that has no sampled tokens (`nothing_of`): 0 / 0 would be
            # NaN, which its weight of 0 would not remove.
            log_ratio_N1 = log_ratio_N1 / sampled_NT.sum(1, keepdim=True).clamp(min=1)
        value_N1, clipped_N1 = _surrogate(
            log_ratio_N1.exp(), advantage_N[:, None], self.min_ratio, self.max_ratio
        )
        return TokenLoss(value_N1.expand_as(logp_NT), clipped_N1.expand_as(logp_NT))


def _surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """Return -min(rho A, clip(rho, low, high) A), and where the clip removes the gradient."""
    value = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    # Beyond the opposite bound the unclipped term is the smaller one, so the token keeps its gradient.
    above, below = (ratio > high) & (advantage > 0), (ratio < low) & (advantage < 0)
    return TokenLoss(value, above | below)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low <= 1:
        raise ValueError(
            "min_ratio must be in [0, 1]: it bounds the ratio itself (0.8, not an offset of 0.2)"
        )
    if not high > 0 or (low > 0 and high < 1):
        least = "1 or more" if low > 0 else "positive"
        raise ValueError(f"max_ratio must be {least}: it is the cap on the ratio itself")
    # Ratios are float32: a cap beyond 3e38 would silently be no cap.
    if 1e30 < high < math.inf:
        raise ValueError("max_ratio must be at most 1e30, or inf for no cap")


def check_cut(top_p: float, top_k: int, loss: Loss) -> None:
    """Check the truncation of the sampling distribution, which a loss may mistake for a change of the policy.

    Raises:
        ValueError: `top_p` is not a probability, `top_k` is negative, or the loss clips a ratio of `top_p`.
    """
    if not 0 < top_p <= 1:
        raise ValueError("top_p must be above 0 and at most 1, which samples from all tokens")
    if top_k < 0:
        raise ValueError("top_k must be at least 0, which samples from all tokens")
    bound = 0.0 if isinstance(loss, Decoupled) else getattr(loss, "min_ratio", 0.0)
    if bound > top_p:
        # The trainer normalises over all tokens: with equal weights the ratio is the kept probability.
        raise ValueError(f"top_p: ratios begin at {top_p:g}, and loss.min_ratio ({bound:g}) clips them")


AnyLoss = Cispo | Dapo | Decoupled | Grpo | Gspo | Reinforce
"""The losses that a recipe can name."""


@dataclass(frozen=True)
class Kl:
    """A penalty on divergence from the base model, per token, before averaging; off if its coefficient is 0.

    `k3`: e^d - d - 1 with d = log pi_base - log pi_train, never negative, as in GRPO (arXiv 2402.03300,
    eq. 4; Schulman, 2020). `k2`: d^2 / 2, whose gradient is the divergence's on the policy's own samples.
    """

    coefficient: float = 0.0
    estimator: Literal["k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf:
            raise ValueError("coefficient must not be negative, and finite")

    def __call__(self, logp_NT: Tensor, base_logp_NT: Tensor) -> Tensor:
        """Return the divergence of every token, (N, T), with gradient to `logp_NT`, without coefficient."""
        # On the policy's own samples e^d has mean 1, so k3 is unbiased there, as -d is.
        d_NT = base_logp_NT - logp_NT
        return 0.5 * d_NT**2 if self.estimator == "k2" else d_NT.exp() - d_NT - 1
