"""Log-probabilities under a sharded model: see `scalerl.rl.learner.score`; here every call is collective.

The logits of a few tokens at a time are in memory, and are computed again in the backward pass: at a
vocabulary of 150,000 the logits of 16,000 tokens are 10 GB, and their softmax and gradients as much again.

Shapes in names: M completions, T positions, W wanted tokens, C tokens of a chunk, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from scalerl.rl.learner.fsdp.sharding import Whole, group_of
from scalerl.rl.learner.score import Scorer
from scalerl.rl.model.causal_lm import head_of, hidden_states, log_probs_TV

T = TypeVar("T")


class ShardedScorer(Scorer):
    """Scores tokens by a sharded model, `chunk` tokens' logits at a time."""

    def __init__(
        self,
        whole: Whole,
        device: torch.device,
        temperature: float,
        fp32_logits: bool,
        chunk: int,
        packed: bool,
    ) -> None:
        self._whole, self._device = whole, device
        self._temperature, self._fp32_logits = temperature, fp32_logits
        self._chunk, self._packed = chunk, packed
        self._dense = None
        self.model = whole.model

    def by(self, model: nn.Module) -> ShardedScorer:
        """Return the same scorer of another sharded model."""
        assert isinstance(model, Whole)
        settings = (self._temperature, self._fp32_logits, self._chunk, self._packed)
        return ShardedScorer(model, self._device, *settings)

    def _run(self, compute: Callable[[nn.Module], T]) -> T:
        """Call `compute` with embeddings and head gathered; they stay so only for a backward pass."""
        found = self._whole(compute)
        if not torch.is_grad_enabled():
            group_of(self._whole).reshard()
        return found

    def _of_wanted(
        self,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray | None,
        group_M: np.ndarray | None,
    ) -> tuple[Tensor, Tensor]:
        target_W = torch.from_numpy(token_MT[:, 1:][wanted_MT]).to(self._device)

        def compute(model: nn.Module) -> tuple[Tensor, Tensor]:
            hidden_WD = wanted_hidden(model, token_MT, wanted_MT, self._packed)
            weight_VD, bias_V = head_of(model, self._fp32_logits)
            return chunked_log_probs(hidden_WD, weight_VD, bias_V, target_W, self._temperature, self._chunk)

        return self._run(compute)

    @torch.no_grad()
    def distributions(
        self, token_MT: np.ndarray, wanted_MT: np.ndarray, heads: Sequence[bool]
    ) -> Iterator[list[Tensor]]:
        """See `Scorer.distributions`; all parts must be taken, on every rank."""

        def compute(model: nn.Module) -> Tensor:
            return wanted_hidden(model, token_MT, wanted_MT, self._packed)

        hidden_WD = self._run(compute)
        for part_WD in hidden_WD.split(self._chunk):
            yield self._run(
                lambda model, part_WD=part_WD: [
                    log_probs_TV(model, part_WD, self._temperature, fp32) for fp32 in heads
                ]
            )


def wanted_hidden(model: nn.Module, token_MT: np.ndarray, wanted_MT: np.ndarray, packed: bool) -> Tensor:
    """Return the last hidden states (W, D) that predict the wanted tokens, row by row, padded or packed.

    Packed, all completions are one sequence, with positions from 0 in each: transformers separates sequences
    at position 0, in its masks or by the kernels of flash attention.
    """
    device = next(model.parameters()).device
    inputs, at = {"input_ids": token_MT[:, :-1]}, wanted_MT
    if packed:
        # One token at least: a rank without completions must pass something through the blocks.
        read_M = np.where(wanted_MT.any(1), wanted_MT.shape[1] - wanted_MT[:, ::-1].argmax(1), 1)
        read_MT = np.arange(wanted_MT.shape[1]) < read_M[:, None]  # up to the last that predicts something
        position_MT = np.broadcast_to(np.arange(wanted_MT.shape[1]), wanted_MT.shape)
        inputs = {"input_ids": token_MT[:, :-1][read_MT][None], "position_ids": position_MT[read_MT][None]}
        at = wanted_MT[read_MT][None]
    tensors = {name: torch.from_numpy(array).to(device) for name, array in inputs.items()}
    return hidden_states(model, **tensors, use_cache=False)[torch.from_numpy(at).to(device)]


@torch.no_grad()
def can_pack(model: nn.Module) -> bool:
    """Whether the model gives two completions the same hidden states packed as padded."""
    config: Any = model.config
    token_MT = np.array([[1, 2, 3, 4, 5], [4, 3, 2, 1, 0]]) % config.vocab_size
    wanted_MT = np.array([[True] * 4, [True, True, True, False]])
    try:
        padded, packed = (wanted_hidden(model, token_MT, wanted_MT, how) for how in (False, True))
    except (TypeError, ValueError, RuntimeError):
        return False  # a model without positions, for example
    gap = (padded.float() - packed.float()).abs().mean() / padded.float().abs().mean()
    return bool(gap < (1e-3 if padded.dtype == torch.float32 else 0.05))


def chunked_log_probs(
    hidden_WD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_W: Tensor,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return each target's log-probability, with gradient, and its distribution's entropy, without; float32.

    The product with `weight_VD` is in its precision, as in `scalerl.rl.model.causal_lm.log_probs_TV`.
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
            # In place: (C, V) is the largest array of a step, and here it is held once.
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
    """Add a product in float32: bfloat16 would round away what one chunk adds to the sum of all."""
    if grad_VC.dtype == total_VD.dtype:
        total_VD.addmm_(grad_VC, hidden_CD)
    else:
        total_VD += grad_VC @ hidden_CD
