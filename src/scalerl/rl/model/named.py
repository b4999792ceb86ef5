"""The model that a recipe names: a folder, a name on the Hub, or a model that this package makes.

chain-base     the demonstration's, trained at its first use (`scalerl.rl.model.demo_base`)
smollm2        SmolLM2-135M-Instruct, unpacked from a Python package (`scalerl.rl.model.smollm2`)
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scalerl.errors import InputError, brief
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.model.build import BuildProgress, cache_folder
from scalerl.rl.model.causal_lm import dtype_of, empty_model
from scalerl.rl.model.demo_base import CHAIN_BASE, BaseModel, base_folder, base_spec, build_base, new_model
from scalerl.rl.model.smollm2 import SMOLLM2, build_smollm2, is_made, new_smollm2, smollm2_folder
from scalerl.rl.tasks.chain import VOCABULARY, Chain


def find_model(
    recipe: Recipe, progress: Callable[[BuildProgress], None] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the folder or name of the recipe's model, and what config.json should record about it.

    The name `chain-base` stands for the base model of the task, which is built at its first use and cached,
    and `chain-base:seed=1,hidden_size=32` for a variant (`base_spec`). That of another task than `chain` is
    the demonstration's. `smollm2` stands for SmolLM2-135M-Instruct (`scalerl.rl.model.smollm2`).

    Raises:
        InputError: there is no such folder; the name has an unknown option, or a prompt an unknown word.
        WriteError: the base model could not be saved.
    """
    if recipe.model == SMOLLM2:
        return str(build_smollm2(smollm2_folder(), progress)), {}
    if not is_built(recipe.model):
        model = recipe.model
        is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1  # not a name on the Hub
        if is_path and not Path(model).is_dir():
            raise InputError(f"model: no folder {model}")
        return model, {}
    spec = _spec_of(recipe)
    folder = build_base(spec, cache_folder(), progress)
    made = json.loads((folder / "base.json").read_text())
    base = {"seconds": made["seconds"], "steps": made["steps"], "flops": made["flops"]}
    if not isinstance(recipe.task, Chain):
        return str(folder), {"base": base}
    thinking = recipe.context.thinking
    ceiling = {
        "value": spec.demonstrations.task.ceiling(thinking),
        "why": f"{thinking} thinking tokens are enough for {thinking // 2} operations, of up to "
        f"{spec.demonstrations.task.k_max}; a guess is right one time in ten",
    }
    return str(folder), {"base": base, "ceiling": ceiling, "strata": "chain length"}


def model_shape(recipe: Recipe) -> nn.Module:
    """Return the model of a recipe without weights; only a config is downloaded, and nothing is built."""
    dtype = dtype_of(recipe.precision)
    if recipe.model == SMOLLM2:
        with torch.device("meta"):
            return new_smollm2().to(dtype)
    if not is_built(recipe.model):
        return empty_model(recipe.model, dtype)
    spec = _spec_of(recipe)
    with torch.device("meta"):
        return new_model(spec).to(dtype)


def is_built(model: str) -> bool:
    """Whether a recipe's model is the demonstration's, which is trained here at its first use."""
    return model.partition(":")[0] == CHAIN_BASE


def _spec_of(recipe: Recipe) -> BaseModel:
    task: Any = recipe.task
    if not isinstance(task, Chain):
        for prompt in (*task.prompts("heldout"), *task.prompts("train")):
            words = prompt.text.split() if prompt.messages is None else ["a chat"]
            if unknown := [word for word in words if word not in VOCABULARY]:
                found = f"and prompt {prompt.id} holds {brief(unknown[0])}: name another model"
                raise InputError(f"model: {CHAIN_BASE!r} knows {' '.join(VOCABULARY)}, {found}")
        task = load_recipe("demo").task
    return base_spec(recipe.model, task, recipe.context.thinking)


def is_to_be_built(recipe: Recipe) -> bool:
    """Whether the recipe's model is one that this package makes, and is not in the cache yet."""
    if recipe.model == SMOLLM2:
        return not is_made(smollm2_folder())
    return (
        is_built(recipe.model) and not (base_folder(_spec_of(recipe), cache_folder()) / "base.json").is_file()
    )
