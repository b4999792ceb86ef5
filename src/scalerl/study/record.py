"""A study on the disk: what was planned, what became of it. It is read without what trains.

    NAME/
      study.json          the plan: arms, seeds, budgets, runs; it may grow by arms and seeds
      attempts.jsonl      one line whenever the process of a run has ended, and how
      decisions.jsonl     arms that were stopped at a budget, and why; learning rates that were chosen
      forecasts.jsonl     at every budget, of every run the forecast of later ones, frozen when written
      runs/ARM/seedN/     a run folder each (`scalerl.record.reader`)
      runs/ARM/seedN.log  what its processes printed

`study.json`: schema, name, kind (of the arms), base (name of the arm that the others are compared with), axis
(of the budgets), budgets (rising; the last is that of every recipe), target (a pass rate, or null), price
(dollars per GPU-hour, or null), retries, warnings, arms [{name, changes, recipe}], runs [{arm, seed, model,
folder}].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scalerl.errors import InputError, brief
from scalerl.jsonl import read_object, read_rows
from scalerl.record.reader import AXES, RunRecord, final_folder

SCHEMA = 1
PLAN, ATTEMPTS, DECISIONS, FORECASTS = "study.json", "attempts.jsonl", "decisions.jsonl", "forecasts.jsonl"

REMOVED = "its folder was removed"
"""Cause on record of a run that is begun anew, whatever came of it before."""

Outcome = Literal["finished", "failed", "stopped", "under way", "not started"]
"""What became of a run: `failed` after as many attempts as the study allows, `stopped` by its decision."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: an arm and a seed."""

    arm: str
    seed: int
    model: str
    """The base model that the seed begins from."""
    folder: str
    """Of the run, in the folder of the study."""

    @property
    def key(self) -> str:
        """How the lines of the study's files name it."""
        return f"{self.arm} seed {self.seed}"


@dataclass(frozen=True)
class Attempt:
    """How one process of a run ended."""

    run: str
    outcome: Literal["done", "failed", "diverged", "paused", "cut"]
    """`done` with its part of the budget; `paused` by an alarm; `cut` from outside, which is no failure."""
    cause: str
    seconds: float
    until: float
    """Part of the budget that it was to go to."""


@dataclass(frozen=True)
class StudyRun:
    """A planned run and what became of it. `record` is None before its first evaluation."""

    plan: PlannedRun
    outcome: Outcome
    record: RunRecord | None
    attempts: tuple[Attempt, ...] = ()

    @property
    def cause(self) -> str:
        """Why it failed, of its last attempt; empty where it did not."""
        return self.attempts[-1].cause if self.outcome == "failed" and self.attempts else ""


@dataclass(frozen=True)
class ArmPlan:
    """An arm: what it changes of the base recipe, and the whole recipe, its seed and model apart."""

    name: str
    changes: Mapping[str, Any]
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class StudyRecord:
    """The folder of a study, read."""

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
        """Read the folder of a study, whether it is finished or not.

        Raises:
            InputError: it is none, or a file in it cannot be read.
        """
        path = Path(path)
        plan = read_plan(path)
        warnings: list[str] = list(plan["warnings"])
        attempts = read_attempts(path, warnings)
        decisions = tuple(read_decisions(path, warnings))
        forecasts = tuple(row for row in read_forecasts(path, warnings) if "why" not in row)
        stopped = {row["arm"] for row in decisions if row["decision"] == "stopped"}
        runs = tuple(
            _run(path, PlannedRun(**row), attempts, stopped, plan["retries"]) for row in plan["runs"]
        )
        arms = tuple(ArmPlan(**row) for row in plan["arms"])
        return cls(path, plan, arms, runs, decisions, forecasts, tuple(warnings))

    def until(self, budget: float) -> StudyRecord:
        """The study as it was once its runs had come to a budget: evaluations up to there."""
        axis = str(self.plan["axis"])
        runs = tuple(replace(run, record=run.record and cut(run.record, axis, budget)) for run in self.runs)
        return replace(self, runs=runs)

    def of_arm(self, name: str) -> tuple[StudyRun, ...]:
        """The runs of an arm, one for each seed."""
        return tuple(run for run in self.runs if run.plan.arm == name)


def cut(record: RunRecord, axis: str, budget: float) -> RunRecord:
    """The record as it was once `budget` was spent: the evaluation there is the last."""
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
_ATTEMPT = {"run": _TEXT, "outcome": _TEXT, "cause": _TEXT, "seconds": _NUMBER, "until": _NUMBER}
_FORECAST = {"run": _TEXT, "target_compute": _NUMBER}
_DECISIONS = {
    "stopped": {"arm": _TEXT, "budget": _NUMBER},
    "goes on": {"arm": _TEXT, "budget": _NUMBER},
    "learning rate": {"arm": _TEXT, "value": _NUMBER},
    "combined": {"arm": _TEXT, "of": (list,)},
}


