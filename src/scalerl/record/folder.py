"""The folder of a run, locked, and followed where it is moved; and where a run can be written at all.

check_unused, check_writable    refuse a place before anything is started
RunFolder.claim                 lock it: before its first read, until the end
RunFolder.here, moved           where it is now
RunFolder.set_apart             keep what a run has left there in before-N/, for a run that begins anew
"""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from scalerl.errors import InputError, WriteError
from scalerl.files import is_aside, lock, sync

RECORDS = (
    *("evals.jsonl", "eval_prompts.jsonl", "steps.jsonl", "groups.jsonl"),
    *("forecasts.jsonl", "alarms.jsonl", "timeline.jsonl"),
)
"""The files that are appended to."""
CUT = ".cut.part"
"""Of a cut of these that is under way."""
_OF_A_RUN = (
    *(CUT, "checkpoints", *RECORDS, "lost.jsonl", "report.html"),
    *("tracking.json", "wandb", "tensorboard", "config.json"),
)
"""All that a run writes, but for logs of servers; what makes it a run comes last."""
_SERVER_LOG = re.compile(r"vllm-\d+\.log")
_BEFORE = re.compile(r"before-(\d+)")
_MOVING = ".before.part"
"""What is set apart is collected there, until it is all there."""


class RunFolder:
    """A run folder that this process has locked; it is made where there is none.

    It is known by its path, and by a handle, which stays with the folder where that is moved.
    """

    def __init__(self, path: Path, handle: int, made: tuple[Path, ...] = ()) -> None:
        """Use `claim`; `made` are the folders that were made for it."""
        self.path, self.handle = path, handle
        self.close = weakref.finalize(self, _close, handle, made)
        """Unlock it, as the end of the process does; a folder that was made for it and is empty goes."""

    @classmethod
    def claim(cls, path: str | Path, new: bool = False) -> RunFolder:
        """Lock the folder `path` for this process; for a `new` run nothing may be in it.

        Raises:
            InputError: another process writes there, or no folder can be made there, or it is not empty.
        """
        path = Path(path)
        if new:
            _check_empty(path)
        while True:
            made = _make(path)
            try:
                folder = cls(path, lock(path, "another process is writing this run"), made)
            except FileNotFoundError:  # the process that had made it has removed it
                continue
            except OSError as error:
                raise _cannot(path, error) from error
            if not folder._is_at(path):  # it was removed between its opening and its lock
                folder.close()
                continue
            if new:
                check_unused(path)  # again: another run may have come and gone meanwhile
            try:
                folder._end_moving()
            except OSError as error:
                raise _cannot(path, error) from error
            return folder

    def here(self) -> Path:
        """Return its path, or the one to which it has been moved.

        Raises:
            WriteError: it was removed.
        """
        if self._is_at(self.path):
            return self.path
        if (now := self._path_of_handle()) and self._is_at(now):
            return now
        raise WriteError(
            f"{self.path}: the run folder was removed, or moved to another file system, during the run; "
            "nothing more can be saved; scalerl train COPY --resume goes on with a copy, where there is one"
        )

    def moved(self) -> Path | None:
        """Return the path to which it has been moved; None where it has not.

        Raises:
            WriteError: it was removed.
        """
        here = self.here()
        return None if here == self.path else here

    def open(self, name: str, flags: int) -> int:
        """Open a file in it, wherever it is, and return the handle.

        Raises:
            OSError: it cannot be opened.
        """
        return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=self.handle)

    def set_apart(self) -> Path | None:
        """Move all that a run has left there into `before-N`, and return that; None where there was nothing.

        What a kill leaves on the way is the run still, as long as config.json is there; then `claim` ends it.

        Raises:
            WriteError: the disk does not take it.
        """
        here = self.here()
        try:
            names = [path.name for path in here.iterdir() if _SERVER_LOG.fullmatch(path.name)]
            names += [name for name in _OF_A_RUN if os.path.lexists(here / name)]
            if not names:
                return None
            (here / _MOVING).mkdir(exist_ok=True)
            for name in names:
                (here / name).rename(here / _MOVING / name)
            return self._end_moving()
        except OSError as error:
            raise WriteError(
                f"{error.filename or here}: {error.strerror or error}; nothing is lost"
            ) from error

    def _end_moving(self) -> Path | None:
        """Name what `set_apart` has moved, if it is all there."""
        here = self.path
        if not (here / _MOVING).is_dir() or os.path.lexists(here / "config.json"):
            return None
        numbers = [int(found[1]) for path in here.iterdir() if (found := _BEFORE.fullmatch(path.name))]
        sync(here / _MOVING)
        apart = (here / _MOVING).rename(here / f"before-{max(numbers, default=0) + 1}")
        sync(here)
        return apart

    def _is_at(self, path: Path) -> bool:
        """Whether a path leads to it.

        One that cannot be looked at (a network disk that is away) counts as if it did: a run is not ended by
        what is not known.
        """
        try:
            there = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        if os.path.samestat(there, os.fstat(self.handle)):
            return True
        # Some file systems give a folder another number each time; the kernel knows the path all the same.
        return self._path_of_handle() == Path(os.path.realpath(path))

    def _path_of_handle(self) -> Path | None:
        try:
            return Path(f"/proc/self/fd/{self.handle}").readlink()
        except OSError:  # no Linux
            return None


def check_unused(folder: Path) -> None:
    """Raise InputError if `folder` cannot become a new run: a file, not empty, out of reach, or closed."""
    _check_empty(folder)
    check_writable(folder)


def _check_empty(folder: Path) -> None:
    try:
        is_used = folder.exists() and (not folder.is_dir() or not all(map(_is_of_a_start, folder.iterdir())))
    except OSError as error:  # a name too long, a folder on the way that may not be entered
        raise InputError(f"{folder}: {error.strerror or error}") from error
    if is_used:
        raise InputError(f"{folder} exists already: choose another folder with -o, or remove it")


def check_writable(folder: Path) -> None:
    """Raise InputError if no file can be made in `folder`, or the folder itself cannot be; nothing stays."""
    made = _make(folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _cannot(folder, error) from error
    finally:
        _remove(made)


def _make(folder: Path, tries: int = 20) -> tuple[Path, ...]:
    """Make a folder and those above it, and return those that were not there.

    Raises:
        InputError: it cannot be made.
    """
    made: list[Path] = []
    for place in reversed([folder, *folder.parents]):
        try:
            if not place.exists():
                place.mkdir()
                made.append(place)
        except FileExistsError:  # another run has just begun there
            continue
        except OSError as error:
            _remove(made)
            if isinstance(error, FileNotFoundError) and tries:  # or ended, and took a folder above with it
                return _make(folder, tries - 1)
            raise _cannot(folder, error) from error
    return tuple(made)


def _remove(made: Iterable[Path]) -> None:
    for place in reversed([*made]):
        with suppress(OSError):  # another run has begun there
            place.rmdir()


def _close(handle: int, made: tuple[Path, ...]) -> None:
    _remove(made)  # which is locked yet: no other run can have begun in it
    os.close(handle)


def _is_of_a_start(path: Path) -> bool:
    """Whether a path is what a run leaves that was killed as it began, the log of a server, which begins
    before it, or an earlier run that was set apart."""
    return is_aside(path) or any(name.fullmatch(path.name) for name in (_SERVER_LOG, _BEFORE))


def _cannot(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder}: nothing can be written there ({error.strerror or error})")
