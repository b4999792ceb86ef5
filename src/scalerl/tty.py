"""Output by its reader: colours and folded tables for a terminal, plain text for a pipe, and nothing where
the reader has gone.

NO_COLOR takes the colours away, FORCE_COLOR gives them to a pipe too, and a terminal that is dumb gets what a
pipe gets. (https://no-color.org, https://force-color.org)
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_NEVER_FOLDED = 100_000
"""Columns of a pipe: nothing in it is cut or folded."""


def console_for(stream: TextIO) -> Console | None:
    """A console of rich for a stream that is looked at; None where plain text belongs, line by line."""
    colours = not os.environ.get("NO_COLOR")
    looked_at = stream.isatty()
    forced = colours and bool(os.environ.get("FORCE_COLOR"))
    if os.environ.get("TERM") in ("dumb", "unknown") or not (looked_at or forced):
        return None
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        color_system="auto" if colours else None,
        width=None if looked_at else _NEVER_FOLDED,
    )


class Unfailing:
    """A stream that drops what it cannot write: the terminal was closed, the reader of the pipe has exited.

    Standard error carries progress and messages, for which no run must end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, if it can be written."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if it can be."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's."""
        return getattr(self._stream, name)
