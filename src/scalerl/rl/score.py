"""Log-probabilities of tokens that were sampled earlier, under a model as it is now, with gradient.

Two ways with one result. A dense model in float32 (`scalerl.rl.dense`) is run over packed tokens: no padding,
and the prompt that a group shares once, its gradient the sum over the group. Every other model (mixtures of
experts, GPT-2, adapters, bf16, activation checkpointing), and a batch whose attention would not fit, is run
through its own modules, sequence by sequence.

Shapes in names: M completions, T positions, D hidden size, V vocabulary, W wanted tokens, R packed places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.dense import DenseModel
from scalerl.rl.model import hidden_states, log_probs_TV
from scalerl.rl.packed import packed_hidden_states
from scalerl.rl.packing import Packing

MAX_SCORES = 1 << 27
"""Attention scores (completions x heads x positions squared) of a forward pass that keeps them for its
backward pass, at 4 bytes each; beyond that the model's own attention, which keeps none, takes over."""


class Scorer:
    """Scores tokens by `model`, at the sampling temperature."""

    def __init__(self, model: nn.Module, temperature: float, fp32_logits: bool) -> None:
        self.model = model
        self._temperature = temperature
        self._fp32_logits = fp32_logits
        self._device = next(model.parameters()).device
        in_float32 = all(p.dtype == torch.float32 for p in model.parameters())
        self._dense = DenseModel.of(model) if in_float32 else None

    @property
    def dense(self) -> DenseModel | None:
        """What the packed way needs; None where the model goes through its own modules."""
        checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in self.model.modules())
        return None if checkpointing else self._dense

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
        if prompt_M is None or group_M is None:
            prompt_M, group_M = np.ones(len(token_MT), dtype=np.int64), np.arange(len(token_MT))
        wanted = torch.from_numpy(wanted_MT).to(self._device)
        dense = self.dense
        if dense and token_MT.size * token_MT.shape[1] * dense.heads <= MAX_SCORES:
            heads = dense.heads, dense.kv_heads
            packing = Packing.of(token_MT, wanted_MT, prompt_M, group_M, heads, self._device)
            logp_RV = self._log_probs(packed_hidden_states(dense, packing))
            chosen_W = logp_RV[packing.row_W, packing.target_W]
            entropy_W = _entropy(logp_RV)[packing.row_W]
        else:
            token = torch.from_numpy(token_MT).to(self._device)
            # Right padding needs no mask: causal attention does not look ahead.
            hidden_MTD = hidden_states(self.model, input_ids=token[:, :-1], use_cache=False)
            logp_WV = self._log_probs(hidden_MTD[wanted])
            chosen_W = logp_WV.gather(-1, token[:, 1:][wanted][:, None])[:, 0]
            entropy_W = _entropy(logp_WV)
        zero_MT = torch.zeros(wanted_MT.shape, device=self._device)
        return zero_MT.masked_scatter(wanted, chosen_W), zero_MT.masked_scatter(wanted, entropy_W)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return log_probs_TV(self.model, hidden, self._temperature, self._fp32_logits)


@torch.no_grad()
def _entropy(logp: Any) -> Tensor:
    return -(logp.exp() * logp).sum(-1)
