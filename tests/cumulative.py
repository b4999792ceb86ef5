"""What docs/run-folder.md calls cumulative, and what it says of device-seconds, checked on a record."""

import json
from itertools import pairwise

import pytest

_STEPS = ("step", "version", "tokens", "flops", "device_seconds", "wall_seconds", "idle_seconds", "restarted")
_PACE = (
    "verify_seconds",
    "verify_hidden_seconds",
    "installs",
    "install_seconds",
    "decode",
    "decode_cpu",
    "cpu",
)
_EVALS = ("step", "version", "tokens", "flops", "device_seconds", "samples", "prompts")


def check_counters(folder, trainers=1, apart=False):
    """No cumulative value of a row is below that of the row before; device-seconds add up to what is held."""
    steps, evals = (_lines(folder / name) for name in ("steps.jsonl", "evals.jsonl"))
    _check_rising([_of_step(row) for row in steps])
    _check_rising([_flat({key: row[key] for key in _EVALS}) for row in evals])
    for row in [*steps, *evals]:
        assert set(row["device_seconds"]) == {"generate", "train", "evaluate", "idle", "startup"}
    for row in steps:
        spent = row["device_seconds"]
        held = row["wall_seconds"] * trainers
        if apart:
            held += spent["generate"] + row["idle_seconds"]["generate"]
        assert spent["generate"] + spent["train"] + spent["idle"] == pytest.approx(held)
        assert spent["idle"] >= 0
        assert min(row["idle_seconds"].values()) >= 0
        assert spent["startup"] > 0


def _of_step(row):
    ledger = {fate: n for fate, n in row["ledger"].items() if fate != "in_flight"}
    return _flat(
        {key: row[key] for key in _STEPS} | {"ledger": ledger, "pace": {k: row["pace"][k] for k in _PACE}}
    )


def _check_rising(rows):
    for before, after in pairwise(rows):
        assert set(before) <= set(after)
        fallen = {key: (value, after[key]) for key, value in before.items() if after[key] < value}
        assert not fallen, f"after step {before['.step']}"


def _flat(value, name=""):
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{name}.{i}").items()}
    return {name: value}


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
