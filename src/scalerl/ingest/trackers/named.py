"""Recognise and read runs on a tracker's server, with a limit on every wait.

    wandb:ENTITY/PROJECT/RUN             a run, by its ID or its display name
    wandb:ENTITY/PROJECT?group=NAME      all runs of a group; without `?group=` all runs of the project
    mlflow:RUN_ID                        a run at MLFLOW_TRACKING_URI
    mlflow:EXPERIMENT/RUN                a run, by its name or ID; without `/RUN` all runs of the experiment
    mlflow:http://HOST:PORT/...          either of these at this server; or the address of one of its pages

A file or folder of such a name takes precedence.
"""

import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from scalerl.errors import InputError, brief_error
from scalerl.ingest.formats.format import Format, Unread, Wanted
from scalerl.ingest.logs.log import Log
from scalerl.ingest.trackers.runs import Answered

T = TypeVar("T")
ANSWER_SECONDS = 60.0
"""The longest wait for an answer of a server, in which a client may have retried several times."""
_TRACKERS = {"wandb": "runs of W&B, by name", "mlflow": "runs of a server of MLflow, by name"}


def tracker_of(path: str | Path) -> str:
    """Return the tracker whose server has the run of this name; empty if it names a file."""
    name, colon, _ = str(path).partition(":")
    return name if colon and name in _TRACKERS and not os.path.lexists(path) else ""


def on_server(path: str | Path, format: str | None = None) -> Format | None:
    """Return the format that reads the runs of this name from a tracker's server; None for other names.

    Raises:
        InputError: it is such a name, and a `format` is given, which only a file has.
    """
    tracker = tracker_of(path)
    if not tracker:
        return None
    if format is not None:
        raise InputError(f"--format: only for a file or a folder, which {path} is not")
    return Format(tracker, _TRACKERS[tracker], lambda _: True, partial(_read, tracker))


def _read(tracker: str, path: Path, wanted: Wanted) -> Sequence[Log | Unread]:
    name = re.sub(r"^(mlflow:https?:)/+", r"\1//", str(path))  # a path has no double slash
    if tracker == "wandb":
        from scalerl.ingest.trackers.wandb import read
    else:
        from scalerl.ingest.trackers.mlflow import read
    return _within(ANSWER_SECONDS, lambda answered: read(name, wanted, answered), name)


def _within(seconds: float, read: Callable[[Answered], T], name: str) -> T:
    """Return the result of `read`, run in a thread that is abandoned if it does not answer in time.

    Clients retry for minutes, and W&B's waits for its own process without limit.
    """
    answers: queue.SimpleQueue[None] = queue.SimpleQueue()
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(read(lambda: answers.put(None)))
        except BaseException as error:  # raised again in the thread that waits
            result.set_exception(error)
        answers.put(None)

    threading.Thread(target=work, daemon=True, name=f"reader of {name}").start()
    try:
        while not result.done():
            answers.get(timeout=seconds)
        return result.result()
    except queue.Empty:
        raise InputError(f"{name}: no answer within {seconds:g} s; is the server up?") from None
    except InputError:
        raise
    except Exception as error:  # whatever the client makes of what a server sends
        raise InputError(f"{name}: {brief_error(error)}") from error
