"""Scores of tokens by weights that were held while training went on: see `scalerl.rl.learner.probe`.

Shapes in names: N completions, T positions, W wanted tokens, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

Distributions = Callable[[Tensor, Tensor, Sequence[bool]], Iterator[list[Tensor]]]
"""See `scalerl.rl.learner.score.Scorer.distributions`."""


def copies(trained: Sequence[Tensor]) -> list[Tensor]:
    """Of the weights as they are, in the memory of the processor."""
    return [p.detach().to("cpu", copy=True) for p in trained]


@torch.no_grad()
def scores_of_held(
    held: Sequence[Tensor],
    trained: Sequence[Tensor],
    distributions: Distributions,
    token_NT: Tensor,
    wanted_NT: Tensor,
    heads: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """With the weights `held` in the place of `trained`: log-probability of every wanted token after the
    first by each head, (W, H), and its rank and the variance of ranks by the first head, (W, 2)."""
    chosen_W = token_NT[:, 1:][wanted_NT]
    logps, ranks, start = [], [], 0
    with _in_place(held, trained):
        for logp_WV, *other in distributions(token_NT, wanted_NT, heads):
            chosen_W1 = chosen_W[start : start + len(logp_WV), None].to(logp_WV.device)
            start += len(logp_WV)
            logps.append(torch.cat([l_WV.gather(-1, chosen_W1) for l_WV in (logp_WV, *other)], 1).cpu())
            ranks.append(torch.stack(ranks_of(logp_WV, chosen_W1), 1).cpu())
    return torch.cat(logps), torch.cat(ranks)


def ranks_of(logp_WV: Tensor, chosen_W1: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks of tokens in their distributions, and the variance of each for a token that is a sample."""
    logp_W1, p_WV = logp_WV.gather(-1, chosen_W1), logp_WV.double().exp()
    likelier_W = torch.where(logp_WV > logp_W1, p_WV, 0).sum(-1)
    tied_W = torch.where(logp_WV == logp_W1, p_WV, 0).sum(-1)
    return likelier_W + tied_W / 2, (1 - (p_WV**3).sum(-1)) / 12


@contextmanager
def _in_place(held: Sequence[Tensor], trained: Sequence[Tensor]) -> Iterator[None]:
    """The weights held where the trained ones are; these are put back as they were."""
    own = copies(trained)
    try:
        _install(held, trained)
        yield
    finally:
        _install(own, trained)


def _install(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        parameter.detach().copy_(value)
