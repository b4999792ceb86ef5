"""Files: inputs that users name, atomic writes, locks, and sources that change."""

import errno
import math
import os
import re
import select
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, TypeVar

from scalerl.errors import InputError, WriteError, brief

_LONGEST_NAME_BYTES = 100
_RETRY, _SELDOM = 1.0, 60.0
"""Seconds until a failed read is retried: the first time, and after many failures."""
_BACK_OFF = 10
"""A failed read is followed by a pause of at least this many times its duration."""
_PIPE_SECONDS = 5.0
"""How long to wait for data from a named pipe."""
_KERNEL = frozenset(
    (
        *("proc", "sysfs", "debugfs", "tracefs", "securityfs", "configfs", "cgroup", "cgroup2", "bpf"),
        *("pstore", "efivarfs", "fusectl", "mqueue", "devpts", "binfmt_misc", "selinuxfs", "rpc_pipefs"),
    )
)
"""File systems whose files the kernel generates on reading."""
_UNIX_ONLY = ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC")
_NO_WAIT, _NO_LINK, _NOT_INHERITED = (getattr(os, name, 0) for name in _UNIX_ONLY)
"""Flags of `os.open`; 0 on Windows, which lacks them and lets no child process inherit files anyway."""
_BINARY = getattr(os, "O_BINARY", 0)
"""The flag that stops Windows from translating line ends."""
_T = TypeVar("_T")


def as_path(path: str | Path) -> Path:
    """Convert a user's argument to a path; raise an InputError if it cannot be one."""
    try:
        return Path(path)
    except TypeError:
        raise InputError(f"expected the path of a file or folder, found {brief(path)}") from None


def open_input(path: Path) -> BinaryIO:
    """Open a file named by the user, or a pipe that has a writer.

    Raises:
        InputError: it is a device, a socket, a kernel file, or a named pipe without a writer.
        OSError: it cannot be opened.
    """
    check_input(path, pipes=True)
    # Non-blocking, as opening a pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | _NO_WAIT | _NOT_INHERITED | _BINARY)
    try:
        if stat.S_ISFIFO(os.fstat(handle).st_mode):
            if not _has_writer(handle, path):
                raise InputError(f"{path}: a pipe, to which nothing was written in {_PIPE_SECONDS:g} s")
            os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an OSError in the block into an InputError that names `path`."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


@contextmanager
def writing(path: str | Path, more: str = "") -> Iterator[None]:
    """Turn an OSError in the block into a WriteError that names `path`; `more` is appended to the message."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}{more}") from error


def check_input(path: Path, pipes: bool = False) -> None:
    """Raise an InputError unless a path is a folder or a file, or, with `pipes`, a pipe.

    Kernel files claim to be regular and to have 0 bytes, 4096, or 128 TB (/proc/kcore). Reading one may block
    for ever (/proc/kmsg) or have side effects. Only their file system tells them from other files.

    Raises:
        OSError: there is no such path, or access is denied.
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
        raise InputError(f"{path}: a kernel file ({kind}), not a log; expected a file or a folder on a disk")


def _has_writer(handle: int, path: Path) -> bool:
    """Whether a pipe delivers data in time; an unnamed pipe has a writer, and no time limit."""
    try:
        is_named = stat.S_ISFIFO(os.lstat(os.path.realpath(path)).st_mode)
    except OSError:  # /dev/fd/63 resolves to no real name
        is_named = False
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(_PIPE_SECONDS * 1000 if is_named else None))


@cache
def _kernel_systems() -> dict[int, str]:
    """Return the kinds of all mounted kernel file systems, by device number; empty except on Linux."""
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
    """Write `text`, or its parts, to `path` atomically: write and sync another file, then rename it.

    `errors` is as for `open`.

    Raises:
        OSError: `path` cannot be written, or is a device, a pipe or a socket.
    """
    if path.is_dir():  # `.` has no name from which to make that of a file beside it
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # The rename would replace a device (/dev/null) or a link (/dev/stdout) by a file, for the whole system.
    is_other = path.exists() and not path.is_file()
    if is_other or os.path.realpath(path.parent) == "/dev":
        raise OSError(errno.EINVAL, "a device, a pipe or a socket; expected the name of a file")
    aside = path.with_name(f".{os.urandom(8).hex()}.part")
    # A new file with a random name, so that no existing link or file of another process is written to.
    # The permissions are those of a plain `open`.
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | _NOT_INHERITED | _BINARY, 0o666)
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
    """Whether the name of a file marks it as a left-over of a killed `write_atomically`."""
    return path.name.startswith(".") and path.suffix == ".part"


