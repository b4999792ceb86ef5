"""JSONL of metrics, one row a step: prime-rl's metrics.jsonl, those of many others, verl's file logger."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalerl.errors import InputError, brief, listed
from scalerl.ingest.formats.format import Format, Unread, Wanted, each_run
from scalerl.ingest.formats.lines import files_in, head_rows, lines, name_of, subfolders
from scalerl.ingest.formats.rows import RUNS, STEPS, TIMES, RowReader, step_in, time_of
from scalerl.ingest.logs.log import Log, LogBuilder, finite
from scalerl.jsonl import flat, parse_lines
from scalerl.record.evaluation import AXES

_FILE = "metrics.jsonl"
_TRAINER, _ORCHESTRATOR = "trainer", "orchestrator"
"""The two processes of prime-rl that log: into one file each, or both into one."""
_OF_ORCHESTRATOR = frozenset(
    ("time/pack", "time/wait_for_policy", "time/generate_completions", "time/wait_for_ckpt")
)
"""Metrics that only the orchestrator's rows have, where both processes log into one file."""
_COMPUTE = frozenset((*AXES, "device_seconds"))
"""Columns that make a row with a pass rate a row of our own tables."""


def recognises(path: Path) -> bool:
    """Return whether this is JSONL whose rows have a step, or a folder of `metrics.jsonl`; no own table."""
    if path.is_dir():
        return any(_recognises_file(file) for run in _runs(path) for _, file in _files(run))
    return _recognises_file(path)


def read(path: Path, wanted: Wanted) -> list[Log | Unread]:
    """Read a file as one run, or as several by a column of names; in a folder join the files of each run."""
    if not path.is_dir():
        return [*_read_run([("", path)], path, name_of(path), wanted)]
    runs = {run: files for run in _runs(path) if (files := _files(run))}
    names = ((run, name_of(run, path)) for run in runs)
    missing = f"{path}: no {_FILE} in it (symbolic links are left out)"
    return each_run(path, names, lambda run, name: _read_run(runs[run], run, name, wanted), missing)


FORMAT = Format("jsonl", "JSONL of metrics with a step, as prime-rl's metrics.jsonl", recognises, read)


def _recognises_file(path: Path) -> bool:
    try:
        rows = [flat(row, separator="/") for row in head_rows(path)]
    except InputError:  # rows beyond a limit, which the reader reports
        rows = head_rows(path)
    if any(_is_own(row) or _tops(row) == {"step", "data"} for row in rows):  # the latter: verl's
        return False
    return any(not math.isnan(step_in(row.get(name))) for row in rows for name in STEPS)


def _is_own(row: Mapping[str, Any]) -> bool:
    """Return whether a row belongs to a table of compute and pass rates, or only of steps and pass rates."""
    if "pass_rate" not in row:
        return False
    return not _COMPUTE.isdisjoint(_tops(row)) or not any(name in row for name in TIMES)


def _tops(row: Mapping[str, Any]) -> set[str]:
    return {name.partition("/")[0] for name in row}


def _runs(path: Path) -> list[Path]:
    """Return the folder itself if it is that of a run, else its subfolders."""
    return [path] if _files(path) else subfolders(path)


def _files(run: Path) -> list[tuple[str, Path]]:
    """Return the files of a run, each with the process that wrote it; empty for the run's own."""
    try:
        places = [("", run), *((one.name, one) for one in subfolders(run))]
        return [
            (name, file)
            for name, folder in places
            if name in ("", _TRAINER, _ORCHESTRATOR)
            for file in files_in(folder)
            if file.name == _FILE
        ]
    except PermissionError:
        return []


def _read_run(files: Sequence[tuple[str, Path]], source: Path, name: str, wanted: Wanted) -> list[Log]:
    """Read the rows of all files; a metric that two processes log is kept apart by a prefix."""
    prefix = f"{_ORCHESTRATOR}/"
    reader = RowReader(str(source), "jsonl", name, lambda metric: wanted(metric.removeprefix(prefix)))
    for process, file in files:
        reader.begin_file()
        for line, row in parse_lines(lines(file), str(file), reader.notes):
            if process == _ORCHESTRATOR or not _OF_ORCHESTRATOR.isdisjoint(row):
                cells = flat(row, separator="/", where=str(file))
                own = (*STEPS, *TIMES, *RUNS)
                row = {key if key in own else prefix + key: value for key, value in cells.items()}
            reader.add(row, line)
    return [_joined(log, prefix) for log in reader.build()]


def _joined(log: Log, prefix: str) -> Log:
    """Give the orchestrator's metrics their own names, except for those that both processes log."""
    logged = dict.fromkeys((*log.names, *log.omitted))  # a metric with only NaN is not among the names
    renamed = {name: name.removeprefix(prefix) for name in logged}
    both = {name: own for name, own in renamed.items() if name != own and own in logged}
    # Two processes log one name at different steps and times: one series of both would be of neither.
    renamed |= {name: name for name in both}
    notes = log.notes
    if both:
        shared = listed([*both.values()])
        notes += (f"trainer and orchestrator both log {shared}: the orchestrator's are {prefix}*",)
    return replace(
        log,
        metrics={renamed[name]: series for name, series in log.metrics.items()},
        omitted={renamed[name]: omitted for name, omitted in log.omitted.items()},
        names=tuple(renamed[name] for name in log.names),
        notes=notes,
    )


def _recognises_verl(path: Path) -> bool:
    """Return whether this is what verl's file logger writes, by its first rows."""
    rows = head_rows(path, most=3)
    return bool(rows) and all(_is_row_of_verl(row) for row in rows)


def _read_verl(path: Path, wanted: Wanted) -> list[Log]:
    """Read one run of verl's file logger, which writes no times, unless users add them.

    Raises:
        InputError: a line is not such a row, or there are none.
    """
    builder = LogBuilder(str(path), "verl", name_of(path), wanted)
    is_empty = True
    for number, row in parse_lines(lines(path), str(path), builder.notes):
        if not _is_row_of_verl(row):
            raise InputError(
                f'{path}, line {number}: {brief(row)}; expected a row as {{"step": 1, "data": {{...}}}}'
            )
        _, time = time_of(row)
        cells = flat(row["data"], separator="/", where=f"{path}, line {number}")
        builder.add(finite(row["step"]), time, cells, line=number)
        is_empty = False
    if is_empty:
        raise InputError(f'{path}: no row of verl\'s logger in it, such as {{"step": 1, "data": {{...}}}}')
    return [builder.build()]


VERL = Format("verl", "verl's file logger", _recognises_verl, _read_verl)


def _is_row_of_verl(row: dict) -> bool:
    return isinstance(row.get("data"), dict) and not math.isnan(finite(row.get("step")))
