"""A console line by line, as a person sees it; what a row of metrics is, and a form of rows."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scalerl import limits
from scalerl.ingest.formats.lines import lines
from scalerl.ingest.formats.rows import unix_seconds

NUMBER = r"[-+]?(?:\d{1,50}\.?\d{0,50}|\.\d{1,50})(?:[eE][-+]?\d{1,9})?|[-+]?(?:nan|inf)"
"""A number as Python prints it."""
MOST_PROCESSES = 100
"""Most processes that may have an open row at one time."""
# Ray colours its prefix of workers' lines, and loggers colour what they print, also in files.
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"\s*\((?P<name>[^()]{1,200}? pid=\d{1,9}[^()]{0,60})\) ?")
"""Ray's prefix of every line of a worker."""
_REPEATED = re.compile(r"\s{0,9}\[repeated \d{1,9}x across cluster\].*")
"""Ray's suffix of a line that several workers print."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_LEAST_DRAWN = 8
"""Characters of the shortest row, or part of one."""
_SIGNS = re.compile(rb"[sS]tep|[{'\"]|\xe2| \| |%\||alidation|Results|Epoch|Running evals|[\0\x1b]")
"""Signs of a part of a row, of a bar, or of a line that needs a closer look; most other lines have none.

The byte E2 is the first of the characters with which blocks and panels begin.
"""
_STAMPED = 60
"""Characters at the start of a line within which loggers put the time."""


@dataclass(frozen=True)
class ConsoleLine:
    """One line; every state of a progress bar that was drawn over is a line of its own."""

    source: str
    number: int
    text: str
    """The line without colours, NUL bytes, and Ray's prefix and suffix."""
    process: str
    """Name of the process, as Ray gives it; empty without one."""
    whole: bool
    """Whether the line ended: the last line of a killed run may not."""

    @property
    def where(self) -> str:
        """The place of the line, for messages."""
        return f"{self.source}, line {self.number}"

    def time(self) -> float:
        """Return the Unix seconds that a logger put at its start, or NaN; clocks are assumed to be in UTC."""
        stamp = _TIME.search(self.text, 0, _STAMPED)
        return unix_seconds(stamp[0]) if stamp else math.nan


@dataclass(frozen=True)
class ConsoleRow:
    """Metrics of one step."""

    trainer: str
    """The trainer that uses this form, by its name in the vocabularies."""
    step: float
    """NaN if the form has none."""
    values: Mapping[str, object] | None
    """Values by metric; None for a row that cannot be parsed."""
    line: ConsoleLine
    """First line of the row."""
    is_closed: bool = True
    """Whether its end is marked, so that it is known to be whole."""


class ConsoleForm(ABC):
    """One form of rows. It has a state, as a row may continue over several lines."""

    @abstractmethod
    def take(self, line: ConsoleLine) -> Sequence[ConsoleRow]:
        """Take the next line; return the rows that end with it.

        Raises:
            InputError: a row has more values than it may have.
        """

    def end(self) -> Sequence[ConsoleRow]:
        """Return the rows that are open at the end of the console; none if every row ends with its line."""
        return ()


def read_lines(path: Path, most: float = math.inf) -> Iterator[ConsoleLine]:
    """Yield the lines in the first `most` bytes of a console that may be part of a row.

    Raises:
        InputError: it is in UTF-16, or compressed.
    """
    seen = 0
    for number, raw, ended in lines(path, is_text=False):
        seen += len(raw) + 1
        if seen > most:
            return
        if not _SIGNS.search(raw):
            continue
        text = raw.replace(b"\0", b"").decode(errors="replace")
        if "\x1b" in text:
            text = _COLOUR.sub("", text)
        whole = ended and len(raw) <= limits.ROW.most
        for part, is_last in _drawn(text):
            found = _PROCESS.match(part) if " pid=" in part else None
            said = part[found.end() :] if found else part
            if "[repeated " in said:
                said = _REPEATED.sub("", said)
            yield ConsoleLine(str(path), number, said, found["name"] if found else "", whole or not is_last)


def _drawn(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the texts that were drawn over each other in a line, and whether each is the last."""
    # One by one: a line of 16 MB of returns would become millions of texts at once.
    start = 0
    while (end := text.find("\r", start)) >= 0:
        if end - start >= _LEAST_DRAWN:
            yield text[start:end], False
        start = end + 1
    yield text[start:], True
