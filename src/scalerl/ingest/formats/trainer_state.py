"""trainer_state.json, which the Hugging Face trainers (TRL among them) save with every checkpoint."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import head, is_plain, name_of, subfolders
from scalerl.ingest.logs.log import Log, LogBuilder, finite
from scalerl.jsonl import read_object

_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")
_SCALARS = (
    *("global_step", "max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps"),
    *("num_input_tokens_seen", "total_flos"),
)
"""What the state says about the run besides its log."""
_MODEL_KEYS = ("_name_or_path", "base_model_name_or_path", "model_type")
"""Keys of config.json, or of adapter_config.json where an adapter was trained."""


def recognises(path: Path) -> bool:
    """Return whether this is such a file, or a folder of a run or of runs with one."""
    if path.is_dir():
        return any(map(_states, _runs(path)))
    return (
        path.suffix == ".json" and (path.name == _FILE or b'"log_history"' in head(path)) and path.is_file()
    )


def read(path: Path, wanted: Wanted) -> list[Log | Unread]:
    """Read one run from a file, or from the newest checkpoint of a folder, which has the whole log."""
    if not path.is_dir():
        # The file has the same name in all runs, and its folder is checkpoint-N: the one above names the run.
        folder = path.absolute().parent
        if _CHECKPOINT.fullmatch(folder.name):
            folder = folder.parent
        return [_log(path, str(path), name_of(folder if path.name == _FILE else path), wanted)]
    runs = [(run, run.name) for run in _runs(path) if _states(run)]
    missing = f"{path}: no {_FILE} in it, or in its checkpoint-* (symbolic links are left out)"
    return each_run(path, runs, lambda run, _: [_newest(run, path, wanted)], missing)


FORMAT = Format(
    "trainer-state", "trainer_state.json of the Hugging Face trainers, or a folder with it", recognises, read
)


def _runs(path: Path) -> list[Path]:
    """Return the folder itself if it is that of a run, else its subfolders."""
    return [path] if _states(path) else subfolders(path)


def _states(run: Path) -> list[Path]:
    """Return the states of a run: its own, saved at its end, then its checkpoints', newest first."""
    found = [run / _FILE] if is_plain(run / _FILE) else []
    try:
        steps = [
            (int(match[1]), one) for one in subfolders(run) if (match := _CHECKPOINT.fullmatch(one.name))
        ]
    except PermissionError:
        return found
    return found + [one / _FILE for _, one in sorted(steps, reverse=True) if is_plain(one / _FILE)]


def _newest(run: Path, top: Path, wanted: Wanted) -> Log:
    """Read the latest whole state: the last one is torn if the trainer was killed while saving it."""
    name = name_of(run, top)
    notes: list[str] = []
    logs: list[Log] = []
    states = _states(run)
    for state in states:
        try:
            logs.append(_log(state, str(run), name, wanted, notes))
        except InputError as error:
            if state == states[-1] and not logs:
                raise
            notes.append(f"{error}; the checkpoint before it was taken")
            continue
        # At most two are read, as every checkpoint repeats the whole log_history.
        if len(logs) == 2 or state != run / _FILE:  # the run's own may be older, if it was resumed
            break
    return max(logs, key=lambda log: finite(log.config.get("global_step", 0)))


def _log(file: Path, source: str, name: str, wanted: Wanted, notes: list[str] | None = None) -> Log:
    builder = LogBuilder(source, FORMAT.name, name, wanted)
    builder.notes += notes or []
    try:
        state = read_object(file)
    except InputError as error:
        cause = error.__cause__
        if not (isinstance(cause, json.JSONDecodeError) and not cause.doc.rstrip().endswith("}")):
            raise
        advice = ": read that of an earlier checkpoint" if notes is None else ""
        raise InputError(f"{error}; the file is cut off (a crash while writing){advice}") from cause
    fill(builder, state, file)
    builder.config.update(_model(file.parent))
    return builder.build()


def fill(builder: LogBuilder, state: Mapping[str, Any], file: Path) -> None:
    """Add the content of a state, from a file or from a running trainer, to a log.

    Raises:
        InputError: it is not such a state; the message names `file`.
    """
    rows = state.get("log_history")
    if not isinstance(rows, list):
        raise InputError(f"{file}: no 'log_history', a list of rows; expected a {_FILE}")
    builder.config.update({key: state[key] for key in _SCALARS if not math.isnan(finite(state.get(key)))})
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(f"{file}: row {number} of 'log_history' is {brief(row)}, expected an object")
        step = finite(row.get("step"))
        if math.isnan(step):
            raise InputError(f"{file}: row {number} of 'log_history' has the step {brief(row.get('step'))}")
        # The rows have no times; a step may have several, one of training and one of evaluation.
        values = {key: value for key, value in row.items() if key != "step"}
        builder.add(step, math.nan, values, line=number)


def _model(folder: Path) -> dict[str, Any]:
    """Return some keys of the configs beside the weights; none if they are missing or damaged."""
    found: dict[str, Any] = {}
    for name in ("config.json", "adapter_config.json"):
        if is_plain(folder / name):
            try:
                config = read_object(folder / name)
            except InputError:
                continue
            found |= {key: config[key] for key in _MODEL_KEYS if isinstance(config.get(key), str)}
    return found
