"""The runs in a folder and below it: run folders, and logs as `scalerl fit` recognises them.

Folders are recognised by the names in them. Files with the suffix of a log are recognised by their first
bytes, and read again only if the answer may have changed. A scan starts no such read after 0.2 seconds, so a
folder with many logs is listed over several scans.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from scalerl.errors import InputError
from scalerl.ingest.formats.console.reader import CONSOLE_SUFFIXES
from scalerl.ingest.formats.lines import HEAD
from scalerl.ingest.formats.recognise import formats
from scalerl.ingest.load import log_format

_DEEPEST = 12
_MOST_FOLDERS = 50_000
"""If there are more folders (in a home, by mistake), the others are not listed, and an entry says so."""
_SETTLED = 2.0
"""Seconds without change before a folder's list is kept: the resolution of the coarsest clock in use."""
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_WANDB_RUN = re.compile(r"(offline-)?run-.+")
_SUFFIXES = (".jsonl", ".csv", ".db", ".parquet", *CONSOLE_SUFFIXES)
"""Suffixes of files that may be logs."""
_JSONL, _PROCESSES = "metrics.jsonl", ("trainer", "orchestrator")
"""Files of prime-rl: in the folder of a run, or in folders of its processes inside it."""
_BESIDE = ("-wal", "-journal", "-shm")
_LOOK_SECONDS = 0.2
_SMALL = 2**14
_WANDB_LOG = re.compile(r"debug(-\w+)?\.log")


@dataclass(frozen=True)
class Entry:
    """A folder or file with a run, or with the runs of a log; `path` is real, and in the listed folder."""

    id: str
    """The id that a browser uses: it is looked up, and never made into a path."""
    path: Path
    shown: str
    """The path relative to the listed folder."""
    format: str
    """`run` for a run folder, else the name of a format of `scalerl.ingest`; empty for an unread folder."""
    refused: str = ""
    """Why it is not read; empty if it is."""


class Listing:
    """The runs in the real folder `root`. Folders are listed again only when they have changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folders, self._files = _Folders(), _LogFiles()
        self._entries: dict[tuple[str, str, str], Entry] = {}
        with suppress(InputError):  # raised by a reader that a package announces
            list(formats())  # imports all readers, so that this does not count as the time of a scan

    def scan(self) -> dict[str, Entry]:
        """Return the entries by id, in the order of their paths.

        Links to folders are not followed; a run with a file that is a link out of `root` is rejected. A
        folder that cannot be read becomes an entry that says so, as there may be runs in it; so does `root`
        if it has too many folders.
        """
        self._folders, self._files = _Folders(self._folders), _LogFiles(self._files)
        before, self._entries = self._entries, {}
        for found in self._found():
            if (entry := before.get(found)) is None:
                folder, format, unread = found
                shown = os.fsencode(Path(folder).relative_to(self.root).as_posix())
                name = hashlib.blake2b(shown, digest_size=8).hexdigest()
                entry = Entry(name, Path(folder), shown.decode(errors="replace"), format, unread)
            self._entries[found] = entry
        entries = sorted(self._entries.values(), key=lambda entry: entry.shown)
        return {entry.id: _refuse_links(entry, self.root, self._folders) for entry in entries}

    def check(self, entry: Entry) -> Entry:
        """Return the entry, rejected if its links lead out of the folder by now."""
        return _refuse_links(entry, self.root, _Folders())

    def _found(self) -> Iterator[tuple[str, str, str]]:
        """Yield folders and files with runs: path, format, and why one cannot be read.

        There is no search below the folder of a run.
        """
        root = str(self.root)
        waiting, count = [(root, 0)], 0
        while waiting and count < _MOST_FOLDERS:
            folder, depth = waiting.pop()
            count += 1
            try:
                found = self._folders.of(folder)
            except OSError as error:
                # A folder other than the root may just have been removed.
                if folder == root or not isinstance(error, FileNotFoundError):
                    yield folder, "", f"the folder cannot be read: {error.strerror or error}"
                continue
            if format := _format(folder, found.names, found.below):
                yield folder, format, ""
                if format != "trainer-state" or not _is_broken(folder, found):
                    continue
                found = replace(found, below=())  # not below, where its checkpoints are
            elif self._is_of_processes(folder, found):
                yield folder, "jsonl", ""
                continue
            for name in sorted(found.names - {*found.below, *found.links}):
                path = f"{folder}/{name}"
                if name.endswith(_SUFFIXES) and (format := self._files.format_of(path)):
                    yield path, format, ""
            if depth < _DEEPEST:
                names = (name for name in found.below if not name.startswith("."))
                waiting += [(f"{folder}/{name}", depth + 1) for name in names]
        if waiting:
            why = f"only {_MOST_FOLDERS:,} folders were looked into: runs in the others are not listed"
            yield root, "", why

    def _is_of_processes(self, folder: str, found: _Folder) -> bool:
        """Whether this is a run's folder with its metrics in `_JSONL`, or in one such file per process."""
        places = [folder] if _JSONL in found.names else []
        for name in set(_PROCESSES) & set(found.below):
            try:
                places += [f"{folder}/{name}"] * (_JSONL in self._folders.of(f"{folder}/{name}").names)
            except OSError:
                continue
        return any(self._files.format_of(f"{place}/{_JSONL}") == "jsonl" for place in places)


@dataclass(frozen=True)
class _Folder:
    """The names in a folder: of all entries, of folders, and of links."""

    names: frozenset[str]
    below: tuple[str, ...]
    links: tuple[str, ...]


