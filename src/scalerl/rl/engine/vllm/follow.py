"""A completion that vLLM returned, held against the length rule: what was sampled, forced, and cut off.

Shapes in names: T tokens of a completion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scalerl.errors import WorkerError
from scalerl.rl.algo.length import LengthRule, Marker


class Followed(NamedTuple):
    """The completion is the first `n` tokens, the ones at `forced` among them were inserted."""

    n: int
    forced: slice
    truncated: bool


def follow(rule: LengthRule, token_T: np.ndarray, interrupt_at: int, end_token: int) -> Followed:
    """What `LengthState` makes of the tokens, one by one, and all at once.

    Raises:
        WorkerError: the tokens do not follow the rule: they are too few, or others where some are forced.
    """
    ends = np.flatnonzero(token_T == end_token)
    if not rule.phrase:
        return _finished(token_T, 0, ends, rule.max_tokens, slice(0, 0))
    thinking = min(interrupt_at, *(ends[:1] + 1)) if len(ends) else interrupt_at
    closed = _closes_at(rule.end_of_thinking, token_T[:thinking])
    if closed is not None:
        return _finished(token_T, closed + 1, ends, rule.answer, slice(0, 0))
    if thinking < interrupt_at or (len(ends) and ends[0] == interrupt_at - 1):
        return Followed(thinking, slice(0, 0), truncated=False)
    forced = slice(interrupt_at, interrupt_at + len(rule.phrase))
    if tuple(token_T[forced]) != rule.phrase:
        raise WorkerError(
            f"vLLM did not end the thinking at token {interrupt_at}: is its server started with "
            "--logits-processors, as docs/vllm.md says?"
        )
    return _finished(token_T, forced.stop, ends, rule.answer, forced)


def _finished(token_T: np.ndarray, start: int, ends: np.ndarray, budget: int, forced: slice) -> Followed:
    """The end token is within `budget` tokens from `start`, or the completion is truncated there."""
    later = ends[ends >= start]
    if len(later) and later[0] < start + budget:
        return Followed(int(later[0]) + 1, forced, truncated=False)
    if len(token_T) < start + budget:
        raise WorkerError(f"vLLM ended a completion after {len(token_T)} tokens, with budget left")
    return Followed(start + budget, forced, truncated=True)


def _closes_at(marker: Marker, token_T: np.ndarray) -> int | None:
    """Where the end of thinking is written whole for the first time."""
    if not marker.decode:
        places = np.flatnonzero(token_T == marker.tokens[0])
        return int(places[0]) if len(places) else None
    for place in np.flatnonzero(np.isin(token_T, sorted(marker.last))):
        if marker.closes(token_T[max(place + 1 - marker.window, 0) : place + 1]):
            return int(place)
    return None
