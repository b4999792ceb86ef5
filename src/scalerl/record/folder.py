"""The folder of a run, locked, and followed if it is moved; and where a run can be written at all.

check_unused, check_writable    reject a place before anything is started
RunFolder.claim                 lock it, from before its first read until the end
RunFolder.here                  where it is now
RunFolder.set_apart             move what a run has left there to before-N/, for a run that starts over
holds_run, runs_below           what is a run folder, for readers; name_of_path names it
"""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from scalerl.errors import InputError, WriteError, printable
from scalerl.files import is_aside, lock, reading, sync
from scalerl.jsonl import dumps, read_object
from scalerl.record import activity

RECORDS = (
    *("evals.jsonl", "eval_prompts.jsonl", "downstream.jsonl", "steps.jsonl", "groups.jsonl"),
    *("forecasts.jsonl", "alarms.jsonl", "samples.jsonl", "timeline.jsonl"),
)
"""The files that are appended to."""
CUT = ".cut.part"
"""The file of an unfinished cut of these."""
_OF_A_RUN = (
    *(CUT, "checkpoints", *RECORDS, "lost.jsonl", "report.html"),
    *("progress.json", "tracking.json", "wandb", "tensorboard", "config.json"),
)
"""All that a run writes, except server logs, in the order in which it is set apart."""
_SERVER_LOG = re.compile(r"vllm-\d+\.log")
_BEFORE = re.compile(r"before-(\d+)")
_MOVING = ".before.part"
"""What is set apart is collected here until it is complete."""
_GENERIC = ("run", "log", "output", "train", "metrics", "console", "stdout")
"""File names that do not tell one run from another."""


class RunFolder:
    """A run folder that this process has locked; it is created if it does not exist.

    It is identified by its path, and by a handle that stays with the folder if it is moved.
    """

    def __init__(self, path: Path, handle: int, is_made: bool) -> None:
        """Use `claim`."""
        self.path, self.handle = path, handle
        self.close = weakref.finalize(self, _close, path, handle, is_made)
        """Unlock it, as the end of the process does too; remove it if it was created here and is empty."""

    @classmethod
    def claim(cls, path: str | Path, new: bool = False) -> RunFolder:
        """Lock the folder `path` for this process; for a `new` run it must be empty.

        Raises:
            InputError: another process writes there, no folder can be created there, or it is not empty.
        """
        path = Path(path)
        if new:
            _check_empty(path)
        while True:
            try:
                is_made = not path.exists()
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if isinstance(error, FileExistsError) and not os.path.lexists(path):
                    continue  # the process that created it removed it before this one looked at it
                raise _cannot(path, error) from error
            try:
                folder = cls(path, lock(path, "another process is writing this run"), is_made)
            except FileNotFoundError:  # the process that created it has removed it
                continue
            except OSError as error:
                raise _cannot(path, error) from error
            try:
                if _leads_to(path, folder.handle):
                    if new:
                        check_unused(path)  # again: another run may have come and gone meanwhile
                    folder._end_moving()
                    return folder
            except OSError as error:
                folder.close()
                raise _cannot(path, error) from error
            except BaseException:
                folder.close()
                raise
            folder.close()  # it was removed after it was opened and before it was locked

    def here(self) -> Path:
        """Return its path, or its new path if it has been moved.

        Raises:
            WriteError: it was removed.
        """
        for path in (self.path, _path_of(self.handle)):
            if path and _leads_to(path, self.handle):
                return path
        raise WriteError(
            f"{self.path}: the run folder was removed, or moved to another file system, during the run; "
            "nothing more can be saved; scalerl train COPY --resume goes on with a copy, where there is one"
        )

    def open(self, name: str, flags: int) -> int:
        """Open a file in the folder, wherever that is, and return the handle.

        Raises:
            OSError: it cannot be opened.
        """
        return os.open(name, flags | os.O_CLOEXEC, 0o666, dir_fd=self.handle)

    def show(self, doing: activity.Activity) -> None:
        """Replace progress.json, wherever the folder is; if the disk refuses it, the old file stays.

        It is not synced, as it only shows a run in progress.
        """
        part = ".progress.part"
        with suppress(OSError):
            handle = self.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(dumps(doing.to_json()) + "\n")
            os.rename(part, activity.FILE, src_dir_fd=self.handle, dst_dir_fd=self.handle)

    def show_nothing(self) -> None:
        """Remove progress.json, as the run is no longer active."""
        with suppress(OSError):
            os.unlink(activity.FILE, dir_fd=self.handle)

    def set_apart(self) -> Path | None:
        """Move all that a run has left there into `before-N`, and return that; None if there was nothing.

        After a kill on the way, the next `claim` moves the files back, unless all had been moved.

        Raises:
            WriteError: a file cannot be moved.
        """
        here = self.here()
        try:
            names = [path.name for path in here.iterdir() if _SERVER_LOG.fullmatch(path.name)]
            names += [name for name in _OF_A_RUN if os.path.lexists(here / name)]
            if not names:
                return None
            (here / _MOVING).mkdir()
            for name in names:
                (here / name).rename(here / _MOVING / name)
            return _name_moved(here)
        except OSError as error:
            raise WriteError(
                f"{error.filename or here}: {error.strerror or error}; nothing is lost"
            ) from error

    def _end_moving(self) -> None:
        """Finish a `set_apart` that was killed: a run is in its place or set apart, never split."""
        moving = self.path / _MOVING
        if not moving.is_dir():
            return
        moved = [path.name for path in moving.iterdir()]
        is_all = not any(os.path.lexists(self.path / name) for name in _OF_A_RUN)
        # A name in both is from a run that was started since, and keeps its place: nothing is overwritten.
        if is_all or any(os.path.lexists(self.path / name) for name in moved):
            _name_moved(self.path)
            return
        for name in moved:
            (moving / name).rename(self.path / name)
        moving.rmdir()
        sync(self.path)


