"""A training run, from a recipe to a run folder: claims the folder, and makes the run or restores it.

`scalerl.rl.training_run` has what happens after every step.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from scalerl.errors import DivergedError, InputError, LearnerLostError
from scalerl.own_code import check_main_guard, check_picklable
from scalerl.record.activity import Activity
from scalerl.record.folder import RunFolder, check_writable
from scalerl.record.reader import RunRecord
from scalerl.rl.checkpoint.best import Smooth
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.engine.vllm.launch import find_python
from scalerl.rl.learner.load import load_learner
from scalerl.rl.loop.parts import Load
from scalerl.rl.loop.progress import Activities, Progress
from scalerl.rl.loop.resume import check_restart, has_finished
from scalerl.rl.model.causal_lm import gpus_in_use
from scalerl.rl.model.named import find_model
from scalerl.rl.model.shape import check_run
from scalerl.rl.tracking.tracker import Tracker
from scalerl.rl.tracking.trackers import trackers_of
from scalerl.rl.training_run import Freeze, TrainingJob, TrainingRun
from scalerl.rl.workers.signals import interrupted_by

_LOG = logging.getLogger("scalerl")
MOST_REWINDS = 5
"""Times in a row that a run goes back to one checkpoint because the learner of a cluster was lost."""


def train(
    recipe: Recipe | str | Path,
    run: str | Path | RunFolder | None = None,
    model: str | Path | None = None,
    *,
    resume: bool = False,
    restart: bool = False,
    until: float = math.inf,
    forecaster: Freeze | None = None,
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
        recipe: what to train, or the name or path of it, as for `load_recipe`. The model `chain-base` is
            built at its first use, and cached.
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
        stop: once it is set, the run makes a checkpoint and ends by KeyboardInterrupt; while it still starts
            there is nothing to save, and it ends at once.
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
        OwnCodeError: a loss, advantage, averaging, curriculum or length control of the user's own raised an
            error, or returned what it must not; there is a checkpoint of the step, unless the learner is on
            several processes.
        WorkerError: processes were lost again and again; where they were those of an evaluation, there is a
            checkpoint that has it.
        KeyboardInterrupt: it was stopped; `resume` goes on.
    """
    check_main_guard()
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
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
        if recipe.vllm and not recipe.vllm.urls:
            find_python(recipe.vllm)  # before a model is loaded
        if resume and has_finished(place.path, recipe):
            return RunRecord.read(place.path)
        if restart:
            check_restart(place.path)
        check_writable(place.path)
        trackers = [*trackers_of(recipe.tracking), *trackers]
        for part in (*trackers, forecaster) if trackers else ():
            check_picklable(part, f"tracking: {part!r}")
        torch.set_num_threads(recipe.cpu_threads)
        if restart and (apart := place.set_apart()):
            _LOG.warning("the run begins anew; what was there is kept in %s", apart)
        if recipe.cluster is not None:
            from scalerl.rl.workers.ray.session import connected

            around.enter_context(connected(recipe.cluster, recipe.engine))
        stop, aside = stop or threading.Event(), evaluate_aside
        around.callback(place.show_nothing)
        activities = Activities(activity, place.show)
        reports = progress, activities
        by = forecaster, smooth
        job = TrainingJob(recipe, place, found, about, until, *by, *reports, trackers, stop, aside, load)
        _train_through_losses(job, resume)
        return RunRecord.read(place.here())


def _train_through_losses(job: TrainingJob, resume: bool) -> None:
    """Train to the end; resume from the last checkpoint whenever the learner of a cluster is lost."""
    rewinds, started = 0, -1
    lost: LearnerLostError | None = None
    while True:
        try:
            with ExitStack() as closing:
                with interrupted_by(job.stop):
                    run = TrainingRun(job, resume, closing)
                run.begin()
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
