"""Requests to vLLM servers, their completions, and the other events of a server pool.

Shapes in names: T tokens of a completion.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalerl.errors import ScalerlError, WorkerError, brief
from scalerl.rl.engine.sampling import Request


@dataclass(frozen=True)
class Completed:
    """A completion as it came back."""

    request: Request
    token_T: np.ndarray
    logp_T: np.ndarray
    marks: list[tuple[int, int]]
    """From which token on which version sampled; the first version read the prompt."""
    cached: int
    """Tokens of the prompt that were found in the prefix cache."""


@dataclass(frozen=True)
class Installed:
    """A server has these weights."""

    server: int
    version: int
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A completion came to nothing: it had so many tokens when that was last asked; it begins again."""

    prompt: int
    """Tokens of its prompt."""
    tokens: int


@dataclass(frozen=True)
class Restarted:
    """A server died, and the groups with these sequence numbers with it."""

    server: int
    seq_nos: set[int]
    why: str


@dataclass(frozen=True)
class FailedRequest:
    """Nothing goes on."""

    error: ScalerlError


Event = Completed | Installed | Lost | Restarted | FailedRequest


@dataclass
class Flight:
    """A request on its way to a server, or there."""

    request: Request
    name: str
    marks: list[tuple[int, int]]
    seen: int = 0
    """Tokens that it is known to have."""
    task: asyncio.Task[None] | None = None

    @property
    def loss(self) -> Lost:
        """What is lost where it comes to nothing."""
        return Lost(len(self.request.prompt_T), self.seen)


def parsed(name: str, answer: Any, flight: Flight) -> Completed | None:
    """The completion; None where it was called back."""
    try:
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "abort":
            return None
        token_T = np.array(choice["token_ids"], dtype=np.int64)
        logp_T = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (KeyError, TypeError, ValueError, AttributeError):
        raise WorkerError(f"{name}: no tokens in its answer {brief(answer)}: is it vLLM?") from None
    if token_T.shape != logp_T.shape or token_T.ndim != 1 or not np.isfinite(logp_T).all():
        raise WorkerError(f"{name}: its answer has not one finite log-probability for each token")
    return Completed(flight.request, token_T, logp_T, flight.marks, cached)
