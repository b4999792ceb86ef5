"""Running a study: every arm and seed to each budget in turn, in parallel processes.

    tune          the learning rate of every arm, if the study says so
    for budget:   run every run to it     skipping finished runs, resuming cut ones, retrying crashed ones
                  freeze                  a forecast for every later budget, before any run continues
                  decide                  which arms stop here

All of its state is on the disk, in the files of `scalerl.study.record`: a study that is killed at any moment
and restarted ends with the same results.
"""

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, ScalerlError, WriteError
from scalerl.files import lock
from scalerl.jsonl import read_object
from scalerl.own_code import code_of, codes_in
from scalerl.record.saved_weights import final_folder
from scalerl.record.writer import append_row
from scalerl.rl.checkpoint.store import step_folders
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.loop.resume import is_finished
from scalerl.rl.model.causal_lm import compute_device, gpus_in_use
from scalerl.rl.model.named import find_model, is_to_be_built
from scalerl.rl.tasks.task import check_task
from scalerl.rl.workers.backend import Channel
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
from scalerl.study.run.jobs import Job, JobPool, when_stopped, work

_POLL_SECONDS = 0.1
_STOP_TIMEOUT_SECONDS = 120.0
"""Seconds that stopped runs have to write their checkpoints."""


@dataclass(frozen=True)
class StudyProgress:
    """The progress of a study, reported several times a second and with every notice."""

    done: int
    runs: int
    """Number of runs in this round, which is one budget of the study."""
    running: tuple[tuple[str, float, float], ...]
    """Name, share of the budget and last pass rate of every run in progress."""
    notice: str = ""


@dataclass(frozen=True)
class RunTask:
    """A run, its recipe, and the part of the budget at which it is to stop."""

    run: PlannedRun
    recipe: Recipe
    until: float


Watch = Callable[[StudyProgress], None]


