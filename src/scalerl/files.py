"""Files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import math
import os
import re
import secrets
import select
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, TypeVar

from scalerl.errors import InputError

_LONGEST_NAME_BYTES = 100
_RETRY, _SELDOM = 1.0, 60.0
"""Seconds after which a read that failed is tried again: the first time, and after many."""
_PATIENCE = 10
"""A read that failed is followed by at least this many times its length without another."""
_PIPE_SECONDS = 5.0
"""How long a named pipe is waited for that nothing writes to."""
_KERNEL = frozenset(
    (
        *("proc", "sysfs", "debugfs", "tracefs", "securityfs", "configfs", "cgroup", "cgroup2", "bpf"),
        *("pstore", "efivarfs", "fusectl", "mqueue", "devpts", "binfmt_misc", "selinuxfs", "rpc_pipefs"),
    )
)
"""File systems whose files are made by the kernel as they are read."""
_T = TypeVar("_T")


def open_input(path: Path) -> BinaryIO:
    """Open a file that a user names, or a pipe that something writes to.

    Raises:
        InputError: it is a device, a socket, a file of the kernel's, or a named pipe that nothing writes to.
        OSError: it cannot be opened.
    """
    check_input(path, pipes=True)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # which else waits for a writer
    try:
        if stat.S_ISFIFO(os.fstat(handle).st_mode) and not _has_writer(handle, path):
            raise InputError(f"{path}: a pipe, to which nothing was written in {_PIPE_SECONDS:g} s")
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise an InputError that names `path` for what the system refuses within: an unreadable folder, say."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def check_input(path: Path, pipes: bool = False) -> None:
    """Raise an InputError unless a path is a folder or a file, or a pipe where these may be read.

    Files of the kernel are said to be regular and have 0 bytes, or 4096, or 128 TB (/proc/kcore); to read
    one may wait for ever (/proc/kmsg) or do something. The file system that they are on tells them apart.

    Raises:
        OSError: there is no such path, or it may not be reached.
    """
    found = path.stat()
    if stat.S_ISFIFO(found.st_mode) and pipes:
        return
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        is_device = stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)
        if pipes:
            what = "a device" if is_device else "a socket"
            raise InputError(f"{path}: {what}; expected a file, or - for standard input")
        raise InputError(f"{path}: a pipe, a socket or a device; expected a file or a folder")
    if (kind := _kernel_systems().get(found.st_dev)) is not None:
        raise InputError(
            f"{path}: of the kernel's own ({kind}), no log; expected a file or a folder on a disk"
        )


def _has_writer(handle: int, path: Path) -> bool:
    """Whether something comes out of a pipe; one without a name has a writer, however long that takes."""
    try:
        is_named = stat.S_ISFIFO(os.lstat(os.path.realpath(path)).st_mode)
    except OSError:  # /dev/fd/63 leads to a name that is none
        is_named = False
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(_PIPE_SECONDS * 1000 if is_named else None))


@cache
def _kernel_systems() -> dict[int, str]:
    """The devices of all mounted file systems of the kernel's, and their kinds; none but on Linux."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for mount in mounts:
        about, _, more = mount.partition(" - ")
        kind = more.split(" ", 1)[0]
        if kind in _KERNEL:
            major, minor = about.split(" ")[2].split(":")
            found[os.makedev(int(major), int(minor))] = kind
    return found


def write_atomically(path: Path, text: str | Iterable[str], errors: str = "strict") -> None:
    """Write `text`, or its parts, to `path` whole or not at all: aside, synced, then renamed.

    `errors` is what becomes of letters that UTF-8 has not, as of `open`.
    """
    aside = path.with_name(f".{secrets.token_hex(8)}.part")
    # Made here, and under a name of its own: nothing is written through a link that was there, or that
    # another process writes to. The permissions are those that a plain `open` gives.
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors=errors) as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def is_aside(path: Path) -> bool:
    """Whether a file is, by its name, what `write_atomically` leaves behind when it is killed."""
    return path.name.startswith(".") and path.suffix == ".part"


