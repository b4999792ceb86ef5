"""Runs a study: every arm and seed to each budget in turn, in processes beside one another.

    tune          the learning rate of every arm, if the study says so
    for budget:   run every run to it     skipping what is there, resuming what was cut, retrying what crashed
                  freeze                  a forecast of every later budget, before any run goes there
                  decide                  which arms stop here

All of its state is on the disk, in the files of `scalerl.study.record`: a study that is killed at any moment
and started again ends with the same results.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from scalerl.errors import InputError, ScalerlError, WriteError
from scalerl.files import lock
from scalerl.jsonl import read_object
from scalerl.kinds import code_of, codes_in
from scalerl.record.reader import final_folder
from scalerl.record.writer import append_row
from scalerl.rl.checkpoint.store import step_folders
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.loop.resume import is_finished
from scalerl.rl.model.causal_lm import compute_device
from scalerl.rl.model.named import find_model, is_to_be_built
from scalerl.rl.tasks.task import check_task
from scalerl.rl.workers.process import masked_signals
from scalerl.study.arms import Arm
from scalerl.study.plan import Plan, with_rate, write_plan
from scalerl.study.record import (
    ATTEMPTS,
    DECISIONS,
    FORECASTS,
    REMOVED,
    Attempt,
    PlannedRun,
    StudyRecord,
    attempts_of,
    has_failed,
    read_attempts,
)
from scalerl.study.run.decisions import (
    choose_rates,
    decide_combination,
    freeze_forecasts,
    stop_arms,
    with_combined,
)
from scalerl.study.run.job import RunJob, RunTask

_POLL_SECONDS = 0.1
_STOP_TIMEOUT_SECONDS = 120.0
"""For the checkpoints of runs that are stopped."""


@dataclass(frozen=True)
class StudyProgress:
    """How far a study is: given to its watcher several times a second, and with every notice."""

    done: int
    runs: int
    """Runs of this round, one budget of the study."""
    running: tuple[tuple[str, float, float], ...]
    """Name, share of the budget and last pass rate of every run under way."""
    notice: str = ""


Watch = Callable[[StudyProgress], None]


def run_study(
    plan: Plan, folder: Path, *, cores: int, watch: Watch, stop: threading.Event | None = None
) -> StudyRecord:
    """Run a plan into `folder`, or go on with it, and return its record.

    The arguments are those of `scalerl.study.entry.run`, the errors too; another process that runs the study
    is an InputError as well.
    """
    for task in {repr(arm.recipe.task): arm.recipe.task for arm in plan.arms}.values():
        check_task(task)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = lock(folder, "another process is running this study")
        try:
            plan = with_combined(plan, folder)
            write_plan(plan, folder)
            _Runner(plan, folder, cores, watch, stop or threading.Event()).run()
        finally:
            os.close(handle)
    except OSError as error:
        raise WriteError(f"{error.filename or folder}: {error.strerror or error}") from error
    return StudyRecord.read(folder)


class _Runner:
    def __init__(self, plan: Plan, folder: Path, cores: int, watch: Watch, stop: threading.Event) -> None:
        self.plan, self.folder, self.cores, self.watch, self.stop = plan, folder, cores, watch, stop
        self.on_gpus = compute_device().type == "cuda"
        for name in (ATTEMPTS, DECISIONS, FORECASTS):
            _drop_torn_line(folder / name)
        self.attempts = read_attempts(folder, [])

    def run(self) -> None:
        self._compare_code()
        self._rounds()
        if decide_combination(self.plan, self.folder):
            self.plan = with_combined(self.plan, self.folder)
            write_plan(self.plan, self.folder)
            self._rounds()

    def _rounds(self) -> None:
        """Run all arms to all budgets; what has run is left as it is."""
        plan = self.plan
        arms = self._tuned()
        self._prepare([plan.recipe(run, arms[run.arm]) for run in plan.runs])
        runs = plan.runs
        for budget in plan.budgets:
            self._round([RunTask(run, plan.recipe(run, arms[run.arm]), budget) for run in runs])
            if budget < plan.budgets[-1]:
                runs = [run for run in runs if not self._has_failed(run)]
                freeze_forecasts(plan, self.folder, runs, budget)
                stopped = stop_arms(plan, self.folder, budget)
                runs = [run for run in runs if run.arm not in stopped]

    # -- a round -------------------------------------------------------------------------------------------

    def _round(self, tasks: Sequence[RunTask]) -> None:
        """Run every task to its part of the budget, or until it fails for good."""
        for task in tasks:
            self._tidy(task.run)  # a kill may have come before
            ended = any(a.outcome in ("done", "diverged", "paused") for a in self._attempts_of(task.run))
            if ended and not (self.folder / task.run.folder).exists():
                self._record(Attempt(task.run.key, "cut", REMOVED, 0.0, task.until))
        waiting = deque(task for task in tasks if not self._ended(task))
        done, running = len(tasks) - len(waiting), list[RunJob]()
        try:
            while waiting or running:
                # Only the first in the queue: a run of several devices would else be overtaken for ever.
                while waiting and (cores := self._free_cores(waiting[0], running)):
                    running.append(RunJob(waiting.popleft(), self.folder, cores, self.on_gpus))
                for job in list(running):
                    if ended := job.poll():
                        running.remove(job)
                        notice = self._note(job, *ended)
                        if self._ended(job.task):
                            done += 1
                        else:
                            waiting.append(job.task)
                        self._report(done, len(tasks), running, notice)
                if self.stop.is_set():
                    raise KeyboardInterrupt
                self._report(done, len(tasks), running)
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self._stop(running)
            raise

    def _ended(self, task: RunTask) -> bool:
        """Return whether the run has come to its part of the budget, or failed for good.

        Raises:
            InputError: it had come there, and its evaluations are gone since, or are not those of its end.
        """
        if self._has_failed(task.run):
            return True
        folder = self.folder / task.run.folder
        came = final_folder(folder).is_dir() or any(
            attempt.outcome == "done" and attempt.until >= task.until
            for attempt in self._attempts_of(task.run)
        )
        if came and not (folder / "evals.jsonl").is_file():
            raise InputError(
                f"{folder}: its evals.jsonl is gone; put it back, or remove the folder to run it again"
            )
        is_finished(folder)  # raises where its final weights are of another step
        return came

    def _has_failed(self, run: PlannedRun) -> bool:
        return has_failed(self._attempts_of(run), self.plan.study.retries)

    def _attempts_of(self, run: PlannedRun) -> tuple[Attempt, ...]:
        return attempts_of(run.key, self.attempts)

    def _free_cores(self, task: RunTask, running: Sequence[RunJob]) -> tuple[int, ...]:
        """Return the numbers of the cores or GPUs for a task; none while too few are free."""
        taken = {number for job in running for number in job.cores}
        free = tuple(number for number in range(self.cores) if number not in taken)
        needed = task.recipe.devices
        return free[:needed] if len(free) >= needed or not running else ()

    def _note(self, job: RunJob, outcome: str, cause: str) -> str:
        """Put the end of an attempt on record, and return a line about it."""
        self._keep(job, outcome, cause)
        task = job.task
        text = f"{task.run.key}: {outcome}"
        if outcome == "done":
            self._tidy(task.run)
            return f"{text} in {job.seconds:.0f} s, pass rate {job.pass_rate:.3f}"
        again = "" if self._ended(task) else "; it is tried again"
        return f"{text} ({cause}){again}"

    def _keep(self, job: RunJob, outcome: str, cause: str) -> None:
        if outcome == "disk":
            raise WriteError(cause)
        task = job.task
        self._record(Attempt(task.run.key, outcome, cause, job.seconds, task.until))  # pyright: ignore

    def _record(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        append_row(self.folder / ATTEMPTS, vars(attempt))

    def _tidy(self, run: PlannedRun) -> None:
        """Remove the checkpoints of a run that is finished, but for its final weights."""
        folder = self.folder / run.folder
        if final_folder(folder).is_dir():
            for _, checkpoint in step_folders(final_folder(folder).parent):
                shutil.rmtree(checkpoint)

    def _report(self, done: int, runs: int, running: Sequence[RunJob], notice: str = "") -> None:
        under_way = tuple((job.task.run.key, job.share, job.pass_rate) for job in running)
        self.watch(StudyProgress(done, runs, under_way, notice))

    def _stop(self, running: Sequence[RunJob]) -> None:
        """Have the runs under way make checkpoints; kill those that have not exited in time."""
        for job in running:
            job.stop()
        deadline = time.monotonic() + _STOP_TIMEOUT_SECONDS
        with suppress(KeyboardInterrupt):  # the second: kill at once, and resume from what is there
            while any(job.poll() is None for job in running) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        for job in running:
            ended = job.poll()
            if ended is None:
                job.kill()
                ended = "cut", "killed before it had made a checkpoint"
            with suppress(WriteError):  # it may be what the study is stopped for
                self._keep(job, *ended)

    # -- between rounds ------------------------------------------------------------------------------------

    def _prepare(self, recipes: Iterable[Recipe]) -> None:
        """Build the base models that are not downloaded, once, and not in every run that starts from one."""
        built = {
            (recipe.model, repr(recipe.task), recipe.context.thinking): recipe
            for recipe in recipes
            if is_to_be_built(recipe)
        }
        if not built:
            return
        text = f"building {len(built)} base model{'s' * (len(built) > 1)} first"
        self._report(0, len(self.plan.runs), (), text)
        waiting, running = deque(built.values()), list[BaseProcess]()
        try:
            while waiting or running:
                if self.stop.is_set():
                    raise KeyboardInterrupt
                while waiting and len(running) < self.cores:
                    with masked_signals():
                        running.append(get_context("spawn").Process(target=_build, args=[waiting.popleft()]))
                        running[-1].start()
                time.sleep(_POLL_SECONDS)
                running = [process for process in running if process.is_alive()]
        finally:
            for process in running:
                process.terminate()
                process.join()

    def _compare_code(self) -> None:
        """Report the custom kinds whose files have changed since runs of this study were made."""
        now = {kind: code for arm in self.plan.arms for kind, code in code_of(arm.recipe.to_dict()).items()}
        configs = [self.folder / run.folder / "config.json" for run in self.plan.runs]
        ran = [codes_in(read_object(path)) for path in configs if path.is_file()]
        for kind, code in now.items():
            if any(codes.get(kind, [code])[-1] != code for codes in ran):
                text = f"{kind} has changed since runs of this study were made, which are kept as they are"
                self._report(0, len(configs), (), f"{text}; -o FOLDER runs all by the new code")

    def _tuned(self) -> dict[str, Arm]:
        """Return the arms, each with the learning rate that the rule of the study chooses."""
        plan, tuning = self.plan, self.plan.study.learning_rate
        if tuning is None:
            return {arm.name: arm for arm in plan.arms}
        trials = [(run, plan.recipe(run, arm)) for run, arm in plan.trials()]
        self._prepare(recipe for _, recipe in trials)
        self._round([RunTask(run, recipe, tuning.budget) for run, recipe in trials])
        rates = choose_rates(plan, self.folder, {run.key for run, _ in trials if self._has_failed(run)})
        return {arm.name: with_rate(arm, rates[arm.name]) for arm in plan.arms}


def _build(recipe: Recipe) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that `finally` clauses run
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    with suppress(ScalerlError):  # the run that needs the model reports it
        find_model(recipe)


def _drop_torn_line(path: Path) -> None:
    """Cut off what a kill left of a line: the next one would be appended to it."""
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
