"""Results of checkpoints that were evaluated one by one: a folder with one JSON file per evaluation.

    lm-evaluation-harness   "results" by task, "n-samples", "model_name" (loggers/evaluation_tracker.py)
    lighteval               "results" by task, "config_general" (logging/evaluation_tracker.py)
    Inspect                 "results" of the task in "eval", as JSON (inspect_ai/log/_log.py)
    OLMES                   "metrics" of the task in "task_name", of which one is primary
    other scripts           an object with numbers, one of which is named for correctness

The step of a harness's file is in the name of its model, else in its path. Any other file has a `step`, or
the step is in its path: checkpoint-100, global_step_100, iter_0000100. The rest of that name tells runs
apart. No time is read: the files give the time of the evaluation, not that of the training.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, counted, listed
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import folders_below, head, name_of
from scalerl.ingest.formats.rows import STEPS, unix_seconds
from scalerl.ingest.logs.log import Log, LogBuilder, Room, as_number, finite
from scalerl.jsonl import flat, read_object
from scalerl.numbers import as_mapping
from scalerl.record.metric import is_named_for_correctness

_FIRST = 256
"""Bytes that show a harness's file by its first key."""
_LOOKED_AT, _FILES_SEEN = 8, 2000
"""Files that are read to recognise a folder, and the files among which they are searched."""
_STEP = re.compile(
    r"(?:^|(?<=[^a-z]))(?:checkpoint|ckpt|step|iter(?:ation)?|update)[-_=]?(\d{1,15})(?![0-9a-z]|\.\d)", re.I
)
_APART = re.compile(
    r"[-_]?\d{4}-\d\d-\d\dT[\d.:+-]+\d(?:_[^/]*_[0-9A-Za-z]{22}(?=\.json$))?|task-\d+-[^/]*(?=-metrics\.json$)"
)
"""What tells files of one run apart: a date; with it the task and an id (Inspect); the task (OLMES)."""
_HARNESS = re.compile(
    rb'\s*\{\s*"(?:results"\s*:\s*\{|config_general"|version"\s*:\s*\d+\s*,\s*"status"\s*:|task_name"\s*:'
    rb'\s*"[^"]*"\s*,\s*"task_hash")'
)
"""How the files of harnesses start."""
_MODEL_ARGUMENTS = ("peft", "delta", "pretrained", "model", "path")
"""The arguments from which lm-evaluation-harness takes a model's name, in this order."""


@dataclass(frozen=True)
class _Results:
    """One file of results."""

    values: Mapping[str, Any]
    """Metrics by name, each with the prefix `eval/`."""
    step: float
    """NaN if nothing names it."""
    run: str
    """The part of the name that files of the same run share."""
    model: str
    """Name of the model; empty if the file is from no harness."""
    made: float
    """Unix seconds of the evaluation, to order repeated ones; 0 if the file does not give them."""


def recognises(path: Path) -> bool:
    """Return whether this is a folder with results of checkpoints, or one file of a harness."""
    if not path.is_dir():
        return path.suffix == ".json" and _is_of_harness(path)
    return any(_results(itertools.islice(_files(path, _FILES_SEEN), _LOOKED_AT), path, []))


def read(path: Path, wanted: Wanted) -> list[Log | Unread]:
    """Read every file in a folder, each as an evaluation of the run that its model's name identifies."""
    if not path.is_dir():
        raise InputError(
            f"{path}: the results of one evaluation; give the folder with those of all checkpoints"
        )
    errors: list[str] = []
    found = [*_results(_files(path), path, errors)]
    notes = [f"{counted(len(errors), 'file')} left out, such as {errors[0]}"] if errors else []
    runs: dict[str, list[_Results]] = defaultdict(list)
    for one in found:
        if not math.isnan(one.step):
            runs[one.run].append(one)
    models = sorted({one.model for one in found if math.isnan(one.step)})
    if models:
        notes.append(
            f"results of {counted(len(models), 'model')} left out, without a step in the name "
            f"(checkpoint-100): {listed(models)}; those of the base model count in a folder called step_0"
        )
    if not runs:
        raise InputError(f"{path}: {'; '.join(notes) or 'no results of checkpoints in it'}")
    room = Room(str(path))
    names = dict(zip(runs, _short(list(runs), path), strict=True))

    def log(_: Path, run: str) -> list[Log]:
        builder = LogBuilder(str(path), FORMAT.name, names[run], wanted, room)
        builder.notes += notes
        for one in sorted(runs[run], key=lambda one: (one.step, one.made)):
            builder.add(one.step, math.nan, one.values)
        return [builder.build()]

    return each_run(path, ((path, run) for run in runs), log, "", room)


FORMAT = Format(
    "results",
    "a folder with results of evaluated checkpoints (lm-eval, lighteval, Inspect, OLMES)",
    recognises,
    read,
)


def _is_of_harness(path: Path) -> bool:
    return _HARNESS.match(head(path, _FIRST)) is not None  # of many files, most of which are something else


def _files(folder: Path, most: int | None = None) -> Iterator[Path]:
    """Yield the files in a folder that may have results, among the first `most` files if that is given."""
    files = (file for _, found in folders_below(folder) for file in found)
    for file in itertools.islice(files, most):
        if file.suffix == ".json" and (
            _STEP.search(file.relative_to(folder).as_posix()) or _is_of_harness(file)
        ):
            yield file


