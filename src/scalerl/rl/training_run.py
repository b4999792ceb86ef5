"""The parts of a training run, and the work after every step of the pipeline (`TrainingRun.train`).

After a step: record, evaluate, freeze a forecast, checkpoint, stop.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from scalerl.errors import (
    CannotAnswerError,
    MovedError,
    OutOfMemoryError,
    OwnCodeError,
    PausedError,
    ScalerlError,
    WorkerError,
    first_line,
)
from scalerl.jsonl import read_object
from scalerl.record.activity import Count
from scalerl.record.evaluation import EvalPoint
from scalerl.record.folder import RunFolder
from scalerl.record.reader import RunRecord
from scalerl.record.writer import RunWriter
from scalerl.rl.checkpoint.best import BestWeights, Smooth, drop_newer
from scalerl.rl.checkpoint.store import Checkpoints
from scalerl.rl.config.engine import Vllm
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.health.watch import Finding, Watch
from scalerl.rl.learner.probe import Probe
from scalerl.rl.loop.budget import amounts, spent
from scalerl.rl.loop.counters import RunClock, RunCounters, groups_row, step_row
from scalerl.rl.loop.evaluations import Agenda, EvaluationError, Evaluations, before_training
from scalerl.rl.loop.parts import Load, parts_of
from scalerl.rl.loop.pipeline import Pipeline, Step
from scalerl.rl.loop.progress import TRAINING, Activities, Progress, View
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.loop.resume import (
    changes_of_resume,
    check_saved,
    config_of,
    drop_final,
    find_checkpoint,
    resume_line,
    save_final,
    set_newer_aside,
)
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.placement.evaluate import EvaluationResult
from scalerl.rl.tracking.process import Setup
from scalerl.rl.tracking.sender import TrackingSender
from scalerl.rl.tracking.tracker import TrackedRun, Tracker
from scalerl.rl.types import Weights
from scalerl.rl.verify.samples import training_samples

Freeze = Callable[[RunRecord, str, float], Mapping[str, Any]]
"""Make a row of forecasts.jsonl from the run so far, the compute axis and the budget."""
_LOG = logging.getLogger("scalerl")
_STATEFUL = ("generator", "pipeline", "pool", "counters", "evaluations", "agenda", "health", "probe")
"""Parts whose state is saved in a checkpoint; the learner saves its own."""


@dataclass(frozen=True)
class TrainingJob:
    """The checked arguments of `train`, the same for every attempt."""

    recipe: Recipe
    place: RunFolder
    model: str
    about: Mapping[str, Any]
    until: float
    forecaster: Freeze | None
    smooth: Smooth | None
    progress: Callable[[Progress], None]
    activities: Activities
    trackers: Sequence[Tracker]
    stop: threading.Event
    evaluate_aside: bool
    load: Load


class TrainingRun:
    """The parts of a run, and the work after every step; closing `closing` stops the parts."""

    def __init__(self, job: TrainingJob, resume: bool, closing: ExitStack) -> None:
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
            self.learner.restore(saved["folder"])
        self.started = self.learner.version
        """The version from which the run continues."""
        activities.doing("starting the generator")
        # The generator raises if the recipe does not fit the model, so it comes before anything is written.
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
        due, budget, had = recipe.evaluation, recipe.budget.amount, amounts(self.writer.config)
        first = budget * (had[0] / had[-1])  # the run's original budget, in the unit of the recipe
        self.agenda = Agenda(due.count, due.forecast_at, every=due.every, budget=budget, first=first)
        tf32 = recipe.precision == "float32" and isinstance(recipe.engine, Vllm)
        self.health = Watch(recipe.health, "tf32" if tf32 else recipe.precision, self._on_finding)
        self.probe = Probe(self.learner, recipe)
        heard = self._on_point, lambda row: self.sender.suite(row)
        evaluate = parts.evaluate(job.stop, activities)
        self.evaluations = Evaluations(evaluate, self.writer, recipe, self.counters, *heard, activities)
        self.learner.watch(
            job.stop, lambda done, of: activities.doing(TRAINING, Count(done, of, "micro-batches"))
        )
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
        self.generator.wait_until_started()  # last, so that all processes start up concurrently
        self._saved = saved

    def begin(self) -> None:
        """Restore the checkpoint, or evaluate the model before training."""
        saved, self._saved = self._saved, None
        with self.clock.stopped():  # evaluations without a process of their own run here
            if saved:
                for name in _STATEFUL:
                    getattr(self, name).restore(saved[name])
                if amounts(self.writer.config) != amounts(saved["config"]):
                    self.agenda.aim_at_new_end(self._spent() / self.recipe.budget.amount)
            else:
                self.evaluations.start(0, self.learner.weights())

    @property
    def folder(self) -> Path:
        """The run folder, even after it was moved."""
        return self.place.here()

    def follow(self, closing: ExitStack) -> None:
        """Log the run to the trackers from now on, until `closing` is closed."""
        settings, path = self.recipe.tracking, self.folder.absolute()
        name, config = settings.name or path.name, read_object(path / "config.json")
        run = TrackedRun(path, name, settings.project, settings.group, config, self.learner.version + 1)
        job, seconds = self.job, settings.close_seconds
        setup = Setup(job.trackers, run, job.forecaster, *self.recipe.budget_on_axis(), seconds)
        self.sender = closing.enter_context(TrackingSender(setup))

    def train(self) -> bool:
        """Train until the budget is spent or no prompts are left; return false if `until` came first."""
        try:
            return self._train()
        except (OutOfMemoryError, OwnCodeError) as error:
            raise type(error)(self._saved_within(error)) from error

    def _train(self) -> bool:
        self.counters.startup_seconds += self.clock.lap() * self.counters.devices["train"]
        budget, until = self.recipe.budget.amount, self.job.until
        if self._spent() >= budget:  # the checkpoint lacks only the last evaluations
            return True
        if until <= self._spent():
            return False
        with self.clock.stopped(), self._saved_first():
            if not self._forecast(self._spent() / budget):  # due since the last stop, and stopped again
                self._save()
                raise KeyboardInterrupt
        self._starts_step(self._spent() / budget)
        for step in self.pipeline.steps():
            self._record(step)
            share = self._spent() / budget
            with self.clock.stopped(), self._saved_first():  # not training time
                if self.agenda.evaluates(self._spent(), step.index):
                    self.evaluations.start(step.index, self.learner.weights(), last=share >= 1)
                if self._forecast(share):
                    self.evaluations.write_finished(self.stop)
            self.view.step(step.index, share, self.counters.tokens_per_second)
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
        _LOG.warning(
            "the curriculum has retired all %d training prompts: the run ends after step %d, with %.0f %% of "
            "its budget spent; give more prompts, or a curriculum that retires fewer",
            *(len(self.pool.prompts), self.learner.version, 100 * self._spent() / budget),
        )
        return True

    def save_final(self) -> None:
        """Evaluate and save the final weights."""
        if self.evaluations.last_step < self.learner.version:  # the run ended as every prompt was retired
            self.evaluations.start(self.learner.version, self.learner.weights(), last=True)
        with self._saved_first():
            if not self.evaluations.write_finished(self.stop, most=0):
                self._save()
                raise KeyboardInterrupt
        self.activities.doing("saving the final weights")
        if self.best is not None:
            self.best.wait()
        settings = self.recipe.checkpoint
        if settings.steps or settings.minutes:  # for a later resume with a larger budget
            self.checkpoints.folder = self.folder / "checkpoints"
            self.checkpoints.make(self.learner.version, self.state())
        self.checkpoints.wait()
        save_final(self.folder, self.learner.version, self.learner.saver, self.tokenizer)
        if self.folder != self.place.path:
            raise MovedError(f"{self._moved_to()}: it has come to its end, and is whole there")

    def state(self) -> dict[str, Any]:
        """Return copies of all state that a resume needs, except the learner's."""
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

    def _forecast(self, share: float) -> bool:
        """Freeze a forecast if due; return false if the run is stopped first, so that a resume freezes it."""
        if self.agenda.to_freeze(share) and self.job.forecaster and share < 1:
            # The forecast must be frozen before training goes on.
            if not self.evaluations.write_finished(self.stop, most=0):
                return False
            self.activities.doing("forecasting")
            try:
                row = self.job.forecaster(RunRecord.read(self.folder), *self.recipe.budget_on_axis())
            except CannotAnswerError:
                pass  # too early for a forecast; the next milestone may have one
            else:
                self.writer.forecast(row)
                self.view.frozen(row)
        self.agenda.froze(share)
        return True

    @contextmanager
    def _saved_first(self) -> Iterator[None]:
        """End the run if an evaluation cannot be made, with a checkpoint from which a resume makes it."""
        try:
            yield
        except EvaluationError as error:
            self._save()
            raise WorkerError(f"{error}; {resume_line(self.folder)} goes on, and makes it") from error

    def _save(self, within: bool = False) -> None:
        """Save a checkpoint in the current place of the run folder, and wait until it is on the disk."""
        self.activities.doing("saving a checkpoint")
        self.checkpoints.folder = self.folder / "checkpoints"
        self.checkpoints.make(self.learner.version, self.state(), within)
        self.checkpoints.finish()

    def _stop_within(self) -> NoReturn:
        """Stop within a step, with a checkpoint of everything sampled and verified so far."""
        self.counters.hold(self.generator.counters, self.clock.lap())
        with self.clock.stopped(), self._saved_first():
            self.evaluations.write_finished(self.stop)
            self._save(within=True)
        raise KeyboardInterrupt

    def _saved_within(self, error: OutOfMemoryError | OwnCodeError) -> str:
        """Save a checkpoint of the state before an error, and return the line for the user."""
        memory = isinstance(error, OutOfMemoryError)
        again = f"{resume_line(self.folder)}{' --set key=value' * memory} goes on from"
        if memory and error.torn:
            return f"{error}; {again} the last checkpoint"
        self.counters.hold(self.generator.counters, self.clock.lap())
        try:
            self._save(within=True)
        except (ScalerlError, RuntimeError, MemoryError) as second:  # a checkpoint takes memory too
            return f"{error}; {again} the last checkpoint, as none could be made ({first_line(second)})"
        return f"{error}; {again} a checkpoint of this step"

    def _checkpoint(self, step: Step, at_cut: bool) -> None:
        moved, stopped = self.folder != self.place.path, self.stop.is_set()
        ends = at_cut or moved or self.health.pause_for is not None
        if ends:
            # Wait for them, unless something is about to end this process.
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
