"""Length control: when thinking ends, when an answer has run out of budget, what length costs.

`ForcedInterruption`, `LengthPenalty` and `NoLengthControl` are the choices of a recipe, `LengthRule` the same
with the tokens of one tokenizer, and `LengthState` follows the completions in the decode slots of an engine,
token by token.

Shapes in names: S decode slots, G completions of a group, W tokens at the end of a completion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import numpy as np

from scalerl.errors import InputError


class LengthControl(Protocol):
    """An interruption of the thinking, and a penalty on length; by default neither."""

    def penalty(self, length: int, correct: bool) -> float:
        """Return what is added to the reward of a completion of `length` sampled tokens: 0 or negative."""
        return 0.0

    def interruption(self) -> ForcedInterruption | None:
        """Return the rule by which thinking is ended by force; None where it is not."""
        return None


@dataclass(frozen=True)
class ForcedInterruption(LengthControl):
    """End the thinking at a random length by inserting a phrase (ScaleRL section 2; arXiv 2510.13786).

    The length is drawn per completion, uniformly in [`low`, `high`] thinking tokens. Where a recipe does not
    say them they are 5/6 of `context.thinking` and all of it, the paper's share. A completion that is still
    thinking then gets the tokens of `phrase`, which must end with the end of thinking, and goes on to its
    answer. Inserted tokens carry no gradient and count in no length.
    """

    low: int | None = None
    high: int | None = None
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    kind: Literal["forced_interruption"] = "forced_interruption"

    def __post_init__(self) -> None:
        high = math.inf if self.high is None else self.high
        if not 1 <= (1 if self.low is None else self.low) <= high:
            raise ValueError("low and high must satisfy 1 <= low <= high")

    def within(self, thinking: int, answer: int) -> Self:
        """Return the same with the lengths of a context of so many tokens where it has none.

        Raises:
            ValueError: a length exceeds it.
        """
        low, high = self.bounds(thinking)
        for name, length in (("high", high), ("low", low)):
            if length > thinking:
                raise ValueError(f"length.{name}: {length} exceeds context.thinking ({thinking})")
        return replace(self, low=low, high=high)

    def bounds(self, thinking: int) -> tuple[int, int]:
        """Return `low` and `high`, or those of a context of so many thinking tokens."""
        high = thinking if self.high is None else self.high
        return max(1, high * 5 // 6) if self.low is None else self.low, high

    def interruption(self) -> ForcedInterruption:
        """Return this choice itself: it is the rule."""
        return self


@dataclass(frozen=True)
class LengthPenalty(LengthControl):
    """Take from the reward of a correct completion that is long.

    clip((max_length - length) / cache - 1, -1, 0): DAPO's overlong shaping (arXiv 2503.14476, eq. 13), as in
    arXiv 2510.13786.

    Nothing up to max_length - cache sampled tokens, 1 from max_length on. No thinking is interrupted.
    """

    max_length: int | None = None
    """Sampled tokens; if not given, the most that a completion may have, as in arXiv 2510.13786."""
    cache: int | None = None
    """Sampled tokens; if not given, a seventh of `max_length`, as there."""
    kind: Literal["length_penalty"] = "length_penalty"

    def __post_init__(self) -> None:
        longest = math.inf if self.max_length is None else self.max_length
        if not 1 <= (1 if self.cache is None else self.cache) <= longest:
            raise ValueError("max_length and cache must satisfy 1 <= cache <= max_length")

    def within(self, thinking: int, answer: int) -> Self:
        """Return the same with the lengths of a context of so many tokens where it has none."""
        longest = thinking + answer if self.max_length is None else self.max_length
        return replace(self, max_length=longest, cache=self.cache or max(1, longest // 7))

    def penalty(self, length: int, correct: bool) -> float:
        """Return what is added to the reward: 0 or negative."""
        if self.max_length is None or self.cache is None:
            raise ValueError("max_length and cache are those of no context yet: within() gives them")
        return min(max((self.max_length - length) / self.cache - 1.0, -1.0), 0.0) if correct else 0.0


@dataclass(frozen=True)
class NoLengthControl(LengthControl):
    """Let completions run until thinking and answer budget together are used up; then they are truncated."""

    kind: Literal["none"] = "none"


AnyLength = ForcedInterruption | LengthPenalty | NoLengthControl
"""The length controls that a recipe can name."""


@dataclass(frozen=True)
class Marker:
    """The end of thinking as a tokenizer writes it.

    Where it is one token, that token ends the thinking. Where it is several, it may be written in more than
    one way (the last may be merged with what follows), so that it is looked for in the decoded text.
    """

    tokens: tuple[int, ...]
    text: str = ""
    last: frozenset[int] = frozenset()
    """Tokens that can be the last of it, where it is several."""
    decode: Callable[[list[int]], str] | None = None

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> Marker:
        """Return the marker that `tokenizer` writes `text` as."""
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) == 1:
            return cls(tokens)
        # By all tokens of the vocabulary, once: the last character may be merged with what follows it.
        last = frozenset(i for i in range(len(tokenizer)) if text[-1] in tokenizer.decode([i]))
        return cls(tokens, text, last, tokenizer.decode)

    @property
    def window(self) -> int:
        """The most tokens that it can take: every one has a character of it."""
        return max(len(self.text), 1)

    def closes(self, tail: np.ndarray) -> bool:
        """Return whether the text of the tokens `tail` has the marker; -1 is no token."""
        return self.decode is not None and self.text in self.decode([int(t) for t in tail if t >= 0])


@dataclass(frozen=True)
class LengthRule:
    """Budgets in tokens, and the tokens that an interruption inserts."""

    thinking: int
    answer: int
    end_of_thinking: Marker
    phrase: tuple[int, ...] = ()
    interrupt: tuple[int, int] | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens that a completion can have, inserted ones included."""
        return self.thinking + len(self.phrase) + self.answer

    def draw(self, u_G: np.ndarray) -> np.ndarray:
        """Return the lengths at which completions would be interrupted, from numbers uniform in [0, 1)."""
        if self.interrupt is None:
            # No completion gets so far.
            return np.full(len(u_G), self.max_tokens + 1)
        low, high = self.interrupt
        return low + (u_G * (high - low + 1)).astype(np.int64)

    @classmethod
    def resolve(
        cls,
        choice: LengthControl,
        tokenizer: Any,
        thinking: int,
        answer: int,
        end_of_thinking: str,
    ) -> LengthRule:
        """Find the tokens of the phrase and of the end of thinking.

        Raises:
            InputError: the tokenizer cannot write the end of thinking.
        """
        written = end_of_thinking.strip()
        if not written:
            raise InputError("end_of_thinking: must not be empty")
        marker = Marker.of(tokenizer, end_of_thinking)
        if written not in tokenizer.decode(list(marker.tokens)):
            raise InputError(f"end_of_thinking: this tokenizer cannot write {end_of_thinking!r}")
        # More tokens than characters: some hold part of one alone, and no decoded tail ends with it.
        if len(marker.tokens) > 1 and (not marker.last or len(written) < len(marker.tokens)):
            raise InputError(f"end_of_thinking: this tokenizer splits a character of {end_of_thinking!r}")
        forced = choice.interruption()
        if forced is None:
            return cls(thinking, answer, marker)
        phrase = tuple(tokenizer(forced.phrase, add_special_tokens=False)["input_ids"])
        return cls(thinking, answer, marker, phrase, forced.bounds(thinking))


