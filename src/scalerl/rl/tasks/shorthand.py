"""Tasks in one line: `task = "reasoning-gym:chain_sum"` stands for a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TABLES: dict[str, Callable[[str], dict[str, Any]]] = {
    "code": lambda rest: {"kind": "code", "path": rest},
    "reasoning-gym": lambda rest: {"kind": "reasoning_gym", "name": rest},
    "verifiers": lambda rest: {"kind": "verifiers", "id": rest},
    "trl": lambda rest: _rewarded({"kind": "trl", "functions": [rest]}),
    "verl": lambda rest: _rewarded({"kind": "verl", "score": rest}),
}
_DATA = (".jsonl", ".ndjson", ".parquet")


def table_of(task: str) -> dict[str, Any]:
    """Return the table that a task in one line stands for; any other text is a kind.

    code:PATH              programming problems of a data set
    reasoning-gym:NAME     problems of a data set of reasoning-gym
    trl:FILE.py:NAME       a reward function of TRL, on the data of `task.path`
    verl:FILE.py:NAME      a `compute_score` of verl, on the Parquet file `task.path`
    verifiers:ID           a taskset of one turn, written for the package verifiers
    FILE.jsonl, .parquet   prompts and answers, verified as mathematics
    """
    start, _, rest = task.partition(":")
    if rest and start in _TABLES:
        return _TABLES[start](rest)
    if task.endswith(_DATA):
        return {"kind": "dataset", "path": task}
    return {"kind": task}


def _rewarded(verifier: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "dataset", "answer": "*", "verifier": verifier}
