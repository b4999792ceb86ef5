"""Log-probabilities under a sharded model: see `scalerl.rl.learner.score`; here every call is collective.

Shapes in names: M completions, T positions, F tokens of all completions, W wanted tokens, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from scalerl.rl.learner.fsdp.sharding import Whole, group_of
from scalerl.rl.learner.fsdp.vocabulary import chunked_log_probs
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
        """The same of another model, which is sharded too."""
        assert isinstance(model, Whole)
        settings = (self._temperature, self._fp32_logits, self._chunk, self._packed)
        return ShardedScorer(model, self._device, *settings)

    def _run(self, compute: Callable[[nn.Module], T]) -> T:
        """`compute` with what is around the blocks gathered, which stays so only for a backward pass."""
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
    """Last hidden states (W, D) that predict the wanted tokens, row by row, padded or packed.

    Packed, all that is read is one sequence, with positions from 0 in each completion: transformers keeps
    apart what begins at position 0, in its masks or by the kernels of flash attention.
    """
    device = next(model.parameters()).device
    inputs, at = {"input_ids": token_MT[:, :-1]}, wanted_MT
    if packed:
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
        return False  # it takes no positions, say
    gap = (padded.float() - packed.float()).abs().mean() / padded.float().abs().mean()
    return bool(gap < (1e-3 if padded.dtype == torch.float32 else 0.05))
