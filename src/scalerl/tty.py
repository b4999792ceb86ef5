"""Output by destination: colours and folded tables on a terminal, plain text in a pipe.

NO_COLOR turns colours off, FORCE_COLOR turns them on even for a pipe, and a dumb terminal is treated as a
pipe (https://no-color.org, https://force-color.org).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_NEVER_FOLDED = 100_000
"""The width of a pipe, in which nothing is cut or folded."""


def console_for(stream: TextIO) -> Console | None:
    """Return rich's console for a terminal or a stream with forced colours; None for plain text."""
    colours = not os.environ.get("NO_COLOR")
    is_terminal = stream.isatty()
    forced = colours and bool(os.environ.get("FORCE_COLOR"))
    if os.environ.get("TERM") in ("dumb", "unknown") or not (is_terminal or forced):
        return None
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        color_system="auto" if colours else None,
        width=None if is_terminal else _NEVER_FOLDED,
    )


class OutputError(OSError):
    """Standard output could not be written: the disk is full, say, or the reader of the pipe has exited."""


class _Stream:
    """A stream that delegates everything except what a subclass overrides."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the stream."""
        return getattr(self._stream, name)


class Output(_Stream):
    """Standard output whose errors are OutputErrors, to tell them from those of sockets and files."""

    def write(self, text: str) -> int:
        """Write `text`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(*error.args) from error

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(*error.args) from error


class Unfailing(_Stream):
    """A stream that drops what it cannot write, as after the terminal was closed.

    Standard error carries progress and messages, and a failure to write these must not end a run.
    """

    def write(self, text: str) -> int:
        """Write `text` if possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        with suppress(OSError):
            self._stream.flush()


class Aside(Unfailing):
    """Standard error in place of standard output, which `answer` keeps, as the user's code may print."""

    def __init__(self, stream: TextIO, answer: TextIO) -> None:
        super().__init__(stream)
        self.answer = answer
