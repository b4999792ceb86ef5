"""Log-probabilities of tokens that were sampled earlier, under a model as it is now, with gradient.

Two ways with one result. A dense model in float32 on a CPU (`scalerl.rl.kernels.dense`) is run over packed
tokens: no padding, and the prompt that a group shares once, its gradient the sum over the group. Every other
model (mixtures of experts, GPT-2, adapters, bf16, activation checkpointing), and every model where there is
no C compiler, is run through its own modules, sequence by sequence.

Shapes in names: M completions, T positions, S positions that are read, D hidden size, V vocabulary, W wanted
tokens, R distinct places at which they are predicted, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.kernels.dense import DenseModel
from scalerl.rl.kernels.packed import can_pack, packed_hidden_states
from scalerl.rl.kernels.packing import Packing
from scalerl.rl.model.causal_lm import hidden_states, log_probs_TV

# At a vocabulary of 150,000 these are 300 MB in float32.
TOKENS_AT_ONCE = 512
"""Tokens whose distributions are in memory at once."""


class Scorer:
    """Scores tokens by `model`, at the sampling temperature."""

    def __init__(self, model: nn.Module, temperature: float, fp32_logits: bool, kernels: bool = True) -> None:
        """`kernels` allows the packed pass in C, where it computes this model."""
        self.model = model
        self._temperature = temperature
        self._fp32_logits = fp32_logits
        self._device = next(model.parameters()).device
        self._kernels = kernels
        dense = DenseModel.of(model) if kernels else None
        self._dense = dense if dense and can_pack(dense) else None

    def by(self, model: nn.Module) -> Scorer:
        """Return the same scorer of another model."""
        return Scorer(model, self._temperature, self._fp32_logits, self._kernels)

    @property
    def dense(self) -> DenseModel | None:
        """The model for the packed pass; None where the model goes through its own modules."""
        base: Any = self.model.base_model
        blocks = base.layers if self._dense else ()
        return None if any(block.gradient_checkpointing for block in blocks) else self._dense

    def __call__(
        self,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray | None = None,
        group_M: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every wanted token after the first, shape (M, T - 1); 0 elsewhere.

        `token_MT` is right-padded; `wanted_MT` has shape (M, T - 1). Sequences of one group in `group_M`
        begin with the same `prompt_M` tokens; without these, every sequence is on its own. Only the wanted
        positions go through the head: the logits of prompts and padding are never made.
        """
        logp_W, entropy_W = self._of_wanted(token_MT, wanted_MT, prompt_M, group_M)
        wanted = torch.from_numpy(wanted_MT).to(self._device)
        zero_MT = torch.zeros(wanted_MT.shape, device=self._device)
        # Row by row, which is the order of `_of_wanted`.
        return zero_MT.masked_scatter(wanted, logp_W), zero_MT.masked_scatter(wanted, entropy_W)

    def _of_wanted(
        self,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray | None,
        group_M: np.ndarray | None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of the wanted tokens, row by row; see `__call__`."""
        hidden_RD, row_W = self._hidden(token_MT, wanted_MT, prompt_M, group_M)
        logp_RV = log_probs_TV(self.model, hidden_RD, self._temperature, self._fp32_logits)
        target_W = torch.from_numpy(token_MT[:, 1:][wanted_MT]).to(self._device)
        with torch.no_grad():
            # Recorded and not trained: a graph of its own would hold (R, V) once more.
            entropy_R = -(logp_RV.exp() * logp_RV).sum(-1)
        return logp_RV[row_W, target_W], entropy_R[row_W]

    def distributions(
        self, token_MT: np.ndarray, wanted_MT: np.ndarray, heads: Sequence[bool]
    ) -> Iterator[list[Tensor]]:
        """Log-probabilities over the vocabulary at every wanted token after the first, a part at a time.

        In order, each part with a tensor (W, V) for each of `heads`: whether the LM head is in FP32. All of
        them at once would be gigabytes for long completions.
        """
        hidden_RD, row_W = self._hidden(token_MT, wanted_MT, None, None)
        for part_W in row_W.split(TOKENS_AT_ONCE):
            hidden_WD = hidden_RD[part_W]
            yield [log_probs_TV(self.model, hidden_WD, self._temperature, fp32) for fp32 in heads]

    def _hidden(
        self,
        token_MT: np.ndarray,
        wanted_MT: np.ndarray,
        prompt_M: np.ndarray | None,
        group_M: np.ndarray | None,
    ) -> tuple[Tensor, Tensor]:
        """Last hidden states (R, D), each once, and for every wanted token, row by row, which is its."""
        if dense := self.dense:
            if prompt_M is None or group_M is None:
                prompt_M, group_M = np.ones(len(token_MT), dtype=np.int64), np.arange(len(token_MT))
            packing = Packing.of(token_MT, wanted_MT, prompt_M, group_M)
            return packed_hidden_states(dense, packing), torch.from_numpy(packing.row_W)
        token_MS = torch.from_numpy(token_MT[:, :-1]).to(self._device)
        # Right padding needs no mask: causal attention does not look ahead.
        hidden_MSD = hidden_states(self.model, input_ids=token_MS, use_cache=False)
        hidden_RD = hidden_MSD[torch.from_numpy(wanted_MT).to(self._device)]
        return hidden_RD, torch.arange(len(hidden_RD), device=self._device)


def copies(trained: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the weights as they are, in the memory of the CPU."""
    return [p.detach().to("cpu", copy=True) for p in trained]


@torch.no_grad()
def scores_of_held(
    held: Sequence[Tensor],
    trained: Sequence[Tensor],
    score: Scorer,
    token_NT: Tensor,
    wanted_NT: Tensor,
    heads: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Score tokens with the weights `held` in the place of `trained`.

    Returns:
        The log-probability of every wanted token after the first by each of H heads, (W, H); and its rank and
        the variance of ranks by the first head, (W, 2).
    """
    chosen_W = token_NT[:, 1:][wanted_NT]
    logps, ranks, start = [], [], 0
    with _in_place(held, trained):
        for logp_WV, *other in score.distributions(token_NT.cpu().numpy(), wanted_NT.cpu().numpy(), heads):
            chosen_W1 = chosen_W[start : start + len(logp_WV), None].to(logp_WV.device)
            start += len(logp_WV)
            logps.append(torch.cat([l_WV.gather(-1, chosen_W1) for l_WV in (logp_WV, *other)], 1).cpu())
            ranks.append(torch.stack(ranks_of(logp_WV, chosen_W1), 1).cpu())
    return torch.cat(logps), torch.cat(ranks)


def ranks_of(logp_WV: Tensor, chosen_W1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ranks of tokens in their distributions, and the variance of each rank of a sample."""
    # In float64, as each probability is one of 150,000 that are added up.
    logp_W1, p_WV = logp_WV.gather(-1, chosen_W1), logp_WV.double().exp()
    likelier_W = torch.where(logp_WV > logp_W1, p_WV, 0).sum(-1)
    tied_W = torch.where(logp_WV == logp_W1, p_WV, 0).sum(-1)
    return likelier_W + tied_W / 2, (1 - (p_WV**3).sum(-1)) / 12


@contextmanager
def _in_place(held: Sequence[Tensor], trained: Sequence[Tensor]) -> Iterator[None]:
    """Put the held weights in the place of the trained ones, which are then restored."""
    # In the place of the trained ones: a second model would take as much memory again, in shards of its own.
    own = copies(trained)
    try:
        _install(held, trained)
        yield
    finally:
        _install(own, trained)


def _install(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.detach().copy_(value)
