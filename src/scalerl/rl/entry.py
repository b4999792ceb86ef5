"""What a script calls: train a recipe into a run folder, and evaluate a model on its held-out prompts."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.record.folder import RunFolder
from scalerl.record.reader import RunRecord, final_folder
from scalerl.rl.checkpoint.store import step_folders
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.learner.build import load_learner
from scalerl.rl.loop.progress import Progress
from scalerl.rl.model.causal_lm import copy_weights, model_of
from scalerl.rl.model.demo_base import find_model
from scalerl.rl.placement.evaluate import EvaluationResult, Evaluator
from scalerl.rl.tracking import Tracker
from scalerl.rl.train import Forecaster
from scalerl.rl.train import train as train_model


def train(
    recipe: Recipe,
    run: str | Path | RunFolder | None = None,
    *,
    resume: bool = False,
    restart: bool = False,
    until: float = math.inf,
    forecaster: Forecaster | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
    trackers: Sequence[Tracker] = (),
    stop: threading.Event | None = None,
    evaluate_aside: bool = True,
    load: Callable[[Recipe, str], Any] = load_learner,
) -> RunRecord:
    """Train `recipe` into a run folder, as `scalerl train` does, and return the record of the run.

    A script that calls this needs the usual `if __name__ == "__main__":`, as processes are started:

        from scalerl import rl

        if __name__ == "__main__":
            recipe = rl.load_recipe("demo", ["loss.max_ratio=4"])
            record = rl.train(recipe, run="runs/mine")
            print(record.evals[-1].pass_rate)

    Args:
        recipe: what to train. The model `chain-base` is built at its first use, and cached.
        run: the run folder, which must not exist unless it is resumed; runs/NAME-seedN of the recipe where it
            is not given. A `RunFolder` is locked already, and stays so.
        resume: go on from the newest checkpoint in the folder; begin where there is no run.
        restart: begin anew; what is in the folder is kept in its before-1, before-2 ...
        until: a part of the budget, in its unit, at which to stop with a checkpoint.
        forecaster: freezes a forecast of the end at each share of `evaluation.forecast_at`:
            `scalerl.forecast.freeze.freeze` is what the command uses.
        progress: called after every step and every evaluation.
        trackers: the run is logged to them and to those that the recipe names.
        stop: once it is set, the run makes a checkpoint and ends by KeyboardInterrupt.
        evaluate_aside: whether evaluations have a process of their own; the record is the same without.
        load: makes the learner of a recipe and a model's folder, where it is not that of one process.

    Raises:
        ScalerlError: what `scalerl.rl.train.train` raises, each with one line that says what to do.
        KeyboardInterrupt: it was stopped; `resume` goes on.
    """
    model, about = find_model(recipe)
    return train_model(
        recipe,
        run if run is not None else Path("runs") / f"{recipe.name}-seed{recipe.seed}",
        model,
        resume=resume,
        restart=restart,
        forecaster=forecaster,
        watch=progress,
        extra=about,
        evaluate_aside=evaluate_aside,
        stop=stop,
        until=until,
        trackers=trackers,
        load=load,
    )


def evaluate(recipe: Recipe, model: str | Path | None = None) -> EvaluationResult:
    """Evaluate a model on the held-out prompts of `recipe`, in this process, as a run does.

    The same weights give the same result at every call: temperature, length control, seed and completions per
    prompt are those of the recipe.

    Args:
        recipe: its task has the prompts and the verifier; `evaluation.samples` says how often each prompt is
            sampled.
        model: a model's folder or name, or a run folder: its final weights, or else those of its newest
            checkpoint. The model of the recipe where it is not given.

    Returns:
        The correct completions of each held-out prompt (`correct_P`), shares and lengths; `version` is the
        step of a checkpoint, 0 of any other model. The pass rate is `correct_P.mean() / evaluation.samples`.

    Raises:
        InputError: there is no such model, it does not fit the recipe, or the run has no checkpoint.
    """
    folder, version = _weights_of(recipe, model)
    recipe = check_prompts(recipe, folder)
    with closing(Evaluator(recipe, folder)) as evaluator:
        return evaluator.evaluate(copy_weights(model_of(recipe, folder)), version)


def _weights_of(recipe: Recipe, model: str | Path | None) -> tuple[str, int]:
    """The folder or name of a model, and the step that its weights are of."""
    if model is None:
        return find_model(recipe)[0], 0
    if not (Path(model) / "config.json").is_file() or not (Path(model) / "steps.jsonl").is_file():
        return str(model), 0
    if final_folder(Path(model)).is_dir():
        return str(final_folder(Path(model))), RunRecord.read(model).evals[-1].step
    checkpoints = step_folders(Path(model) / "checkpoints")
    if not checkpoints:
        raise InputError(f"{model}: a run without a checkpoint; train it on, or name a model")
    step, folder = checkpoints[0]  # the newest
    return str(folder), step
