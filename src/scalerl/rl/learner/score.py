"""Log-probabilities of previously sampled tokens under the current model, with gradient.

Three implementations give the same result. A dense model in float32 on a CPU (`scalerl.rl.kernels.dense`) is
run over packed tokens: without padding, and with the prompt of a group read once, its gradient summed over
the group. Every other model (mixtures of experts, GPT-2, adapters, bf16, activation checkpointing, compiled
blocks, shards), and any model without a C compiler, is run through its own modules: over packed tokens if it
has an attention for them (`scalerl.rl.model.packed_attention`), otherwise padded.

With a vocabulary of 150,000 the logits of 16,000 tokens take 10 GB, and so do their softmax and gradient.
Only the logits of `chunk` positions are in memory here; they are computed again in the backward pass if there
is more than one chunk.

Shapes in names: M completions, T positions, S positions that are read, D hidden size, V vocabulary, W wanted
tokens, R distinct positions that predict them, C positions of a chunk, H heads, L layers with experts,
K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.kernels.dense import DenseModel
from scalerl.rl.kernels.packed import Packing, can_pack, packed_hidden_states
from scalerl.rl.learner.sharding import Whole, group_of, local_of, plain_of
from scalerl.rl.model.causal_lm import cut_TV, head_of, hidden_states, log_probs_TV, logits_of, product
from scalerl.rl.model.packed_attention import packed_inputs
from scalerl.rl.model.routing import Routers

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
    """Return the log-probability of each target, with gradient, and its entropy, without gradient; (W,).

    `row_W` is the index into `hidden_RD` that predicts each target. Weight, bias and `fp32` are as in
    `scalerl.rl.model.causal_lm.head_of`. Sums over the vocabulary are in float32, or in float64 for float64
    weights.
    """
    # Sorted by position, so that the targets of a chunk are a slice.
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
        # Separate tensors: FSDP2 warns about views that leave a module and loses its hooks if they change.
        logp_W = hidden_RD.new_empty(len(row_W), dtype=kind)
        entropy_R = hidden_RD.new_empty(len(hidden_RD), dtype=kind)
        logp_CV = hidden_RD.new_empty(0)
        for number, start in enumerate(range(0, len(hidden_RD), chunk)):
            part, wanted = slice(start, start + chunk), slice(*cuts[number : number + 2])
            logp_CV = _log_softmax(hidden_RD[part], weight_VD, bias_V, temperature, fp32)
            logp_W[wanted] = logp_CV[row_W[wanted] - start, target_W[wanted]]
            entropy_R[part] = -logp_CV.exp().mul_(logp_CV).sum(-1)
        # Keeping a single chunk takes no more memory than the backward pass does, and saves a product.
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
                # In float32: in bfloat16 the sum over chunks would lose small contributions.
                added_VD = product(grad_CV.t(), hidden_CD)
                grad_weight_VD = added_VD if grad_weight_VD is None else grad_weight_VD.add_(added_VD)
                del added_VD  # as large as the head; it would live until the next one is made
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


T = TypeVar("T")


class Scorer:
    """Scores of tokens by `model` at the sampling temperature; collective if the model is sharded."""

    def __init__(
        self,
        model: nn.Module,
        temperature: float,
        fp32_logits: bool,
        *,
        chunk: int = 1024,
        packed: bool = False,
        kernels: bool = True,
        cut: tuple[float, int] = (1.0, 0),
    ) -> None:
        """Choose the implementation: `packed` says that the model's attention takes packed sequences, and
        `kernels` allows the packed pass in C if it supports the model. The logits of `chunk` tokens are in
        memory at once. `cut` is `top_p` and `top_k` of a recipe, used only by `distributions`."""
        self.model = plain_of(model)
        self._whole, self._temperature, self._fp32_logits = model, temperature, fp32_logits
        self._chunk, self.packed, self._cut = chunk, packed, cut
        self._device = next(model.parameters()).device
        self.routers = Routers.of(self.model)
        """The routers of a mixture of experts; after a pass they hold its load over the wanted tokens."""
        dense = DenseModel.of(model) if kernels and model is self.model else None
        self._dense = dense if dense and can_pack(dense) else None

    @property
    def dense(self) -> DenseModel | None:
        """The model for the packed pass in C; None if the model runs through its own modules."""
        base: Any = self.model.base_model
        blocks = base.layers if self._dense else ()
        return None if any(block.gradient_checkpointing for block in blocks) else self._dense

    def __call__(
        self,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray | None = None,
        group_M: np.ndarray | None = None,
        expert_MTLK: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every wanted token after the first, (M, T - 1); 0 elsewhere.

        `token_MT` is right-padded; `wanted_MT` has shape (M, T - 1). Sequences of one group in `group_M`
        start with the same `prompt_M` tokens; without these arguments all sequences are separate. Only wanted
        positions go through the head: logits of prompts and padding are never computed. `expert_MTLK` has the
        experts that read each token but the last, and replaces the routers' own choice.
        """
        target_W = torch.from_numpy(token_MT[:, 1:][wanted_MT]).to(self._device)

        def compute(model: nn.Module) -> tuple[Tensor, Tensor]:
            hidden_RD, row_W = self._hidden(model, token_MT, wanted_MT, prompt_M, group_M, expert_MTLK)
            weight_VD, bias_V = head_of(model, self._fp32_logits)
            how = (self._temperature, self._chunk, self._fp32_logits)
            return chunked_log_probs(hidden_RD.to(weight_VD.dtype), weight_VD, bias_V, row_W, target_W, *how)

        logp_W, entropy_W = self._run(compute)
        wanted = torch.from_numpy(wanted_MT).to(self._device)
        zero_MT = logp_W.new_zeros(wanted_MT.shape)
        # `masked_scatter` fills row by row, which is the order of the wanted tokens.
        return zero_MT.masked_scatter(wanted, logp_W), zero_MT.masked_scatter(wanted, entropy_W)

    @torch.no_grad()
    def distributions(
        self,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        heads: Sequence[bool],
        expert_MTLK: np.ndarray | None = None,
    ) -> Iterator[list[Tensor]]:
        """Yield sampling log-probabilities over the vocabulary at wanted tokens after the first, in parts.

        Each part has a tensor (W, V) for each of `heads`, which say whether the LM head is in FP32. All parts
        at once would take gigabytes for long completions. Every rank must take all parts.
        """
        hidden_RD, row_W = self._run(
            lambda model: self._hidden(model, token_MT, wanted_MT, None, None, expert_MTLK)
        )
        for part_W in row_W.split(self._chunk):
            hidden_WD = hidden_RD[part_W]
            yield self._run(
                lambda model, hidden_WD=hidden_WD: [
                    cut_TV(log_probs_TV(model, hidden_WD, self._temperature, fp32), *self._cut)
                    for fp32 in heads
                ]
            )

    def _run(self, compute: Callable[[nn.Module], T]) -> T:
        """Call `compute` with the model; embeddings and head of a sharded model are gathered meanwhile."""
        if not isinstance(self._whole, Whole):
            return compute(self.model)
        found = self._whole(compute)
        if not torch.is_grad_enabled():  # only a backward pass needs them to stay gathered
            group_of(self._whole).reshard()
        return found

    def _hidden(
        self,
        model: nn.Module,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray | None,
        group_M: np.ndarray | None,
        expert_MTLK: np.ndarray | None,
    ) -> tuple[Tensor, Tensor]:
        """Return distinct last hidden states (R, D), and each wanted token's index into them, row by row."""
        if dense := self.dense:
            if prompt_M is None or group_M is None:
                prompt_M, group_M = np.ones(len(token_MT), dtype=np.int64), np.arange(len(token_MT))
            packing = Packing.of(token_MT, wanted_MT, prompt_M, group_M)
            return packed_hidden_states(dense, packing), torch.from_numpy(packing.row_W)
        hidden_RD = wanted_hidden(model, token_MT, wanted_MT, self.packed, self.routers, expert_MTLK)
        return hidden_RD, torch.arange(len(hidden_RD), device=self._device)


