"""What a reader of one kind of file provides, and how readers treat several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl import limits
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.ingest.logs.log import Log, Room

Wanted = Callable[[str], bool]
"""A test of whether to keep a metric of this name."""


@dataclass(frozen=True)
class Unread:
    """A run that cannot be read; the other runs of its source are still read."""

    path: str
    """The file or folder that was given."""
    run: str
    """Name of the run within the path; empty if the path is the run."""
    reason: str

    def __str__(self) -> str:
        where = f"{self.path}, run {self.run!r}" if self.run else self.path
        return f"left out: {where}: {self.reason.removeprefix(f'{self.path}: ')}"

    def to_json(self) -> dict[str, str | None]:
        """Return an entry of "unread" in JSON."""
        return {"path": self.path, "run": self.run or None, "reason": self.reason}


def each_run(
    path: Path,
    places: Iterable[tuple[Path, str]],
    read: Callable[[Path, str], Iterable[Log]],
    missing: str,
    room: Room | None = None,
) -> list[Log | Unread]:
    """Read the runs at some places in a folder, each with its name; an unreadable one is named instead.

    An unreadable run frees its part of the `room` that all share.

    Raises:
        InputError: there are none (`missing` is the message), or too many, or none can be read (the message
            is that of the first).
    """
    places = list(places)
    limits.FOUND.check(len(places), path)
    if not places:
        raise InputError(missing)
    found: list[Log | Unread] = []
    errors: list[str] = []  # an exception would keep all that was read of its run
    for place, name in places:
        try:
            with room.held() if room is not None else nullcontext():
                found += read(place, name)
        except (InputError, OSError) as error:
            errors.append(str(error) if isinstance(error, InputError) else unopened(error, place))
            found.append(Unread(str(path), name, errors[-1]))
    if errors and len(errors) == len(found):
        raise InputError(errors[0])
    return found


def unopened(error: OSError, place: Path) -> str:
    """Describe the system's error for a file or folder that cannot be read."""
    return f"{error.filename or place}: {error.strerror or error}"


@dataclass(frozen=True)
class Format:
    """One kind of file or folder that trainers or trackers write."""

    name: str
    """Name of the format for `--format`."""
    what: str
    """A description in a few words, for help and messages."""
    recognises: Callable[[Path], bool]
    """Returns whether a path is one of these, by its names and first bytes; raises only OSError."""
    read: Callable[[Path, Wanted], Sequence[Log | Unread]]
    """Reads all runs in it, with the wanted metrics of each, and names those that cannot be read. If none
    can, it raises an InputError that says what is wrong, or OSError. It holds no more in memory than what is
    wanted, however large the file is."""
