"""Length control: when thinking ends, when an answer has run out of budget, what length costs.

`ForcedInterruption`, `LengthPenalty` and `NoLengthControl` are the choices of a recipe, `LengthRule` the same
with the tokens of one tokenizer, and `LengthState` follows the completions in the rows of a generator, token
by token.

Shapes in names: R rows, G completions of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import numpy as np

from scalerl.errors import InputError


class LengthControl(Protocol):
    """What ends a completion before its budget does, and what length costs; by default nothing."""

    def penalty(self, length: int, correct: bool) -> float:
        """What is added to the reward of a completion of `length` sampled tokens: 0 or negative."""
        return 0.0

    def interruption(self) -> ForcedInterruption | None:
        """How the thinking of a completion is ended by force; None where it is not."""
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
        """As its fields say."""
        return self


@dataclass(frozen=True)
class LengthPenalty(LengthControl):
    """Take from the reward of a correct completion that is long.

    clip((max_length - length) / cache - 1, -1, 0): DAPO's overlong shaping (arXiv 2503.14476, eq. 13), as in
    arXiv 2510.13786.

    Nothing up to max_length - cache sampled tokens, 1 from max_length on. Nobody is interrupted.
    """

    max_length: int | None = None
    """The most that a completion may sample where it is not given, as in arXiv 2510.13786."""
    cache: int | None = None
    """A seventh of `max_length` where it is not given, as there."""
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
        """What is added to the reward, 0 or negative."""
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
        """The marker `text` to `tokenizer`."""
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
        """Whether the text of the tokens `tail` holds it; -1 stands where there was none."""
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
        """The lengths at which completions would be interrupted, from numbers uniform in [0, 1)."""
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
    """Where each row stands: thinking, being interrupted, or answering."""

    _BY_ROW = ("_thought_R", "_answered_R", "_thinking_R", "_interrupt_at_R", "_inserting_R", "_tail_RW")

    def __init__(self, rule: LengthRule, n_rows: int) -> None:
        self.rule = rule
        self._thought_R = np.zeros(n_rows, dtype=np.int64)
        self._answered_R = np.zeros(n_rows, dtype=np.int64)
        self._thinking_R = np.ones(n_rows, dtype=bool)
        self._interrupt_at_R = np.zeros(n_rows, dtype=np.int64)
        self._inserting_R = np.full(n_rows, -1)  # index into the phrase, or -1
        # The last entry is for rows that insert nothing: their index, -1, finds it.
        self._phrase = np.array([*rule.phrase, -1], dtype=np.int64)
        self._last = np.array(sorted(rule.end_of_thinking.last), dtype=np.int64)
        self._tail_RW = np.full((n_rows, rule.end_of_thinking.window), -1, dtype=np.int64)

    def start(self, row: int, interrupt_at: int) -> None:
        """Begin a new completion in `row`."""
        self._thought_R[row] = self._answered_R[row] = 0
        self._thinking_R[row] = True
        self._interrupt_at_R[row] = interrupt_at
        self._inserting_R[row] = -1
        self._tail_RW[row] = -1

    def save(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Where `rows` stand, for `load`."""
        return {name: getattr(self, name)[rows] for name in self._BY_ROW}

    def load(self, rows: np.ndarray, saved: Mapping[str, np.ndarray]) -> None:
        """Go on from what `save` returned."""
        for name in self._BY_ROW:
            getattr(self, name)[rows] = saved[name]

    def forced_token(self) -> np.ndarray:
        """The token that must come next in each row, or -1 where the model chooses."""
        return self._phrase[self._inserting_R]

    def advance(
        self, token_R: np.ndarray, end_tokens: Sequence[int], given_R: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take the next token of each row, -1 of one that has none; returns which completions have ended or
        are truncated, and which of them are truncated.

        Tokens that an environment has given, where `given_R` is true, use up the budget, and end nothing.
        """
        rule = self.rule
        moves_R = token_R >= 0
        inserting_R = self._inserting_R >= 0
        thinking_R = self._thinking_R & ~inserting_R & moves_R
        answering_R = ~self._thinking_R & moves_R
        self._thought_R += thinking_R
        self._answered_R += answering_R

        # Inserted tokens end nothing, whatever they are: the model goes on behind them.
        own_R = ~inserting_R if given_R is None else ~inserting_R & ~given_R
        ended_R = own_R & np.isin(token_R, end_tokens)
        closes_R = thinking_R & own_R & self._closes(token_R)
        if rule.phrase:
            starts_R = thinking_R & ~closes_R & (self._thought_R >= self._interrupt_at_R)
            last_R = self._inserting_R == len(rule.phrase) - 1
            self._inserting_R = np.where(inserting_R & ~last_R, self._inserting_R + 1, -1)
            # Not where the end token was sampled just there: nothing would follow.
            self._inserting_R[starts_R & ~ended_R] = 0
            # The phrase ends with the end of thinking, as `resolve` has checked.
            closes_R |= last_R
            out_R = answering_R & (self._answered_R >= rule.answer)
        else:
            out_R = self._thought_R + self._answered_R >= rule.max_tokens
        self._thinking_R &= ~closes_R
        truncated_R = out_R & ~ended_R
        return ended_R | truncated_R, truncated_R

    def _closes(self, token_R: np.ndarray) -> np.ndarray:
        """Where the end of thinking has just been written, by the model."""
        marker, tail_RW = self.rule.end_of_thinking, self._tail_RW
        # NumPy copies overlapping slices as if by way of a third array.
        tail_RW[:, :-1] = tail_RW[:, 1:]
        tail_RW[:, -1] = token_R
        if tail_RW.shape[1] == 1:
            return token_R == marker.tokens[0]
        closes_R = np.isin(token_R, self._last)
        for row in np.flatnonzero(closes_R):
            closes_R[row] = marker.closes(tail_RW[row])
        return closes_R
