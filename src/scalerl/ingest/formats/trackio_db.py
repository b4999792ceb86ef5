"""trackio's local store: a SQLite file per project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl import limits
from scalerl.errors import InputError
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.formats.sqlite import Database, Store, columns_of
from scalerl.ingest.logs.log import Log, LogBuilder, finite
from scalerl.jsonl import flat, parse_json, why_not_json


def _read(database: Database) -> list[Log]:
    """Read all runs of a project."""
    path, sql = database.path, database.sql
    builders: dict[str, LogBuilder] = {}
    texts = 0
    columns = columns_of(sql, "metrics")
    run = "run_id" if "run_id" in columns else "run_name"  # before 0.24 a run was its name
    order = "ORDER BY id" if "id" in columns else ""
    rows = sql.execute(f"SELECT {run}, run_name, step, timestamp, metrics FROM metrics {order}")
    for line, (key, name, step, time, text) in enumerate(rows, start=1):
        # Not the key, which before 0.24 is the name again.
        texts += sum(len(cell) for cell in (name, time, text) if isinstance(cell, str | bytes))
        database.check_texts(texts)
        builder = builders.get(str(key))
        if builder is None:
            limits.FOUND.check(len(builders) + 1, path)
            builder = LogBuilder(
                str(path), "trackio", f"{database.prefix}{name}", database.wanted, database.room
            )
            builders[str(key)] = builder
        row = flat(_object(text, path), separator="/", where=str(path))
        builder.add(finite(step), unix_seconds(time), row, line)
    if columns_of(sql, "configs") >= {run, "config"}:
        for key, text in sql.execute(f"SELECT {run}, config FROM configs"):
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
        raise InputError(f"{path}: a row of trackio's is not JSON ({why_not_json(error)})") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: a row of trackio's is no JSON object")
    return found


FORMAT = Store(
    "trackio",
    "trackio's local store, PROJECT.db or the folder of it",
    "trackio",
    "PROJECT.db",
    {"metrics": ("run_name", "step", "timestamp", "metrics")},
    _read,
).format()