def run_study(
    plan: Plan, folder: Path, *, cores: int, watch: Watch, stop: threading.Event | None = None
) -> StudyRecord:
    """Run a plan into `folder`, or continue it, and return its record.

    Arguments and errors are those of `scalerl.study.entry.run`; if another process is running the study, that
    is an InputError too.
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
        self.plan, self.folder, self.watch, self.stop = plan, folder, watch, stop
        self.gpus = [gpu.name for gpu in gpus_in_use()] if compute_device().type == "cuda" else []
        """GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES; may be empty."""
        self.cores = min(cores, len(self.gpus) or cores)
        # Remove a partial last line, left by a kill, as the next line would be appended to it.
        for path in (folder / name for name in (ATTEMPTS, DECISIONS, FORECASTS)):
            if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
                os.truncate(path, data.rfind(b"\n") + 1)
        self.attempts = read_attempts(folder, [])

    def run(self) -> None:
        self._compare_code()
        self._rounds()
        if decide_combination(self.plan, self.folder):
            self.plan = with_combined(self.plan, self.folder)
            write_plan(self.plan, self.folder)
            self._rounds()

    def _rounds(self) -> None:
        """Run all arms to all budgets, skipping what has been run."""
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
            self._tidy(task.run)  # a kill may have prevented this before
            ended = any(a.outcome in ("done", "diverged", "paused") for a in self._attempts_of(task.run))
            if ended and not (self.folder / task.run.folder).exists():
                self._record(Attempt(task.run.key, "cut", REMOVED, 0.0, task.until))
        waiting = [task for task in tasks if not self._ended(task)]
        done = len(tasks) - len(waiting)

        def again(job: Job, outcome: str, cause: str) -> bool:
            if stopping:
                with suppress(WriteError):  # this error may be the very reason for stopping
                    self._keep(waiting[job.number], job, outcome, cause)
                return False
            notice = self._note(waiting[job.number], job, outcome, cause)
            goes_on = not self._ended(waiting[job.number])
            self._report(done + pool.done + (not goes_on), len(tasks), pool.running, notice)
            return goes_on

        jobs = [self._job(i, task) for i, task in enumerate(waiting)]
        stopping, pool = False, JobPool(jobs, self.cores, again)
        try:
            while pool.done < len(waiting):
                pool.poll(_POLL_SECONDS)
                if self.stop.is_set():
                    raise KeyboardInterrupt
                self._report(done + pool.done, len(tasks), pool.running)
        except BaseException:
            stopping = True
            for job in pool.stop(_STOP_TIMEOUT_SECONDS):
                again(job, "cut", "killed before it had made a checkpoint")
            raise

    def _job(self, number: int, task: RunTask) -> Job:
        folder = self.folder / task.run.folder

        def arguments(cores: Sequence[int]) -> tuple[Any, ...]:
            folder.parent.mkdir(parents=True, exist_ok=True)
            gpus = ",".join(self.gpus[number] for number in cores) if self.gpus else None
            log = folder.parent / f"{folder.name}.log"
            return task.recipe.without_prompts(), folder, task.until, log, gpus

        return Job(task.run.key, number, target=work, arguments=arguments, needs=task.recipe.devices)

    def _ended(self, task: RunTask) -> bool:
        """Return whether the run has reached its part of the budget, or failed for good."""
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
        is_finished(folder)  # raises if its final weights are of another step
        return came

    def _has_failed(self, run: PlannedRun) -> bool:
        return has_failed(self._attempts_of(run), self.plan.study.retries)

    def _attempts_of(self, run: PlannedRun) -> tuple[Attempt, ...]:
        return attempts_of(run.key, self.attempts)

    def _note(self, task: RunTask, job: Job, outcome: str, cause: str) -> str:
        """Record the end of an attempt, and return a line about it."""
        self._keep(task, job, outcome, cause)
        text = f"{task.run.key}: {outcome}"
        if outcome == "done":
            self._tidy(task.run)
            unsolved = "; it solves no held-out prompt (look at its samples.jsonl)"
            solved = job.progress[1]
            return f"{text} in {job.seconds:.0f} s, pass rate {solved:.3f}{unsolved * (solved == 0)}"
        again = "" if self._ended(task) else "; it is tried again"
        return f"{text} ({cause}){again}"

    def _keep(self, task: RunTask, job: Job, outcome: str, cause: str) -> None:
        if outcome == "disk":
            raise WriteError(cause)
        self._record(Attempt(task.run.key, outcome, cause, job.seconds, task.until))  # pyright: ignore

    def _record(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        append_row(self.folder / ATTEMPTS, vars(attempt))

    def _tidy(self, run: PlannedRun) -> None:
        """Remove the checkpoints of a finished run, except its final weights."""
        folder = self.folder / run.folder
        if final_folder(folder).is_dir():
            for _, checkpoint in step_folders(final_folder(folder).parent):
                shutil.rmtree(checkpoint)

    def _report(self, done: int, runs: int, running: Sequence[Job], notice: str = "") -> None:
        under_way = tuple((job.name, *job.progress) for job in running)
        self.watch(StudyProgress(done, runs, under_way, notice))

    # -- between rounds ------------------------------------------------------------------------------------

    def _prepare(self, recipes: Iterable[Recipe]) -> None:
        """Build the base models that are not downloaded, once, instead of in every run that needs one."""
        built = {
            (recipe.model, repr(recipe.task), recipe.context.thinking): recipe
            for recipe in recipes
            if is_to_be_built(recipe)
        }
        if not built:
            return
        self._say(f"building {len(built)} base model{'s' * (len(built) > 1)} first")
        # Errors are ignored here: the run that needs the model reports them.
        jobs = [
            Job("base model", i, target=_build, arguments=lambda cores, recipe=recipe: [recipe])
            for i, recipe in enumerate(built.values())
        ]
        pool = JobPool(jobs, self.cores, lambda job, outcome, cause: False)
        try:
            while pool.done < len(jobs):
                if self.stop.is_set():
                    raise KeyboardInterrupt
                pool.poll(_POLL_SECONDS)
        finally:
            pool.stop(_STOP_TIMEOUT_SECONDS)

    def _compare_code(self) -> None:
        """Report custom kinds whose files have changed since runs of this study used them."""
        now = {kind: code for arm in self.plan.arms for kind, code in code_of(arm.recipe.to_dict()).items()}
        configs = [self.folder / run.folder / "config.json" for run in self.plan.runs]
        ran = [codes_in(read_object(path)) for path in configs if path.is_file()]
        for kind, code in now.items():
            if any(codes.get(kind, [code])[-1] != code for codes in ran):
                text = f"{kind} has changed since runs of this study were made, which are kept as they are"
                self._say(f"{text}; -o FOLDER runs all by the new code")

    def _say(self, notice: str) -> None:
        finished = sum(final_folder(self.folder / run.folder).is_dir() for run in self.plan.runs)
        self._report(finished, len(self.plan.runs), (), notice)

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


def _build(channel: Channel, recipe: Recipe) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that `finally` clauses run
    when_stopped(channel, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with suppress(ScalerlError):
        find_model(recipe)
