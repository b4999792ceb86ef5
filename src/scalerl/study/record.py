"""A study on the disk: what was planned, what became of it. It is read without what trains.

    NAME/
      study.json          the plan: arms, seeds, budgets, runs; written once
      attempts.jsonl      one line whenever the process of a run has ended, and how
      decisions.jsonl     arms that were stopped at a budget, and why; learning rates that were chosen
      forecasts.jsonl     at every budget, of every run the forecast of later ones, frozen when written
      runs/ARM/seedN/     a run folder each (`scalerl.record`)
      runs/ARM/seedN.log  what its processes printed

`study.json`: schema, name, kind (of the arms), base (name of the arm that the others are compared with), axis
(of the budgets), budgets (rising; the last is that of every recipe), target (a pass rate, or null), price
(dollars per GPU-hour, or null), retries, warnings, design (factors and levels of a factorial, else null),
arms [{name, changes, recipe}], runs [{arm, seed, model, folder}].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scalerl.errors import InputError, brief
from scalerl.jsonl import read_bytes, read_rows
from scalerl.record import RunRecord, final_folder

SCHEMA = 1
PLAN, ATTEMPTS, DECISIONS, FORECASTS = "study.json", "attempts.jsonl", "decisions.jsonl", "forecasts.jsonl"

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
    """Lines of forecasts.jsonl: {"run", "at", and what `scalerl.curve.freeze.freeze` gives}."""
    warnings: tuple[str, ...]

    @classmethod
    def read(cls, path: str | Path) -> StudyRecord:
        """Read the folder of a study, whether it is finished or not.

        Raises:
            InputError: it is none, or a file in it cannot be read.
        """
        path = Path(path)
        try:
            return cls._read(path)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: no study as this version writes it ({brief(str(error))})") from error

    @classmethod
    def _read(cls, path: Path) -> StudyRecord:
        plan = read_plan(path)
        warnings: list[str] = [str(text) for text in plan["warnings"]]
        attempts = [Attempt(**row) for row in read_rows(path / ATTEMPTS, warnings)]
        decisions = tuple(read_rows(path / DECISIONS, warnings))
        forecasts = tuple(row for row in read_rows(path / FORECASTS, warnings) if "why" not in row)
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


def read_plan(path: Path) -> dict[str, Any]:
    """The plan in study.json.

    Raises:
        InputError: there is none, or it is not one of this version.
    """
    file = path / PLAN
    if not file.is_file():
        raise InputError(f"{path}: holds no {PLAN}, so it is no study")
    try:
        plan = json.loads(read_bytes(file))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from error
    if not isinstance(plan, dict) or plan.get("schema") != SCHEMA:
        raise InputError(f"{file}: no plan of schema {SCHEMA}")
    return plan


def _run(path: Path, plan: PlannedRun, attempts: list[Attempt], stopped: set[str], retries: int) -> StudyRun:
    folder = path / plan.folder
    mine = tuple(attempt for attempt in attempts if attempt.run == plan.key)
    record = RunRecord.read(folder) if (folder / "evals.jsonl").is_file() else None
    return StudyRun(plan, _outcome(folder, plan.arm in stopped, mine, retries), record, mine)


def _outcome(folder: Path, stopped: bool, attempts: tuple[Attempt, ...], retries: int) -> Outcome:
    if final_folder(folder).is_dir():
        return "finished"
    if has_failed(attempts, retries):
        return "failed"
    if stopped:
        return "stopped"
    return "under way" if attempts or folder.exists() else "not started"


def has_failed(attempts: tuple[Attempt, ...], retries: int) -> bool:
    """Whether a run is given up: it diverged or was paused, which it would again, or failed too often."""
    last_done = max((i for i, a in enumerate(attempts) if a.outcome == "done"), default=-1)
    since = [attempt.outcome for attempt in attempts[last_done + 1 :]]
    return bool({"diverged", "paused"} & set(since)) or since.count("failed") > retries
