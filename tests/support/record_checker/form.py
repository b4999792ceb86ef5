"""The lines of a run folder, and whether they have the form that docs/reference/run-folder.md says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILES = ("steps.jsonl", "groups.jsonl", "evals.jsonl", "eval_prompts.jsonl")
STEP_KEYS = (
    *("step", "version", "time", "skipped", "loss", "grad_norm", "lr", "entropy", "ratio_mean", "ratio_max"),
    *("ratio_clipped", "ess", "logp_shift", "kl", "reward_mean", "correct", "groups", "completions"),
    *("groups_used", "completions_used", "zero_variance", "truncated", "interrupted", "failed", "queue"),
    *("mean_length", "multi_version", "kv_staleness_max", "pool", "ledger", "restarted", "wall_seconds"),
    *("idle_seconds", "weight_sync", "tokens", "flops", "device_seconds"),
)
EVAL_KEYS = (
    *("step", "time", "device_seconds", "flops", "tokens", "samples", "prompts", "version", "pass_rate"),
    *("n_prompts", "n_samples", "mean_p_1mp", "failed", "truncated", "interrupted", "mean_length", "entropy"),
)
SUITE_KEYS = (
    *("suite", *EVAL_KEYS, "pass_rate_interval", "pass_at_k", "pass_at_k_interval", "prompt_set", "id"),
    "correct",
)
SAMPLE_KEYS = (
    *("source", "step", "prompt", "epoch", "sample", "prompt_text", "completion", "reward", "correct"),
    *("finish", "versions", "length"),
)
FORECAST_KEYS = (
    *(
        "made_at_step",
        "time",
        "axis",
        "compute",
        "target_compute",
        "median",
        "prediction",
        "curve",
        "fit_json",
    ),
)


class Record:
    """The lines of a run folder, and what is wrong with their form.

    Of a run that was killed and not resumed yet the last line of a file may be unfinished, and the
    groups of a step, or the prompts of an evaluation, without it.
    """

    def __init__(self, folder: Path, killed: bool) -> None:
        self.folder, self.killed, self.faults = folder, killed, []
        self.config: Row = {}
        try:
            self.config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            self.faults.append(f"config.json: {error}")
        for name in FILES:
            if not killed and not (folder / name).exists():
                self.faults.append(f"{name}: missing")
        self.steps, self.groups, self.evals, self.prompts = (self._lines(name) for name in FILES)
        self.forecasts, self.lost = self._lines("forecasts.jsonl"), self._lines("lost.jsonl")
        self.samples = self._lines("samples.jsonl")
        self.downstream = self._lines("downstream.jsonl")
        self.timeline = self._lines("timeline.jsonl")
        self._keys()

    def _lines(self, name: str) -> list[Row]:
        path = self.folder / name
        *whole, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
        if rest and not self.killed:
            self.faults.append(f"{name}: its last line is unfinished")
        rows = [parsed(line) for line in whole]
        self.faults += [f"{name}:{n}: no JSON object" for n, row in enumerate(rows, 1) if row is None]
        return [row for row in rows if row is not None]

    def _keys(self) -> None:
        """Every key of the page is there; the rules rely on it."""
        asked = [
            ("config.json", [self.config], ("schema", "seed", "recipe", "placement", "versions", "devices"))
        ]
        asked += [("steps.jsonl", self.steps, STEP_KEYS), ("evals.jsonl", self.evals, EVAL_KEYS)]
        asked += [("groups.jsonl", self.groups, ("step", "prompt", "epoch", "fate", "correct", "n"))]
        asked += [("eval_prompts.jsonl", self.prompts, ("step", "prompt_set", "n", "id", "correct"))]
        asked += [("downstream.jsonl", self.downstream, SUITE_KEYS)]
        asked += [("samples.jsonl", self.samples, SAMPLE_KEYS)]
        asked += [("forecasts.jsonl", self.forecasts, FORECAST_KEYS)]
        for name, rows, keys in asked:
            for number, row in enumerate(rows, 1):
                if missing := [key for key in keys if key not in row]:
                    self.faults.append(f"{name}:{number}: without {', '.join(missing)}")


def flat(row: Row, names: Iterable[str]) -> dict[str, float]:
    """The numbers under these names, by dotted name."""
    found: dict[str, float] = {}
    for name in names:
        value = row.get(name)
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in flat(value, value).items()}
        elif isinstance(value, list):
            found |= {f"{name}.{i}": inner for i, inner in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found


def parsed(line: str | bytes) -> Row | None:
    """A line as a JSON object; none where it is something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def close(one: float, other: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def is_whole(value: float) -> bool:
    return close(value, round(value), 1e-6)


def short(numbers: Sequence[int]) -> str:
    return (
        str(list(numbers)) if len(numbers) < 20 else f"[{numbers[0]}, ... {len(numbers)} ..., {numbers[-1]}]"
    )
