"""What a study decides between its runs, each decision on record before anything follows from it.

A decision that is on record is not made again; one that a kill kept from being written is made from the same
runs, and so is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import CannotAnswerError, InputError
from scalerl.forecast.freeze import freeze
from scalerl.record.reader import RunRecord
from scalerl.record.writer import append_row
from scalerl.study.arms import combine
from scalerl.study.plan import Plan
from scalerl.study.record import (
    DECISIONS,
    FORECASTS,
    PlannedRun,
    StudyRecord,
    cut,
    read_decisions,
    read_forecasts,
)
from scalerl.study.spec import Stop
from scalerl.study.verdict.best import below_best, last_gains


def freeze_forecasts(plan: Plan, folder: Path, runs: Sequence[PlannedRun], budget: float) -> None:
    """Put on record what is forecast for the later budgets, of `runs`, which have come to this one."""
    known = {(row["run"], row.get("at"), row["target_compute"]) for row in read_forecasts(folder, [])}
    later = [target for target in plan.budgets if target > budget]
    for run in runs:
        for target in later:
            if (run.key, budget, target) in known:
                continue
            row: dict[str, Any] = {"run": run.key, "at": budget, "target_compute": target}
            record = cut(RunRecord.read(folder / run.folder), plan.axis, budget)
            try:
                row |= freeze(record, plan.axis, target)
            except CannotAnswerError as error:  # it is not asked again, when more would be known
                row["why"] = str(error)
            append_row(folder / FORECASTS, row)


def stop_arms(plan: Plan, folder: Path, budget: float) -> set[str]:
    """The arms that go no further, from this budget or from one before."""
    decided = read_decisions(folder, [])
    out = {row["arm"] for row in decided if row["decision"] == "stopped" and row["budget"] < budget}
    weighed = {row["arm"] for row in decided if row.get("budget") == budget}
    left = [arm.name for arm in plan.arms if arm.name not in out | weighed]
    if plan.study.stop and left:
        below = below_best(StudyRecord.read(folder).until(budget), plan.axis)
        stopped = _below(plan, plan.study.stop, below, out)
        for arm in left:
            row = {"decision": "goes on", "arm": arm, "budget": budget, "probability": below.get(arm)}
            if arm in stopped:
                saved = (plan.budgets[-1] - budget) * len(plan.seeds)
                row |= {"decision": "stopped", "saved": saved}
            append_row(folder / DECISIONS, row)
    return {row["arm"] for row in read_decisions(folder, []) if row["decision"] == "stopped"}


def _below(plan: Plan, stop: Stop, below: Mapping[str, float | None], out: Collection[str]) -> list[str]:
    """The arms to stop, those that are most surely below the best first; the base never is."""
    sure = {
        arm: p
        for arm, p in below.items()
        if p is not None and p >= stop.below_best and arm not in out and arm != plan.arms[0].name
    }
    may_go = max(len(plan.arms) - len(out) - stop.at_least, 0)
    return sorted(sure, key=lambda arm: -sure[arm])[:may_go]


def choose_rates(plan: Plan, folder: Path, failed: Collection[str]) -> dict[str, float]:
    """The learning rate of every arm, by the trials of it; `failed` are the keys of those that were given up.

    An arm whose trials all failed keeps its own.
    """
    chosen = {row["arm"]: row["value"] for row in _of(folder, "learning rate")}
    trials = list(plan.trials())
    for arm in plan.arms:
        if arm.name in chosen:
            continue
        tried: dict[float, float | None] = {}
        for value in dict.fromkeys(value for _, of, value in trials if of.name == arm.name):
            runs = [run for run, of, v in trials if of.name == arm.name and v == value]
            lost = any(run.key in failed for run in runs)
            tried[value] = None if lost else float(np.mean([_late_rate(folder / run.folder) for run in runs]))
        rates = {value: rate for value, rate in tried.items() if rate is not None}
        chosen[arm.name] = max(rates, key=lambda value: rates[value], default=arm.recipe.optimiser.lr)
        row = {"decision": "learning rate", "arm": arm.name, "value": chosen[arm.name], "tried": tried}
        append_row(folder / DECISIONS, row)
    return chosen


def _late_rate(run: Path) -> float:
    """Mean pass rate over the last quarter of the evaluations."""
    rates = [point.pass_rate for point in RunRecord.read(run).evals]
    return float(np.mean(rates[-max(len(rates) // 4, 1) :]))


def decide_combination(plan: Plan, folder: Path) -> bool:
    """Choose the arms to combine, where the study asks for it and has not done so; whether it did now.

    Those whose pass rate was measured to be highest at the budget, above the base's over the seeds that both
    have, told or not: it is run to be told. Where there was nothing to combine it is decided again once the
    study has grown.
    """
    decided = _of(folder, "combined")
    done = any(len(row["of"]) > 1 or row.get("runs") == len(plan.runs) for row in decided)
    if done or not plan.study.combine:
        return False
    gains = last_gains(StudyRecord.read(folder))
    better = sorted((arm for arm in gains if gains[arm] > 0), key=lambda arm: -gains[arm])
    chosen = _compatible(plan, better)
    row = {"decision": "combined", "arm": " + ".join(chosen), "of": chosen, "gains": gains}
    append_row(folder / DECISIONS, row | {"runs": len(plan.runs)})
    return True


def with_combined(plan: Plan, folder: Path) -> Plan:
    """The plan, and the combination that was decided on, where it is one of two arms or more."""
    arms = {arm.name: arm for arm in plan.arms}
    for row in _of(folder, "combined"):
        if len(row["of"]) > 1 and row["arm"] not in arms:
            plan = replace(plan, arms=(*plan.arms, combine(plan.base, [arms[name] for name in row["of"]])))
    return plan


def _compatible(plan: Plan, names: Sequence[str]) -> list[str]:
    """The first of them, as many as the study combines, less what changes the same as one before."""
    arms = {arm.name: arm for arm in plan.arms}
    chosen: list[str] = []
    for name in names:
        with suppress(InputError):
            combine(plan.base, [arms[other] for other in (*chosen, name)])
            chosen.append(name)
    return chosen[: plan.study.combine]


def _of(folder: Path, decision: str) -> list[dict[str, Any]]:
    return [row for row in read_decisions(folder, []) if row["decision"] == decision]
