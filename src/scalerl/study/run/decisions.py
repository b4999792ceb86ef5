"""The decisions of a study between its runs, each written to disk before it takes effect.

A recorded decision is not made again. If a kill prevented its recording, it is made again from the same runs,
with the same result.
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
    """Write the forecasts of `runs`, which have reached this budget, for the later budgets."""
    # A frozen forecast is never made again, as a resume might know more than the first attempt.
    known = {(row["run"], row.get("at"), row["target_compute"]) for row in read_lines(folder, FORECASTS, [])}
    later = [target for target in plan.budgets if target > budget]
    for run in runs:
        for target in later:
            if (run.key, budget, target) in known:
                continue
            row: dict[str, Any] = {"run": run.key, "at": budget, "target_compute": target}
            # Cut the record at this budget, which a run may have exceeded by part of a step.
            record = cut(RunRecord.read(folder / run.folder), plan.axis, budget)
            try:
                row |= freeze(record, plan.axis, target)
            except CannotAnswerError as error:  # recorded, so that no later attempt uses more evaluations
                row["why"] = str(error)
            append_row(folder / FORECASTS, row)


def stop_arms(plan: Plan, folder: Path, budget: float) -> set[str]:
    """Decide which arms stop at this budget; return all arms stopped here or at an earlier budget."""
    decided = read_lines(folder, DECISIONS, [])
    out = {row["arm"] for row in decided if row["decision"] == "stopped" and row["budget"] < budget}
    known = {row["arm"] for row in decided if row.get("budget") == budget}
    left = [arm.name for arm in plan.arms if arm.name not in out | known]
    if (rule := plan.study.stop) and left:
        below = below_best(StudyRecord.read(folder).until(budget), plan.axis)
        # Arms that are most surely below the best stop first; the base never stops.
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
    """Choose the learning rate of every arm by its trials; `failed` has the keys of failed trials.

    An arm whose trials all failed keeps its own rate.
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

    They are the arms with the highest pass rates at the budget, if above the base's over the seeds that both
    have, significant or not. If there was nothing to combine, this is decided again once the study has grown.
    """
    decided = _of(folder, "combined")
    done = any(len(row["of"]) > 1 or row.get("runs") == len(plan.runs) for row in decided)
    if done or not plan.study.combine:
        return False
    gains = last_gains(StudyRecord.read(folder))
    arms = {arm.name: arm for arm in plan.arms}
    chosen: list[str] = []
    for name in sorted((arm for arm in gains if gains[arm] > 0), key=lambda arm: -gains[arm]):
        with suppress(InputError):  # raised if it changes the same key as a better arm
            if len(chosen) < plan.study.combine:
                combine(plan.base, [arms[other] for other in (*chosen, name)])
                chosen.append(name)
    row = {"decision": "combined", "arm": " + ".join(chosen), "of": chosen, "gains": gains}
    append_row(folder / DECISIONS, row | {"runs": len(plan.runs)})
    return True


def with_combined(plan: Plan, folder: Path) -> Plan:
    """Add the recorded combination to the plan if it consists of at least two arms."""
    arms = {arm.name: arm for arm in plan.arms}
    for row in _of(folder, "combined"):
        # If one of its arms is missing, the check of the plan rejects the study as another one.
        if len(row["of"]) > 1 and row["arm"] not in arms and arms.keys() >= {*row["of"]}:
            plan = replace(plan, arms=(*plan.arms, combine(plan.base, [arms[name] for name in row["of"]])))
    return plan


def _of(folder: Path, decision: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(folder, DECISIONS, []) if row["decision"] == decision]
