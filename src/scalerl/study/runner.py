"""Runs a study: every arm and seed to each budget in turn, in processes beside one another.

    tune          the learning rate of every arm, where the study asks for it
    for budget:   run every run to it     skipping what is there, resuming what was cut, retrying what crashed
                  freeze                  a forecast of every later budget, before anything goes there
                  decide                  which arms are not worth the next budget

All of its state is on the disk, in the files of `scalerl.study.record`: killed at any moment and started
again, it goes on to the same end.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from scalerl.curve.freeze import freeze
from scalerl.errors import CannotAnswerError, InputError, WriteError
from scalerl.files import lock
from scalerl.jsonl import read_jsonl
from scalerl.record import RunRecord, final_folder
from scalerl.rl.base import find_model, is_built
from scalerl.rl.recipe import Recipe
from scalerl.run_writer import append_row
from scalerl.study.arms import Arm, combine
from scalerl.study.best import below_best
from scalerl.study.job import Job, Task
from scalerl.study.plan import Plan, with_rate, write_plan
from scalerl.study.record import (
    ATTEMPTS,
    DECISIONS,
    FORECASTS,
    Attempt,
    PlannedRun,
    StudyRecord,
    has_failed,
)
from scalerl.study.verdict import judge_study

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0
"""For the checkpoints of runs that are to stop."""


@dataclass(frozen=True)
class StudyProgress:
    """What a watcher sees, several times a second, and whenever there is something to say."""

    done: int
    runs: int
    """Of this round."""
    running: tuple[tuple[str, float, float], ...]
    """Name, share of the budget and last pass rate of every run under way."""
    notice: str = ""


Watch = Callable[[StudyProgress], None]


def run_study(
    plan: Plan, folder: Path, *, cores: int, watch: Watch, stop: threading.Event | None = None
) -> StudyRecord:
    """Run the study into `folder`, or go on with it, and return its record.

    Args:
        plan: what to run.
        folder: of the study.
        cores: how many to use; a run takes one, or one for each of its devices.
        watch: is told how far the runs are.
        stop: once it is set, every run makes a checkpoint, and the study ends as by Ctrl-C.

    Raises:
        InputError: another study is in the folder, or another process runs it.
        WriteError: the disk does not take what is written; what was written before is kept.
        KeyboardInterrupt: it was stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = lock(folder, "another process is running this study")
    try:
        write_plan(plan, folder)
        _Runner(plan, folder, cores, watch, stop or threading.Event()).run()
    finally:
        os.close(handle)
    return StudyRecord.read(folder)


