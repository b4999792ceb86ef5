"""The shape of a recipe's model, read from its config.json alone: without torch, and without weights."""

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
    """Return whether a recipe's model is one of the small ones that need no hub."""
    return model.partition(":")[0] in _BUILT


def shape_of(recipe: Recipe, model: str | Path | None = None) -> ModelShape:
    """Return the shape of `model`, a folder or a name, or of the recipe's; a config may be downloaded.

    Raises:
        InputError: there is no such model, or it is of a form whose memory is not known.
    """
    name = str(model or recipe.model)
    if is_made_here(name):  # which may not be built yet: its config is made in memory
        from scalerl.rl.model.named import model_shape

        return ModelShape.of(model_shape(recipe).config.to_dict(), name)  # pyright: ignore
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import hf_hub_download

        with in_one_line(f"model {name}: no such folder, and its config.json cannot be fetched from the Hub"):
            path = Path(hf_hub_download(name, "config.json"))
    return ModelShape.of(read_model_config(path), name)


def check_run(recipe: Recipe, model: str | Path, gpus: Sequence[Gpu]) -> None:
    """Raise an InputError where the processes of a run do not fit the memory of their devices, before any of
    them is started. A model whose memory is not known is left unchecked.
    """
    try:
        shape = shape_of(recipe, model)
    except InputError:
        return
    started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun
    n_heldout = len(prompts_of(recipe.task, "heldout"))
    check_memory(memory_of(recipe, shape, gpus, n_heldout, int(started) if started else None))
