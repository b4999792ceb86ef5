"""Finding where a run that was cut can go on."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.rl.checkpoint import final_folder, newest_checkpoints, step_folders
from scalerl.rl.recipe import Recipe
from scalerl.run_writer import RECORDS

_LOG = logging.getLogger("scalerl")


def is_finished(folder: Path) -> bool:
    """Whether the run has reached its end."""
    return final_folder(folder).is_dir()


def find_checkpoint(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The state in the newest checkpoint that is whole, and whose record is whole; None where there is none.

    Checkpoints that are newer are removed: the run will come by their steps again.

    Raises:
        InputError: the run is one of another recipe.
    """
    _check_recipe(folder, recipe)
    for step, state in newest_checkpoints(folder / "checkpoints"):
        short = [name for name, length in state["lengths"].items() if _size(folder / name) < length]
        if short:
            _LOG.warning("%s is shorter than at step %d: that checkpoint is passed over", short[0], step)
            continue
        for other, path in step_folders(folder / "checkpoints"):
            if other > step:
                shutil.rmtree(path)
        return state
    if any((folder / name).exists() for name in RECORDS):
        _LOG.warning("%s has no checkpoint: the run begins anew", folder)
    return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    path = folder / "config.json"
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: holds no recipe") from error
    now = json.loads(json.dumps(recipe.to_dict()))
    different = [key for key in now if key not in _FREE and now[key] != before.get(key)]
    if different:
        key = different[0]
        raise InputError(f"{folder}: the run has {key} = {before.get(key)}, and this recipe {now[key]}")


_FREE = ("checkpoint", "health")
"""What may be changed on the way: nothing that is trained depends on it."""
