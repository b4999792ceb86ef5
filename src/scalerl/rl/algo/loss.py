"""Policy losses: pure functions of the log-probabilities, before any averaging.

A loss says what one token contributes; how tokens are weighed is `scalerl.rl.algo.averaging`, so that the two
vary independently: loss = (value * weight).sum(). All bounds are on the importance ratio itself: 1.26, not an
offset of .26 from one.

    rho_t = pi_train(y_t) / pi_gen(y_t)        sg: no gradient flows through it

`comes_with` has the averaging and the advantage of a loss's paper, where they are not the recipe's defaults:
a recipe that names the loss alone gets these.

Shapes in names: N completions, T tokens (padded; what padding holds is weighed by 0).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """Loss of every token, and where a bound on the ratio acts; both (N, T)."""

    value_NT: Tensor
    clipped_NT: Tensor


class Loss(Protocol):
    """A policy loss.

    One with an attribute `updates` above 1 has a fifth argument with a default: the log-probabilities by the
    weights before the first of every so many steps, given where those are not the trainer's; see `Decoupled`.
    """

    def __call__(
        self, logp_NT: Tensor, behaviour_logp_NT: Tensor, advantage_N: Tensor, sampled_NT: Tensor
    ) -> TokenLoss:
        """From the trainer's log-probabilities (with gradient), those at sampling, the advantages, and which
        tokens were sampled. Both log-probabilities are 0 where nothing was."""
        ...


@dataclass(frozen=True)
class Cispo:
    """Truncated importance sampling with a stop-gradient: CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    per token = -sg(min(rho, max_ratio)) * A * log pi_train

    `max_ratio` is the cap on the ratio itself (5.0 means rho <= 5), with no lower clip. Every token keeps its
    gradient, a clipped one as well: the cap limits its weight.
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
    """REINFORCE with a truncated importance weight of the whole completion, as the policy gradient has it.

    per token = -sg(min(rho_1 rho_2 ... rho_|y|, max_ratio)) * A * log pi_train

    One completion is one action, so its weight is the product over its tokens (Ionides, 2008; the weight that
    V-trace, arXiv 1802.01561, truncates token by token: for that take CISPO with max_ratio = 1).
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
        # Clamped as a logarithm: over thousands of tokens the product itself overflows float32, at e^88.
        weight_N = log_ratio_N.clamp(max=math.log(self.max_ratio)).exp()
        clipped_N = log_ratio_N > math.log(self.max_ratio)
        value_NT = -(weight_N * advantage_N)[:, None] * logp_NT
        return TokenLoss(value_NT, clipped_N[:, None].expand_as(value_NT))


@dataclass(frozen=True)
class _TokenClip:
    """PPO's clipped surrogate by token (arXiv 1707.06347, eq. 7).

    per token = -min(rho A, clip(rho, min_ratio, max_ratio) A)

    A token beyond the bound that its advantage pushes towards loses its gradient.
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

    DAPO's own is 1.28. Its dynamic sampling is a choice of its own here. Its eq. 8 divides by the tokens of a
    prompt's completions, which is the average by prompt (its code, by those of the batch: averaging `token`).
    """

    max_ratio: float = 1.26
    comes_with: ClassVar[Mapping[str, str]] = {"averaging": "prompt", "advantage": "prompt_std"}
    kind: Literal["dapo"] = "dapo"


@dataclass(frozen=True)
class Decoupled:
    """PPO whose proximal policy is not the one that sampled (arXiv 2110.00641), as AReaL has it.

    w = pi_prox(y_t) / pi_gen(y_t)        r = pi_train(y_t) / pi_prox(y_t)
    per token = -sg(w) * min(r A, clip(r, min_ratio, max_ratio) A), and 0 where w > max_weight

    The proximal policy is the trainer's before the first of every `updates` steps: a copy of its weights, by
    which the batches of the other steps are scored. So AReaL trains a batch that is cut into `updates`
    mini-batches (arXiv 2505.24298). With 1 the policies are one, and r only has a gradient.
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
        """See `Loss`; without `proximal_logp_NT` the proximal policy is the one that is trained."""
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

    With `length_normalised` off, s is the product itself. With averaging by sample, which it brings,
    the loss is GSPO's own; with another, a completion counts by the sum of its tokens' weights. The bounds
    are those that did best in arXiv 2510.13786 (offsets of 3e-3 and 5e-3); GSPO's own are .9997 and 1.0004.
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
        """See `Loss`; gradient flows through the ratio, and so alike to every token."""
        log_ratio_N1 = ((logp_NT - behaviour_logp_NT) * sampled_NT).sum(1, keepdim=True)
        if self.length_normalised:
            # A rank that has no completion left scores one without sampled tokens
            # (`nothing_of`): 0 / 0 would be NaN, and so would NaN times its weight of 0.
            log_ratio_N1 = log_ratio_N1 / sampled_NT.sum(1, keepdim=True).clamp(min=1)
        value_N1, clipped_N1 = _surrogate(
            log_ratio_N1.exp(), advantage_N[:, None], self.min_ratio, self.max_ratio
        )
        return TokenLoss(value_N1.expand_as(logp_NT), clipped_N1.expand_as(logp_NT))


def _surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """-min(rho A, clip(rho, low, high) A), and where the clip takes the gradient."""
    value = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    # Beyond the other bound the term without clip is the smaller one: the token keeps its gradient.
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
    # Ratios are float32: a cap beyond 3e38 would be none, and no message would say so.
    if 1e30 < high < math.inf:
        raise ValueError("max_ratio must be at most 1e30, or inf for no cap")


def check_cut(top_p: float, top_k: int, loss: Loss) -> None:
    """Check what is sampled from, which a loss may take for a change of the policy.

    Raises:
        ValueError: `top_p` is no probability, `top_k` is negative, or a ratio of `top_p` is clipped.
    """
    if not 0 < top_p <= 1:
        raise ValueError("top_p must be above 0 and at most 1, which samples from all tokens")
    if top_k < 0:
        raise ValueError("top_k must be at least 0, which samples from all tokens")
    bound = 0.0 if isinstance(loss, Decoupled) else getattr(loss, "min_ratio", 0.0)
    if bound > top_p:
        # The trainer's probabilities are of all tokens: at equal weights the ratio is what was kept.
        raise ValueError(f"top_p: ratios begin at {top_p:g}, and loss.min_ratio ({bound:g}) clips them")


AnyLoss = Cispo | Dapo | Decoupled | Grpo | Gspo | Reinforce
"""The losses that a recipe can name."""


@dataclass(frozen=True)
class Kl:
    """A penalty for leaving the base model, per token, before averaging; off unless its coefficient is set.

    `k3`: e^d - d - 1 with d = log pi_base - log pi_train, never negative, as GRPO has it (arXiv 2402.03300,
    eq. 4; Schulman, 2020). `k2`: d^2 / 2, whose gradient is the divergence's on the policy's own
    samples.
    """

    coefficient: float = 0.0
    estimator: Literal["k2", "k3"] = "k3"

    def __post_init__(self) -> None:
        if not 0 <= self.coefficient < math.inf:
            raise ValueError("coefficient must not be negative, and finite")

    def __call__(self, logp_NT: Tensor, base_logp_NT: Tensor) -> Tensor:
        """The divergence of every token, (N, T), with gradient through `logp_NT`; without the coefficient."""
        # e^d has the mean 1 over the policy's own samples, so that k3 there is unbiased, as -d is.
        d_NT = base_logp_NT - logp_NT
        return 0.5 * d_NT**2 if self.estimator == "k2" else d_NT.exp() - d_NT - 1
