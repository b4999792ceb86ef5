"""A training run, from a recipe to a run folder.

train         makes the parts, or restores them from a checkpoint; trains; saves the final weights
_Run.train    after every step of the pipeline: record, evaluate, freeze a forecast, checkpoint, stop
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scalerl.errors import (
    CannotAnswerError,
    DivergedError,
    LearnerLostError,
    MovedError,
    PausedError,
    WorkerError,
    WriteError,
)
from scalerl.jsonl import read_object
from scalerl.record.folder import RunFolder, check_writable
from scalerl.record.reader import EvalPoint, RunRecord, final_folder
from scalerl.record.writer import RunWriter
from scalerl.rl.checkpoint.manifest import Sums
from scalerl.rl.checkpoint.store import Checkpoints, drop_asides, save_model, write_whole
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.run_config import config_of
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.health.watch import Finding, Watch
from scalerl.rl.learner.build import load_learner
from scalerl.rl.learner.probe import Probe
from scalerl.rl.loop.agenda import Agenda
from scalerl.rl.loop.counters import RunCounters, groups_row, step_row
from scalerl.rl.loop.evaluations import EvaluationError, Evaluations
from scalerl.rl.loop.parts import Parts, parts_of
from scalerl.rl.loop.pipeline import Pipeline, Step
from scalerl.rl.loop.pool import PromptPool
from scalerl.rl.loop.progress import Progress, View
from scalerl.rl.loop.resume import (
    check_begun,
    check_config,
    check_recipe,
    check_restart,
    check_same_prompts,
    find_checkpoint,
    free_choices,
    is_finished,
    resume_line,
    set_newer_aside,
    write_finished,
)
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.tracking import TrackedRun, Tracker
from scalerl.rl.tracking.process import Setup
from scalerl.rl.tracking.sender import TrackingSender, check_picklable
from scalerl.rl.tracking.trackers import trackers_of

Forecaster = Callable[[RunRecord, str, float], Mapping[str, Any]]
"""From the run so far, the compute axis and the budget: the row of forecasts.jsonl."""

_LOG = logging.getLogger("scalerl")
MOST_REWINDS = 5
"""Times in a row that a run goes back to one checkpoint because the learner of a cluster was lost."""
_STATEFUL = (
    "learner",
    "generator",
    "pipeline",
    "pool",
    "counters",
    "evaluations",
    "agenda",
    "health",
    "probe",
)
"""Parts of a run that a checkpoint keeps the state of, in this order: the pipeline waits for groups that are
being verified, and tells the pool."""


def train(
    recipe: Recipe,
    folder: str | Path | RunFolder,
    model_folder: str | Path,
    *,
    resume: bool = False,
    restart: bool = False,
    forecaster: Forecaster | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
    extra: Mapping[str, Any] | None = None,
    evaluate_aside: bool = True,
    stop: threading.Event | None = None,
    until: float = math.inf,
    trackers: Sequence[Tracker] = (),
    load: Callable[[Recipe, str], Any] = load_learner,
) -> RunRecord:
    """Train `recipe` into the run folder `folder`, and return its record.

    With the placement `inline` generator and learner share this process, so that one seed gives one result,
    bit for bit. Evaluations run in a process of their own unless `evaluate_aside` is false, with the same
    result. (A script that calls this needs the usual `if __name__ == "__main__":`, as processes are spawned.)
    `forecaster` freezes a forecast of the end at each share of `recipe.evaluation.forecast_at`. `extra` goes
    into config.json.

    `resume` goes on from the newest checkpoint in `folder`, or from the beginning where there has been none;
    with the placement `inline` the record is then that of a run that was never cut, times apart. `restart`
    begins anew: what a run has left in `folder` is moved to `before-N` in it. Once `stop` is set, the run
    makes a checkpoint after the step under way, and ends as by Ctrl-C. Once `until` of the budget is spent,
    in its unit, it makes a checkpoint and returns; `resume` then goes on from there.

    The folder is locked from before its first read until this returns; a `RunFolder` is locked already, and
    stays so. Moved meanwhile, it gets a checkpoint where it is, and the run ends.

    The run is logged to the trackers of `recipe.tracking` and to `trackers`, from a process of their own,
    which makes a forecast with `forecaster` after every evaluation. What becomes of them is logged as
    warnings of "scalerl", and changes nothing of the run.

    `load` makes the learner of a recipe and a model's folder, where it is not to be in this process alone.

    Raises:
        InputError: the folder exists (or, with `resume`, holds another recipe, or is being written), the
            model cannot be loaded, or does not fit the recipe's context; a tracker is not installed, or
            cannot go to another process. With `resume` also: the run has had checkpoints and none is left,
            config.json was edited, or the final weights and the record do not agree.
        WriteError: the disk does not take the record, or the checkpoint that a stop needs; what was written
            before is kept. A `MovedError`, one of these: the folder was moved.
        PausedError: an alarm, where `health.on_alarm` is "pause"; there is a checkpoint of the step.
        DivergedError: gradients or probabilities are not finite any more; what was written before is kept.
        WorkerError: processes were lost again and again; where they were those of an evaluation, there is a
            checkpoint that has it.
        KeyboardInterrupt: it was stopped.
    """
    with ExitStack() as around:
        place = folder
        if not isinstance(place, RunFolder):
            place = around.enter_context(closing(RunFolder.claim(place, new=not (resume or restart))))
        recipe = check_prompts(recipe, model_folder)
        if resume:
            check_recipe(place.path, recipe)
            if is_finished(place.path):
                return RunRecord.read(place.path)
            check_begun(place.path)
        if restart:
            check_restart(place.path)
        check_writable(place.path)
        trackers = [*trackers_of(recipe.tracking), *trackers]
        check_picklable(trackers, forecaster)
        torch.set_num_threads(1)  # results must not depend on how many cores there are
        if restart and (apart := place.set_apart()):
            _LOG.warning("the run begins anew; what was there is kept in %s", apart)

        def attempt(resume: bool, closing: ExitStack) -> _TrainingRun:
            make_parts = partial(parts_of, folder=place.here(), aside=evaluate_aside, load=load)
            to_stop = stop or threading.Event()
            return _TrainingRun(
                recipe, place, str(model_folder), resume, extra or {}, watch, to_stop, make_parts, closing
            )

        def go_on(run: _TrainingRun, closing: ExitStack) -> None:
            run.follow(trackers, forecaster, closing)
            try:
                if run.train(forecaster, until):
                    run.save_final()
            except DivergedError as error:
                run.health.diverged(error.step)
                raise

        if recipe.cluster is not None:
            from scalerl.rl.workers.ray.session import connected

            around.enter_context(connected(recipe.cluster))
        _try_until_done(attempt, go_on, resume)
        return RunRecord.read(place.here())


def _try_until_done(
    attempt: Callable[[bool, ExitStack], _TrainingRun],
    go_on: Callable[[_TrainingRun, ExitStack], None],
    resume: bool,
) -> None:
    """Where the learner of a cluster is lost, the run is made again from its last checkpoint, as by a
    resume."""
    rewinds, began = 0, -1
    lost: LearnerLostError | None = None
    while True:
        try:
            with ExitStack() as closing:
                run = attempt(resume, closing)
                rewinds, began = (0 if run.began > began else rewinds), run.began
                if lost:
                    _LOG.warning("the run goes on from step %d", began)
                    run.parts.went_back(lost, began)
                return go_on(run, closing)
        except LearnerLostError as error:
            rewinds, resume, lost = rewinds + 1, True, error
            if rewinds > MOST_REWINDS:
                raise
            _LOG.warning("%s; the run goes on from its last checkpoint", error)


class _TrainingRun:
    """The parts of a run, and what is done with them after every step. `closing` ends them."""

    def __init__(
        self,
        recipe: Recipe,
        place: RunFolder,
        model_folder: str,
        resume: bool,
        extra: Mapping[str, Any],
        watch: Callable[[Progress], None],
        stop: threading.Event,
        make_parts: Callable[[Recipe, str, ExitStack], Parts],
        closing: ExitStack,
    ) -> None:
        self.clock = _RunClock()
        self.place, self.recipe, self.stop, folder = place, recipe, stop, place.here()
        self.parts = parts = make_parts(recipe, model_folder, closing)
        self.tokenizer, self.learner = load_tokenizer(model_folder), parts.learner()
        self.verifier = parts.verifier(self.tokenizer)
        task = recipe.task
        self.pool = PromptPool(task.prompts("train"), recipe.curriculum, recipe.seed)

        saved = find_checkpoint(folder) if resume else None
        if saved:
            check_config(folder, saved)
            check_same_prompts(saved, task)
            self.learner.restore(saved["learner"], saved["folder"])
        self.began = self.learner.version
        """The version that it goes on from."""
        version = saved["generator"]["version"] if saved else 0
        # It complains of what does not fit, and nothing has been written yet.
        self.generator = parts.generator(self.learner, version)
        if resume and (folder / "config.json").exists():
            set_newer_aside(folder, saved["step"] if saved else 0)
            self.writer = RunWriter.resume(place, saved["lengths"] if saved else {})
            self.writer.change(recipe=free_choices(recipe), devices={"trainers": self.learner.trainers})
        else:
            self.writer = RunWriter(place, config_of(recipe, self.learner, extra))
        closing.callback(self.writer.close)
        if parts.timeline is not None:
            closing.callback(lambda: self.writer.timeline(parts.timeline.events()))

        self.counters = RunCounters(recipe.processes, self.learner.trainers, recipe.apart)
        asked = recipe.evaluation.count, recipe.evaluation.forecast_at
        self.view, self.agenda = View(watch), Agenda(*asked)
        self.health = Watch(recipe.health, recipe.precision, self._on_finding)
        self.probe = Probe(self.learner, recipe)
        self.evaluations = Evaluations(
            parts.evaluate(),
            self.writer,
            [prompt.id for prompt in task.prompts("heldout")],
            task.heldout_hash,
            recipe.evaluation.samples,
            self.counters,
            self._on_point,
        )
        self.pipeline = Pipeline(recipe, self.pool, self.generator, self.learner, self.verifier.begin)
        made = self.writer.checkpointed
        self.checkpoints = Checkpoints(
            folder / "checkpoints", recipe.checkpoint, self.learner, self.tokenizer, made
        )
        closing.callback(self.checkpoints.close)
        self.generator.wait_until_started()  # all that is started by now does so at the same time
        with self.clock.stopped():  # without a process of their own evaluations are made here
            if saved:
                for name in _STATEFUL[1:]:  # the learner's is, before the generator took its weights
                    getattr(self, name).restore(saved[name])
            else:
                self.evaluations.ask(0, self.learner.weights())

    @property
    def folder(self) -> Path:
        """Where it is now."""
        return self.place.here()

    def follow(self, trackers: Sequence[Tracker], forecaster: Forecaster | None, closing: ExitStack) -> None:
        """Log the run to `trackers` from here on, until `closing` ends them."""
        settings, budget, path = self.recipe.tracking, self.recipe.budget, self.folder.absolute()
        run = TrackedRun(
            path,
            settings.name or path.name,
            settings.project,
            settings.group,
            read_object(path / "config.json"),
            self.learner.version + 1,
        )
        setup = Setup(trackers, run, forecaster, budget.kind, budget.amount, settings.close_seconds)
        self.sender = closing.enter_context(TrackingSender(setup))

    def train(self, forecaster: Forecaster | None, until: float) -> bool:
        """Until the budget is spent or the pool has run dry; false where `until` came first."""
        self.counters.startup_seconds += self.clock.lap() * self.learner.trainers
        budget = self.recipe.budget.amount
        if self._spent() >= budget:  # all that a checkpoint was made for was its last evaluations
            return True
        if until <= self._spent():
            return False
        with self.clock.stopped(), self._saved_first():
            if not self._forecast(self._spent() / budget, forecaster):  # where it was stopped, and again
                self._save()
                raise KeyboardInterrupt
        for step in self.pipeline.steps():
            self._record(step)
            share = self._spent() / budget
            with self.clock.stopped(), self._saved_first():  # it is no part of training
                self._evaluate(step, share, forecaster)
            self.view.step(step.index, share, self.counters)
            if share >= 1:
                return True
            at_cut = self._spent() >= until
            with self._saved_first():
                self._checkpoint(step, at_cut)
            if at_cut:
                return False
        return True

    def save_final(self) -> None:
        """Evaluate and save the weights as they are at the end."""
        if self.evaluations.last_step < self.learner.version:  # every prompt has been retired
            self.evaluations.ask(self.learner.version, self.learner.weights())
        with self._saved_first():
            if not self.evaluations.write_finished(self.stop, most=0):
                self._save()
                raise KeyboardInterrupt
        self.checkpoints.wait()
        folder, step = self.folder, self.learner.version
        try:
            save = self.learner.saver(folder, resumable=False)

            def write(aside: Path) -> Sums:
                sums = save_model(save, self.tokenizer, aside)
                write_finished(aside, step)
                return sums

            write_whole(final_folder(folder), write)
        except WriteError as error:
            raise WriteError(
                f"{error}; the record is whole: free space, and {resume_line(folder)} goes on to its end"
            ) from error
        drop_asides(folder / "checkpoints", step)
        if self.folder != self.place.path:
            raise MovedError(f"{self._moved_to()}: it has come to its end, and is whole there")

    def state(self) -> dict[str, Any]:
        """Copies of everything that a resume needs."""
        parts = {name: getattr(self, name).state() for name in _STATEFUL}
        return parts | {"lengths": self.writer.lengths(), "config": self.writer.config}

    def _moved_to(self) -> str:
        return f"{self.place.path}: the run folder was moved during the run, to {self.folder}"

    def _record(self, step: Step) -> None:
        self.counters.add(step, self.generator.counters, self.clock.lap())
        with self.clock.stopped():
            started = time.perf_counter()
            probed = self.probe([rollout for group in step.groups for rollout in group.rollouts])
            self.counters.evaluate_seconds += (time.perf_counter() - started) * self.learner.trainers
        row = step_row(step, self.counters, self.pipeline) | probed
        self.writer.step(row, groups_row(step))
        if self.parts.timeline is not None:
            self.writer.timeline(self.parts.timeline.lines(step.index, step.trained_at, step.train_seconds))
        self.sender.step(row)
        self.health.step(row)
        for failure in self.verifier.new_failures():
            _LOG.warning(failure)

    def _evaluate(self, step: Step, share: float, forecaster: Forecaster | None) -> None:
        if self.agenda.evaluates(share):
            self.evaluations.ask(step.index, self.learner.weights())
        if self._forecast(share, forecaster):
            self.evaluations.write_finished(self.stop)

    def _forecast(self, share: float, forecaster: Forecaster | None) -> bool:
        """Freeze the forecast that is due; false where the run stops first: a resume freezes it before its
        first step, of the same evaluations."""
        if self.agenda.to_freeze(share) and forecaster and share < 1:
            # Nothing is trained until the forecast is frozen.
            if not self.evaluations.write_finished(self.stop, most=0):
                return False
            self._freeze(forecaster)
        self.agenda.froze(share)
        return True

    @contextmanager
    def _saved_first(self) -> Iterator[None]:
        """An evaluation that cannot be made ends the run, after a checkpoint that has it."""
        try:
            yield
        except EvaluationError as error:
            self._save()
            raise WorkerError(f"{error}; {resume_line(self.folder)} goes on, and makes it") from error

    def _save(self) -> None:
        """Make a checkpoint where the run folder is now, and wait until it is on the disk."""
        self.checkpoints.folder = self.folder / "checkpoints"
        self.checkpoints.make(self.learner.version, self.state())
        self.checkpoints.finish()

    def _freeze(self, forecaster: Forecaster) -> None:
        budget = self.recipe.budget
        try:
            row = forecaster(RunRecord.read(self.folder), budget.kind, budget.amount)
        except CannotAnswerError:
            return  # too early to say anything; the next milestone may
        self.writer.forecast(row)
        self.view.forecast = row

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

    def _spent(self) -> float:
        return self.counters.flops if self.recipe.budget.kind == "flops" else float(self.learner.version)

    def _on_finding(self, finding: Finding) -> None:
        row = finding.json()
        self.writer.alarm(row)
        self.sender.finding(row)
        self.view.finding(finding)

    def _on_point(self, point: EvalPoint) -> None:
        self.view.point(point)
        self.sender.evaluation(point)
        self.health.evaluation(point)


class _RunClock:
    """Wall time of training: laps, without the time in which it is stopped."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last one, less those in which it was stopped."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What is done meanwhile does not count as training."""
        started = time.perf_counter()
        yield
        self._since += time.perf_counter() - started
