"""Length control: when thinking ends, when an answer has run out of budget.

`ForcedInterruption` is the choice of a recipe, `LengthRule` the same with the tokens of one tokenizer, and
`LengthState` follows the completions in the rows of a generator, token by token.

Shapes in names: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scalerl.errors import InputError


@dataclass(frozen=True)
class ForcedInterruption:
    """End the thinking at a random length by inserting a phrase (ScaleRL section 2; arXiv 2510.13786).

    The length is drawn per completion, uniformly in [`low`, `high`] thinking tokens. A completion that is
    still thinking then gets the tokens of `phrase`, which must end with the end of thinking, and goes on to
    its answer. Inserted tokens carry no gradient and count in no length.
    """

    kind: Literal["forced_interruption"] = "forced_interruption"
    low: int = 10240
    high: int = 12288
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError("low and high must satisfy 1 <= low <= high")


@dataclass(frozen=True)
class NoInterruption:
    """Let completions run until thinking and answer budget together are used up; then they are truncated."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class LengthRule:
    """Budgets in tokens, and the tokens that an interruption inserts."""

    thinking: int
    answer: int
    end_of_thinking: int
    phrase: tuple[int, ...] = ()
    interrupt: tuple[int, int] | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens that a completion can have, inserted ones included."""
        return self.thinking + len(self.phrase) + self.answer

    def draw(self, u: float) -> int:
        """The length at which this completion would be interrupted, from `u` uniform in [0, 1)."""
        if self.interrupt is None:
            return self.max_tokens + 1
        low, high = self.interrupt
        return low + int(u * (high - low + 1))

    def state(self, n_rows: int) -> LengthState:
        """A state for the rows of a generator."""
        return LengthState(self, n_rows)

    @classmethod
    def resolve(
        cls,
        choice: ForcedInterruption | NoInterruption,
        tokenizer: Any,
        thinking: int,
        answer: int,
        end_of_thinking: str,
    ) -> LengthRule:
        """Find the token ids of the phrase and of the end of thinking.

        Raises:
            InputError: the end of thinking is not one token, or the phrase does not end with it.
        """
        marker = tokenizer(end_of_thinking, add_special_tokens=False)["input_ids"]
        if len(marker) != 1:
            raise InputError(
                f"length: {end_of_thinking!r} is {len(marker)} tokens to this tokenizer; it must be one"
            )
        if isinstance(choice, NoInterruption):
            return cls(thinking, answer, marker[0])
        phrase = tuple(tokenizer(choice.phrase, add_special_tokens=False)["input_ids"])
        if not phrase or phrase[-1] != marker[0]:
            raise InputError(f"length.phrase: must end with {end_of_thinking!r}")
        if choice.high > thinking:
            raise InputError(f"length.high: {choice.high} exceeds context.thinking ({thinking})")
        return cls(thinking, answer, marker[0], phrase, (choice.low, choice.high))


class LengthState:
    """Where each row stands: thinking, being interrupted, or answering."""

    def __init__(self, rule: LengthRule, n_rows: int) -> None:
        self.rule = rule
        self._thought_R = np.zeros(n_rows, dtype=np.int64)
        self._answered_R = np.zeros(n_rows, dtype=np.int64)
        self._thinking_R = np.ones(n_rows, dtype=bool)
        self._interrupt_at_R = np.zeros(n_rows, dtype=np.int64)
        self._inserting_R = np.full(n_rows, -1)  # index into the phrase, or -1
        self._phrase = np.array([*rule.phrase, -1], dtype=np.int64)

    def start(self, row: int, interrupt_at: int) -> None:
        """Begin a new completion in `row`."""
        self._thought_R[row] = self._answered_R[row] = 0
        self._thinking_R[row] = True
        self._interrupt_at_R[row] = interrupt_at
        self._inserting_R[row] = -1

    def forced_token(self) -> np.ndarray:
        """The token that must come next in each row, or -1 where the model chooses."""
        return self._phrase[self._inserting_R]

    def advance(self, token_R: np.ndarray, end_token: int) -> tuple[np.ndarray, np.ndarray]:
        """Take the next token of each row; returns which completions are done, and which truncated."""
        rule = self.rule
        inserting_R = self._inserting_R >= 0
        thinking_R = self._thinking_R & ~inserting_R
        answering_R = ~self._thinking_R
        self._thought_R += thinking_R
        self._answered_R += answering_R

        ended_R = ~inserting_R & (token_R == end_token)
        closes_R = thinking_R & (token_R == rule.end_of_thinking)
        if rule.phrase:
            starts_R = thinking_R & ~closes_R & (self._thought_R >= self._interrupt_at_R)
            last_R = self._inserting_R == len(rule.phrase) - 1
            self._inserting_R = np.where(inserting_R & ~last_R, self._inserting_R + 1, -1)
            self._inserting_R[starts_R & ~ended_R] = 0
            closes_R |= last_R
            out_R = answering_R & (self._answered_R >= rule.answer)
        else:
            out_R = self._thought_R + self._answered_R >= rule.max_tokens
        self._thinking_R &= ~closes_R
        truncated_R = out_R & ~ended_R
        return ended_R | truncated_R, truncated_R
