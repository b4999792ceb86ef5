"""The decisions of a study between its runs, each written to disk before it is acted on.

A decision on record is not made again; one that a kill kept from being written is made from the same runs,
and so is the same.
"""

from collections.abc import Collection, Sequence
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
from scalerl.study.record import DECISIONS, FORECASTS, PlannedRun, StudyRecord, cut, read_lines
from scalerl.study.verdict.arm_fits import below_best, last_gains


def freeze_forecasts(plan: Plan, folder: Path, runs: Sequence[PlannedRun], budget: float) -> None:
    """Write the forecasts of the later budgets for `runs`, which have come to this one."""
    # A frozen forecast is never made again: a resume would know more than it did.
    known = {(row["run"], row.get("at"), row["target_compute"]) for row in read_lines(folder, FORECASTS, [])}
    later = [target for target in plan.budgets if target > budget]
    for run in runs:
        for target in later:
            if (run.key, budget, target) in known:
                continue
            row: dict[str, Any] = {"run": run.key, "at": budget, "target_compute": target}
            # Cut to this budget, which a run may have passed by part of a step.
            record = cut(RunRecord.read(folder / run.folder), plan.axis, budget)
            try:
                row |= freeze(record, plan.axis, target)
            except CannotAnswerError as error:  # kept, so that it is not made later from more evaluations
                row["why"] = str(error)
            append_row(folder / FORECASTS, row)


def stop_arms(plan: Plan, folder: Path, budget: float) -> set[str]:
    """Decide which arms stop at this budget; return all that were stopped, here or at one before."""
    decided = read_lines(folder, DECISIONS, [])
    out = {row["arm"] for row in decided if row["decision"] == "stopped" and row["budget"] < budget}
    known = {row["arm"] for row in decided if row.get("budget") == budget}
    left = [arm.name for arm in plan.arms if arm.name not in out | known]
    if (rule := plan.study.stop) and left:
        below = below_best(StudyRecord.read(folder).until(budget), plan.axis)
        # Those that are most surely below the best stop first; the base never does.
        sure = {
            arm: p
            for arm, p in below.items()
            if p is not None and p >= rule.below_best and arm not in out and arm != plan.arms[0].name
        }
        most = max(len(plan.arms) - len(out) - rule.at_least, 0)
        stopped = sorted(sure, key=lambda arm: -sure[arm])[:most]
        for arm in left:
            row = {"decision": "goes on", "arm": arm, "budget": budget, "probability": below.get(arm)}
            if arm in stopped:
                saved = (plan.budgets[-1] - budget) * len(plan.seeds)
                row |= {"decision": "stopped", "saved": saved}
            append_row(folder / DECISIONS, row)
    return {row["arm"] for row in read_lines(folder, DECISIONS, []) if row["decision"] == "stopped"}


def choose_rates(plan: Plan, folder: Path, failed: Collection[str]) -> dict[str, float]:
    """Choose the learning rate of every arm by its trials; `failed` has the keys of those that failed.

    An arm whose trials all failed keeps its own.
    """
    chosen = {row["arm"]: row["value"] for row in _of(folder, "learning rate")}
    for arm in plan.arms:
        if arm.name in chosen:
            continue
        trials: dict[float, list[PlannedRun]] = {}
        for run, tried_arm in plan.trials():
            if tried_arm.name == arm.name:
                trials.setdefault(tried_arm.recipe.optimiser.lr, []).append(run)
        tried: dict[float, float | None] = {}
        for value, runs in trials.items():
            if any(run.key in failed for run in runs):
                tried[value] = None
                continue
            of_runs = [[one.pass_rate for one in RunRecord.read(folder / run.folder).evals] for run in runs]
            late = [np.mean(rates_N[-max(len(rates_N) // 4, 1) :]) for rates_N in of_runs]
            tried[value] = float(np.mean(late))
        rates = {value: rate for value, rate in tried.items() if rate is not None}
        chosen[arm.name] = max(rates, key=lambda value: rates[value], default=arm.recipe.optimiser.lr)
        row = {"decision": "learning rate", "arm": arm.name, "value": chosen[arm.name], "tried": tried}
        append_row(folder / DECISIONS, row)
    return chosen


def decide_combination(plan: Plan, folder: Path) -> bool:
    """Choose the arms to combine if that is due, and return whether it was.

    They are those with the highest pass rate at the budget, above the base's over the seeds that both have,
    significant or not. Where there was nothing to combine it is decided again once the study has grown.
    """
    decided = _of(folder, "combined")
    done = any(len(row["of"]) > 1 or row.get("runs") == len(plan.runs) for row in decided)
    if done or not plan.study.combine:
        return False
    gains = last_gains(StudyRecord.read(folder))
    arms = {arm.name: arm for arm in plan.arms}
    chosen: list[str] = []
    for name in sorted((arm for arm in gains if gains[arm] > 0), key=lambda arm: -gains[arm]):
        with suppress(InputError):  # it changes the same key as a better one
            if len(chosen) < plan.study.combine:
                combine(plan.base, [arms[other] for other in (*chosen, name)])
                chosen.append(name)
    row = {"decision": "combined", "arm": " + ".join(chosen), "of": chosen, "gains": gains}
    append_row(folder / DECISIONS, row | {"runs": len(plan.runs)})
    return True


def with_combined(plan: Plan, folder: Path) -> Plan:
    """Add the combination on record to the plan, where it is of two arms or more."""
    arms = {arm.name: arm for arm in plan.arms}
    for row in _of(folder, "combined"):
        # Without one of them it is another study, which the check of the plan refuses.
        if len(row["of"]) > 1 and row["arm"] not in arms and arms.keys() >= {*row["of"]}:
            plan = replace(plan, arms=(*plan.arms, combine(plan.base, [arms[name] for name in row["of"]])))
    return plan


def _of(folder: Path, decision: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder, DECISIONS, []) if row["decision"] == decision]
