"""The config.json of a run: the recipe, the versions, the devices, the sandbox."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from scalerl._version import __version__
from scalerl.kinds import code_of
from scalerl.rl.config.recipe import Recipe
from scalerl.rl.config.settings import usable_cores
from scalerl.rl.tasks.code import Code


def config_of(
    recipe: Recipe, learner: Any, devices: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of a run of `recipe` by `learner` on `devices`; `extra` goes on top."""
    import transformers

    parameters = sum(p.numel() for p in learner.model.parameters())
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "recipe": recipe.to_json(),
        "model": {"path": recipe.model, "parameters": parameters},
        "code": {kind: [code] for kind, code in code_of(recipe.to_dict()).items()},
        "budget": dict(zip(("kind", "amount"), recipe.budget_on_axis(), strict=True)),
        "placement": "cluster" if recipe.cluster else recipe.placement.kind,
        "versions": {
            "scalerl": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "devices": {
            "generate and train": str(learner.device),
            **devices,
            "machine": platform.machine(),
            "cores": usable_cores(),
        },
        **({"sandbox": recipe.task.environment()} if isinstance(recipe.task, Code) else {}),
        **extra,
    }