class _Folders:
    """Lists folders, each once. A folder that has not changed since it was listed `before` is not listed
    again: that takes one system call instead of four, for 2,000 runs every second."""

    def __init__(self, before: _Folders | None = None) -> None:
        self._before = before._kept if before is not None else {}
        self._kept: dict[str, tuple[tuple[int, ...], _Folder]] = {}
        self._current: dict[str, _Folder] = {}

    def of(self, path: str) -> _Folder:
        """Return the entries of a folder.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        if (known := self._current.get(path)) is not None:
            return known
        now = os.stat(path)  # noqa: PTH116
        # Include ctime, which no user can set back.
        state = (now.st_dev, now.st_ino, now.st_mtime_ns, now.st_ctime_ns)
        listed, (before, found) = time.time(), self._before.get(path, ((), None))
        if found is None or before != state:
            with os.scandir(path) as entries:
                own = list(entries)
            found = _Folder(
                frozenset(one.name for one in own),
                tuple(one.name for one in own if one.is_dir(follow_symlinks=False)),
                tuple(one.name for one in own if one.is_symlink()),
            )
        # A change within the same tick of the file system's clock would not be seen.
        if listed - max(now.st_mtime, now.st_ctime) > _SETTLED:
            self._kept[path] = state, found
        self._current[path] = found
        return found


class _LogFiles:
    """Recognises logs by the first bytes of files, which are read again only if they may have changed."""

    def __init__(self, before: _LogFiles | None = None) -> None:
        self._before = before._known if before is not None else {}
        self._known: dict[str, tuple[tuple[int, int, int], str]] = {}
        self._due = time.monotonic() + _LOOK_SECONDS

    def format_of(self, path: str) -> str:
        """Return the format of a file; empty if it is not a log, or if there was no time to check yet."""
        try:
            now = os.stat(path, follow_symlinks=False)  # noqa: PTH116
        except OSError:
            return ""
        state = (now.st_ino, now.st_size, now.st_mtime_ns)
        before, format = self._before.get(path, (None, ""))
        if before is not None:
            self._known[path] = before, format
            if before[0] == state[0]:
                is_log_still = format and state[1] >= before[1]
                # Checking a megabyte of text takes .3 s, so a growing file is checked at twice the size.
                is_none_still = not format and _SMALL <= before[1] <= state[1] < 2 * before[1]
                if is_log_still or is_none_still or state == before or min(state[1], before[1]) >= HEAD:
                    return format
        if time.monotonic() >= self._due:
            return format
        with suppress(InputError, OSError):  # it may become readable later
            format = log_format(Path(path))
            self._known[path] = state, format
        return format


def _refuse_links(entry: Entry, root: Path, folders: _Folders) -> Entry:
    """Reject an entry with links out of the folder; checked every time, as their targets may change."""
    if not entry.format:
        return entry
    place = str(entry.path)
    links = _links(place, folders)
    if place.endswith(".db"):  # SQLite follows the links beside its files
        links = filter(os.path.islink, [place + end for end in _BESIDE])
    # Not `Path.resolve`, which raises for a link to itself.
    out = next((one for one in links if not Path(os.path.realpath(one)).is_relative_to(root)), None)
    why = f"{os.path.basename(out)} is a link that leads out of the folder" if out else ""  # noqa: PTH119
    return entry if why == entry.refused else replace(entry, refused=why)


def _links(folder: str, folders: _Folders, below: int = 3) -> Iterator[str]:
    """Yield the links in a folder and as deep below it as any reader looks (wandb/wandb/run-*/*.wandb).

    Links to W&B's own log, `debug-core.log` in the user's cache, are left out, as no reader opens them.
    """
    try:
        found = folders.of(folder)
    except OSError:
        return
    for name in found.links:
        link = f"{folder}/{name}"
        # Not `Path.is_dir`, which raises if access is denied.
        if not _WANDB_LOG.fullmatch(name) or os.path.isdir(link):  # noqa: PTH112
            yield link
    for name in found.below if below else ():
        if name != "checkpoints":
            yield from _links(f"{folder}/{name}", folders, below - 1)


def _is_broken(folder: str, found: _Folder) -> bool:
    """Whether a folder has other logs but no complete trainer state, as after a kill during a save."""
    places = [folder, *(f"{folder}/{name}" for name in found.below if _CHECKPOINT.fullmatch(name))]
    others = any(name.endswith(_SUFFIXES) for name in found.names)
    return others and not any(_ends_whole(Path(place, "trainer_state.json")) for place in places)


def _ends_whole(state: Path) -> bool:
    try:
        with state.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 64, 0))
            return file.read(64).rstrip().endswith(b"}")
    except OSError:
        return False


def _format(folder: str, names: Collection[str], below: Sequence[str]) -> str:
    """Return the format of a folder from names alone; empty if it has none."""
    if "evals.jsonl" in names:
        return "run"
    states = (Path(folder, name, "trainer_state.json") for name in below if _CHECKPOINT.fullmatch(name))
    if "trainer_state.json" in names or any(state.is_file() for state in states):
        return "trainer-state"
    if any("tfevents" in name for name in names):
        return "tensorboard"
    if "meta.yaml" in names and (
        "metrics" in below or any(Path(folder, name, "metrics").is_dir() for name in below)
    ):
        return "mlflow"
    if any(name.endswith(".wandb") for name in names) or (
        folder.rpartition("/")[2] == "wandb" and any(map(_WANDB_RUN.fullmatch, below))
    ):
        return "wandb"
    return ""
