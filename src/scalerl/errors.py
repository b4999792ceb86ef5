"""The errors that a user meets: one line each, and the exit status that goes with it."""

from __future__ import annotations

import reprlib
from typing import Any


class ScalerlError(Exception):
    """Base of every error that `scalerl` raises on purpose; its text is one line for the user.

    What is not printable (a line break in the name of a column, say) is shown escaped.
    """

    exit_status = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class InputError(ScalerlError):
    """The input or the usage is wrong: the text names file, line, column or key, and what would be right."""

    exit_status = 2


class CannotAnswerError(ScalerlError):
    """The input is sound, but the data cannot answer the question (too few points, no rise)."""

    exit_status = 3


class InterruptedRunError(ScalerlError):
    """The user stopped a run; the text says where the record is that it left."""

    exit_status = 130


class DivergedError(ScalerlError):
    """Training has left the finite numbers at `step`; the record up to there is kept."""

    exit_status = 1

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")
        self.step, self.what = step, what

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again from its arguments, not from its text: it may come from the process of a learner."""
        return type(self), (self.step, self.what)


class PausedError(ScalerlError):
    """An alarm of the run's health paused it, as its recipe asks for; the record up to there is kept."""

    exit_status = 4


class WorkerError(ScalerlError):
    """A process of the run died; what was written before is kept."""

    exit_status = 1


class LearnerLostError(WorkerError):
    """Processes of a learner on a cluster died: the run can go on from its last checkpoint.

    `who` was lost, on which `node`, and when (`at`, Unix seconds), where that is known.
    """

    def __init__(
        self, message: str, who: str = "the learner", node: str = "", at: float | None = None
    ) -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, at


class WriteError(ScalerlError):
    """The record could not be written (a full disk, above all); what was written before is kept."""

    exit_status = 2


class MovedError(WriteError):
    """The run folder was moved while the run wrote it; the text says where it is, and what goes on there."""


def printable(text: str) -> str:
    """Text of somebody's file for a terminal or a page: what is not printable is escaped.

    That is line breaks, the codes by which a terminal is told things, marks that turn the direction of what
    follows, and halves of surrogates, which no encoding takes.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number_of(value: Any, what: str) -> float:
    """An argument that a caller gave as a number, as a float; infinities and NaN are numbers here.

    Raises:
        InputError: it is text, None or another thing; `what` names it.
    """
    try:
        if not isinstance(value, str | bytes | bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{what} is a number, found {brief(value)}")


_LONGEST_LINE = 200
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60


def brief(value: Any) -> str:
    """A value found in somebody's file, short enough for a line."""
    return _BRIEF.repr(value)


def counted(n: int, noun: str) -> str:
    """A number of things in words: `1 row`, `2 rows`."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def first_line(error: BaseException) -> str:
    """What an error of somebody else says, on one line; its type where it says nothing."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def brief_error(error: BaseException) -> str:
    """The type of an error and the first line of what it says."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"
