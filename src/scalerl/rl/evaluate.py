"""Evaluation of a model on the held-out prompts of a recipe, outside any run."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from scalerl.errors import InputError, brief
from scalerl.record.saved_weights import final_folder
from scalerl.rl.checkpoint.store import step_folders
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.engine.build import check_prompts
from scalerl.rl.loop.resume import final_step
from scalerl.rl.model.causal_lm import model_of
from scalerl.rl.model.named import find_model
from scalerl.rl.model.weights import weights_of
from scalerl.rl.placement.evaluate import EvaluationResult, Evaluator


def evaluate(recipe: Recipe, model: str | Path | None = None, suites: Sequence[str] = ()) -> EvaluationResult:
    """Evaluate a model on the held-out prompts of `recipe` as a run does, in this process.

    The same weights give the same result at every call: temperature, length control, seed and completions per
    prompt are those of the recipe.

    Args:
        recipe: its task has the prompts and the verifier; `evaluation.samples` is the number of completions
            per prompt.
        model: a model's folder or name, or a run folder: its final weights, or else those of its newest
            checkpoint. Defaults to the model of the recipe.
        suites: names of downstream suites of the recipe to evaluate too.

    Returns:
        The number of correct completions of each held-out prompt (`correct_P`), shares and lengths; `version`
        is the step of a run's weights, 0 for any other model. The pass rate is
        `correct_P.mean() / evaluation.samples`. `downstream` has the same for each suite.

    Raises:
        InputError: there is no such model or suite, the model does not fit the recipe, or the run has no
            checkpoint.
    """
    if not isinstance(recipe, Recipe):
        what = f"a recipe (scalerl.rl.load_recipe(path)), found {brief(recipe)}"
        raise InputError(f"evaluate takes {what}; model=... names a run or a model")
    there = [suite.name for suite in recipe.evaluation.downstream]
    if unknown := [name for name in suites if name not in there]:
        raise InputError(f"no suite {brief(unknown[0])}; there are: {', '.join(there) or 'none'}")
    folder, version = _weights_of(recipe, model)
    recipe = check_prompts(recipe, folder)
    with closing(Evaluator(recipe, folder)) as evaluator:
        return evaluator.evaluate(weights_of(model_of(recipe, folder)), version, suites)


def _weights_of(recipe: Recipe, model: str | Path | None) -> tuple[str, int]:
    """Return the folder or name of a model, and the step of its weights."""
    if model is None:
        return find_model(recipe)[0], 0
    run = Path(model)
    if not (run / "config.json").is_file() or not (run / "steps.jsonl").is_file():
        return str(model), 0
    if (final := final_folder(run)).is_dir():
        return str(final), final_step(run)
    checkpoints = step_folders(run / "checkpoints")
    if not checkpoints:
        raise InputError(f"{model}: a run without a checkpoint; train it on, or name a model")
    step, folder = checkpoints[0]  # the newest
    return str(folder), step
