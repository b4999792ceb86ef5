"""MLflow's file store: a folder per experiment and run, a file per metric."""

import ast
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import files_in, folders_below, is_plain, lines, name_of, subfolders
from scalerl.ingest.formats.rows import unix_seconds
from scalerl.ingest.logs.log import Log, LogBuilder, Room

_META = "meta.yaml"
_LONGEST = 2**16
"""The bytes of a parameter or a tag that are read."""
_META_LINE = re.compile(r"^(run_name|run_id|lifecycle_stage):[ \t]*(.*)$", re.MULTILINE)


def recognises(path: Path) -> bool:
    """Return whether this is `mlruns/`, an experiment in it, or one run."""
    return path.is_dir() and next(_runs(path), None) is not None


def read(path: Path, wanted: Wanted) -> list[Log | Unread]:
    """Read all runs that were not deleted, from a folder of any of the three kinds."""
    runs = _runs(path) if path.is_dir() else ()
    missing = f"{path}: no runs of MLflow in it, folders with {_META} and metrics/"
    room = Room(str(path))

    def read_one(run: Path, _: str) -> list[Log]:
        # A deleted run stays on disk until `mlflow gc`; one that the user names is read nevertheless.
        is_run = run == path or _meta(run).get("lifecycle_stage") != "deleted"
        return [_log(run, wanted, room)] if is_run else []

    return each_run(path, ((run, run.name) for run in runs), read_one, missing, room)


FORMAT = Format("mlflow", "MLflow's file store: mlruns/, an experiment or a run", recognises, read)


def _runs(path: Path) -> Iterator[Path]:
    """Yield the folders of runs: this one, those in it, or those in an experiment in it."""
    if _is_run(path):
        yield path
        return
    for one in subfolders(path):
        try:
            if _is_run(one):
                if is_plain(path / _META):
                    yield one
            elif is_plain(one / _META):
                yield from filter(_is_run, subfolders(one))
        except PermissionError:
            continue


def _is_run(path: Path) -> bool:
    metrics = path / "metrics"
    return is_plain(path / _META) and metrics.is_dir() and not metrics.is_symlink()


def _log(run: Path, wanted: Wanted, room: Room) -> Log:
    meta = _meta(run)
    tag = run / "tags" / "mlflow.runName"
    name = meta.get("run_name") or (_text(tag) if is_plain(tag) else "") or meta.get("run_id") or name_of(run)
    builder = LogBuilder(str(run), "mlflow", name, wanted, room)
    for metric, file in _files(run / "metrics"):
        builder.begin_file()
        _read_metric(file, metric, builder, wanted(metric))
    params = run / "params"
    if params.is_dir() and not params.is_symlink():
        for key, file in _files(params):
            builder.config[key.replace("/", ".")] = parameter(_text(file))
    return builder.build()


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield all files below a folder with their names; a name with slashes has subfolders."""
    for inner, _ in folders_below(folder):
        for file in files_in(inner):
            yield file.relative_to(folder).as_posix(), file


def _read_metric(file: Path, metric: str, builder: LogBuilder, is_wanted: bool) -> None:
    """Read the lines of a metric's file; of an unwanted metric only up to the first number, for its name."""
    for number, line, ended in lines(file):
        if not line.strip():
            continue
        if not ended:  # a step that is cut off would still be a step
            builder.notes.append(f"{file}: the last line is unfinished (a crash while writing); left out")
            return
        row = _row(line)
        if row is None:
            text = brief(line.decode(errors="replace"))
            raise InputError(
                f"{file}, line {number}: {text}; expected a time in milliseconds, a value and a step"
            )
        time, value, step = row
        builder.add(step, time, {metric: value}, line=number)
        # A file holds one metric: of an unwanted one the first number is enough to list its name.
        if not is_wanted and math.isfinite(value):
            return


def _row(line: bytes) -> tuple[float, float, float] | None:
    """Parse Unix seconds, value and step from a line, or return None; old lines have no step, which is 0."""
    cells = line.split(maxsplit=5)
    if len(cells) not in (2, 3, 5):  # the last two of five belong to a data set
        return None
    try:
        return unix_seconds(int(cells[0])), float(cells[1]), float(int(cells[2])) if len(cells) > 2 else 0.0
    except (ValueError, OverflowError):
        return None


def _meta(run: Path) -> dict[str, str]:
    """Return some keys of meta.yaml, which has one a line and no nested ones that matter here."""
    found = {}
    for key, value in _META_LINE.findall(_text(run / _META)):
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] == "'":
            value = value[1:-1].replace("''", "'")
        elif len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        found[key] = value
    return found


def _text(file: Path) -> str:
    with file.open("rb") as opened:
        # Cut, not rejected: tags hold notes of any length, and a damaged byte must not cost the run.
        return opened.read(_LONGEST).decode("utf-8", errors="replace").strip()


def as_logged(value: Any) -> Any:
    """Convert a value from a database, where the largest number stands for infinity, to what was logged."""
    is_largest = isinstance(value, float) and abs(value) >= sys.float_info.max
    return math.copysign(math.inf, value) if is_largest else value


def parameter(text: str) -> Any:
    """Convert a parameter, which MLflow stores as text, to the number or boolean that it was."""
    if len(text) > 40 or not re.fullmatch(r"True|False|None|[-+]?[\d.]+(?:[eE][-+]?\d+)?", text):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
