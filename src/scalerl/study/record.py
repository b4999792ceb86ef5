"""The folder of a study: its plan, and the outcome of its runs. Reading it needs no torch.

    NAME/
      study.json          the plan: arms, seeds, budgets, runs; it may grow by arms and seeds
      attempts.jsonl      one line for every process of a run that has ended, and how it ended
      decisions.jsonl     arms stopped at a budget, and why; chosen learning rates
      forecasts.jsonl     each run's forecasts, made at every budget for the later ones, and frozen
      runs/ARM/seedN/     a run folder each (`scalerl.record.reader`)
      runs/ARM/seedN.log  the output of its processes

`study.json`: schema, name, kind (of the arms), base (name of the arm that the others are compared with), axis
(of the budgets), budgets (rising; the last is that of every recipe), target (a pass rate, or null), price
(dollars per GPU-hour, or null), retries, warnings, arms [{name, changes, recipe}], runs [{arm, seed, model,
folder}].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scalerl.errors import InputError, brief
from scalerl.jsonl import read_object, read_rows
from scalerl.record.evaluation import AXES
from scalerl.record.reader import RunRecord
from scalerl.record.saved_weights import final_folder

SCHEMA = 1
PLAN, ATTEMPTS, DECISIONS, FORECASTS = "study.json", "attempts.jsonl", "decisions.jsonl", "forecasts.jsonl"

REMOVED = "its folder was removed"
"""The recorded cause when a run starts again from scratch."""

Outcome = Literal["finished", "failed", "stopped", "under way", "not started"]
"""Outcome of a run: `failed` after as many attempts as the study allows, `stopped` by its decision."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: an arm and a seed."""

    arm: str
    seed: int
    model: str
    """The base model that the seed starts from."""
    folder: str
    """The run's folder, relative to that of the study."""

    @property
    def key(self) -> str:
        """The run's name in the lines of the study's files."""
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True)
class Attempt:
    """How one process of a run ended."""

    run: str
    outcome: Literal["done", "failed", "diverged", "paused", "cut"]
    """`done` with its part of the budget; `paused` by an alarm; `cut` from outside, so not a failure."""
    cause: str
    seconds: float
    until: float
    """Compute at which it was to stop."""


@dataclass(frozen=True)
class StudyRun:
    """A planned run and its outcome; `record` is None before the first evaluation, and if it cannot be read,
    for the reason in `unread`."""

    plan: PlannedRun
    outcome: Outcome
    record: RunRecord | None
    attempts: tuple[Attempt, ...] = ()
    unread: str = ""

    @property
    def cause(self) -> str:
        """Why its last attempt failed; empty if the run has not failed for good."""
        return self.attempts[-1].cause if self.outcome == "failed" and self.attempts else ""

    @property
    def last_pass_rate(self) -> float:
        """Pass rate of the last evaluation; NaN before the first."""
        return self.record.evals[-1].pass_rate if self.record and self.record.evals else math.nan


@dataclass(frozen=True)
class ArmPlan:
    """An arm: its changes to the base recipe, and its whole recipe except for seed and model."""

    name: str
    changes: Mapping[str, Any]
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class StudyRecord:
    """The contents of a study's folder, made by `read`."""

    path: Path
    plan: Mapping[str, Any]
    arms: tuple[ArmPlan, ...]
    runs: tuple[StudyRun, ...]
    decisions: tuple[dict[str, Any], ...]
    forecasts: tuple[dict[str, Any], ...]
    """Lines of forecasts.jsonl: {"run", "at", and what `scalerl.forecast.freeze.freeze` gives}."""
    warnings: tuple[str, ...]

    @classmethod
    def read(cls, path: str | Path) -> StudyRecord:
        """Read the folder of a study, finished or not; a run that cannot be read is left out with a warning.

        Raises:
            InputError: the folder holds no study, or a file in it cannot be read.
        """
        path = Path(path)
        plan = read_plan(path)
        warnings: list[str] = list(plan["warnings"])
        attempts = read_attempts(path, warnings)
        decisions = tuple(read_lines(path, DECISIONS, warnings))
        forecasts = tuple(row for row in read_lines(path, FORECASTS, warnings) if "why" not in row)
        stopped = {row["arm"] for row in decisions if row["decision"] == "stopped"}
        runs = tuple(
            _read_run(path, PlannedRun(**row), attempts, stopped, plan["retries"]) for row in plan["runs"]
        )
        warnings += [f"left out: {run.plan.key}: {run.unread}" for run in runs if run.unread]
        arms = tuple(ArmPlan(**row) for row in plan["arms"])
        return cls(path, plan, arms, runs, decisions, forecasts, tuple(warnings))

    def until(self, budget: float) -> StudyRecord:
        """Return the study as it was when its runs reached a budget, with evaluations up to there."""
        axis = str(self.plan["axis"])
        runs = tuple(replace(run, record=run.record and cut(run.record, axis, budget)) for run in self.runs)
        return replace(self, runs=runs)

    def of_arm(self, name: str) -> tuple[StudyRun, ...]:
        """Return the runs of an arm, one for each seed."""
        return tuple(run for run in self.runs if run.plan.arm == name)


def cut(record: RunRecord, axis: str, budget: float) -> RunRecord:
    """Return the record as it was when `budget` was spent, with the evaluation there as the last."""
    n = int(np.searchsorted(record.compute(axis), budget * (1 - 1e-9))) + 1
    return replace(record, evals=record.evals[:n], lines=record.lines[:n])