def lock(folder: Path, busy: str) -> int:
    """Lock a folder for this process, until the handle that is returned is closed or the process ends.

    Raises:
        InputError: another process has locked it (`busy` says what for), or its file system locks no files.
        OSError: there is no such folder, or it is none.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        why = f"its file system locks no files ({error.strerror})"
        raise InputError(f"{folder}: {busy if isinstance(error, BlockingIOError) else why}") from None
    return handle


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_name(name: str, empty: str = "_") -> str:
    """A name as that of a folder, which every file system takes; `empty` where nothing of it is left.

    Names that differ may come out alike, but for long ones.
    """
    kept = re.sub(r"[^\w.=+-]+", "_", name).strip("._") or empty
    if len(kept.encode()) <= _LONGEST_NAME_BYTES:
        return kept
    import hashlib

    # What is cut off may be all that tells two names apart.
    start = kept.encode()[:_LONGEST_NAME_BYTES].decode(errors="ignore")
    return f"{start}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


Signature = tuple[Any, ...]


def signature(path: Path) -> Signature | None:
    """Something that is another once what is at `path` has changed; None where nothing is, or may be seen.

    Of a run folder the files that are read count, of another folder all that is below it.
    """
    place = os.fspath(path)  # joined as text, which takes a fifth of the time of joining paths
    if (evals := _state(f"{place}/evals.jsonl")) is not None:
        return evals, *(_state(f"{place}/{name}") for name in _OF_RUNS)
    try:
        is_folder = stat.S_ISDIR(os.stat(place).st_mode)  # noqa: PTH116
    except OSError:
        return None
    if not is_folder:
        # SQLite writes what is new beside the file, and into it when it comes to that.
        return tuple(_state(place + end) for end in _BESIDE)
    return tuple(
        (name, _state(f"{folder}/{name}"))
        for folder, _, names in os.walk(place)
        for name in sorted(names)
        if not name.endswith("-shm")  # SQLite's, which whoever reads writes to
    )


def written(path: Path) -> float:
    """Unix seconds at which anything that `signature` looks at was written to last; NaN where nothing is."""
    return _last_write(signature(path))


def _last_write(found: Signature | None) -> float:
    states = [entry[1] if entry and isinstance(entry[0], str) else entry for entry in found or ()]
    return max((state[-1] / 1e9 for state in states if state), default=math.nan)


class Changing:
    """What is at `path`, read when it has changed since.

    A read that failed is tried again though nothing has changed, ever more seldom: what was wrong may leave
    no trace there when it is over, as a permission or a lock does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: object = object()
        self._now: Signature | None = None
        self._wait, self._again = 0.0, math.inf

    def is_due(self) -> bool:
        """Whether `read` would read."""
        self._now = signature(self.path)
        return self._now != self._seen or monotonic() >= self._again

    @property
    def written(self) -> float:
        """Unix seconds of the last write, as of the last look; minus infinity where that is not known."""
        at = _last_write(self._now)
        return -math.inf if math.isnan(at) else at

    def read(self, reader: Callable[[], _T]) -> _T | None:
        """What `reader` returns, or raises; None where it is not yet time for it."""
        if not self.is_due():
            return None
        started = monotonic()
        if self._now != self._seen:
            self._wait = 0.0
        self._seen, self._again = self._now, math.inf
        try:
            return reader()
        except Exception:
            self._wait = min(max(2 * self._wait, _RETRY), _SELDOM)
            ended = monotonic()
            self._again = ended + max(self._wait, _PATIENCE * (ended - started))
            raise


_BESIDE = ("", "-wal", "-journal")
_OF_RUNS = (
    *("config.json", "steps.jsonl", "alarms.jsonl", "forecasts.jsonl"),
    "checkpoints/final",
)


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        now = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return now.st_ino, now.st_size, now.st_mtime_ns
