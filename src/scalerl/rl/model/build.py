"""Models that this package makes: their folders in the cache, and the progress of their making."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from scalerl.errors import WriteError


@dataclass(frozen=True)
class BuildProgress:
    """How far the making of a model has come."""

    share: float
    """Of the work, estimated."""
    text: str
    milestone: bool = True
    """Whether to print a line where no bar can be drawn."""


def cache_folder() -> Path:
    """Return the folder of base models: $SCALERL_CACHE, or scalerl in the user's cache folder."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SCALERL_CACHE") or Path(user) / "scalerl")


@contextmanager
def made_aside(folder: Path, last: str) -> Iterator[Path]:
    """Give an empty folder beside `folder`, which becomes `folder` once the block has filled it.

    `last` is a file of it. So a model is never found half made, whether its making was interrupted or two
    processes make it at once.

    Raises:
        WriteError: it cannot be written.
    """
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)  # fails if there is a link
        yield aside
        try:
            aside.rename(folder)
        except OSError:  # another process was first, with the same model: the folder is there, and not empty
            if not (folder / last).is_file():
                raise
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        why = getattr(error, "strerror", None) or error
        raise WriteError(f"{folder}: the model could not be saved ({why})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
