"""Completions by vLLM: their sampling parameters, and their results, checked against the length rule.

Shapes in names: T tokens of a completion.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from scalerl.errors import WorkerError
from scalerl.rl.algo.length import LengthRule, Marker
from scalerl.rl.engine.sampling import Request, Sampling, Turn, stream_keys
from scalerl.rl.engine.vllm.protocol import LENGTH, rule_to_json
from scalerl.rl.sync.vllm_client import SampledTokens
from scalerl.rl.types import Rollout


@dataclass(frozen=True)
class Completed:
    """A completion as the server returned it."""

    request: Request
    token_T: np.ndarray
    logp_T: np.ndarray
    marks: list[tuple[int, int]]
    """Pairs (token, version): from this token on, this version sampled. The first version read the prompt."""
    cached: int
    """Number of earlier tokens that were found in the prefix cache."""
    truncated: bool = False
    """Whether its environment failed, or answered with more than fits."""


def sampling_params(
    sampling: Sampling, request: Request, seeded: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of vLLM's SamplingParams for a turn, and their `extra_args`."""
    params: dict[str, Any] = {
        "max_tokens": sampling.length.max_tokens - _before(request),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,
        "ignore_eos": True,  # only the end tokens of `Sampling` end a completion
        "stop_token_ids": list(sampling.end_tokens),
        "skip_special_tokens": False,
    }
    if seeded:
        # A stream for each turn: with the same seed vLLM would draw the same numbers again.
        key = stream_keys(request.key, last=[len(request.turns)])[0] if request.turns else request.key
        params["seed"] = int(key.view(np.int64))  # vLLM's seeds are signed
    if not sampling.length.phrase:
        return params, {}
    rule = {"rule": rule_to_json(sampling.length), "interrupt_at": request.interrupt_at}
    return params, {LENGTH: json.dumps(rule | {"end_tokens": sampling.end_tokens})}


def completed_of(
    name: str, answer: SampledTokens, request: Request, marks: list[tuple[int, int]]
) -> Completed:
    """Return the completion in the answer of the engine `name` to a request.

    Raises:
        WorkerError: not every token has a finite log-probability.
    """
    token_T, logp_T, cached = answer
    if token_T.shape != logp_T.shape or token_T.ndim != 1 or not np.isfinite(logp_T).all():
        raise WorkerError(f"{name}: its answer has not one finite log-probability for each token")
    return Completed(request, token_T, logp_T, marks, cached)


def turn_of(
    completed: Completed, sampling: Sampling, answer: Sequence[int] | np.ndarray = ()
) -> tuple[Turn, bool]:
    """Return the turn, checked against the length rule, with its answer, and whether it is truncated.

    Raises:
        WorkerError: its tokens do not follow the rule.
    """
    request, marks = completed.request, completed.marks
    n, forced, truncated = follow(
        sampling.length,
        completed.token_T,
        request.interrupt_at,
        sampling.end_tokens,
        _before(request),
    )
    sampled_T = np.arange(n + len(answer)) < n
    sampled_T[forced] = False
    version_T = np.zeros(len(sampled_T), dtype=np.int32)
    # In order: each mark overwrites the versions from its token on.
    for start, version in marks:
        version_T[start:] = version
    logp_T = np.zeros(len(sampled_T), dtype=np.float32)
    logp_T[sampled_T] = completed.logp_T[:n][sampled_T[:n]]
    token_T = np.concatenate([completed.token_T[:n], np.array(answer, dtype=np.int64)])
    return Turn(token_T, sampled_T, logp_T, version_T, marks[0][1], completed.cached), truncated


def rollout_of(completed: Completed, sampling: Sampling) -> Rollout:
    """Return the whole completion, given its last turn.

    Raises:
        WorkerError: its tokens do not follow the length rule.
    """
    request = completed.request
    last, truncated = turn_of(completed, sampling)
    turns = [*request.turns, last]
    return request.rollout(
        token_T=np.concatenate([turn.token_T for turn in turns]),
        sampled_T=np.concatenate([turn.sampled_T for turn in turns]),
        logp_T=np.concatenate([turn.logp_T for turn in turns]),
        version_T=np.concatenate([turn.version_T for turn in turns]),
        first_version=turns[0].first_version,
        truncated=truncated or completed.truncated,
    )


def groups_of(completed: Iterable[Completed], sampling: Sampling) -> list[tuple[Rollout, ...]]:
    """Return the completions of groups, by sequence number and sample."""
    ordered = sorted(completed, key=lambda one: one.request)
    groups = groupby(ordered, key=lambda one: one.request.seq_no)
    return [tuple(rollout_of(one, sampling) for one in group) for _, group in groups]


def _before(request: Request) -> int:
    """Return the number of tokens of a completion before the turn to be sampled."""
    return sum(len(turn.token_T) for turn in request.turns)


class Followed(NamedTuple):
    """A completion: the first `n` tokens, of which those at `forced` were inserted."""

    n: int
    forced: slice
    truncated: bool


def follow(
    rule: LengthRule, token_T: np.ndarray, interrupt_at: int, end_tokens: Sequence[int], before: int = 0
) -> Followed:
    """Return the sampled, forced and truncated tokens, as `LengthState` would find them one at a time.

    Without an interruption, other turns of `before` tokens may precede them.

    Raises:
        WorkerError: the tokens do not follow the rule: they are too few, or differ from the forced ones.
    """
    ends = np.flatnonzero(np.isin(token_T, end_tokens))
    if not rule.phrase:
        return _finished(token_T, 0, ends, rule.max_tokens - before, slice(0, 0))
    # A completion may end during its thinking; tokens that vLLM returns after the end token do not count.
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
            "--logits-processors, as docs/howto/vllm.md says?"
        )
    return _finished(token_T, forced.stop, ends, rule.answer, forced)


def _finished(token_T: np.ndarray, start: int, ends: np.ndarray, budget: int, forced: slice) -> Followed:
    """Return the completion up to its end token within `budget` tokens from `start`, or truncated there."""
    later = ends[ends >= start]
    if len(later) and later[0] < start + budget:
        return Followed(int(later[0]) + 1, forced, truncated=False)
    if len(token_T) < start + budget:
        raise WorkerError(f"vLLM ended a completion after {len(token_T)} tokens, with budget left")
    # The next token is the end token that `LengthProcessor` forced to end the request.
    return Followed(start + budget, forced, truncated=True)


def _closes_at(marker: Marker, token_T: np.ndarray) -> int | None:
    """Return the first position at which the end of thinking is complete, or None."""
    if not marker.decode:
        found = np.flatnonzero(token_T == marker.tokens[0])
        return int(found[0]) if len(found) else None
    for at in np.flatnonzero(np.isin(token_T, sorted(marker.last))):
        if marker.closes(token_T[max(at + 1 - marker.window, 0) : at + 1]):
            return int(at)
    return None
