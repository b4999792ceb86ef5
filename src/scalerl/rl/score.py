"""Log-probabilities of tokens that were sampled earlier, under a model as it is now, with gradient.

Two ways with one result. A dense model in float32 on a CPU (`scalerl.rl.dense`) is run over packed tokens: no
padding, and the prompt that a group shares once, its gradient the sum over the group. Every other model
(mixtures of experts, GPT-2, adapters, bf16, activation checkpointing), and every model where there is no C
compiler, is run through its own modules, sequence by sequence.

Shapes in names: M completions, T positions, D hidden size, V vocabulary, W wanted tokens, R packed places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.dense import DenseModel
from scalerl.rl.model import hidden_states, log_probs_TV
from scalerl.rl.packed import can_pack, packed_hidden_states
from scalerl.rl.packing import Packing


class Scorer:
    """Scores tokens by `model`, at the sampling temperature."""

    def __init__(self, model: nn.Module, temperature: float, fp32_logits: bool) -> None:
        self.model = model
        self._temperature = temperature
        self._fp32_logits = fp32_logits
        self._device = next(model.parameters()).device
        dense = DenseModel.of(model)
        self._dense = dense if dense and can_pack(dense) else None

    def by(self, model: nn.Module) -> Scorer:
        """The same of another model."""
        return Scorer(model, self._temperature, self._fp32_logits)

    @property
    def dense(self) -> DenseModel | None:
        """What the packed way needs; None where the model goes through its own modules."""
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
        if prompt_M is None or group_M is None:
            prompt_M, group_M = np.ones(len(token_MT), dtype=np.int64), np.arange(len(token_MT))
        wanted = torch.from_numpy(wanted_MT).to(self._device)
        dense = self.dense
        if dense:
            packing = Packing.of(token_MT, wanted_MT, prompt_M, group_M)
            row_W, target_W = torch.from_numpy(packing.row_W), torch.from_numpy(packing.target_W)
            logp_RV = self._log_probs(packed_hidden_states(dense, packing))
            chosen_W, entropy_W = logp_RV[row_W, target_W], _entropy(logp_RV)[row_W]
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
