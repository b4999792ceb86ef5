"""A training run, from a recipe to a run folder: claim the folder, then start or restore the run.

`scalerl.rl.training_run` does the work after every step.
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
"""How many times in a row a run returns to the same checkpoint after losing the learner of a cluster."""


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

    A script that calls this needs the usual `if __name__ == "__main__":`, as it starts processes:

        from scalerl import rl

        if __name__ == "__main__":
            recipe = rl.load_recipe("demo", ["loss.max_ratio=4"])
            record = rl.train(recipe, run="runs/mine")
            print(record.evals[-1].pass_rate)

    With the placement `inline`, the result is a function of the seed, bit for bit, and a resumed run has the
    same record as one that was never stopped, except for times. The folder is locked until this returns; if
    it is moved meanwhile, the run saves a checkpoint in its new place and ends.

    Args:
        recipe: the recipe, or its name or path, as for `load_recipe`. The model `chain-base` is built on
            first use and cached.
        run: the run folder, which must not exist unless `resume` or `restart` is given; defaults to
            runs/NAME-seedN of the recipe. A `RunFolder` is already locked, and stays locked.
        model: a model's folder or name, instead of the recipe's.
        resume: resume from the newest checkpoint in the folder; start from scratch if it has no run.
        restart: start from scratch; the folder's previous contents are kept in its before-1, before-2 ...
        until: a part of the budget, in its unit, at which to stop with a checkpoint.
        forecaster: freezes a forecast of the end at each share of `evaluation.forecast_at`; the command uses
            `scalerl.forecast.freeze.freeze`.
        smooth: computes the smoothed pass rates by which `evaluation.keep = "best"` chooses, which requires
            it; the command uses `scalerl.forecast.best.rates_by_step`.
        progress: called after every step and every evaluation.
        activity: called within steps too, a few times a second, with the current activity.
        trackers: log the run, beside the trackers that the recipe names, from a process of their own. Their
            errors are logged as warnings of "scalerl", and do not affect the run.
        stop: once it is set, the run saves a checkpoint and raises KeyboardInterrupt. During start-up, when
            there is nothing to save yet, it raises at once.
        evaluate_aside: whether evaluations run in a process of their own; the record is the same either way.
        load: makes the learner from a recipe and a model's folder; by default one in a single process.

    Raises:
        InputError: the folder exists, or another process is writing it; the model cannot be loaded, or does
            not fit the recipe's context; a tracker is not installed, or cannot be pickled. With `resume`
            also: the run has another recipe, its checkpoints are gone, config.json was edited, or the final
            weights and the record do not agree.
        WriteError: the record, or the checkpoint for a stop, cannot be written to the disk; what was written
            before is kept. Its subclass `MovedError`: the folder was moved.
        PausedError: an alarm was raised and `health.on_alarm` is "pause"; the step has a checkpoint.
        DivergedError: gradients or probabilities are no longer finite; what was written before is kept.
        OutOfMemoryError: a process has too little memory; the step has a checkpoint if one could be saved.
        OwnCodeError: a custom loss, advantage, averaging, curriculum or length control raised an error or
            returned an invalid value; the step has a checkpoint, unless the learner spans several processes.
        WorkerError: processes were lost repeatedly; if an evaluation could not be finished, a checkpoint
            has been saved from which a resume repeats it.
        KeyboardInterrupt: the run was stopped; `resume` continues it.
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
            find_python(recipe.vllm)  # raises before a model is loaded
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
    """Train to the end, resuming from the last checkpoint whenever the learner of a cluster is lost."""
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
