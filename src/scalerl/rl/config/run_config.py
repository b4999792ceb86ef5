"""What config.json of a run says: the recipe, and with what it was run."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from scalerl._version import __version__
from scalerl.rl.config.recipe import Recipe


def config_of(recipe: Recipe, learner: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run of `recipe` by `learner`; `extra` goes on top."""
    import transformers

    parameters = sum(p.numel() for p in learner.model.parameters())
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "recipe": recipe.to_json(),
        "model": {"path": recipe.model, "parameters": parameters},
        "budget": asdict(recipe.budget),
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
            "trainers": learner.trainers,
            "machine": platform.machine(),
            "cores": _cores(),
        },
        **extra,
    }


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
