"""Which names are of runs on a tracker's server, and how such runs are read: with a limit on every wait.

    wandb:ENTITY/PROJECT/RUN             a run, by its ID or its display name
    wandb:ENTITY/PROJECT?group=NAME      all runs of a group; without `?group=` all runs of the project
    mlflow:RUN_ID                        a run at MLFLOW_TRACKING_URI
    mlflow:EXPERIMENT/RUN                a run, by its name or ID; without `/RUN` all runs of the experiment
    mlflow:http://HOST:PORT/...          either of both at this server; or an address from its pages

A file or folder of such a name goes before.
"""

import os
import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from scalerl.errors import InputError, brief_error
from scalerl.ingest.formats.format import Format, Unread, Wanted
from scalerl.ingest.logs.log import Log, LogBuilder, Room

T = TypeVar("T")
ANSWER_SECONDS = 60.0
"""The longest wait for an answer of a server, in which a client may have tried several times."""
_TRACKERS = {"wandb": "runs of W&B, by name", "mlflow": "runs of a server of MLflow, by name"}

Found = Log | Unread | None
"""What a tracker's reader yields: a run, one that cannot be read, or None when some answer has come."""


def tracker_of(path: str | Path) -> str:
    """Return the tracker whose server has the run of this name; empty where it is the name of a file."""
    name, colon, _ = str(path).partition(":")
    return name if colon and name in _TRACKERS and not os.path.lexists(path) else ""


def on_server(path: str | Path, format: str | None = None) -> Format | None:
    """Return how the runs of this name are read from a tracker's server; None if it is no such name.

    Raises:
        InputError: it is one, and a `format` is given, which only a file has.
    """
    tracker = tracker_of(path)
    if not tracker:
        return None
    if format is not None:
        raise InputError(f"--format: only for a file or a folder, which {path} is not")
    return Format(tracker, _TRACKERS[tracker], lambda _: True, partial(_read, tracker))


def _read(tracker: str, path: Path, wanted: Wanted) -> Sequence[Log | Unread]:
    name = re.sub(r"^(mlflow:https?:)/+", r"\1//", str(path))  # a path has no two slashes
    reader = import_module(f"{__package__}.{tracker}")
    found = _within(ANSWER_SECONDS, lambda: reader.read(name, wanted), name)
    return [one for one in found if one is not None]


def each_run(
    name: str,
    format: str,
    runs: Sequence[tuple[str | None, str, T]],
    wanted: Wanted,
    read: Callable[[T, LogBuilder], Iterator[Log | None]],
) -> Iterator[Found]:
    """Yield what a reader does with every run, given its name and ID; one of several may be unreadable."""
    named, room = Counter(own or id for own, id, _ in runs), Room(name)
    for own, id, run in runs:
        title = (own or id) + f" {id}" * (named[own or id] > 1)
        try:
            with room.held():
                yield from read(run, LogBuilder(name, format, title, wanted, room))
        except InputError as error:
            if len(runs) == 1:
                raise
            yield Unread(name, title, str(error))


def _within(seconds: float, made: Callable[[], Iterator[Found]], name: str) -> Iterator[Found]:
    """Yield what a reader does in a thread of its own, which is left behind if it does not answer in time.

    Clients try again for minutes, and W&B's waits for its own process without limit.
    """
    answers: queue.SimpleQueue[Found | BaseException | type[StopIteration]] = queue.SimpleQueue()

    def work() -> None:
        try:
            for one in made():
                answers.put(one)
            answers.put(StopIteration)
        except BaseException as error:  # raised again in the thread that waits
            answers.put(error)

    threading.Thread(target=work, daemon=True, name=f"reader of {name}").start()
    while True:
        try:
            one = answers.get(timeout=seconds)
        except queue.Empty:
            raise InputError(f"{name}: no answer within {seconds:g} s; is the server up?") from None
        if one is StopIteration:
            return
        if isinstance(one, InputError):
            raise one
        if isinstance(one, Exception):  # whatever the client makes of what a server sends
            raise InputError(f"{name}: {brief_error(one)}") from one
        if isinstance(one, BaseException):
            raise one
        yield one  # pyright: ignore[reportReturnType]