class _Runner:
    def __init__(self, plan: Plan, folder: Path, cores: int, watch: Watch, stop: threading.Event) -> None:
        self.plan, self.folder, self.cores, self.watch, self.stop = plan, folder, cores, watch, stop
        for name in (ATTEMPTS, DECISIONS, FORECASTS):
            _drop_torn_line(folder / name)
        self.attempts = [Attempt(**row) for row in _rows(folder / ATTEMPTS)]

    def run(self) -> None:
        self._rounds()
        if combined := self._combined():
            self.plan = replace(self.plan, arms=(*self.plan.arms, combined))
            write_plan(self.plan, self.folder)
            self._rounds()

    def _rounds(self) -> None:
        """All arms to all budgets; what is there is left as it is."""
        plan = self.plan
        arms = self._tuned()
        self._prepare([plan.recipe(run, arms[run.arm]) for run in plan.runs])
        stopped: set[str] = set()
        for i, budget in enumerate(plan.budgets):
            self._round(
                [
                    Task(run, plan.recipe(run, arms[run.arm]), budget)
                    for run in plan.runs
                    if run.arm not in stopped
                ]
            )
            if later := plan.budgets[i + 1 :]:
                self._freeze(budget, later)
                stopped |= self._decide(budget)

    # -- a round -------------------------------------------------------------------------------------------

    def _round(self, tasks: Sequence[Task]) -> None:
        """Every run to its part of the budget, or to where it fails for good."""
        waiting = deque(task for task in tasks if not self._ended(task))
        done, running = len(tasks) - len(waiting), list[Job]()
        try:
            while waiting or running:
                while waiting and self._fits(waiting[0], running):
                    running.append(Job(waiting.popleft(), self.folder))
                for job in list(running):
                    if ended := job.poll():
                        running.remove(job)
                        notice = self._note(job, *ended)
                        if self._ended(job.task):
                            done += 1
                        else:
                            waiting.append(job.task)
                        self.watch(self._progress(done, len(tasks), running, notice))
                if self.stop.is_set():
                    raise KeyboardInterrupt
                self.watch(self._progress(done, len(tasks), running))
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self._end(running)
            raise

    def _ended(self, task: Task) -> bool:
        """Whether it has come to its part of the budget, or failed for good."""
        mine = tuple(attempt for attempt in self.attempts if attempt.run == task.run.key)
        return (
            final_folder(self.folder / task.run.folder).is_dir()
            or any(attempt.outcome == "done" and attempt.until >= task.until for attempt in mine)
            or has_failed(mine, self.plan.retries)
        )

    def _fits(self, task: Task, running: Sequence[Job]) -> bool:
        taken = sum(job.task.cores for job in running)
        return not running or taken + task.cores <= self.cores

    def _note(self, job: Job, outcome: str, cause: str) -> str:
        """Put the end of an attempt on record, and say it."""
        if outcome == "disk":
            raise WriteError(cause)
        task = job.task
        attempt = Attempt(task.run.key, outcome, cause, job.seconds, task.until)  # pyright: ignore
        self.attempts.append(attempt)
        append_row(self.folder / ATTEMPTS, vars(attempt))
        text = f"{task.run.key}: {outcome}"
        if outcome == "done":
            return f"{text} in {job.seconds:.0f} s, pass rate {job.pass_rate:.3f}"
        again = "" if self._ended(task) else "; it is tried again"
        return f"{text} ({cause}){again}"

    def _progress(self, done: int, runs: int, running: Sequence[Job], notice: str = "") -> StudyProgress:
        under_way = tuple((job.task.run.key, job.share, job.pass_rate) for job in running)
        return StudyProgress(done, runs, under_way, notice)

    def _end(self, running: Sequence[Job]) -> None:
        """Let the runs that are under way make their checkpoints; what does not end in time is killed."""
        for job in running:
            job.stop()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(job.poll() is None for job in running) and time.monotonic() < deadline:
            with suppress(KeyboardInterrupt):
                time.sleep(_POLL_SECONDS)
        for job in running:
            if job.poll() is None:
                job.kill()

    # -- between rounds ------------------------------------------------------------------------------------

    def _prepare(self, recipes: Iterable[Recipe]) -> None:
        """Build the base models that are built here: once, and not by every run that begins from one."""
        built = {
            (recipe.model, repr(recipe.task), recipe.context.thinking): recipe
            for recipe in recipes
            if is_built(recipe.model)
        }
        with ProcessPoolExecutor(min(self.cores, max(len(built), 1)), get_context("spawn")) as pool:
            for _ in pool.map(_build, built.values()):
                pass

    def _freeze(self, budget: float, later: Sequence[float]) -> None:
        """Put on record what is forecast for the later budgets, of every run that has come to this one."""
        known = {(row["run"], row["at"], row["target_compute"]) for row in _rows(self.folder / FORECASTS)}
        for run in self.plan.runs:
            left = [target for target in later if (run.key, budget, target) not in known]
            if not left or not (self.folder / run.folder / "evals.jsonl").is_file():
                continue
            record = RunRecord.read(self.folder / run.folder)
            for target in left:
                with suppress(CannotAnswerError):  # too short a curve: there is nothing to hold it to
                    row = freeze(record, self.plan.axis, target)
                    append_row(self.folder / FORECASTS, {"run": run.key, "at": budget, **row})

    def _decide(self, budget: float) -> set[str]:
        """The arms that are stopped at this budget or were before; put on record with why."""
        decided = _rows(self.folder / DECISIONS)
        if self.plan.stop and not any(row.get("budget") == budget for row in decided):
            self._weigh(self.plan.stop.below_best, self.plan.stop.at_least, budget, decided)
            decided = _rows(self.folder / DECISIONS)
        return {row["arm"] for row in decided if row["decision"] == "stopped"}

    def _weigh(self, threshold: float, at_least: int, budget: float, decided: Sequence[dict]) -> None:
        base = self.plan.arms[0].name
        out = {row["arm"] for row in decided if row["decision"] == "stopped"}
        below = below_best(StudyRecord.read(self.folder), self.plan.axis)
        # The base stays: it is what all others are compared with.
        ranked = sorted(
            (arm for arm, p in below.items() if p is not None and arm != base and arm not in out),
            key=lambda arm: -(below[arm] or 0.0),
        )
        may_go = len(self.plan.arms) - len(out) - at_least
        for arm in self.plan.arms:
            p = below.get(arm.name)
            stops = arm.name in ranked[: max(may_go, 0)] and p is not None and p >= threshold
            saved = (self.plan.budgets[-1] - budget) * len(self.plan.seeds) if stops else 0.0
            decision = "stopped" if stops else "goes on"
            row = {"decision": decision, "arm": arm.name, "budget": budget, "probability": p, "saved": saved}
            if arm.name not in out:
                append_row(self.folder / DECISIONS, row)

    def _combined(self) -> Arm | None:
        """The best arms in one, where the study asks for it; None where fewer than two beat the base.

        Better is a higher pass rate at the budget, told or not: it is run to be told.
        """
        if not self.plan.combine:
            return None
        decided = [row for row in _rows(self.folder / DECISIONS) if row["decision"] == "combined"]
        if not decided:
            gains = {
                arm: pair.differences["pass_rate"].median
                for arm, pair in judge_study(StudyRecord.read(self.folder)).pairs.items()
            }
            better = sorted((arm for arm in gains if gains[arm] > 0), key=lambda arm: -gains[arm])
            chosen = self._compatible(better)
            row = {"decision": "combined", "arm": " + ".join(chosen), "of": chosen, "gains": gains}
            append_row(self.folder / DECISIONS, row)
            decided = [row]
        names = decided[0]["of"]
        if len(names) < 2:
            return None
        return combine(self.plan.base, [arm for name in names for arm in self.plan.arms if arm.name == name])

    def _compatible(self, names: Sequence[str]) -> list[str]:
        """The first of them, as many as the study combines, less what changes the same as one before."""
        arms = {arm.name: arm for arm in self.plan.arms}
        chosen: list[str] = []
        for name in names:
            try:
                combine(self.plan.base, [arms[other] for other in (*chosen, name)])
            except InputError:
                continue
            chosen = [*chosen, name][: self.plan.combine]
        return chosen

    def _tuned(self) -> dict[str, Arm]:
        """The arms, each with the learning rate that the rule of the study chooses."""
        plan, tuning = self.plan, self.plan.learning_rate
        if tuning is None:
            return {arm.name: arm for arm in plan.arms}
        trials = list(plan.trials())
        self._prepare([plan.recipe(run, arm) for run, arm, _ in trials])
        self._round([Task(run, plan.recipe(run, arm), tuning.budget) for run, arm, _ in trials])
        chosen = {
            row["arm"]: row["value"]
            for row in _rows(self.folder / DECISIONS)
            if row["decision"] == "learning rate"
        }
        for arm in plan.arms:
            if arm.name in chosen:
                continue
            tried = {
                value: self._late_rate([run for run, of, v in trials if of.name == arm.name and v == value])
                for value in tuning.values
            }
            best = max(tried, key=lambda value: tried[value])
            chosen[arm.name] = best if tried[best] >= 0 else arm.recipe.optimiser.lr
            row = {"decision": "learning rate", "arm": arm.name, "value": chosen[arm.name]}
            append_row(self.folder / DECISIONS, row | {"tried": tried})
        return {arm.name: with_rate(arm, chosen[arm.name]) for arm in plan.arms}

    def _late_rate(self, runs: Sequence[PlannedRun]) -> float:
        """Mean pass rate over the last quarter of the evaluations; -1 where a run has failed."""
        rates = []
        for run in runs:
            mine = tuple(attempt for attempt in self.attempts if attempt.run == run.key)
            if has_failed(mine, self.plan.retries):
                return -1.0
            passed = [point.pass_rate for point in RunRecord.read(self.folder / run.folder).evals]
            rates.append(float(np.mean(passed[-max(len(passed) // 4, 1) :])))
        return float(np.mean(rates))


def _build(recipe: Recipe) -> None:
    find_model(recipe)


def _rows(path: Path) -> list[dict]:
    return [row for _, row in read_jsonl(path, [])] if path.is_file() else []


def _drop_torn_line(path: Path) -> None:
    """Cut off what a kill left of a line, which would spoil the next one."""
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