def wanted_hidden(
    model: nn.Module,
    token_MT: np.ndarray,
    wanted_MT: np.ndarray,
    packed: bool,
    routers: Routers | None = None,
    expert_MTLK: np.ndarray | None = None,
) -> Tensor:
    """Return the last hidden states (W, D) that predict the wanted tokens, row by row, `packed` or padded.

    `routers` count the wanted tokens, and use the experts `expert_MTLK`, if given.
    """
    device = next(model.parameters()).device
    if packed:
        # Read up to the last position that predicts a wanted token, but at least one token: a rank without
        # completions must still pass something through the blocks.
        read_M = np.where(wanted_MT.any(1), wanted_MT.shape[1] - wanted_MT[:, ::-1].argmax(1), 1)
        inputs = packed_inputs(token_MT[:, :-1], read_M, device)
        read_MT = np.arange(wanted_MT.shape[1]) < read_M[:, None]
        wanted = wanted_MT[read_MT][None]
    else:
        # Right padding needs no mask: causal attention does not look ahead.
        inputs, wanted = {"input_ids": torch.from_numpy(token_MT[:, :-1]).to(device)}, wanted_MT
        read_MT = np.ones_like(wanted_MT)
    at = torch.from_numpy(wanted).to(device)
    if routers is not None:
        given = None if expert_MTLK is None else torch.from_numpy(expert_MTLK[read_MT]).to(device).long()
        routers.start(at.flatten(), given)
    return hidden_states(model, **inputs, use_cache=False)[at]


