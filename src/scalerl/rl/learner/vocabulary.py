"""Log-probabilities of single tokens from hidden states, a chunk of the logits at a time.

At a vocabulary of 150,000 the logits of 16,000 tokens are 10 GB, and their softmax and gradient as much
again. Here the logits of `chunk` places are in memory, and are computed again in the backward pass where
there is more than one chunk.

Shapes in names: R places at which something is predicted, W wanted tokens (one or more a place), C places of
a chunk, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from scalerl.rl.model.causal_lm import logits_of, product

_softmax_backward: Any = torch.ops.aten._log_softmax_backward_data.default


def chunked_log_probs(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    row_W: Tensor,
    target_W: Tensor,
    temperature: float,
    chunk: int,
    fp32: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability, with gradient, and its distribution's entropy, without; (W,).

    `row_W` is the place that predicts each target. Weight, bias and `fp32` are as
    `scalerl.rl.model.causal_lm.head_of` has them; sums over the vocabulary are in float32, or in float64
    where the weights are.
    """
    # By place, so that the targets of a chunk are a slice.
    order_W = torch.argsort(row_W, stable=True)
    back_W = torch.argsort(order_W)
    row_W, target_W = row_W[order_W], target_W[order_W]
    starts = torch.arange(0, len(hidden_RD) + chunk, chunk, device=row_W.device)
    cuts = torch.searchsorted(row_W, starts).tolist()
    logp_W, entropy_R = _Chunked.apply(
        hidden_RD, weight_VD, bias_V, row_W, target_W, temperature, chunk, fp32, cuts
    )
    return logp_W[back_W], entropy_R[row_W[back_W]]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        row_W: Tensor,
        target_W: Tensor,
        temperature: float,
        chunk: int,
        fp32: bool,
        cuts: list[int],
    ) -> tuple[Tensor, Tensor]:
        kind = torch.promote_types(weight_VD.dtype, torch.float32)
        # Each by itself: FSDP2 warns of views that leave a module, whose hooks are lost if they are changed.
        logp_W = hidden_RD.new_empty(len(row_W), dtype=kind)
        entropy_R = hidden_RD.new_empty(len(hidden_RD), dtype=kind)
        logp_CV = hidden_RD.new_empty(0)
        for number, start in enumerate(range(0, len(hidden_RD), chunk)):
            part, wanted = slice(start, start + chunk), slice(*cuts[number : number + 2])
            logp_CV = _log_softmax(hidden_RD[part], weight_VD, bias_V, temperature, fp32)
            logp_W[wanted] = logp_CV[row_W[wanted] - start, target_W[wanted]]
            entropy_R[part] = -logp_CV.exp().mul_(logp_CV).sum(-1)
        # A single chunk is no more memory than that of the backward pass, and saves a product.
        kept_CV = logp_CV if len(hidden_RD) <= chunk else None
        ctx.save_for_backward(hidden_RD, weight_VD, bias_V, row_W, target_W, kept_CV)
        ctx.rest = temperature, chunk, fp32, cuts
        ctx.mark_non_differentiable(entropy_R)
        return logp_W, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RD, weight_VD, bias_V, row_W, target_W, kept_CV = ctx.saved_tensors
        temperature, chunk, fp32, cuts = ctx.rest
        grad_hidden_RD, grad_weight_VD = torch.empty_like(hidden_RD), None
        grad_bias_V = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        for number, start in enumerate(range(0, len(hidden_RD), chunk)):
            part, wanted = slice(start, start + chunk), slice(*cuts[number : number + 2])
            hidden_CD, logp_CV = hidden_RD[part], kept_CV
            if logp_CV is None:
                logp_CV = _log_softmax(hidden_CD, weight_VD, bias_V, temperature, fp32)
            grad_CV = torch.zeros_like(logp_CV)
            grad_CV.index_put_((row_W[wanted] - start, target_W[wanted]), grads[0][wanted], accumulate=True)
            grad_CV = _softmax_backward(grad_CV, logp_CV, 1, logp_CV.dtype).div_(temperature)
            if not fp32:
                grad_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_RD[part] = product(grad_CV, weight_VD)
            if ctx.needs_input_grad[1]:
                # In float32: bfloat16 would round away what one chunk adds to the sum of all.
                added_VD = product(grad_CV.t(), hidden_CD)
                grad_weight_VD = added_VD if grad_weight_VD is None else grad_weight_VD.add_(added_VD)
                del added_VD  # as large as the head, and the next one is made before it would be replaced
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        if ctx.needs_input_grad[1] and grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD)
        grad_weight_VD = None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_RD, grad_weight_VD, grad_bias_V, *[None] * 6


def _log_softmax(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, fp32: bool
) -> Tensor:
    return torch.log_softmax(logits_of(hidden_CD, weight_VD, bias_V, fp32).div_(temperature), -1)
