"""trackio's local store: a SQLite file per project."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.errors import InputError
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import files_in, first_bytes
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.logs.log import Log, LogBuilder, Room, finite
from scalerl.jsonl import flat, parse_json

_MAGIC = b"SQLite format 3\0"
_COLUMNS = frozenset(("run_name", "step", "timestamp", "metrics"))
_STEPS_AT_ONCE, _STEPS_PER_BYTE = 100_000, 20
"""Of SQLite's machine: how many between two looks, and how many a sound file of so many bytes may take."""


def recognises(path: Path) -> bool:
    """Whether this is such a file, or a folder with some."""
    return any(map(_is_store, _stores(path))) if path.is_dir() else _is_store(path)


def read(path: Path, wanted: Wanted) -> list[Log | Unread]:
    """Read all runs of a project, or of all projects in a folder."""
    if not path.is_dir():
        if not _is_database(path):
            raise InputError(f"{path}: no SQLite file; expected trackio's, PROJECT.db")
        return [*_read_project(path, "", wanted, Room(str(path)))]
    stores = [one for one in _stores(path) if _is_store(one)]
    prefix, room = len(stores) > 1, Room(str(path))
    return each_run(
        path,
        ((one, one.stem) for one in stores),
        lambda one, name: _read_project(one, f"{name}/" * prefix, wanted, room),
        f"{path}: no trackio projects in it, PROJECT.db (symbolic links are left out)",
        room,
    )


FORMAT = Format("trackio", "trackio's local store, PROJECT.db or the folder of it", recognises, read)


def _stores(folder: Path) -> Iterator[Path]:
    return (file for file in files_in(folder) if file.suffix == ".db")


def _is_database(path: Path) -> bool:
    return first_bytes(path, len(_MAGIC)) == _MAGIC


def _is_store(path: Path) -> bool:
    if not _is_database(path):
        return False
    try:
        with _opened(path) as database:
            return _columns(database, "metrics") >= _COLUMNS
    except InputError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection that cannot write.

    What a run that goes on, or was killed, has not yet moved into the file itself is in another beside it,
    which SQLite reads only if it may take note of that there; without one the file is opened as
    immutable, which leaves no trace.

    Raises:
        InputError: SQLite cannot read the file.
    """
    ahead = path.with_name(f"{path.name}-wal")
    live = ahead.is_file() and ahead.stat().st_size > 0
    for end in ("-journal", "-shm"):  # SQLite would wait for ever for a pipe to be written to
        beside = path.with_name(path.name + end)
        live = live and (beside.is_file() or not beside.exists())
    uri = f"{path.absolute().as_uri()}?mode=ro{'' if live else '&immutable=1'}"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=10)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.ROW.most)
            database.execute("PRAGMA trusted_schema = OFF")
            # Pages of a damaged file may lead to one another in a circle, or a hundred of them to each of a
            # hundred: SQLite is stopped once it works for longer than a file of this size can need.
            left = itertools.count(10 + _bytes_of(path) * _STEPS_PER_BYTE // _STEPS_AT_ONCE, -1)
            database.set_progress_handler(lambda: next(left) < 0, _STEPS_AT_ONCE)
            yield database
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter in its messages on a damaged file
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise InputError(
                f"{path}: damaged, its pages lead to one another more often than sound ones"
            ) from error
        raise InputError(f"{path}: SQLite cannot read it ({error}); expected trackio's PROJECT.db") from error


def _bytes_of(path: Path) -> int:
    """Return the size of the file and of its write-ahead log."""
    ahead = path.with_name(f"{path.name}-wal")
    return path.stat().st_size + (ahead.stat().st_size if ahead.is_file() else 0)


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of a table; none where it is missing, or a view, which may take forever."""
    kind = database.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    if kind != ("table",):
        return set()
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}


def _read_project(path: Path, prefix: str, wanted: Wanted, room: Room) -> list[Log]:
    builders: dict[str, LogBuilder] = {}
    texts, size = 0, _bytes_of(path)
    with _opened(path) as database:
        columns = _columns(database, "metrics")
        if not columns >= _COLUMNS:
            raise InputError(f"{path}: no table of metrics as trackio has it")
        run = "run_id" if "run_id" in columns else "run_name"  # before 0.24 a run was its name
        order = "ORDER BY id" if "id" in columns else ""
        rows = database.execute(f"SELECT {run}, run_name, step, timestamp, metrics FROM metrics {order}")
        for line, (key, name, step, time, text) in enumerate(rows, start=1):
            # Not the key, which before 0.24 is the name again.
            texts += sum(len(cell) for cell in (name, time, text) if isinstance(cell, str | bytes))
            if texts > size:
                raise InputError(f"{path}: damaged, its rows have more bytes than the file ({size:,})")
            builder = builders.get(str(key))
            if builder is None:
                limits.FOUND.check(len(builders) + 1, path)
                builder = LogBuilder(str(path), "trackio", f"{prefix}{name}", wanted, room)
                builders[str(key)] = builder
            row = flat(_object(text, path), separator="/", where=str(path))
            builder.add(finite(step), unix_seconds(time), row, line)
        if _columns(database, "configs") >= {run, "config"}:
            for key, text in database.execute(f"SELECT {run}, config FROM configs"):
                if str(key) in builders:
                    config = flat(_object(text, path), where=str(path)).items()
                    builders[str(key)].config.update(one for one in config if not one[0].startswith("_"))
    return [builder.build() for builder in builders.values()]


def _object(text: Any, path: Path) -> Mapping[str, Any]:
    """Parse a cell with a JSON object, which some versions store as a text and some as bytes."""
    if not isinstance(text, str | bytes):  # bytes() of a number would be so many zeros
        raise InputError(f"{path}: a row of trackio's holds a {type(text).__name__}, expected a text of JSON")
    try:
        found = parse_json(text.encode() if isinstance(text, str) else text, str(path))
    except ValueError as error:
        raise InputError(f"{path}: a row of trackio's is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: a row of trackio's is no JSON object")
    return found
