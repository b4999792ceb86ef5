"""Log-probabilities of tokens, the logits of a few at a time; they are computed again in the backward pass.

At a vocabulary of 150,000 the logits of 16,000 tokens are 10 GB, and their softmax and gradients as much
again. Here only `chunk` tokens' are ever there; what is kept of the rest is one number per token.

Shapes in names: W tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def chunked_log_probs(
    hidden_WD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_W: Tensor,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, with gradient, and entropy of its distribution, without; in float32.

    The product with `weight_VD` is in that one's precision, as `scalerl.rl.model.causal_lm.log_probs_TV` has
    it.
    """
    return _Chunked.apply(hidden_WD.to(weight_VD.dtype), weight_VD, bias_V, target_W, temperature, chunk)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_WD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_W: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # Each by itself: FSDP2 warns of views that leave a module, whose hooks are lost if they are changed.
        logp_W, entropy_W, log_sum_W = (
            hidden_WD.new_empty(len(hidden_WD), dtype=torch.float32) for _ in range(3)
        )
        for start in range(0, len(hidden_WD), chunk):
            part = slice(start, start + chunk)
            logits_CV = linear(hidden_WD[part], weight_VD, bias_V).float().div_(temperature)
            log_sum_W[part] = logits_CV.logsumexp(-1)
            logp_CV = logits_CV.sub_(log_sum_W[part, None])
            logp_W[part] = logp_CV.gather(-1, target_W[part, None])[:, 0]
            entropy_W[part] = -torch.linalg.vecdot(logp_CV.exp(), logp_CV)
        ctx.save_for_backward(hidden_WD, weight_VD, bias_V, target_W, log_sum_W)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropy_W)
        return logp_W, entropy_W

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_WD, weight_VD, bias_V, target_W, log_sum_W = ctx.saved_tensors
        grad_hidden_WD = torch.empty_like(hidden_WD)
        grad_weight_VD = None
        if ctx.needs_input_grad[1]:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        grad_bias_V = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        grad_W1 = (grads[0] / ctx.temperature)[:, None]
        for start in range(0, len(hidden_WD), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits_CV = linear(hidden_WD[part], weight_VD, bias_V).float().div_(ctx.temperature)
            # d logp / d logits = (1 at the target) - p
            grad_CV = logits_CV.sub_(log_sum_W[part, None]).exp_().mul_(-grad_W1[part])
            grad_CV.scatter_add_(-1, target_W[part, None], grad_W1[part])
            grad_CV = grad_CV.to(weight_VD.dtype)
            torch.mm(grad_CV, weight_VD, out=grad_hidden_WD[part])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_CV.t(), hidden_WD[part])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_WD, grad_weight_VD, grad_bias_V, None, None, None


def _add_product(total_VD: Tensor, grad_VC: Tensor, hidden_CD: Tensor) -> None:
    """Add in float32: what one chunk adds to the sum of all may be less than bfloat16 can tell."""
    if grad_VC.dtype == total_VD.dtype:
        total_VD.addmm_(grad_VC, hidden_CD)
    else:
        total_VD += grad_VC @ hidden_CD
