"""The config.json of a run, the checkpoint that a stopped run resumes from, and the end of a run."""

import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scalerl._version import __version__
from scalerl.errors import InputError, WriteError, brief
from scalerl.files import sync
from scalerl.jsonl import dumps, plain, read_last, read_object
from scalerl.own_code import code_of, codes_in
from scalerl.record.cut import ends_at
from scalerl.record.folder import RECORDS, check_unused, holds_run
from scalerl.record.reader import UNTRAINED
from scalerl.record.saved_weights import final_folder
from scalerl.rl.checkpoint.manifest import Sums
from scalerl.rl.checkpoint.store import (
    ASIDE,
    STEP,
    Write,
    drop_asides,
    newest_checkpoints,
    save_model,
    step_folders,
    write_whole,
)
from scalerl.rl.config.recipe import Recipe, from_dict, recipe_of_run
from scalerl.rl.config.settings import usable_cores
from scalerl.rl.loop.budget import amounts, changes_of_budget, check_budget
from scalerl.rl.tasks.code import Code

_LOG = logging.getLogger("scalerl")
_FINISHED = "finished.json"


def config_of(
    recipe: Recipe, learner: Any, devices: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.json for a run of `recipe`; keys of `extra` override the others."""
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


def resume_line(folder: Path) -> str:
    """Return the command that resumes the run of this process, with torchrun if that started it."""
    start = "scalerl"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        several = f"--nnodes {nodes} " if nodes > 1 else ""
        start = f"torchrun {several}--nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m scalerl"
    return f"{start} train {folder} --resume"


def restart_line(folder: Path) -> str:
    """Return the part of an error message that says how to restart a run in its folder."""
    return f"scalerl train {folder} --restart begins anew, and keeps what is there apart"


def save_final(folder: Path, step: int, saver: Callable[..., Write], tokenizer: Any) -> None:
    """Save the final weights of a run, with their step.

    Raises:
        WriteError: the weights cannot be written.
    """

    def write(aside: Path) -> Sums:
        sums = save_model(save, tokenizer, aside)
        (aside / _FINISHED).write_text(dumps({"step": step}) + "\n", encoding="utf-8")
        return sums

    try:
        save = saver(folder, resumable=False)
        write_whole(final_folder(folder), write)
    except WriteError as error:
        raise WriteError(
            f"{error}; the record is whole: free space, and {resume_line(folder)} goes on to its end"
        ) from error
    drop_asides(folder / "checkpoints", step)


def drop_final(folder: Path) -> None:
    """Remove the final weights of a run that is resumed; the checkpoint it resumes from has them too."""
    if (final := final_folder(folder)).is_dir():
        gone = final.with_name(".final.part")
        shutil.rmtree(gone, ignore_errors=True)  # the leftovers of an earlier removal that was killed
        final.rename(gone)  # atomic: a kill at any time leaves the folder whole or absent
        sync(final.parent)
        shutil.rmtree(gone, ignore_errors=True)


def final_step(folder: Path) -> int:
    """Return the trainer step of a run's final weights."""
    return read_object(final_folder(folder) / _FINISHED)["step"]


def is_finished(folder: Path) -> bool:
    """Return whether a run has reached its end.

    Raises:
        InputError: there are final weights, but the record ends at another step.
    """
    final = final_folder(folder)
    if not final.is_dir():
        return False
    step = final_step(folder)
    # A finished run has a line of its last step in both files; otherwise one was edited or cut.
    for name in ("steps.jsonl", "evals.jsonl"):
        last = read_last(folder / name).get("step", 0)
        if last != step:
            what = f"{final} holds the weights of step {brief(step)}, and {name} ends at step {brief(last)}"
            back = f"put the record back, or move {final} elsewhere: then --resume goes on as it can"
            raise InputError(f"{what}: {back}; {restart_line(folder)}")
    return True


def has_finished(folder: Path, recipe: Recipe) -> bool:
    """Return whether a run that is to be resumed with `recipe` is finished, by the budget of `recipe`.

    Raises:
        InputError: as in `is_finished`; or the run has another recipe, has spent more than the budget of
            `recipe`, or has lost its checkpoints.
    """
    _check_recipe(folder, recipe)
    finished = is_finished(folder)
    if finished and recipe.budget.amount > recipe_of_run(folder / "config.json")["budget"]["amount"]:
        if not step_folders(folder / "checkpoints"):
            raise InputError(f"{folder}: the run has no checkpoint to go on from; {restart_line(folder)}")
        return False
    if not finished:
        check_started(folder)
    return finished


def check_started(folder: Path) -> None:
    """Raise an InputError for a run without its config.json or checkpoints, or a folder of other files."""
    config = folder / "config.json"
    if not config.exists():
        if _has_records(folder):
            raise InputError(f"{config} is missing: put it back; {restart_line(folder)}")
        check_unused(folder)
    elif read_object(config).get("checkpointed") and not step_folders(folder / "checkpoints"):
        raise InputError(f"{folder}: the run has had checkpoints, and none is left; {restart_line(folder)}")


def check_restart(folder: Path) -> None:
    """Raise an InputError for a folder that has files but does not hold a run."""
    if not (_has_records(folder) or holds_run(folder)):
        check_unused(folder)


def _has_records(folder: Path) -> bool:
    return any((folder / name).exists() for name in RECORDS)


def find_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return the state of the newest usable checkpoint with its `step` and `folder`; None if there was none.

    A checkpoint is usable if it is whole and the record still has all lines up to it.

    Raises:
        InputError: the run has checkpoints but none can be used, or its checkpoints are gone.
    """
    checkpoints = folder / "checkpoints"
    for step, path, state in newest_checkpoints(checkpoints):
        # If a file was shortened, or its line at the cut was edited, it cannot be cut to this checkpoint.
        changed = [name for name, end in state["lengths"].items() if not ends_at(folder / name, end)]
        if changed:
            what = f"{changed[0]} is not what it was"
            _LOG.warning("%s at step %d: that checkpoint is passed over", what, step)
            continue
        return state | {"step": step, "folder": path}
    if step_folders(checkpoints):
        raise InputError(f"{folder}: none of its checkpoints can be used; {restart_line(folder)}")
    check_started(folder)
    if _has_records(folder):
        text = "%s had no checkpoint yet: the run begins anew, and lost.jsonl keeps what it had written"
        _LOG.warning(text, folder)
    return None


def set_newer_aside(folder: Path, used: Path | None) -> None:
    """Rename the checkpoints that are newer than `used`, so that no resume starts from them.

    The run makes these steps again, and removes the renamed checkpoints once it has newer ones.

    Raises:
        WriteError: a checkpoint cannot be renamed.
    """
    try:
        for _, path in step_folders(folder / "checkpoints"):  # the newest first
            if path == used:
                return
            aside = path.with_name(f"{ASIDE}{path.name.removeprefix(STEP)}")
            if aside.exists():  # from an earlier resume; the run has made that step again since
                shutil.rmtree(aside)
            path.rename(aside)
            sync(aside.parent)
    except OSError as error:
        raise WriteError(f"{error.filename or folder}: {error.strerror or error}") from error


def check_saved(folder: Path, saved: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise an InputError if a run cannot resume from the checkpoint `saved` with `recipe`.

    It cannot if config.json has another recipe than the checkpoint, the held-out prompts or those of a suite
    have changed, a training prompt is gone, or only one of `saved` and `recipe` generates inline."""
    task = recipe.task
    _check_config(folder, saved)
    inline = recipe.cluster is None and recipe.vllm is None and recipe.placement.kind == "inline"
    if inline != ("slots" in saved["generator"]):
        where = "other processes ([cluster])" if inline else "the trainer's process (placement inline)"
        raise InputError(f"{folder}: the run generates in {where}: it goes on there")
    if saved["evaluations"]["prompt_set"] != task.heldout_hash:
        raise InputError("the held-out prompts have changed since the run began")
    before = saved["evaluations"].get("suites", {})
    suites = {suite.name: suite.task for suite in recipe.evaluation.downstream if suite.name in before}
    if other := [name for name, suite in suites.items() if before[name] != suite.heldout_hash]:
        raise InputError(
            f"the prompts of suite {other[0]} have changed since the run began: give it another name"
        )
    # Prompts drawn before are needed too: the curriculum uses their history.
    here = {prompt.id for prompt in task.prompts("train")}
    queued = {prompt for deck in saved["pool"]["decks"].values() for prompt in deck["queue"]}
    if gone := sorted({*queued, *saved["pool"]["epochs"]} - here):
        raise InputError(f"the prompts have changed since the run began: {gone[0]} is missing")


def changes_of_resume(folder: Path, recipe: Recipe, devices: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a resume changes in config.json: free settings, devices, code hashes, sandbox and budget.

    If custom code has changed since the last start, a warning is logged and its new hash is appended.
    """
    config = read_object(folder / "config.json")
    code = codes_in(config)
    for kind, now in code_of(recipe.to_dict()).items():
        codes = code.setdefault(kind, [now])
        # Only the last hash is compared: code that is changed back counts as changed again.
        if codes[-1] != now:
            _LOG.warning("%s: %s has changed since the run began: it goes on by the new code", folder, kind)
            codes.append(now)
    may_change = (*UNTRAINED, *_FREE, "budget", "decode_slots")
    free = {key: value for key, value in plain(recipe.to_json()).items() if key in may_change}
    sandbox = {"sandbox": recipe.task.environment()} if isinstance(recipe.task, Code) else {}
    changes = {"recipe": free, "code": code, "devices": dict(devices), **sandbox}
    return changes | changes_of_budget(config, recipe)


def _check_recipe(folder: Path, recipe: Recipe) -> None:
    """Raise an InputError if the run in `folder` has another recipe, or none in its config.json."""
    path = folder / "config.json"
    if not path.exists():
        return
    begun, now = recipe_of_run(path), _trained(plain(recipe.to_json()))
    before = _trained(begun)
    # The budget is checked on its own, as its amount may change within bounds.
    check_budget(folder, before.pop("budget", {}), recipe)
    del now["budget"]
    different = next(_differences(before, now, ""), None)
    if different is not None and different[1] is None:
        # A field that a class has gained since the run started has its default.
        resolved = _trained(plain(from_dict(begun, str(folder)).to_json()))
        different = next(_differences(resolved | {"budget": None}, now | {"budget": None}, ""), None)
    if different is None:
        return
    key, *values = different
    was, here = map(_shown, values)
    how = f"scalerl train {folder} --resume goes on as it was; another recipe is another run (-o)"
    raise InputError(f"{folder}: the run has {key} = {was}, and this recipe {here}; {how}")


def _check_config(folder: Path, saved: Mapping[str, Any]) -> None:
    """Compare config.json with its copy in the checkpoint `saved`.

    Raises an InputError for an edited recipe or schema, and logs a warning for other edits."""
    path = folder / "config.json"
    now, was = (dict(config) for config in (read_object(path), saved.get("config") or read_object(path)))
    budgets = amounts(was), amounts(now)
    if len(budgets[1]) > len(budgets[0]) and budgets[1][: len(budgets[0])] == budgets[0]:
        was, now = _without_budget(was), _without_budget(now)  # a resume has changed the budget since
    edited = {key: values for key, *values in _differences(_kept(was), _kept(now), "")}
    if not edited:
        return
    found = [f"{key} = {_shown(here)}, which was {_shown(before)}" for key, (before, here) in edited.items()]
    text = f"{path}: edited since the checkpoint of step {saved['step']}: it has {'; '.join(found)}"
    if any(key.split(".")[0] in ("recipe", "schema") for key in edited):
        raise InputError(f"{text}: put back what was; another recipe is another run (-o)")
    _LOG.warning("%s; the run goes on, and these values are what its readers see", text)


def _kept(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without the keys that a resume may change."""
    kept = {key: value for key, value in config.items() if key not in ("checkpointed", "code", "sandbox")}
    if isinstance(devices := kept.get("devices"), dict):
        kept["devices"] = {key: value for key, value in devices.items() if key != "trainers"}
    if isinstance(recipe := kept.get("recipe"), dict):
        kept["recipe"] = _trained(recipe)
    return kept


_FREE = {"batch": ("micro", "micro_tokens"), "evaluation": ("decode_slots", "keep", "downstream")}
"""Keys that a resume may change, by table: training does not depend on them. They set memory and speed, which
a run that ran out of memory may need to change, or what is kept and evaluated beside training."""


def _trained(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without the keys that a resume may change."""
    kept = {key: value for key, value in recipe.items() if key not in (*UNTRAINED, "decode_slots")}
    for name, keys in _FREE.items():
        if isinstance(table := kept.get(name), Mapping):
            kept[name] = {key: value for key, value in table.items() if key not in keys}
    if isinstance(engine := recipe.get("engine"), Mapping):  # each kind of engine rounds differently
        kept["engine"] = {"kind": engine.get("kind")}
    return kept


def _without_budget(config: dict[str, Any]) -> dict[str, Any]:
    recipe = {key: value for key, value in config["recipe"].items() if key != "budget"}
    return {key: value for key, value in config.items() if key != "budget"} | {"recipe": recipe}


def _shown(value: Any) -> str:
    return "not set" if value is None else dumps(value)


def _differences(before: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key whose values differ, with both values; nested keys are joined by dots."""
    if isinstance(before, dict) and isinstance(now, dict):
        # A dict keeps its order, a set does not: the first difference is named and must always be the same.
        for name in {**now, **before}:
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now