def read_plan(path: Path) -> dict[str, Any]:
    """The plan in study.json.

    Raises:
        InputError: there is none, or it is not one of this version.
    """
    file = path / PLAN
    if not file.is_file():
        raise InputError(f"{path}: holds no {PLAN}, so it is no study")
    plan = read_object(file)
    if plan.get("schema") != SCHEMA:
        raise InputError(f"{file}: no plan of schema {SCHEMA}")
    _check(plan, _PLAN, str(file))
    for arm in plan["arms"]:
        _check(arm, _ARM, f"{file}, arms")
    for run in plan["runs"]:
        _check(run, _RUN, f"{file}, runs")
    arms = {arm["name"] for arm in plan["arms"]}
    astray = [run for run in plan["runs"] if run["arm"] not in arms or not _is_within(run["folder"])]
    budgets = plan["budgets"]
    if (
        plan["base"] not in arms
        or astray
        or plan["axis"] not in AXES
        or not (budgets and all(_is(budget, _NUMBER) and 0 < budget < math.inf for budget in budgets))
        or not all(isinstance(text, str) for text in plan["warnings"])
    ):
        what = f"run {brief(astray[0])}" if astray else "base, axis, budgets or warnings"
        raise InputError(f"{file}: no study as this version writes it ({what})")
    return plan


def read_attempts(path: Path, warnings: list[str]) -> list[Attempt]:
    """How the processes of runs have ended, in that order.

    Raises:
        InputError: a line is none.
    """
    return [Attempt(**row) for row in _rows(path / ATTEMPTS, lambda row: _ATTEMPT, warnings)]


def read_decisions(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """What was decided while the study ran.

    Raises:
        InputError: a line is none.
    """
    return _rows(path / DECISIONS, lambda row: _DECISIONS.get(str(row.get("decision"))), warnings)


def read_forecasts(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """The forecasts frozen at budgets; one that could not be made says `why`.

    Raises:
        InputError: a line is none.
    """
    return _rows(path / FORECASTS, lambda row: _FORECAST, warnings)


def _rows(path: Path, form: Callable[[Mapping[str, Any]], Any], warnings: list[str]) -> list[dict[str, Any]]:
    rows = read_rows(path, warnings)
    for n, row in enumerate(rows, start=1):
        needed = form(row)
        if needed is None:
            raise InputError(f"{path}, row {n}: no line as this version writes it")
        _check(row, needed, f"{path}, row {n}")
        if needed is _ATTEMPT and (more := row.keys() - needed):
            raise InputError(f"{path}, row {n}: unknown '{min(more)}'")
    return rows


def _check(values: Any, needed: Mapping[str, tuple[type, ...]], where: str) -> None:
    """Complain of the first key that is missing or has another type."""
    for key, types in needed.items():
        if not isinstance(values, dict) or not _is(values.get(key), types):
            found = brief(values.get(key)) if isinstance(values, dict) else brief(values)
            raise InputError(f"{where}: no study as this version writes it ('{key}': {found})")


def _is(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _is_within(folder: str) -> bool:
    """Whether a path stays in the folder of the study."""
    return not Path(folder).is_absolute() and ".." not in Path(folder).parts


def _run(path: Path, plan: PlannedRun, attempts: list[Attempt], stopped: set[str], retries: int) -> StudyRun:
    folder = path / plan.folder
    mine = attempts_of(plan.key, attempts)
    record = RunRecord.read(folder) if (folder / "evals.jsonl").is_file() else None
    return StudyRun(plan, _outcome(folder, plan.arm in stopped, mine, retries), record, mine)


def _outcome(folder: Path, stopped: bool, attempts: tuple[Attempt, ...], retries: int) -> Outcome:
    there = (folder / "evals.jsonl").is_file()
    if there and final_folder(folder).is_dir():
        return "finished"
    if has_failed(attempts, retries):
        return "failed"
    if stopped and there:
        return "stopped"
    return "under way" if folder.exists() else "not started"


def attempts_of(run: str, attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Those of one run, since its folder was removed if it was."""
    mine = [attempt for attempt in attempts if attempt.run == run]
    removed = max((n for n, attempt in enumerate(mine) if attempt.cause == REMOVED), default=-1)
    return tuple(mine[removed + 1 :])


def has_failed(attempts: tuple[Attempt, ...], retries: int) -> bool:
    """Whether a run is given up: it diverged or was paused, which it would again, or failed too often."""
    last_done = max((i for i, a in enumerate(attempts) if a.outcome == "done"), default=-1)
    since = [attempt.outcome for attempt in attempts[last_done + 1 :]]
    return bool({"diverged", "paused"} & set(since)) or since.count("failed") > retries
