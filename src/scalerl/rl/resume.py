"""Finding where a run that was cut can go on."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl.errors import InputError
from scalerl.jsonl import dumps, plain
from scalerl.record import UNTRAINED, final_folder
from scalerl.rl.checkpoint import newest_checkpoints, step_folders
from scalerl.rl.recipe import Recipe, recipe_of_run
from scalerl.run_writer import RECORDS

_LOG = logging.getLogger("scalerl")


def resume_line(folder: Path) -> str:
    """The command that goes on with the run of this process: by torchrun, where that has started it."""
    start = "scalerl"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        several = f"--nnodes {nodes} " if nodes > 1 else ""
        start = f"torchrun {several}--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m scalerl.cli"
    return f"{start} train {folder} --resume"


def is_finished(folder: Path) -> bool:
    """Whether the run has reached its end."""
    return final_folder(folder).is_dir()


def find_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The state in the newest checkpoint that is whole, and whose record is whole, with its `folder`; None
    where there are none.

    Raises:
        InputError: none of its checkpoints can be used.
    """
    checkpoints = folder / "checkpoints"
    for step, state in newest_checkpoints(checkpoints):
        short = [name for name, length in state["lengths"].items() if _size(folder / name) < length]
        if short:
            _LOG.warning("%s is shorter than at step %d: that checkpoint is passed over", short[0], step)
            continue
        return state | {"step": step, "folder": dict(step_folders(checkpoints))[step]}
    if step_folders(checkpoints):
        what = "none of its checkpoints can be used"
        raise InputError(f"{folder}: {what}; once {checkpoints} is removed it begins anew")
    if any((folder / name).exists() for name in RECORDS):
        _LOG.warning("%s has no checkpoint: the run begins anew", folder)
    return None


def drop_newer(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps: the run will come by them again. It must be locked."""
    for other, path in step_folders(folder / "checkpoints"):
        if other > step:
            shutil.rmtree(path)


def check_same_prompts(state: dict[str, Any], task: Any) -> None:
    """Refuse to go on with prompts that are others than those of `state`.

    Raises:
        InputError: held-out prompts have changed, or a prompt to train on is gone.
    """
    if state["evaluations"]["prompt_set"] != task.heldout_hash:
        raise InputError("the held-out prompts have changed since the run began")
    here = {prompt.id for prompt in task.prompts("train")}
    if gone := sorted({*state["pool"]["queue"], *state["pool"]["draws"]} - here):
        raise InputError(f"the prompts have changed since the run began: {gone[0]} is missing")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def free_choices(recipe: Recipe) -> dict[str, Any]:
    """What a resume may change of the recipe of a run, as config.json has it."""
    return {key: value for key, value in plain(recipe.to_json()).items() if key in UNTRAINED}


def check_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse a recipe that is not that of the run.

    Raises:
        InputError: another recipe, or none in config.json.
    """
    path = folder / "config.json"
    if not path.exists():
        return
    before, now = (
        {key: value for key, value in values.items() if key not in UNTRAINED}
        for values in (recipe_of_run(path), plain(recipe.to_json()))
    )
    different = next(_differences(before, now, ""), None)
    if different is None:
        return
    key, *values = different
    was, here = ("not set" if value is None else dumps(value) for value in values)
    how = (
        "--until stops a run sooner, and more than its budget is another run"
        if key.startswith("budget.")
        else "another recipe is another run (-o)"
    )
    goes_on = f"scalerl train {folder} --resume goes on as it was"
    raise InputError(f"{folder}: the run has {key} = {was}, and this recipe {here}; {goes_on}; {how}")


def _differences(before: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """The keys that are not the same, with both values; tables are gone into."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**now, **before}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now
