"""Sampling of completions: the settings of a run, and the random numbers and requests of its completions.

Random numbers are counter-based: each is a hash of (seed, prompt id, epoch, sample) and the position, without
state. So a completion does not depend on the process that sampled it, or on the rest of its batch.

Shapes in names: T tokens, G completions of a group, S streams.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from scalerl.rl.algo.length import LengthRule
from scalerl.rl.config.engine import EngineKind
from scalerl.rl.model.causal_lm import prompt_tokens
from scalerl.rl.types import Prompt, Rollout

PROMPTS_KEPT = 10_000
"""Number of prompts whose tokens are cached, as a prompt is drawn again in each epoch."""
_INTERRUPT_POSITION = -2  # tokens are drawn at positions 0 and above
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
GroupRequest = tuple[Prompt, int, int]
"""A group to be sampled: prompt, epoch, number of completions."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, shared by all completions of a run; its evaluations have a seed of their own."""

    temperature: float
    fp32_logits: bool
    seed: int
    max_prompt_tokens: int
    length: LengthRule
    """Budgets of thinking and answer, in token ids."""
    end_token: int
    engine: EngineKind = "auto"
    stop_tokens: tuple[int, ...] = ()
    """Other tokens that end a completion as `end_token` does."""
    experts: bool = False
    """Whether the experts that read each token are recorded."""
    top_p: float = 1.0
    top_k: int = 0
    """Limits, like `top_p`, on the tokens that can be sampled; see `Recipe`."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """All tokens that end a completion, the tokenizer's first."""
        return (self.end_token, *self.stop_tokens)


class Turn(NamedTuple):
    """A turn of a completion and its environment's answer, T tokens in total."""

    token_T: np.ndarray
    sampled_T: np.ndarray
    """False on the tokens of the answer; see `Rollout` for this field and the next two."""
    logp_T: np.ndarray
    version_T: np.ndarray
    first_version: int
    """Version of the weights that read the earlier tokens that were not cached."""
    cached: int
    """Number of tokens before the turn that were cached."""


@dataclass(frozen=True, order=True)
class Request:
    """A completion to sample; requests compare by order of admission."""

    seq_no: int
    sample: int
    prompt: Prompt = field(compare=False)
    prompt_T: np.ndarray = field(compare=False)
    epoch: int = field(compare=False)
    key: np.uint64 = field(compare=False)
    """Key of its stream of random numbers."""
    interrupt_at: int = field(compare=False)
    """Number of thinking tokens after which it is interrupted."""
    interruptible: bool = field(compare=False, default=True)
    """Whether tokens that were not sampled come from an interruption rather than from an environment."""
    turns: tuple[Turn, ...] = field(compare=False, default=())
    """The earlier turns, if each turn is a request of its own (vLLM)."""
    server: int | None = field(compare=False, default=None)
    """The server that has the earlier turns in its cache."""

    @property
    def version(self) -> int:
        """The version of its newest token; -1 if there is none."""
        return int(self.turns[-1].version_T[-1]) if self.turns else -1

    @property
    def context_T(self) -> np.ndarray:
        """The tokens of the prompt and of the earlier turns with their answers."""
        return np.concatenate([self.prompt_T, *(turn.token_T for turn in self.turns)])

    def rollout(self, sampled_T: np.ndarray, **as_sampled: Any) -> Rollout:
        """Return the sampled completion; `as_sampled` has the other fields of `Rollout`."""
        return Rollout(
            prompt=self.prompt,
            epoch=self.epoch,
            sample=self.sample,
            prompt_T=self.prompt_T,
            sampled_T=sampled_T,
            interrupted=self.interruptible and not sampled_T.all(),
            **as_sampled,
        )


class RequestFactory:
    """A factory of the requests of groups; it caches the tokens of prompts."""

    def __init__(self, tokenizer: Any, sampling: Sampling) -> None:
        self._sampling = sampling
        self._tokens = lru_cache(PROMPTS_KEPT)(partial(prompt_tokens, tokenizer))

    def requests(self, seq_no: int, group: GroupRequest) -> list[Request]:
        """Return the requests of a group, by sample.

        Raises:
            ValueError: the prompt is empty or too long.
        """
        (prompt, epoch, n_samples), sampling = group, self._sampling
        prompt_T = self._tokens(prompt)
        if not 1 <= len(prompt_T) <= sampling.max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {len(prompt_T)} tokens; context.prompt allows 1 to "
                f"{sampling.max_prompt_tokens}"
            )
        key_G = stream_keys(sampling.seed, prompt.id, epoch, last=range(n_samples))
        interrupt_G = sampling.length.draw(uniform(key_G, np.full(n_samples, _INTERRUPT_POSITION)))
        may = sampling.length.interrupt is not None
        return [
            Request(seq_no, sample, prompt, prompt_T, epoch, key_G[sample], int(interrupt_G[sample]), may)
            for sample in range(n_samples)
        ]


def stream_keys(*parts: object, last: Iterable[object]) -> np.ndarray:
    """Return the 64-bit keys of streams of random numbers, one for each item of `last`: uint64, shape (S,).

    A key is a hash of `parts`, which all streams share, and of the stream's item of `last`.
    """
    # `\0` after each part: without it ("a", "b1") and ("ab", "1") would have the same stream.
    common = hashlib.blake2b("".join(f"{part}\0" for part in parts).encode(), digest_size=8)
    digests = []
    for part in last:
        # The parts that all streams share are hashed once.
        own = common.copy()
        own.update(str(part).encode())
        digests.append(own.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def uniform(key_S: np.ndarray, position_S: np.ndarray) -> np.ndarray:
    """Return numbers uniform in [0, 1), one per (key, position): SplitMix64 (Steele, Lea, Flood 2014).

    Both arguments are integer arrays of one shape; the result is float64 of that shape.
    """
    # All are arrays: NumPy lets them wrap around silently, as intended, but warns if a scalar overflows.
    z = key_S.astype(np.uint64) + (position_S.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    # 53 bits, which float64 holds exactly; with more, rounding up could give 1.
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