def lock(folder: Path, busy: str) -> int:
    """Lock a folder for this process, until the returned handle is closed or the process exits.

    Raises:
        InputError: another process has locked it (`busy` is the message), or its file system has no locks,
            or this is Windows.
        OSError: there is no such folder.
    """
    try:
        import fcntl  # absent on Windows, where logs can still be read and fitted
    except ImportError:
        raise InputError(f"{folder}: run folders are written on Linux and macOS only") from None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        why = f"its file system locks no files ({error.strerror})"
        raise InputError(f"{folder}: {busy if isinstance(error, BlockingIOError) else why}") from None
    return handle


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cache_folder() -> Path:
    """Return the folder of base models and compiled C: $SCALERL_CACHE, or else one in the user's cache."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SCALERL_CACHE") or Path(user) / "scalerl")


def folder_name(name: str, empty: str = "_") -> str:
    """Turn a name into a folder name that every file system accepts; `empty` if no character remains.

    Different names may give the same folder name, except for long ones, which get a hash.
    """
    kept = re.sub(r"[^\w.=+-]+", "_", name).strip("._") or empty
    if len(kept.encode()) <= _LONGEST_NAME_BYTES:
        return kept
    import hashlib

    # Two long names may differ only beyond the cut.
    start = kept.encode()[:_LONGEST_NAME_BYTES].decode(errors="ignore")
    return f"{start}_{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


Signature = tuple[Any, ...]


def signature(path: Path) -> Signature | None:
    """Return a value that changes when the content of `path` changes; None if `path` cannot be read.

    It covers the files of a run folder that readers use, and all files below any other folder.
    """
    place = os.fspath(path)  # joining strings takes a fifth of the time of joining paths
    if (evals := _state(f"{place}/evals.jsonl")) is not None:
        return evals, *(_state(f"{place}/{name}") for name in _OF_RUNS)
    try:
        is_folder = stat.S_ISDIR(os.stat(place).st_mode)  # noqa: PTH116
    except OSError:
        return None
    if not is_folder:
        # SQLite writes new data first to files beside the database, and only later to the database.
        return tuple(_state(place + end) for end in _BESIDE)
    return tuple(
        (name, _state(f"{folder}/{name}"))
        for folder, _, names in os.walk(place)
        for name in sorted(names)
        if not name.endswith("-shm")  # SQLite's readers write to these files
    )


def written(path: Path) -> float:
    """Return the Unix seconds of the last write to what `signature` covers; NaN if there is nothing."""
    return _last_write(signature(path))


def _last_write(found: Signature | None) -> float:
    states = [entry[1] if entry and isinstance(entry[0], str) else entry for entry in found or ()]
    return max((state[-1] / 1e9 for state in states if state), default=math.nan)


class Changing:
    """Reads a path again only when it has changed.

    A failed read is retried with back-off even without a change, as some failures (permissions, locks) end
    without a trace in the file. With `always`, every call reads it, as for a source on a server.
    """

    def __init__(self, path: Path, always: bool = False) -> None:
        self.path = path
        self._always = always
        self._seen: object = object()
        self._now: Signature | None = None
        self._wait, self._again = 0.0, math.inf

    def is_due(self) -> bool:
        """Whether `read` would call its reader now."""
        self._now = signature(self.path)
        return self._always or self._now != self._seen or monotonic() >= self._again

    @property
    def written(self) -> float:
        """Unix seconds of the last write, as of the last `is_due`; minus infinity if unknown."""
        at = _last_write(self._now)
        return -math.inf if math.isnan(at) else at

    def read(self, reader: Callable[[], _T]) -> _T | None:
        """Return the result of `reader`, or None if no read is due."""
        if not self.is_due():
            return None
        started = monotonic()
        if self._now != self._seen:
            self._wait = 0.0
        # The signature from before the read, so that a change during it is due again.
        self._seen, self._again = self._now, math.inf
        try:
            return reader()
        except Exception:
            self._wait = min(max(2 * self._wait, _RETRY), _SELDOM)
            ended = monotonic()
            self._again = ended + max(self._wait, _BACK_OFF * (ended - started))
            raise


_BESIDE = ("", "-wal", "-journal")
_OF_RUNS = (*("config.json", "steps.jsonl", "alarms.jsonl", "forecasts.jsonl"), "checkpoints/final")


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        now = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return now.st_ino, now.st_size, now.st_mtime_ns
