"""MLflow's database, as its default is since MLflow 3: `mlflow.db`, a SQLite file with all experiments."""

import math
from collections import Counter
from typing import Any

from scalerl import limits
from scalerl.ingest.formats.mlflow import as_logged, parameter
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.formats.sqlite import Database, Store
from scalerl.ingest.logs.log import Log, LogBuilder, finite

_NAME = "mlflow-db"
_RUNS = """
SELECT runs.run_uuid, experiments.experiment_id, experiments.name, runs.name, tags.value
FROM runs JOIN experiments ON experiments.experiment_id = runs.experiment_id
LEFT JOIN tags ON tags.run_uuid = runs.run_uuid AND tags.key = 'mlflow.runName'
WHERE runs.lifecycle_stage = 'active' AND experiments.lifecycle_stage = 'active'
ORDER BY runs.start_time, runs.run_uuid
"""
_METRIC = (
    "SELECT run_uuid, value, timestamp, step, is_nan FROM metrics WHERE key = ? ORDER BY timestamp, step"
)


def _read(database: Database) -> list[Log]:
    """Read all runs that were not deleted, of all experiments."""
    builders, wanted = _builders(database), dict[str, bool]()
    names: dict[str, str] = {}  # one text for all runs
    for key, run in database.sql.execute("SELECT key, run_uuid FROM latest_metrics"):
        if run not in builders or not isinstance(key, str):
            continue
        name = names.setdefault(key, key)
        if name not in wanted:
            wanted[name] = len(name) <= limits.NAME.most and database.wanted(name)
        if not wanted[name]:
            builders[run].add(0.0, math.nan, {name: 0.0})  # which keeps the name alone
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        # The primary key starts with name and time, so that of other metrics no row is read. And a server
        # that writes waits, as the database is locked, for no longer than one metric takes.
        begun: set[str] = set()
        for run, value, time, step, is_nan in database.sql.execute(_METRIC, (name,)):
            if run in builders:
                if run not in begun:
                    builders[run].begin_file()
                    begun.add(run)
                logged = math.nan if is_nan else as_logged(value)
                builders[run].add(finite(step), unix_seconds(time), {name: logged})
    return [builder.build() for builder in builders.values()]


def _builders(database: Database) -> dict[str, LogBuilder]:
    """Return the logs of all runs by their ids, with their parameters and names that tell them apart."""
    path, texts = str(database.path), 0
    found: dict[str, tuple[Any, str, str]] = {}
    for run, number, experiment, name, tag in database.sql.execute(_RUNS):
        found[str(run)] = number, f"{experiment}/", str(name or tag or run)
        texts += len(found[str(run)][2])
        database.check_texts(texts)
        limits.FOUND.check(len(found), path)
    several = len({number for number, _, _ in found.values()}) > 1
    named = Counter((number, name) for number, _, name in found.values())
    builders = {}
    for run, (number, experiment, name) in found.items():
        # MLflow lets runs of an experiment have one name.
        title = f"{database.prefix}{experiment * several}{name}" + f" {run}" * (named[number, name] > 1)
        builders[run] = LogBuilder(path, _NAME, title, database.wanted, database.room)
    for run, key, text in database.sql.execute("SELECT run_uuid, key, value FROM params"):
        if run in builders:
            texts += len(str(key)) + len(str(text))
            database.check_texts(texts)
            builders[run].config[str(key).replace("/", ".")] = parameter(str(text))
    return builders


FORMAT = Store(
    _NAME,
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
    _read,
).format()
