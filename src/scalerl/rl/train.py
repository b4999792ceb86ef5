"""A training run, from a recipe to a run folder.

train                claims the folder, makes the run or restores it; again where the learner was lost
_TrainingRun.train   after every step of the pipeline: record, evaluate, freeze a forecast, checkpoint, stop
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from scalerl.errors import (
    CannotAnswerError,
    DivergedError,
    InputError,
    LearnerLostError,
    MovedError,
    OutOfMemoryError,
    PausedError,
    ScalerlError,
    WorkerError,
    first_line,
)
from scalerl.jsonl import read_object
from scalerl.record.activity import Activity, Count
from scalerl.record.folder import RunFolder, check_writable
from scalerl.record.reader import EvalPoint, RunRecord
from scalerl.record.writer import RunWriter
from scalerl.rl.checkpoint.best import BestWeights, Smooth, drop_newer
from scalerl.rl.checkpoint.store import Checkpoints
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.run_config import config_of
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.health.watch import Finding, Watch
from scalerl.rl.learner.load import load_learner
from scalerl.rl.learner.probe import Probe
from scalerl.rl.loop.activity import TRAINING, Activities
from scalerl.rl.loop.budget import amounts, spent
from scalerl.rl.loop.counters import RunClock, RunCounters, groups_row, step_row
from scalerl.rl.loop.evaluations import Agenda, EvaluationError, Evaluations, before_training
from scalerl.rl.loop.parts import Load, parts_of
from scalerl.rl.loop.pipeline import Pipeline, Step
from scalerl.rl.loop.pool import PromptPool
from scalerl.rl.loop.progress import Progress, View
from scalerl.rl.loop.resume import (
    changes_of_resume,
    check_restart,
    check_saved,
    drop_final,
    find_checkpoint,
    has_finished,
    resume_line,
    save_final,
    set_newer_aside,
)
from scalerl.rl.model.causal_lm import gpus_in_use, load_tokenizer
from scalerl.rl.model.named import find_model
from scalerl.rl.model.shape import check_run
from scalerl.rl.placement.evaluate import EvaluationResult
from scalerl.rl.tracking import TrackedRun, Tracker
from scalerl.rl.tracking.process import Setup
from scalerl.rl.tracking.sender import TrackingSender, check_picklable
from scalerl.rl.tracking.trackers import trackers_of
from scalerl.rl.types import Weights
from scalerl.rl.verify.samples import training_samples

Forecaster = Callable[[RunRecord, str, float], Mapping[str, Any]]
"""From the run so far, the compute axis and the budget: the row of forecasts.jsonl."""
_LOG = logging.getLogger("scalerl")
MOST_REWINDS = 5
"""Times in a row that a run goes back to one checkpoint because the learner of a cluster was lost."""
_STATEFUL = (
    *("learner", "generator", "pipeline", "pool", "counters"),
    *("evaluations", "agenda", "health", "probe"),
)
"""Parts whose state a checkpoint has."""


def train(
    recipe: Recipe,
    run: str | Path | RunFolder | None = None,
    model: str | Path | None = None,
    *,
    resume: bool = False,
    restart: bool = False,
    until: float = math.inf,
    forecaster: Forecaster | None = None,
    smooth: Smooth | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    activity: Callable[[Activity], None] = lambda activity: None,
    trackers: Sequence[Tracker] = (),
    stop: threading.Event | None = None,
    evaluate_aside: bool = True,
    load: Load = load_learner,
) -> RunRecord:
    """Train `recipe` into a run folder, as `scalerl train` does, and return the record of the run.

    A script that calls this needs the usual `if __name__ == "__main__":`, as processes are started:

        from scalerl import rl

        if __name__ == "__main__":
            recipe = rl.load_recipe("demo", ["loss.max_ratio=4"])
            record = rl.train(recipe, run="runs/mine")
            print(record.evals[-1].pass_rate)

    With the placement `inline` one seed gives one result, bit for bit, and a run that is resumed gives the
    record of one that was never stopped, times apart. The folder is locked until this returns; if it is moved
    meanwhile, the run makes a checkpoint where it is, and ends.

    Args:
        recipe: what to train. The model `chain-base` is built at its first use, and cached.
        run: the run folder, which must not exist unless it is resumed; runs/NAME-seedN of the recipe where it
            is not given. A `RunFolder` is locked already, and stays so.
        model: a model's folder or name, in place of the recipe's.
        resume: go on from the newest checkpoint in the folder; start where there is no run.
        restart: start anew; what is in the folder is kept in its before-1, before-2 ...
        until: a part of the budget, in its unit, at which to stop with a checkpoint.
        forecaster: freezes a forecast of the end at each share of `evaluation.forecast_at`:
            `scalerl.forecast.freeze.freeze` is what the command uses.
        smooth: the pass rates by which `evaluation.keep = "best"` chooses, which needs it:
            `scalerl.forecast.best.rates_by_step` is what the command uses.
        progress: called after every step and every evaluation.
        activity: called within steps too, a few times a second, with what is being done.
        trackers: the run is logged to them and to those that the recipe names, from a process of their own.
            Their errors are logged as warnings of "scalerl", and change nothing of the run.
        stop: once it is set, the run makes a checkpoint and ends by KeyboardInterrupt.
        evaluate_aside: whether evaluations have a process of their own; the record is the same without.
        load: makes the learner of a recipe and a model's folder, where it is not that of one process.

    Raises:
        InputError: the folder exists, or is being written; the model cannot be loaded, or does not fit the
            recipe's context; a tracker is not installed, or cannot be pickled. With `resume` also: the run
            has another recipe, its checkpoints are gone, config.json was edited, or the final weights and the
            record do not agree.
        WriteError: the disk does not take the record, or the checkpoint that a stop needs; what was written
            before is kept. A `MovedError`, one of these: the folder was moved.
        PausedError: an alarm, where `health.on_alarm` is "pause"; there is a checkpoint of the step.
        DivergedError: gradients or probabilities are not finite any more; what was written before is kept.
        OutOfMemoryError: a process has too little memory; there is a checkpoint of the step, where one could
            be made.
        WorkerError: processes were lost again and again; where they were those of an evaluation, there is a
            checkpoint that has it.
        KeyboardInterrupt: it was stopped; `resume` goes on.
    """
    if recipe.evaluation.keep == "best" and smooth is None:
        how = "give train(..., smooth=scalerl.forecast.best.rates_by_step)"
        raise InputError(f"evaluation.keep: 'best' needs the smoothed pass rates: {how}")
    found, about = find_model(recipe) if model is None else (str(model), {})
    with ExitStack() as around:
        place = run if run is not None else Path("runs") / f"{recipe.name}-seed{recipe.seed}"
        if not isinstance(place, RunFolder):
            place = around.enter_context(closing(RunFolder.claim(place, new=not (resume or restart))))
        recipe = check_prompts(recipe, found)
        check_run(recipe, found, gpus_in_use())
        if resume and has_finished(place.path, recipe):
            return RunRecord.read(place.path)
        if restart:
            check_restart(place.path)
        check_writable(place.path)
        trackers = [*trackers_of(recipe.tracking), *trackers]
        check_picklable(trackers, forecaster)
        torch.set_num_threads(1)  # results must not depend on how many cores there are
        if restart and (apart := place.set_apart()):
            _LOG.warning("the run begins anew; what was there is kept in %s", apart)
        if recipe.cluster is not None:
            from scalerl.rl.workers.ray.session import connected

            around.enter_context(connected(recipe.cluster))
        stop, aside = stop or threading.Event(), evaluate_aside
        around.callback(place.show_nothing)
        activities = Activities(activity, place.show)
        reports = progress, activities
        by = forecaster, smooth
        job = _Job(recipe, place, found, about, until, *by, *reports, trackers, stop, aside, load)
        _train_through_losses(job, resume)
        return RunRecord.read(place.here())


@dataclass(frozen=True)
class _Job:
    """What `train` was called with, checked: the same for every attempt."""

    recipe: Recipe
    place: RunFolder
    model: str
    about: Mapping[str, Any]
    until: float
    forecaster: Forecaster | None
    smooth: Smooth | None
    progress: Callable[[Progress], None]
    activities: Activities
    trackers: Sequence[Tracker]
    stop: threading.Event
    evaluate_aside: bool
    load: Load


def _train_through_losses(job: _Job, resume: bool) -> None:
    """Train to the end; resume from the last checkpoint whenever the learner of a cluster is lost."""
    rewinds, started = 0, -1
    lost: LearnerLostError | None = None
    while True:
        try:
            with ExitStack() as closing:
                run = _TrainingRun(job, resume, closing)
                rewinds, started = (0 if run.started > started else rewinds), run.started
                if lost:
                    _LOG.warning("the run goes on from step %d", started)
                    run.parts.went_back(lost, started)
                run.follow(closing)
                try:
                    if run.train():
                        run.save_final()
                except DivergedError as error:
                    run.health.diverged(error.step)
                    raise
                return
        except LearnerLostError as error:
            rewinds, resume, lost = rewinds + 1, True, error
            if rewinds > MOST_REWINDS:
                raise
            _LOG.warning("%s; the run goes on from its last checkpoint", error)


class _TrainingRun:
    """The parts of a run, and what is done with them after every step. `closing` ends them."""

    def __init__(self, job: _Job, resume: bool, closing: ExitStack) -> None:
        self.clock = RunClock()
        self.job, self.place, self.recipe, self.stop = job, job.place, job.recipe, job.stop
        recipe, folder, task = job.recipe, self.folder, job.recipe.task
        self.activities = activities = job.activities
        activities.doing("loading the model")
        self.parts = parts = parts_of(recipe, job.model, closing, folder, job.evaluate_aside, job.load)
        self.tokenizer = load_tokenizer(job.model)
        self.learner: Any = parts.learner()
        self.verifier = parts.verifier(self.tokenizer)
        self.pool = PromptPool(task.prompts("train"), recipe.curriculum, recipe.seed, task.weights)

        saved = find_checkpoint(folder) if resume else None
        if saved:
            check_saved(folder, saved, recipe)
            self.learner.restore(saved["learner"], saved["folder"])
        self.started = self.learner.version
        """The version that the run goes on from."""
        activities.doing("starting the generator")
        # The generator raises where the recipe does not fit the model: nothing has been written until then.
        self.generator = parts.generator(self.learner, saved["generator"]["version"] if saved else 0)
        trainers = self.learner.trainers
        self.counters = RunCounters(recipe.processes, trainers, parts.held, recipe.apart)
        devices = {"trainers": trainers, "held": self.counters.devices}
        if resume and (folder / "config.json").exists():
            if saved:
                _LOG.info("resuming after step %d, from %s", self.started, saved["folder"])
            set_newer_aside(folder, saved["folder"] if saved else None)
            drop_final(folder)
            drop_newer(folder / "checkpoints", self.started)
            self.writer = RunWriter.resume(self.place, saved["lengths"] if saved else {})
            self.writer.change(**changes_of_resume(folder, recipe, devices))
        else:
            self.writer = RunWriter(self.place, config_of(recipe, self.learner, devices, job.about))
        closing.callback(self.writer.close)
        if parts.timeline is not None:
            closing.callback(lambda: self.writer.timeline(parts.timeline.events()))

        self.view = View(job.progress)
        due, at, first = recipe.evaluation, recipe.evaluation.forecast_at, self._first_budget()
        self.agenda = Agenda(due.count, at, every=due.every, budget=recipe.budget.amount, first=first)
        self.health = Watch(recipe.health, recipe.precision, self._on_finding)
        self.probe = Probe(self.learner, recipe)
        evaluate, heard = parts.evaluate(job.stop, activities), (self._on_point, self._on_suite)
        self.evaluations = Evaluations(evaluate, self.writer, recipe, self.counters, *heard, activities)
        self.learner.watch(job.stop, self._report_training)
        verify = self.verifier.start
        self.pipeline = Pipeline(
            recipe, self.pool, self.generator, self.learner, verify, job.stop, activities
        )
        made = self.writer.checkpointed
        self.checkpoints = Checkpoints(
            folder / "checkpoints", recipe.checkpoint, self.learner.saver, self.tokenizer, made
        )
        closing.callback(self.checkpoints.close)
        self.best = None
        if recipe.evaluation.keep == "best" and job.smooth is not None:
            self.best = BestWeights(job.model, recipe.precision, self.tokenizer, job.smooth)
            closing.callback(self.best.close)
        self.generator.wait_until_started()  # all that is started by now does so at the same time
        with self.clock.stopped():  # without a process of their own evaluations are made here
            if saved:
                for name in _STATEFUL[1:]:  # the learner's is, before the generator took its weights
                    getattr(self, name).restore(saved[name])
                if amounts(self.writer.config) != amounts(saved["config"]):
                    self.agenda.aim_at_new_end(self._spent() / recipe.budget.amount)
            else:
                self.evaluations.start(0, self.learner.weights())

    @property
    def folder(self) -> Path:
        """The run folder, wherever it has been moved to."""
        return self.place.here()

    def follow(self, closing: ExitStack) -> None:
        """Log the run to the trackers from here on, until `closing` ends them."""
        settings, path = self.recipe.tracking, self.folder.absolute()
        name, config = settings.name or path.name, read_object(path / "config.json")
        run = TrackedRun(path, name, settings.project, settings.group, config, self.learner.version + 1)
        job, seconds = self.job, settings.close_seconds
        setup = Setup(job.trackers, run, job.forecaster, *self.recipe.budget_on_axis(), seconds)
        self.sender = closing.enter_context(TrackingSender(setup))

    def train(self) -> bool:
        """Train until the budget is spent or the pool has run dry; false where `until` came first."""
        try:
            return self._train()
        except OutOfMemoryError as error:
            raise OutOfMemoryError(self._saved_within(error), error.torn) from error

    def _train(self) -> bool:
        self.counters.startup_seconds += self.clock.lap() * self.counters.devices["train"]
        budget, until = self.recipe.budget.amount, self.job.until
        if self._spent() >= budget:  # all that a checkpoint was made for was its last evaluations
            return True
        if until <= self._spent():
            return False
        with self.clock.stopped(), self._saved_first():
            if not self._forecast(self._spent() / budget):  # where it was stopped, and again
                self._save()
                raise KeyboardInterrupt
        self._starts_step(self._spent() / budget)
        for step in self.pipeline.steps():
            self._record(step)
            share = self._spent() / budget
            with self.clock.stopped(), self._saved_first():  # it is no part of training
                if self.agenda.evaluates(self._spent(), step.index):
                    self.evaluations.start(step.index, self.learner.weights(), last=share >= 1)
                if self._forecast(share):
                    self.evaluations.write_finished(self.stop)
            self.view.step(step.index, share, self.counters)
            self._starts_step(share)
            if share >= 1:
                return True
            at_cut = self._spent() >= until
            with self._saved_first():
                self._checkpoint(step, at_cut)
            if at_cut:
                return False
        if self.stop.is_set():
            self._stop_within()
        return True

    def save_final(self) -> None:
        """Evaluate and save the weights as they are at the end."""
        if self.evaluations.last_step < self.learner.version:  # every prompt has been retired
            self.evaluations.start(self.learner.version, self.learner.weights(), last=True)
        with self._saved_first():
            if not self.evaluations.write_finished(self.stop, most=0):
                self._save()
                raise KeyboardInterrupt
        self.activities.doing("saving the final weights")
        if self.best is not None:
            self.best.wait()
        settings = self.recipe.checkpoint
        if settings.steps or settings.minutes:  # what a later resume extends
            self.checkpoints.folder = self.folder / "checkpoints"
            self.checkpoints.make(self.learner.version, self.state())
        self.checkpoints.wait()
        save_final(self.folder, self.learner.version, self.learner.saver, self.tokenizer)
        if self.folder != self.place.path:
            raise MovedError(f"{self._moved_to()}: it has come to its end, and is whole there")

    def state(self) -> dict[str, Any]:
        """Return copies of everything that a resume needs."""
        parts = {name: getattr(self, name).state() for name in _STATEFUL}
        return parts | {"lengths": self.writer.lengths(), "config": self.writer.config}

    def _moved_to(self) -> str:
        return f"{self.place.path}: the run folder was moved during the run, to {self.folder}"

    def _record(self, step: Step) -> None:
        self.counters.add(step, self.generator.counters, self.clock.lap())
        with self.clock.stopped():
            started = time.perf_counter()
            probed = self.probe([rollout for group in step.groups for rollout in group.rollouts])
            self.counters.add_probe(time.perf_counter() - started)
        row = step_row(step, self.counters, self.pipeline) | probed
        settings = self.recipe.samples
        if settings.every and step.index % settings.every == 0:
            kept = step.groups[: settings.training]
            samples = training_samples(step.index, kept, self.tokenizer)
            self.writer.samples(samples)
            self.sender.samples(samples)
        self.writer.step(row, groups_row(step))
        if self.parts.timeline is not None:
            self.writer.timeline(self.parts.timeline.lines(step.index, step.trained_at, step.train_seconds))
        self.sender.step(row)
        self.health.step(row)
        for failure in self.verifier.new_failures():
            _LOG.warning(failure)

    def _starts_step(self, share: float) -> None:
        self.activities.starts(self.learner.version + (share < 1), share)

    def _report_training(self, done: int, of: int) -> None:
        self.activities.doing(TRAINING, Count(done, of, "micro-batches"))

    def _forecast(self, share: float) -> bool:
        """Freeze the forecast that is due; false where the run stops first: a resume then freezes it."""
        if self.agenda.to_freeze(share) and self.job.forecaster and share < 1:
            # Nothing is trained until the forecast is frozen.
            if not self.evaluations.write_finished(self.stop, most=0):
                return False
            self.activities.doing("forecasting")
            try:
                row = self.job.forecaster(RunRecord.read(self.folder), *self.recipe.budget_on_axis())
            except CannotAnswerError:
                pass  # too early for a forecast; there may be one at the next milestone
            else:
                self.writer.forecast(row)
                self.view.frozen(row)
        self.agenda.froze(share)
        return True

    @contextmanager
    def _saved_first(self) -> Iterator[None]:
        """End the run where an evaluation cannot be made, after a checkpoint that has it."""
        try:
            yield
        except EvaluationError as error:
            self._save()
            raise WorkerError(f"{error}; {resume_line(self.folder)} goes on, and makes it") from error

    def _save(self, within: bool = False) -> None:
        """Make a checkpoint where the run folder is now, and wait until it is on the disk."""
        self.activities.doing("saving a checkpoint")
        self.checkpoints.folder = self.folder / "checkpoints"
        self.checkpoints.make(self.learner.version, self.state(), within)
        self.checkpoints.finish()

    def _stop_within(self) -> NoReturn:
        """Stop within a step, with a checkpoint of all that it has sampled and verified so far."""
        self.counters.hold(self.generator.counters, self.clock.lap())
        with self.clock.stopped(), self._saved_first():
            self.evaluations.write_finished(self.stop)
            self._save(within=True)
        raise KeyboardInterrupt

    def _saved_within(self, error: OutOfMemoryError) -> str:
        """Make a checkpoint of what there was before an error; return the line for the user."""
        again = f"{resume_line(self.folder)} --set key=value goes on from"
        if error.torn:
            return f"{error}; {again} the last checkpoint"
        self.counters.hold(self.generator.counters, self.clock.lap())
        try:
            self._save(within=True)
        except (ScalerlError, RuntimeError, MemoryError) as second:  # it takes memory, too
            return f"{error}; {again} the last checkpoint, as none could be made ({first_line(second)})"
        return f"{error}; {again} a checkpoint of this step"

    def _checkpoint(self, step: Step, at_cut: bool) -> None:
        moved, stopped = self.folder != self.place.path, self.stop.is_set()
        ends = at_cut or moved or self.health.pause_for is not None
        if ends:
            # There is time, unless something is about to end this process.
            self.evaluations.write_finished(self.stop, most=0)
        if ends or stopped:
            self._save()
        elif self.checkpoints.due(step.index):
            self.checkpoints.make(step.index, self.state())
        if moved:
            what = f"a checkpoint of step {step.index} is there, and {resume_line(self.folder)} goes on"
            raise MovedError(f"{self._moved_to()}: {what}")
        if reason := self.health.pause_for:
            raise PausedError(f"paused at {reason}; {resume_line(self.folder)} goes on")
        if stopped:
            raise KeyboardInterrupt

    def _first_budget(self) -> float:
        """Return the amount of the budget that the run began with."""
        first, *_, now = 2 * amounts(self.writer.config)
        return self.recipe.budget.amount * first / now

    def _spent(self) -> float:
        row = {"step": self.learner.version, "ledger": self.counters.fates, **self.counters.json()}
        return spent(self.recipe.budget.kind, row, len(self.pool.prompts))

    def _on_finding(self, finding: Finding) -> None:
        row = finding.json()
        self.writer.alarm(row)
        self.sender.finding(row)
        self.view.finding(finding)

    def _on_point(self, point: EvalPoint, result: EvaluationResult, weights: Weights) -> None:
        self.view.point(point)
        self.sender.evaluation(point)
        self.sender.samples(result.samples)
        self.health.evaluation(point)
        if point.step == 0:
            for line in before_training(point):
                _LOG.warning(line)
        if self.best is not None:
            self.best.consider(self.folder, point.step, weights)

    def _on_suite(self, row: Mapping[str, Any]) -> None:
        self.sender.suite(row)
