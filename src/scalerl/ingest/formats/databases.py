"""The SQLite files of trackers, MLflow and trackio, read while another program may write to them.

MLflow's is `mlflow.db`, its default since MLflow 3, with all experiments; trackio has one for each project.
"""

import itertools
import math
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.errors import InputError
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import files_in, first_bytes
from scalerl.ingest.formats.mlflow import as_logged, parameter
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.formats.wandb_offline import Segment, build_log, is_own_step
from scalerl.ingest.logs.log import Log, LogBuilder, Room, finite
from scalerl.jsonl import flat, parse_json, why_not_json

_MAGIC = b"SQLite format 3\0"
_WAL = struct.Struct("18xB")
"""The byte of the header that is 2 if new rows go to a write-ahead log, a file beside this one."""
_STEPS_AT_ONCE, _STEPS_PER_BYTE = 100_000, 20
"""Steps of SQLite's machine between two checks, and the steps that a sound file may take for each byte."""
_MLFLOW_RUNS = """
SELECT runs.run_uuid, experiments.experiment_id, experiments.name, runs.name, tags.value
FROM runs JOIN experiments ON experiments.experiment_id = runs.experiment_id
LEFT JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = 'mlflow.runName'
WHERE runs.lifecycle_stage = 'active' AND experiments.lifecycle_stage = 'active'
ORDER BY runs.start_time, runs.run_uuid
"""
_MLFLOW_METRIC = (
    "SELECT run_uuid, value, timestamp, step, is_nan FROM metrics WHERE key = ? ORDER BY timestamp, step"
)


@dataclass(frozen=True)
class Database:
    """An open file of a tracker."""

    path: Path
    sql: sqlite3.Connection
    wanted: Wanted
    room: Room
    prefix: str
    """Prefix of the names of its runs."""
    size: int
    """Bytes of the file and of its write-ahead log."""

    def check_texts(self, length: int) -> None:
        """Raise an InputError if the rows read so far have more bytes than the file."""
        if length > self.size:
            raise InputError(f"{self.path}: damaged, its rows have more bytes than the file ({self.size:,})")


@dataclass(frozen=True)
class Store:
    """How a tracker keeps runs in SQLite files."""

    name: str
    """Name of the format."""
    what: str
    """A description in a few words, for help and messages."""
    tracker: str
    file: str
    """How the tracker names such a file."""
    tables: Mapping[str, Collection[str]]
    """The tables that distinguish such a file from others, with columns that they must have."""
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
                raise InputError(f"{path}: not an SQLite file; expected {self.tracker}'s {self.file}")
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
                raise InputError(f"{path}: lacks the tables of {self.tracker}'s {self.file}")
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
        return all(_columns_of(sql, table) >= {*columns} for table, columns in self.tables.items())

    @contextmanager
    def _opened(self, path: Path) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection."""
        uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if _is_at_rest(path) else ''}"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=10)) as sql:
                sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.ROW.most)
                sql.execute("PRAGMA trusted_schema = OFF")
                # Pages of a damaged file may lead to one another in a circle, or each of a hundred to a
                # hundred more: SQLite is stopped once it works for longer than a file of this size can need.
                left = itertools.count(10 + _bytes_of(path) * _STEPS_PER_BYTE // _STEPS_AT_ONCE, -1)
                sql.set_progress_handler(lambda: next(left) < 0, _STEPS_AT_ONCE)
                yield sql
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter in its messages on a damaged file
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise InputError(
                    f"{path}: damaged (reading its pages takes longer than a sound file of this size can)"
                ) from error
            raise InputError(
                f"{path}: SQLite cannot read it ({error}); expected {self.tracker}'s {self.file}"
            ) from error


def _columns_of(sql: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of a table; none if it is missing, or is a view, which may take forever."""
    kind = sql.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    if kind != ("table",):
        return set()
    return {row[1] for row in sql.execute(f"PRAGMA table_info({table})")}


def _candidates(folder: Path) -> Iterator[Path]:
    return (file for file in files_in(folder) if file.suffix == ".db")


def _is_database(path: Path) -> bool:
    return first_bytes(path, len(_MAGIC)) == _MAGIC


