"""The shape of a recipe's model, from its config.json alone: without weights, and mostly without torch."""

import os
from collections.abc import Sequence
from pathlib import Path

from scalerl.errors import InputError, in_one_line
from scalerl.model_config import ModelShape, read_model_config
from scalerl.rl.config.devices import Gpu
from scalerl.rl.config.memory import check_memory, memory_of
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.tasks.task import prompts_of

_BUILT = ("chain-base", "smollm2")


def is_made_here(model: str) -> bool:
    """Return whether a recipe's model is one that this package makes, without the Hub."""
    return model.partition(":")[0] in _BUILT


def shape_of(recipe: Recipe, model: str | Path | None = None) -> ModelShape:
    """Return the shape of `model`, a folder or name, by default the recipe's; may download a config.json.

    Raises:
        InputError: there is no such model, or memory cannot be estimated for its kind.
    """
    name = str(model or recipe.model)
    if is_made_here(name):  # it may not be built yet, so its config is made in memory
        from scalerl.rl.model.named import model_shape

        return ModelShape.of(model_shape(recipe).config.to_dict(), name)  # pyright: ignore
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import hf_hub_download

        with in_one_line(f"model {name}: no such folder, and its config.json cannot be fetched from the Hub"):
            path = Path(hf_hub_download(name, "config.json"))
    return ModelShape.of(read_model_config(path), name)


def check_run(recipe: Recipe, model: str | Path, gpus: Sequence[Gpu]) -> None:
    """Raise an InputError if the processes of a run, before any is started, would not fit their devices.

    A model whose memory cannot be estimated is not checked."""
    try:
        shape = shape_of(recipe, model)
    except InputError:
        return
    started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun
    n_heldout = len(prompts_of(recipe.task, "heldout"))
    check_memory(memory_of(recipe, shape, gpus, n_heldout, int(started) if started else None))
