"""Errors for users: one line each, with an exit status."""

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class ScalerlError(Exception):
    """Base of every error that `scalerl` raises on purpose; its text is one line for the user.

    Unprintable characters (a line break in a column's name, say) are escaped.
    """

    exit_status = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class InputError(ScalerlError):
    """The input or the usage is wrong: the text names the file, line, column or key, and what is expected."""

    exit_status = 2


class OwnCodeError(InputError):
    """A user's custom class raised an error or returned an invalid value; it has changed no state."""


class NoEvaluationError(InputError):
    """A run has begun, and has no evaluation yet."""

    exit_status = 3


class CannotAnswerError(ScalerlError):
    """The input is valid, but the data cannot answer the question (too few evaluations, say)."""

    exit_status = 3


class InterruptedRunError(ScalerlError):
    """The user stopped a run; the text says where its record is."""

    exit_status = 130


class DivergedError(ScalerlError):
    """Training produced a number at `step` that is not finite; the record up to there is kept."""

    exit_status = 1

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")
        self.step, self.what = step, what

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments instead of the text: the error may come from a learner's process."""
        return type(self), (self.step, self.what)


class PausedError(ScalerlError):
    """A health alarm paused the run, as its recipe requests; the record up to there is kept."""

    exit_status = 4


class WorkerError(ScalerlError):
    """A process of the run exited unexpectedly; what was written before is kept."""

    exit_status = 1


class OutOfMemoryError(WorkerError):
    """A process of the run requested more memory than there is; the text says what to change.

    `torn` says that the process failed in the middle of a change, so its state cannot be checkpointed.
    """

    def __init__(self, message: str, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle `torn` too: the error may come from another process."""
        return type(self), (str(self), self.torn)


class LearnerLostError(WorkerError):
    """Processes of a learner on a cluster were lost; the run can resume from its last checkpoint.

    `who` names the lost process, with its `node` and the time `at` (Unix seconds) if they are known.
    """

    def __init__(
        self, message: str, who: str = "the learner", node: str = "", at: float | None = None
    ) -> None:
        super().__init__(message)
        self.who, self.node, self.at = who, node, at


class WriteError(ScalerlError):
    """The record could not be written (on a full disk, say); what was written before is kept."""

    exit_status = 2


class MovedError(WriteError):
    """The run folder was moved during the run; the text says where it is, and how to resume there."""


def printable(text: str) -> str:
    """Escape the unprintable characters of a text from a file, for a terminal or a page.

    They are line breaks, control codes of terminals, marks that change the text direction, and unpaired
    surrogates, which no encoding accepts.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number_of(value: Any, what: str) -> float:
    """Convert an argument to a float; infinities and NaN are accepted.

    Raises:
        InputError: it is text, None or of another type; `what` names it.
    """
    try:
        if not isinstance(value, str | bytes | bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InputError(f"{what} must be a number, found {brief(value)}")


_LONGEST_LINE = 200
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60


def brief(value: Any) -> str:
    """Return the repr of a value from a file, short enough for a line."""
    return _BRIEF.repr(value)


def counted(n: int, noun: str) -> str:
    """Return a count with its noun: `1 row`, `2 rows`."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or the name of its type if it has no text."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}..."


def brief_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn any error of foreign code in the block into an InputError that says `what` is wrong and why.

    Errors of this package pass through unchanged: they are one line already.
    """
    try:
        yield
    except ScalerlError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{what} ({brief_error(error)})") from error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the word of `known` whose spelling is closest to an unknown word; None if none is close."""
    import difflib  # here, as only errors need it

    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def listed(names: Sequence[str], most: int = 12) -> str:
    """List names for a message: the first ones, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
