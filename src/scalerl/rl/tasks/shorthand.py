"""Tasks in one line: `task = "reasoning-gym:chain_sum"` stands for a table."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ROWS = {"kind": "dataset", "answer": "*"}
_TABLES: dict[str, Callable[[str], dict[str, Any]]] = {
    "code": lambda rest: {"kind": "code", "path": rest},
    "reasoning-gym": lambda rest: {"kind": "reasoning_gym", "name": rest},
    "verifiers": lambda rest: {"kind": "verifiers", "id": rest},
    "trl": lambda rest: {**_ROWS, "verifier": {"kind": "trl", "functions": [rest]}},
    "verl": lambda rest: {**_ROWS, "verifier": {"kind": "verl", "score": rest}},
    "env": lambda rest: {"kind": "env", "environment": rest},
}
_DATA = (".jsonl", ".ndjson", ".parquet")
_ALL = 1_000_000
"""Maximum number of evaluated prompts of a benchmark's file."""


def in_full(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recipe, with the tables that tasks in one line stand for."""
    out = dict(values)
    evaluation = values.get("evaluation")
    if isinstance(evaluation, Mapping) and isinstance(suites := evaluation.get("downstream"), list | tuple):
        out["evaluation"] = {**evaluation, "downstream": [_suite_of(suite) for suite in suites]}
    if "task" in values:
        out["task"] = _task_of(values["task"])
    return out


def _task_of(task: Any) -> Any:
    if isinstance(task, str):
        return _table_of(task)
    if not isinstance(task, Mapping):
        return task
    if str(task.get("kind", "")).startswith("env:"):
        task = _table_of(task["kind"]) | {key: value for key, value in task.items() if key != "kind"}
    if not isinstance(tasks := task.get("tasks"), Mapping):
        return task
    tables = {name: _table_of(one) if isinstance(one, str) else one for name, one in tasks.items()}
    return {**task, "tasks": tables}


def _table_of(task: str) -> dict[str, Any]:
    """Return the table for a task in one line; any other text is a kind.

    code:PATH              programming problems of a data set
    reasoning-gym:NAME     problems of a data set of reasoning-gym
    trl:FILE.py:NAME       a reward function of TRL, on the data of `task.path`
    verl:FILE.py:NAME      a `compute_score` of verl, on the Parquet file `task.path`
    env:FILE.py:CLASS      an environment of several turns, with the data of `task.path`
    verifiers:ID           a taskset written for the package verifiers
    FILE.jsonl, .parquet   prompts and answers, verified as mathematics
    """
    start, _, rest = task.partition(":")
    if rest and start in _TABLES:
        return _TABLES[start](rest)
    if task.endswith(_DATA):
        return {"kind": "dataset", "path": task}
    return {"kind": task}


def _suite_of(suite: Any) -> Any:
    """Return the table of a suite, which may itself be, or contain, a task in one line.

    The name defaults to that of the file or of the data set. All rows of a data set are evaluated unless the
    table says which, as none are needed for training.
    """
    table = {"task": suite} if isinstance(suite, str) else suite
    if not isinstance(table, Mapping) or "task" not in table:
        return suite
    task = table["task"]
    if isinstance(task, str):
        start, _, rest = task.partition(":")
        source = rest if start in _TABLES else task
        name = Path(source).stem if source.endswith(_DATA) else source.rpartition("/")[2] or task
        table, task = {"name": name, **table}, _table_of(task)
    is_data = isinstance(task, Mapping) and task.get("kind") in ("dataset", "code", "env") and "path" in task
    if is_data and not any(key.startswith("heldout") for key in task):
        task = {**task, "heldout_path": task["path"], "heldout": _ALL}
    return {**table, "task": task}