_NUMBER, _TEXT = (int, float), (str,)
_PLAN = {
    **dict.fromkeys(("name", "kind", "base", "axis"), _TEXT),
    **dict.fromkeys(("budgets", "warnings", "arms", "runs"), (list,)),
    **dict.fromkeys(("target", "price"), (*_NUMBER, type(None))),
    "retries": (int,),
}
_ARM = {"name": _TEXT, "changes": (dict,), "recipe": (dict,)}
_RUN = {"arm": _TEXT, "seed": (int,), "model": _TEXT, "folder": _TEXT}
_LINES = {
    ATTEMPTS: {"run": _TEXT, "outcome": _TEXT, "cause": _TEXT, "seconds": _NUMBER, "until": _NUMBER},
    FORECASTS: {"run": _TEXT, "target_compute": _NUMBER},
}
_DECISIONS = {
    "stopped": {"arm": _TEXT, "budget": _NUMBER},
    "goes on": {"arm": _TEXT, "budget": _NUMBER},
    "learning rate": {"arm": _TEXT, "value": _NUMBER},
    "combined": {"arm": _TEXT, "of": (list,)},
}


def read_plan(path: Path) -> dict[str, Any]:
    """Read the plan in study.json.

    Raises:
        InputError: there is none, or it is not of this version.
    """
    file = path / PLAN
    if not file.is_file():
        raise InputError(f"{path}: not a study folder: no {PLAN}")
    plan = read_object(file)
    if plan.get("schema") != SCHEMA:
        raise InputError(f"{file}: no plan of schema {SCHEMA}")
    _check(plan, _PLAN, str(file))
    for arm in plan["arms"]:
        _check(arm, _ARM, f"{file}, arms")
    for run in plan["runs"]:
        _check(run, _RUN, f"{file}, runs")
    arms = {arm["name"] for arm in plan["arms"]}
    folders, budgets = [Path(run["folder"]) for run in plan["runs"]], plan["budgets"]
    # Folders of runs must be inside that of the study, as their files are read and shown.
    outside = any(folder.is_absolute() or ".." in folder.parts for folder in folders)
    sound = {
        "base": plan["base"] in arms,
        "runs": not outside and all(run["arm"] in arms for run in plan["runs"]),
        "axis": plan["axis"] in AXES,
        "budgets": budgets and all(_is(budget, _NUMBER) and 0 < budget < math.inf for budget in budgets),
        "warnings": all(isinstance(text, str) for text in plan["warnings"]),
    }
    if astray := [key for key, is_sound in sound.items() if not is_sound]:
        found = brief(plan[astray[0]])
        raise InputError(f"{file}: no study as this version writes it ('{astray[0]}': {found})")
    return plan


def read_lines(study: Path, name: str, warnings: list[str]) -> list[dict[str, Any]]:
    """Read the attempts, decisions or forecasts of a study; empty if there is no such file.

    Raises:
        InputError: a line is not of this version.
    """
    rows = read_rows(study / name, warnings)
    for n, row in enumerate(rows, start=1):
        needed = _DECISIONS.get(str(row.get("decision"))) if name == DECISIONS else _LINES[name]
        where = f"{study / name}, row {n}"
        if needed is None or (name == ATTEMPTS and row.keys() - needed):
            raise InputError(f"{where}: no line as this version writes it")
        _check(row, needed, where)
    return rows


def read_attempts(study: Path, warnings: list[str]) -> list[Attempt]:
    """Read the attempts, in the order in which they ended."""
    return [Attempt(**row) for row in read_lines(study, ATTEMPTS, warnings)]


def _check(values: Any, needed: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Raise InputError for the first key that is missing or has another type."""
    for key, types in needed.items():
        if not isinstance(values, dict) or not _is(values.get(key), types):
            found = brief(values.get(key)) if isinstance(values, dict) else brief(values)
            raise InputError(f"{where}: no study as this version writes it ('{key}': {found})")


def _is(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _read_run(
    study: Path, plan: PlannedRun, attempts: list[Attempt], stopped: set[str], retries: int
) -> StudyRun:
    folder = study / plan.folder
    own = attempts_of(plan.key, attempts)
    evals = folder / "evals.jsonl"
    evaluated = evals.is_file() and evals.stat().st_size > 0  # a resume may have truncated it to nothing
    outcome: Outcome = "under way" if folder.exists() else "not started"
    if evaluated and final_folder(folder).is_dir():
        outcome = "finished"
    elif has_failed(own, retries):
        outcome = "failed"
    elif evaluated and plan.arm in stopped:
        outcome = "stopped"
    try:
        # A damaged line in steps.jsonl leaves the run out here, and does not end the report later.
        record = RunRecord.read(folder).with_columns() if evaluated else None
        if outcome == "under way" and record is not None and record.has_ended:
            outcome = "finished"
        return StudyRun(plan, outcome, record, own)
    except InputError as error:
        return StudyRun(plan, outcome, None, own, str(error))


def attempts_of(run: str, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Return the attempts of one run since its folder was last removed."""
    own = [attempt for attempt in attempts if attempt.run == run]
    removed = max((n for n, attempt in enumerate(own) if attempt.cause == REMOVED), default=-1)
    return tuple(own[removed + 1 :])


def has_failed(attempts: tuple[Attempt, ...], retries: int) -> bool:
    """Return whether a run must not be retried: it diverged or was paused, as it would be again, or it failed
    more than `retries` times since its last success."""
    last_done = max((i for i, a in enumerate(attempts) if a.outcome == "done"), default=-1)
    since = [attempt.outcome for attempt in attempts[last_done + 1 :]]
    return bool({"diverged", "paused"} & set(since)) or since.count("failed") > retries
