"""SQLite files of trackers: recognised by their tables, and read while another program writes to them."""

import itertools
import sqlite3
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from scalerl import limits
from scalerl.errors import InputError
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import files_in, first_bytes
from scalerl.ingest.logs.log import Log, Room

_MAGIC = b"SQLite format 3\0"
_WAL = struct.Struct("18xB")
"""The byte of the header that is 2 where new rows go to a write-ahead log, a file beside this one."""
_STEPS_AT_ONCE, _STEPS_PER_BYTE = 100_000, 20
"""Of SQLite's machine: how many between two looks, and how many a sound file of so many bytes may take."""


@dataclass(frozen=True)
class Database:
    """An open file of a tracker, whose runs are to be read."""

    path: Path
    sql: sqlite3.Connection
    wanted: Wanted
    room: Room
    prefix: str
    """What goes before the names of its runs."""
    size: int
    """Bytes of the file and of its write-ahead log."""

    def check_texts(self, length: int) -> None:
        """Raise an InputError if the rows that were read so far have more bytes than the file."""
        if length > self.size:
            raise InputError(f"{self.path}: damaged, its rows have more bytes than the file ({self.size:,})")


@dataclass(frozen=True)
class Store:
    """How a tracker keeps runs in SQLite files."""

    name: str
    """That of the format."""
    what: str
    """A description in a few words, for help and messages."""
    tracker: str
    file: str
    """How the tracker names such a file."""
    tables: Mapping[str, Collection[str]]
    """The tables that tell such a file from others, and columns that they must have."""
    read: Callable[[Database], list[Log]]

    def format(self) -> Format:
        """Return the format of a file, or of a folder with some."""
        return Format(self.name, self.what, self._recognises, self._read)

    def _recognises(self, path: Path) -> bool:
        return any(map(self._is_one, _candidates(path))) if path.is_dir() else self._is_one(path)

    def _read(self, path: Path, wanted: Wanted) -> list[Log | Unread]:
        """Read all runs of a file, or of all such files in a folder."""
        room = Room(str(path))
        if not path.is_dir():
            if not _is_database(path):
                raise InputError(f"{path}: no SQLite file; expected {self._expected}")
            return [*self._read_file(path, wanted, room, "")]
        files = [one for one in _candidates(path) if self._is_one(one)]
        prefix = len(files) > 1
        return each_run(
            path,
            ((one, one.stem) for one in files),
            lambda one, name: self._read_file(one, wanted, room, f"{name}/" * prefix),
            f"{path}: no SQLite files of {self.tracker} in it, {self.file} (symbolic links are left out)",
            room,
        )

    def _read_file(self, path: Path, wanted: Wanted, room: Room, prefix: str) -> list[Log]:
        with self._opened(path) as sql:
            if not self._has_tables(sql):
                raise InputError(f"{path}: no tables as {self.tracker} has them; expected {self._expected}")
            return self.read(Database(path, sql, wanted, room, prefix, _bytes_of(path)))

    def _is_one(self, path: Path) -> bool:
        if not _is_database(path):
            return False
        try:
            with self._opened(path) as sql:
                return self._has_tables(sql)
        except InputError:
            return False

    def _has_tables(self, sql: sqlite3.Connection) -> bool:
        return all(columns_of(sql, table) >= {*columns} for table, columns in self.tables.items())

    @property
    def _expected(self) -> str:
        return f"{self.tracker}'s {self.file}"

    @contextmanager
    def _opened(self, path: Path) -> Iterator[sqlite3.Connection]:
        """Open a connection that cannot write."""
        uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if _is_at_rest(path) else ''}"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=10)) as sql:
                sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.ROW.most)
                sql.execute("PRAGMA trusted_schema = OFF")
                # Pages of a damaged file may lead to one another in a circle, or a hundred of them to each of
                # a hundred: SQLite is stopped once it works for longer than a file of this size can need.
                left = itertools.count(10 + _bytes_of(path) * _STEPS_PER_BYTE // _STEPS_AT_ONCE, -1)
                sql.set_progress_handler(lambda: next(left) < 0, _STEPS_AT_ONCE)
                yield sql
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter in its messages on a damaged file
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise InputError(
                    f"{path}: damaged, its pages lead to one another more often than sound ones"
                ) from error
            raise InputError(f"{path}: SQLite cannot read it ({error}); expected {self._expected}") from error


def columns_of(sql: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of a table; none where it is missing, or a view, which may take forever."""
    kind = sql.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    if kind != ("table",):
        return set()
    return {row[1] for row in sql.execute(f"PRAGMA table_info({table})")}


def _candidates(folder: Path) -> Iterator[Path]:
    return (file for file in files_in(folder) if file.suffix == ".db")


def _is_database(path: Path) -> bool:
    return first_bytes(path, len(_MAGIC)) == _MAGIC


def _is_at_rest(path: Path) -> bool:
    """Whether nothing writes to a file, so that it may be opened as immutable: without locks, and untouched.

    With a write-ahead log, what a run that goes on, or was killed, has not yet moved into the file itself is
    in that log, which SQLite reads only if it may take note of that in another file, `-shm`; while there is
    no log, opening the file as immutable leaves no trace. Any other file is locked while it is read, as a
    server may write to it, and pages from before and after a write would be mixed.
    """
    header = first_bytes(path, _WAL.size)
    has_log = len(header) == _WAL.size and _WAL.unpack(header) == (2,)
    beside = path.with_name(f"{path.name}-wal")
    if has_log and not (beside.is_file() and beside.stat().st_size > 0):
        return True
    ends = ("-wal", "-journal", "-shm")  # SQLite would wait for ever for a pipe to be written to
    others = (path.with_name(path.name + end) for end in ends)
    return any(other.exists() and not other.is_file() for other in others)


def _bytes_of(path: Path) -> int:
    """Return the size of the file and of its write-ahead log."""
    ahead = path.with_name(f"{path.name}-wal")
    return path.stat().st_size + (ahead.stat().st_size if ahead.is_file() else 0)
