"""What the readers of trackers share: they read the runs of a name one by one."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from scalerl.errors import InputError
from scalerl.ingest.formats.format import Unread, Wanted
from scalerl.ingest.logs.log import Log, LogBuilder, Room

T = TypeVar("T")
Answered = Callable[[], None]
"""A function that a tracker's reader calls whenever the server has answered."""


def each_run(
    name: str,
    format: str,
    runs: Sequence[tuple[str | None, str, T]],
    wanted: Wanted,
    read: Callable[[T, LogBuilder], Log],
) -> list[Log | Unread]:
    """Read every run, given with its name and ID; if there are several, some may be unreadable."""
    named, room = Counter(own or id for own, id, _ in runs), Room(name)
    found: list[Log | Unread] = []
    for own, id, run in runs:
        title = (own or id) + f" {id}" * (named[own or id] > 1)
        try:
            with room.held():
                found.append(read(run, LogBuilder(name, format, title, wanted, room)))
        except InputError as error:
            if len(runs) == 1:
                raise
            found.append(Unread(name, title, str(error)))
    return found