def _is_at_rest(path: Path) -> bool:
    """Return whether nothing writes to a file, so that it may be opened as immutable: no locks, no changes.

    With a write-ahead log, that log holds what a running or killed run has not yet moved into the file
    itself. SQLite reads it only if it may write another file, `-shm`; while there is no such log, opening the
    file as immutable leaves no trace. Any other file is locked while it is read, as a server may write to it,
    and pages from before and after a write would be mixed.
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


def _read_mlflow(database: Database) -> list[Log]:
    """Read all runs that were not deleted, of all experiments."""
    builders, wanted = _mlflow_builders(database), dict[str, bool]()
    names: dict[str, str] = {}  # one string for all runs
    for key, run in database.sql.execute("SELECT key, run_uuid FROM latest_metrics"):
        if run not in builders or not isinstance(key, str):
            continue
        name = names.setdefault(key, key)
        if name not in wanted:
            wanted[name] = len(name) <= limits.NAME.most and database.wanted(name)
        if not wanted[name]:
            builders[run].add(0.0, math.nan, {name: 0.0})  # only keeps the name
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        # The primary key starts with name and time, so no row of another metric is read. And as the database
        # is locked, a server that writes waits for no longer than one metric takes.
        begun: set[str] = set()
        for run, value, time, step, is_nan in database.sql.execute(_MLFLOW_METRIC, (name,)):
            if run in builders:
                if run not in begun:
                    builders[run].begin_file()
                    begun.add(run)
                logged = math.nan if is_nan else as_logged(value)
                builders[run].add(finite(step), unix_seconds(time), {name: logged})
    return [builder.build() for builder in builders.values()]


def _mlflow_builders(database: Database) -> dict[str, LogBuilder]:
    """Return the logs of all runs by id, with their parameters and with distinct names."""
    path, texts = str(database.path), 0
    found: dict[str, tuple[Any, str, str]] = {}
    for run, number, experiment, name, tag in database.sql.execute(_MLFLOW_RUNS):
        found[str(run)] = number, f"{experiment}/", str(name or tag or run)
        texts += len(found[str(run)][2])
        database.check_texts(texts)
        limits.FOUND.check(len(found), path)
    several = len({number for number, _, _ in found.values()}) > 1
    named = Counter((number, name) for number, _, name in found.values())
    builders = {}
    for run, (number, experiment, name) in found.items():
        # MLflow lets several runs of an experiment have one name.
        title = f"{database.prefix}{experiment * several}{name}" + f" {run}" * (named[number, name] > 1)
        builders[run] = LogBuilder(path, "mlflow-db", title, database.wanted, database.room)
    for run, key, text in database.sql.execute("SELECT run_uuid, key, value FROM params"):
        if run in builders:
            texts += len(str(key)) + len(str(text))
            database.check_texts(texts)
            builders[run].config[str(key).replace("/", ".")] = parameter(str(text))
    return builders


MLFLOW = Store(
    "mlflow-db",
    "MLflow's database, mlflow.db or the folder of it",
    "MLflow",
    "mlflow.db",
    {
        "experiments": ("experiment_id", "name", "lifecycle_stage"),
        "runs": ("run_uuid", "name", "experiment_id", "lifecycle_stage", "start_time"),
        "tags": ("key", "value", "run_uuid"),
        "params": ("key", "value", "run_uuid"),
        "metrics": ("key", "value", "timestamp", "run_uuid", "step", "is_nan"),
        "latest_metrics": ("key", "run_uuid"),
    },
    _read_mlflow,
).format()


def _read_trackio(database: Database) -> list[Log]:
    """Read all runs of a project."""
    path, sql = database.path, database.sql
    builders: dict[str, LogBuilder] = {}
    texts = 0
    columns = _columns_of(sql, "metrics")
    run = "run_id" if "run_id" in columns else "run_name"  # before 0.24 a run was identified by its name
    order = "ORDER BY id" if "id" in columns else ""
    rows = sql.execute(f"SELECT {run}, run_name, step, timestamp, metrics FROM metrics {order}")
    for line, (key, name, step, time, text) in enumerate(rows, start=1):
        # Not the key, which before 0.24 is the name again.
        texts += sum(len(cell) for cell in (name, time, text) if isinstance(cell, str | bytes))
        database.check_texts(texts)
        builder = builders.get(str(key))
        if builder is None:
            limits.FOUND.check(len(builders) + 1, path)
            # Without a step, trackio counts calls, as W&B does: so it is of TRL.
            keeps = lambda one: database.wanted(one) or is_own_step(one)  # noqa: E731
            builder = LogBuilder(str(path), "trackio", f"{database.prefix}{name}", keeps, database.room)
            builders[str(key)] = builder
        row = flat(_object(text, path), separator="/", where=str(path))
        builder.add(finite(step), unix_seconds(time), row, line)
    if _columns_of(sql, "configs") >= {run, "config"}:
        for key, text in sql.execute(f"SELECT {run}, config FROM configs"):
            if str(key) in builders:
                config = flat(_object(text, path), where=str(path)).items()
                builders[str(key)].config.update(one for one in config if not one[0].startswith("_"))
    return [
        build_log(one, [Segment(0, one.n_rows, has_own_steps=True)], database.wanted, "trackio")
        for one in builders.values()
    ]


def _object(text: Any, path: Path) -> Mapping[str, Any]:
    """Parse a cell with a JSON object, which some versions store as text and some as bytes."""
    if not isinstance(text, str | bytes):  # bytes() of a number would be that many zeros
        raise InputError(f"{path}: a row of trackio is a {type(text).__name__}, expected JSON text")
    try:
        found = parse_json(text.encode() if isinstance(text, str) else text, str(path))
    except ValueError as error:
        raise InputError(f"{path}: a row of trackio is not JSON ({why_not_json(error)})") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: a row of trackio is not a JSON object")
    return found


TRACKIO = Store(
    "trackio",
    "trackio's local store, PROJECT.db or the folder of it",
    "trackio",
    "PROJECT.db",
    {"metrics": ("run_name", "step", "timestamp", "metrics")},
    _read_trackio,
).format()
