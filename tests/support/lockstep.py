"""Two recordings of one run: their tokens are the same until a draw that rounding decides."""

from dataclasses import dataclass

import numpy as np
import torch

from scalerl.rl.engine.build import load_generator
from scalerl.rl.engine.sampling import stream_keys, uniform

EDGE = 1e-5
"""How near to an edge of its distribution a draw has to be for rounding to move it to the other side."""


@dataclass(frozen=True)
class Difference:
    """The first token that is another, and how far its draw is from the edges between the two."""

    prompt: str
    sample: int
    at: int
    tokens: tuple[int, int]
    away: float

    def __str__(self):
        token, other = self.tokens
        where = f"{self.prompt}, completion {self.sample}, token {self.at}"
        return (
            f"{where}: {token} in place of {other}, whose draw is {self.away:.1e} from the edge between them"
        )


def first_difference(recipe, weights, rollout, twin):
    """Where `rollout` first differs from `twin`, which `weights` sampled; None if nowhere.

    Raises:
        AssertionError: they are not of the same stream of draws, or rounding is not what it comes from.
    """
    assert _stream(rollout) == _stream(twin)
    n = min(len(rollout.token_T), len(twin.token_T))
    differ = np.flatnonzero(rollout.token_T[:n] != twin.token_T[:n])
    if not len(differ):
        assert len(rollout.token_T) == len(twin.token_T), f"{_stream(twin)}: one ends where the other goes on"
        return None
    at = int(differ[0])
    tokens = int(rollout.token_T[at]), int(twin.token_T[at])
    edge_TV, draw_T = edges(recipe, sampler(recipe, weights), twin)
    between_E = edge_TV[at, min(tokens) : max(tokens)]
    away = float(np.abs(between_E - draw_T[at]).max())
    found = Difference(twin.prompt.id, twin.sample, at, tokens, away)
    assert twin.sampled_T[at], f"{found}; it was not drawn, but inserted"
    assert away < EDGE, f"{found}, which is more than rounding ({EDGE:g})"
    return found


def sampler(recipe, weights, rows=1):
    """The generator of a recipe with these weights."""
    generator = load_generator(recipe, recipe.model, recipe.seed, rows)
    generator.update(weights, 0)
    return generator


@torch.no_grad()
def edges(recipe, generator, rollout):
    """The cumulative distribution that each token of `rollout` was drawn from, and the draws."""
    tokens = torch.from_numpy(np.concatenate([rollout.prompt_T, rollout.token_T]))[None]
    logits_TV = generator.model(input_ids=tokens).logits[0, len(rollout.prompt_T) - 1 : -1].double()
    edge_TV = torch.softmax(logits_TV / recipe.temperature, -1).cumsum(-1).numpy()
    position_T = np.arange(len(rollout.token_T))
    (key,) = stream_keys(recipe.seed, rollout.prompt.id, rollout.epoch, last=[rollout.sample])
    return edge_TV, uniform(np.full(len(position_T), key), position_T)


def _stream(rollout):
    return rollout.prompt.id, rollout.epoch, rollout.sample
