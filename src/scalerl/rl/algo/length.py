"""Length control: when thinking ends, when an answer is out of budget, and the penalty on length.

`ForcedInterruption`, `LengthPenalty` and `NoLengthControl` are the choices of a recipe. `LengthRule` is a
choice resolved to the tokens of one tokenizer. `LengthState` tracks the completions in an engine's decode
slots, token by token.

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
    """An interruption of the thinking and a penalty on length; by default there is neither."""

    def penalty(self, length: int, correct: bool) -> float:
        """Return what to add to the reward of a completion of `length` sampled tokens: 0 or negative."""
        return 0.0

    def interruption(self) -> ForcedInterruption | None:
        """Return the rule that interrupts thinking; None for no interruption."""
        return None


@dataclass(frozen=True)
class ForcedInterruption(LengthControl):
    """End the thinking at a random length by inserting a phrase (ScaleRL section 2; arXiv 2510.13786).

    The length is drawn per completion, uniformly in [`low`, `high`] thinking tokens. These default to 5/6 of
    `context.thinking` and all of it, the paper's shares. A completion that is still thinking at that length
    gets the tokens of `phrase`, which must end with the end of thinking, and continues with its answer.
    Inserted tokens carry no gradient and count in no length.
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
        """Return a copy whose missing lengths are set from a context of `thinking` and `answer` tokens.

        Raises:
            ValueError: a length exceeds `thinking`.
        """
        low, high = self.bounds(thinking)
        for name, length in (("high", high), ("low", low)):
            if length > thinking:
                raise ValueError(f"length.{name}: {length} exceeds context.thinking ({thinking})")
        return replace(self, low=low, high=high)

    def bounds(self, thinking: int) -> tuple[int, int]:
        """Return `low` and `high`, with missing ones set from a context of so many thinking tokens."""
        high = thinking if self.high is None else self.high
        return max(1, high * 5 // 6) if self.low is None else self.low, high

    def interruption(self) -> ForcedInterruption:
        """Return this object, which is itself the rule."""
        return self


@dataclass(frozen=True)
class LengthPenalty(LengthControl):
    """Reduce the reward of a correct completion that is long.

    clip((max_length - length) / cache - 1, -1, 0): DAPO's overlong shaping (arXiv 2503.14476, eq. 13), as in
    arXiv 2510.13786.

    It is 0 up to max_length - cache sampled tokens, and -1 from max_length on. Thinking is not interrupted.
    """

    max_length: int | None = None
    """Sampled tokens; defaults to the most that a completion may have, as in arXiv 2510.13786."""
    cache: int | None = None
    """Sampled tokens; defaults to a seventh of `max_length`, as in that paper."""
    kind: Literal["length_penalty"] = "length_penalty"

    def __post_init__(self) -> None:
        longest = math.inf if self.max_length is None else self.max_length
        if not 1 <= (1 if self.cache is None else self.cache) <= longest:
            raise ValueError("max_length and cache must satisfy 1 <= cache <= max_length")

    def within(self, thinking: int, answer: int) -> Self:
        """Return a copy whose missing lengths are set from a context of `thinking` and `answer` tokens."""
        longest = thinking + answer if self.max_length is None else self.max_length
        return replace(self, max_length=longest, cache=self.cache or max(1, longest // 7))

    def penalty(self, length: int, correct: bool) -> float:
        """Return what to add to the reward: 0 or negative."""
        if self.max_length is None or self.cache is None:
            raise ValueError("max_length and cache are those of no context yet: within() gives them")
        return min(max((self.max_length - length) / self.cache - 1.0, -1.0), 0.0) if correct else 0.0


@dataclass(frozen=True)
class NoLengthControl(LengthControl):
    """Truncate completions once they have used up the thinking and the answer budget together."""

    kind: Literal["none"] = "none"


AnyLength = ForcedInterruption | LengthPenalty | NoLengthControl
"""The length controls that a recipe can name."""


@dataclass(frozen=True)
class Marker:
    """The end of thinking in the tokens of a tokenizer.

    If it is a single token, that token ends the thinking. If it is several, it can be written in several ways
    (its last token may be merged with the text after it), so it is searched for in the decoded text.
    """

    tokens: tuple[int, ...]
    text: str = ""
    last: frozenset[int] = frozenset()
    """Tokens that can be its last one, if it is several."""
    decode: Callable[[list[int]], str] | None = None

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> Marker:
        """Return the marker for `text` in the tokens of `tokenizer`."""
        tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) == 1:
            return cls(tokens)
        # Search the whole vocabulary once, as the last character may be merged with the text after it.
        last = frozenset(i for i in range(len(tokenizer)) if text[-1] in tokenizer.decode([i]))
        return cls(tokens, text, last, tokenizer.decode)

    @property
    def window(self) -> int:
        """The most tokens that the marker can span, as each has at least one of its characters."""
        return max(len(self.text), 1)

    def closes(self, tail: np.ndarray) -> bool:
        """Return whether the text of the tokens `tail` contains the marker; -1 stands for no token."""
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
        """Return the lengths at which to interrupt completions, from numbers uniform in [0, 1)."""
        if self.interrupt is None:
            # A length that no completion reaches.
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
        # With more tokens than characters, some hold part of a character, and no decoded tail ends with it.
        if len(marker.tokens) > 1 and (not marker.last or len(written) < len(marker.tokens)):
            raise InputError(f"end_of_thinking: this tokenizer splits a character of {end_of_thinking!r}")
        forced = choice.interruption()
        if forced is None:
            return cls(thinking, answer, marker)
        phrase = tuple(tokenizer(forced.phrase, add_special_tokens=False)["input_ids"])
        return cls(thinking, answer, marker, phrase, forced.bounds(thinking))


class LengthState:
    """State of the completion in each decode slot: thinking, being interrupted, or answering."""

    _BY_SLOT = ("_thought_S", "_answered_S", "_thinking_S", "_interrupt_at_S", "_inserting_S", "_tail_SW")

    def __init__(self, rule: LengthRule, n_slots: int) -> None:
        self.rule = rule
        self._thought_S = np.zeros(n_slots, dtype=np.int64)
        self._answered_S = np.zeros(n_slots, dtype=np.int64)
        self._thinking_S = np.ones(n_slots, dtype=bool)
        self._interrupt_at_S = np.zeros(n_slots, dtype=np.int64)
        self._inserting_S = np.full(n_slots, -1)  # index into the phrase, or -1
        # The last entry is for slots that insert nothing, whose index is -1.
        self._phrase = np.array([*rule.phrase, -1], dtype=np.int64)
        self._last = np.array(sorted(rule.end_of_thinking.last), dtype=np.int64)
        self._tail_SW = np.full((n_slots, rule.end_of_thinking.window), -1, dtype=np.int64)

    def start(self, slot: int, interrupt_at: int) -> None:
        """Start a new completion in `slot`."""
        self._thought_S[slot] = self._answered_S[slot] = 0
        self._thinking_S[slot] = True
        self._interrupt_at_S[slot] = interrupt_at
        self._inserting_S[slot] = -1
        self._tail_SW[slot] = -1

    def save(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Return the state of `slots`, for `load`."""
        return {name: getattr(self, name)[slots] for name in self._BY_SLOT}

    def load(self, slots: np.ndarray, saved: Mapping[str, np.ndarray]) -> None:
        """Restore the state of `slots` that `save` returned."""
        for name in self._BY_SLOT:
            getattr(self, name)[slots] = saved[name]

    def forced_token(self) -> np.ndarray:
        """Return the token that must come next in each slot, -1 where the model chooses."""
        return self._phrase[self._inserting_S]

    def advance(
        self, token_S: np.ndarray, end_tokens: Sequence[int], given_S: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add the next token of each slot, -1 for none; return which slots are done, and which truncated.

        Tokens given by an environment, where `given_S` is true, use up budget, but never end anything.
        """
        rule = self.rule
        moves_S = token_S >= 0
        inserting_S = self._inserting_S >= 0
        thinking_S = self._thinking_S & ~inserting_S & moves_S
        answering_S = ~self._thinking_S & moves_S
        self._thought_S += thinking_S
        self._answered_S += answering_S

        # Inserted tokens never end a completion, whatever they are: the model continues after them.
        own_S = ~inserting_S if given_S is None else ~inserting_S & ~given_S
        ended_S = own_S & np.isin(token_S, end_tokens)
        closes_S = thinking_S & own_S & self._closes(token_S)
        if rule.phrase:
            starts_S = thinking_S & ~closes_S & (self._thought_S >= self._interrupt_at_S)
            last_S = self._inserting_S == len(rule.phrase) - 1
            self._inserting_S = np.where(inserting_S & ~last_S, self._inserting_S + 1, -1)
            # No phrase after an end token that was sampled at this very length: the completion has ended.
            self._inserting_S[starts_S & ~ended_S] = 0
            # The recipe checks that the phrase ends with the end of thinking.
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
        # Safe in NumPy, which copies overlapping slices as if through a buffer.
        tail_SW[:, :-1] = tail_SW[:, 1:]
        tail_SW[:, -1] = token_S
        if tail_SW.shape[1] == 1:
            return token_S == marker.tokens[0]
        closes_S = np.isin(token_S, self._last)
        for slot in np.flatnonzero(closes_S):
            closes_S[slot] = marker.closes(tail_SW[slot])
        return closes_S