@torch.no_grad()
def packs(model: Any, attention: str) -> bool:
    """Give the model an attention for packed sequences; return whether its results stay the same.

    If they do not, restore its previous attention.
    """
    before = model.config._attn_implementation
    token_MT = np.array([[1, 2, 3, 4, 5], [4, 3, 2, 1, 0]]) % model.config.vocab_size
    wanted_MT = np.array([[True] * 4, [True, True, True, False]])
    padded = wanted_hidden(model, token_MT, wanted_MT, packed=False)
    try:
        model.set_attn_implementation(attention)
        packed = wanted_hidden(model, token_MT, wanted_MT, packed=True)
        gap = (padded.float() - packed.float()).abs().mean() / padded.float().abs().mean()
        if gap < (1e-3 if padded.dtype == torch.float32 else 0.05):
            return True
    except (TypeError, ValueError, RuntimeError):
        pass  # a model without positions, for example
    model.set_attn_implementation(before)
    return False


@contextmanager
def in_place(held: Sequence[Tensor], trained: Sequence[Tensor]) -> Iterator[None]:
    """Let the model compute with the weights `held`, without gradient; restore those of `trained` at the end.

    A second model would need its own shards and as much memory again.
    """
    own = copies(trained)
    with torch.no_grad():
        try:
            _copy(held, trained)
            yield
        finally:
            _copy(own, trained)


def copies(trained: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the current weights, or of this rank's shards, in CPU memory."""
    return [local_of(p).detach().to("cpu", copy=True) for p in trained]


def scores_of_held(
    held: Sequence[Tensor],
    trained: Sequence[Tensor],
    score: Scorer,
    token_NT: Tensor,
    wanted_NT: Tensor,
    heads: Sequence[bool],
    expert_NTLK: np.ndarray | None = None,
) -> tuple[Tensor, Tensor]:
    """Score tokens with the weights `held` in place of `trained`.

    Returns:
        The log-probability of every wanted token after the first for each of H heads, (W, H); and, for the
        first head, its rank and the variance of the rank of a sample, (W, 2).
    """
    chosen_W = token_NT[:, 1:][wanted_NT]
    logps, ranks, start = [], [], 0
    with in_place(held, trained):
        tokens = token_NT.cpu().numpy(), wanted_NT.cpu().numpy()
        for logp_WV, *other in score.distributions(*tokens, heads, expert_NTLK):
            chosen_W1 = chosen_W[start : start + len(logp_WV), None].to(logp_WV.device)
            start += len(logp_WV)
            logps.append(torch.cat([l_WV.gather(-1, chosen_W1) for l_WV in (logp_WV, *other)], 1).cpu())
            ranks.append(torch.stack(ranks_of(logp_WV, chosen_W1), 1).cpu())
    return torch.cat(logps), torch.cat(ranks)


def ranks_of(logp_WV: Tensor, chosen_W1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank in [0, 1] of each token in its distribution, and the variance of that of a sample."""
    # In float64, because as many as 150,000 probabilities are added up.
    logp_W1, p_WV = logp_WV.gather(-1, chosen_W1), logp_WV.double().exp()
    likelier_W = torch.where(logp_WV > logp_W1, p_WV, 0).sum(-1)
    tied_W = torch.where(logp_WV == logp_W1, p_WV, 0).sum(-1)
    return likelier_W + tied_W / 2, (1 - (p_WV**3).sum(-1)) / 12


def _copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        local_of(parameter).detach().copy_(local_of(value))