class LengthState:
    """The state of the completion in each decode slot: thinking, being interrupted, or answering."""

    _BY_SLOT = ("_thought_S", "_answered_S", "_thinking_S", "_interrupt_at_S", "_inserting_S", "_tail_SW")

    def __init__(self, rule: LengthRule, n_slots: int) -> None:
        self.rule = rule
        self._thought_S = np.zeros(n_slots, dtype=np.int64)
        self._answered_S = np.zeros(n_slots, dtype=np.int64)
        self._thinking_S = np.ones(n_slots, dtype=bool)
        self._interrupt_at_S = np.zeros(n_slots, dtype=np.int64)
        self._inserting_S = np.full(n_slots, -1)  # index into the phrase, or -1
        # The last entry is for slots that insert nothing: their index, -1, finds it.
        self._phrase = np.array([*rule.phrase, -1], dtype=np.int64)
        self._last = np.array(sorted(rule.end_of_thinking.last), dtype=np.int64)
        self._tail_SW = np.full((n_slots, rule.end_of_thinking.window), -1, dtype=np.int64)

    def start(self, slot: int, interrupt_at: int) -> None:
        """Begin a new completion in `slot`."""
        self._thought_S[slot] = self._answered_S[slot] = 0
        self._thinking_S[slot] = True
        self._interrupt_at_S[slot] = interrupt_at
        self._inserting_S[slot] = -1
        self._tail_SW[slot] = -1

    def save(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Return the state of `slots`, for `load`."""
        return {name: getattr(self, name)[slots] for name in self._BY_SLOT}

    def load(self, slots: np.ndarray, saved: Mapping[str, np.ndarray]) -> None:
        """Go on from what `save` returned."""
        for name in self._BY_SLOT:
            getattr(self, name)[slots] = saved[name]

    def forced_token(self) -> np.ndarray:
        """Return the token that must come next in each slot, -1 where the model chooses."""
        return self._phrase[self._inserting_S]

    def advance(
        self, token_S: np.ndarray, end_tokens: Sequence[int], given_S: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take the next token of each slot, -1 of one that has none; return which completions have ended or
        are truncated, and which of them are truncated.

        Tokens that an environment has given, where `given_S` is true, use up the budget, and end nothing.
        """
        rule = self.rule
        moves_S = token_S >= 0
        inserting_S = self._inserting_S >= 0
        thinking_S = self._thinking_S & ~inserting_S & moves_S
        answering_S = ~self._thinking_S & moves_S
        self._thought_S += thinking_S
        self._answered_S += answering_S

        # Inserted tokens end nothing, whatever they are: the model goes on behind them.
        own_S = ~inserting_S if given_S is None else ~inserting_S & ~given_S
        ended_S = own_S & np.isin(token_S, end_tokens)
        closes_S = thinking_S & own_S & self._closes(token_S)
        if rule.phrase:
            starts_S = thinking_S & ~closes_S & (self._thought_S >= self._interrupt_at_S)
            last_S = self._inserting_S == len(rule.phrase) - 1
            self._inserting_S = np.where(inserting_S & ~last_S, self._inserting_S + 1, -1)
            # Not where the end token was sampled just there: nothing would follow.
            self._inserting_S[starts_S & ~ended_S] = 0
            # The phrase ends with the end of thinking, as `resolve` has checked.
            closes_S |= last_S
            out_S = answering_S & (self._answered_S >= rule.answer)
        else:
            out_S = self._thought_S + self._answered_S >= rule.max_tokens
        self._thinking_S &= ~closes_S
        truncated_S = out_S & ~ended_S
        return ended_S | truncated_S, truncated_S

    def _closes(self, token_S: np.ndarray) -> np.ndarray:
        """Return in which slots the model has just written the end of thinking."""
        marker, tail_SW = self.rule.end_of_thinking, self._tail_SW
        # NumPy copies overlapping slices as if by way of a third array.
        tail_SW[:, :-1] = tail_SW[:, 1:]
        tail_SW[:, -1] = token_S
        if tail_SW.shape[1] == 1:
            return token_S == marker.tokens[0]
        closes_S = np.isin(token_S, self._last)
        for slot in np.flatnonzero(closes_S):
            closes_S[slot] = marker.closes(tail_SW[slot])
        return closes_S