def _name_moved(folder: Path) -> Path:
    """Rename the folder of moved files to the next `before-N`."""
    numbers = [int(found[1]) for path in folder.iterdir() if (found := _BEFORE.fullmatch(path.name))]
    sync(folder / _MOVING)
    apart = (folder / _MOVING).rename(folder / f"before-{max(numbers, default=0) + 1}")
    sync(folder)
    return apart


def _leads_to(path: Path, handle: int) -> bool:
    """Return whether a path leads to the folder of a handle.

    A path that cannot be checked (a network disk that is away) counts as leading there: a run must not end
    because of what is not known.
    """
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    if os.path.samestat(there, os.fstat(handle)):
        return True
    # Some file systems give a folder another number each time; the kernel still knows its path.
    return _path_of(handle) == Path(os.path.realpath(path))


def _path_of(handle: int) -> Path | None:
    try:
        return Path(f"/proc/self/fd/{handle}").readlink()
    except OSError:  # not on Linux
        return None


def check_unused(folder: Path) -> None:
    """Raise InputError if `folder` cannot become a new run: a file, not empty, unreachable, or no access."""
    _check_empty(folder)
    check_writable(folder)


def _check_empty(folder: Path) -> None:
    with reading(folder):  # a name may be too long, or a folder on the way not be accessible
        is_folder = folder.is_dir()
        used = [path for path in folder.iterdir() if not _is_of_a_start(path)] if is_folder else []
        used += [folder] if folder.exists() and not is_folder else []
    if used:
        # Name what `rm -r RUN/*` leaves, as the folder seems to be empty.
        what = used[0] if all(path.name.startswith(".") for path in used) else folder
        raise InputError(f"{what} exists already: choose another folder with -o, or remove it")


def check_writable(folder: Path) -> None:
    """Raise InputError if no file can be created in `folder`, or where it would be; leaves nothing there."""
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _cannot(folder, error) from error


def _close(path: Path, handle: int, is_made: bool) -> None:
    if is_made and _leads_to(path, handle):  # else another process may have made what is there now
        with suppress(OSError):  # it is not empty; it is still locked, so no other run can have started in it
            path.rmdir()
    os.close(handle)


def _is_of_a_start(path: Path) -> bool:
    """Return whether a path is left by a run that was killed at its start, the log of a server, which starts
    before it, or an earlier run that was set apart.

    A cut that is under way is none of these: the first resume would apply it to the record of the new run.
    """
    known = any(name.fullmatch(path.name) for name in (_SERVER_LOG, _BEFORE))
    return known or path.name == activity.FILE or (is_aside(path) and path.name != CUT)


def _cannot(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder}: nothing can be written there ({error.strerror or error})")


def holds_run(path: Path) -> bool:
    """Return whether a path is a run folder, evaluated or not; OSError if it is not accessible."""
    return (path / "evals.jsonl").is_file() or _has_begun(path)


def runs_below(path: Path) -> list[str]:
    """Return the names of the run folders in a folder; OSError if that is not accessible."""
    return sorted(child.name for child in path.iterdir() if child.is_dir() and holds_run(child))


def _has_begun(path: Path) -> bool:
    """Return whether a run is starting there, or config.json is that of a run: models have one, too."""
    file = path / "config.json"
    try:
        return activity.read_activity(path) is not None or (file.is_file() and "schema" in read_object(file))
    except InputError:
        return False


def name_of_path(path: str | Path) -> str:
    """Return a printable name for a folder or a file, without the suffix of a file.

    A file with a name that all logs have, `run.log` or `metrics.jsonl`, gets the name of its folder.
    """
    path = Path(path)
    if not path.name:  # such as that of `.`
        path = path.resolve()
    if path.stem.lower() in _GENERIC and not path.is_dir():
        path = path.absolute().parent
    return printable((path.name if path.is_dir() else path.stem) or str(path))


def why_no_run(path: Path) -> str:
    """Return why a path cannot be read as a run folder."""
    if not path.is_dir():
        return "a file, not a run folder" if path.exists() else "no such run folder"
    if _has_begun(path):
        return "the run has no evaluation yet"
    if names := runs_below(path):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return f"a folder of runs; name one of them ({shown}), or see all with scalerl serve"
    return "no evals.jsonl in it, so it is no run folder; nor is it a log in a known format"