def step_named_in(name: str) -> int | None:
    """Return the last step in a name or path, such as 100 in checkpoint-100/hf; None without one."""
    found = _STEP.findall(name)
    return int(found[-1]) if found else None


def _results(files: Iterable[Path], folder: Path, errors: list[str]) -> Iterator[_Results]:
    """Yield the content of the files that have results; `errors` names those that are no JSON objects."""
    for file in files:
        try:
            one = _result(file, folder)
        except InputError as error:
            errors.append(str(error))
        else:
            if one is not None:
                yield one


def _result(file: Path, folder: Path) -> _Results | None:
    """Return the content of a file; None if it has no results.

    Raises:
        InputError: it is not a JSON object, or cannot be read.
    """
    found = read_object(file)
    values, model = _harness(found) or _inspect(found) or _olmes(found) or (flat(found, "eval/", "/"), "")
    values = {name: value for name, value in values.items() if as_number(value) is not None}
    if not model and not any(map(is_named_for_correctness, values)):
        return None
    place = _APART.sub("", file.relative_to(folder).as_posix())
    own = next((found[name] for name in STEPS if name in found and not model), None)
    if not math.isnan(finite(own)):
        return _Results(values, finite(own), re.sub(r"\d+", "*", place), model, 0.0)
    text = place if step_named_in(model) is None else model
    step = step_named_in(text)
    # For a file in a folder both may have the step in their name.
    run = _STEP.sub(lambda found: "*" if int(found[1]) == step else found[0], text)
    made = unix_seconds(found.get("date") or as_mapping(found.get("eval")).get("created"))
    return _Results(values, math.nan if step is None else step, run, model, 0.0 if math.isnan(made) else made)


def _harness(found: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the metrics and the model of a harness's file; None if it is from no harness."""
    tasks, lm_eval, lighteval = (
        as_mapping(found.get(key)) for key in ("results", "config", "config_general")
    )
    if not tasks or not (lm_eval or lighteval):
        return None
    values = flat(tasks, "eval/", "/")
    if len(tasks) == 2:  # without lighteval's mean over tasks, if there is one
        values = {name: value for name, value in values.items() if not name.startswith("eval/all/")}
    counts = as_mapping(found.get("n-samples")) or as_mapping(found.get("config_tasks"))
    for task, value in counts.items():
        count = as_mapping(value)
        values[f"eval/{task}/n_prompts"] = count.get("effective", count.get("effective_num_docs"))
    arguments = as_mapping(lm_eval.get("model_args"))
    if isinstance(text := lm_eval.get("model_args"), str):
        parts = (part.partition("=") for part in text.split(","))
        arguments = {name: value for name, _, value in parts}
    names = [as_mapping(lighteval.get("model_config")).get("model_name"), lighteval.get("model_name")]
    names += [found.get("model_name"), *map(arguments.get, _MODEL_ARGUMENTS)]
    return values, next((name for name in names if name and isinstance(name, str)), "?")


def _inspect(found: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the accuracy by each scorer, and the model; None if it is not from Inspect.

    A mean over epochs is a share of right answers, and no other reducer's: the best of them is pass@k.
    """
    asked, results = as_mapping(found.get("eval")), as_mapping(found.get("results"))
    if not isinstance(task := asked.get("task"), str) or "status" not in found:
        return None
    if found["status"] != "success":
        return {}, ""
    scores, epochs = results.get("scores"), finite(as_mapping(asked.get("config")).get("epochs"))
    epochs = epochs if epochs > 0 else 1.0  # NaN, too
    values: dict[str, Any] = {}
    for score in map(as_mapping, scores if isinstance(scores, list) else ()):
        if score.get("reducer") in (None, "mean"):
            accuracy = as_mapping(as_mapping(score.get("metrics")).get("accuracy"))
            values[f"eval/{task}/accuracy,{score.get('name')}"] = accuracy.get("value")
    values[f"eval/{task}/n_prompts"] = finite(results.get("completed_samples")) / epochs
    values[f"eval/{task}/n_samples"] = epochs
    return values, str(as_mapping(asked.get("model_args")).get("model_path") or asked.get("model") or "?")


def _olmes(found: Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return the primary metric of a task, and the model; None if it is not from OLMES."""
    task, primary = found.get("task_name"), str(as_mapping(found.get("task_config")).get("primary_metric"))
    if not isinstance(task, str) or "task_hash" not in found:
        return None
    values = {f"eval/{task}/{primary}": as_mapping(found.get("metrics")).get(primary)}
    values[f"eval/{task}/n_prompts"] = found.get("num_instances")
    model = as_mapping(found.get("model_config"))
    return values, "/".join(str(model[key]) for key in ("model", "revision") if model.get(key)) or "?"


def _short(runs: list[str], folder: Path) -> list[str]:
    """Name runs by the parts in which their paths differ."""
    if len(runs) == 1:
        return [name_of(folder)]
    paths = [run.split("/") for run in runs]
    first, last = _n_shared(paths), _n_shared([path[::-1] for path in paths])
    return ["/".join(path[first : len(path) - last]) or run for path, run in zip(paths, runs, strict=True)]


def _n_shared(paths: list[list[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False)))
