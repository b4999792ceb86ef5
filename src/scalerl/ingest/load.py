"""Read a run, our own or any other trainer's, from a path or a name; only this module tells which it is."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Self

from scalerl import limits
from scalerl.curve.points import Points
from scalerl.errors import InputError, NoEvaluationError, listed
from scalerl.files import as_path, check_input, reading
from scalerl.ingest.choice import candidates
from scalerl.ingest.formats.console.reader import CONSOLE_SUFFIXES, has_rows
from scalerl.ingest.formats.format import Format, Unread, Wanted, unopened
from scalerl.ingest.formats.json_rows import json_rows
from scalerl.ingest.formats.lines import HEAD
from scalerl.ingest.formats.recognise import formats, recognise
from scalerl.ingest.formats.table import parse_table, read_table
from scalerl.ingest.imported import as_run
from scalerl.ingest.logs.log import Log
from scalerl.ingest.options import ReadOptions
from scalerl.ingest.trackers.named import on_server
from scalerl.ingest.vocabularies import ANY, BY_TRAINER, VOCABULARIES, Vocabulary, any_of, tell
from scalerl.jsonl import read_bytes, whole_of
from scalerl.record.folder import holds_run, runs_below
from scalerl.record.metric import is_held_out_share
from scalerl.record.prompts import of_task
from scalerl.record.reader import RunRecord

_MOST_LOOKED_AT = 50
"""Most entries of a folder that are searched for logs, if the folder is not a run."""
_TABLES = (".csv", ".tsv", ".jsonl")
"""Suffixes of tables, which have no format of their own; a .json file is one only if it has rows."""
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class FoundRuns:
    """The runs of a file or folder, and those that cannot be read."""

    all: tuple[RunRecord | Unread, ...]
    """Runs that can and that cannot be read, in the order of the source."""

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        """The runs that can be read."""
        return tuple(one for one in self.all if isinstance(one, RunRecord))

    @property
    def unread(self) -> tuple[Unread, ...]:
        """The runs that cannot be read."""
        return tuple(one for one in self.all if isinstance(one, Unread))


def load_run(
    path: str | Path,
    *,
    metric: str | None = None,
    format: str | None = None,
    trainer: str | None = None,
    run: str | None = None,
    training_log: str | Path | None = None,
    devices: float | None = None,
    model: str | Path | None = None,
    max_reward: float | None = None,
    min_reward: float | None = None,
    pooled: bool = False,
    prompts: Mapping[str, int] | None = None,
) -> RunRecord:
    """Read a run folder, or a run in the log of another trainer.

    Args:
        path: a run folder; a log of a trainer or tracker that `scalerl ingest` reads; or a run on the server
            of a tracker, as `wandb:ENTITY/PROJECT/RUN` or `mlflow:EXPERIMENT/RUN`.
        metric: for a log, the metric that is the pass rate: a name, in which `*` is any text, or the first
            that exists of several with commas between. By default the best known held-out one
            (docs/reference/ingest.md). For a mixture of tasks, `pass_rate/NAME` is that of one of them.
        format: the format of the log; by default it is recognised.
        trainer: the trainer whose names the metrics have; by default it is recognised.
        run: the run to read, if there are several.
        training_log: for evaluations of checkpoints, the log of their training: compute is taken from it.
        devices: the number of devices of the run, where the log does not say it.
        model: the model's folder or config.json, to count FLOPs.
        max_reward: what a correct answer earns: the metric is divided by it, percentages by 100.
        min_reward: what a wrong answer earns, if not 0.
        pooled: whether to take the mean of all data sets, weighted by their prompts.
        prompts: the number of held-out prompts by data set, where the log does not say it.

    Raises:
        InputError: there is nothing at the path, it cannot be read, it holds several runs and none is named,
            or it is a plain table of compute and pass rates (`scalerl.read_table` reads those).
    """
    cost = None if model is None else Path(model)
    source = ReadOptions(
        *(metric, format, trainer, run, devices, training_log, cost, max_reward, min_reward, pooled),
        prompts=prompts or {},
        in_python=True,
    )
    found, foreign = _records(path, source)
    if found is None:
        what = "a table, not a run: use scalerl.read_table"
        raise InputError(f"{path}: {what if Path(path).is_file() else 'no such file or folder'}")
    source.check_used([path], foreign)
    _check_one(found.runs, path)
    return _with(found.runs[0], found.unread)


def read_source(
    path: str | Path, asked: ReadOptions | None = None, format: Format | None = None
) -> FoundRuns:
    """Read all runs in a file or folder that can be read, or only the one that is asked for.

    A run that cannot be read does not affect the others: it is named in `FoundRuns.unread`.

    Args:
        path: what a trainer or a tracker has written.
        asked: the user's options, which are not to be guessed.
        format: its format, if that has been recognised already.

    Raises:
        InputError: its format is unknown, it cannot be read, has no run of that name, or has no run with
            anything that could be a pass rate.
    """
    path, asked = Path(path), asked or ReadOptions()
    asked = replace(asked, model=asked.cost())
    found = format or on_server(path, asked.format) or recognise(path, asked.format)
    if found is None:
        _check_holds_no_logs(path)
        raise InputError(
            f"{path}: unknown log format; known: {', '.join(one.name for one in formats())} (--format); "
            "a table of compute and pass rates is read by scalerl fit, not ingest"
        )
    try:
        logs = _logs(path, found, asked)
        notes = ()
        if asked.format is None and path.is_dir():  # an output folder may hold a tracker's logs, too
            others = [one.name for one in formats() if one.name != found.name and one.recognises(path)]
            what = f"holds logs of several formats; {found.name} is read, and not {listed(others)}"
            notes = (f"{path}: {what} (--format {others[0]})",) if others else ()
    except OSError as error:
        raise InputError(unopened(error, path)) from error
    names = [log.run if isinstance(log, Unread) else log.name for log in logs]
    if asked.run is not None:
        logs = [log for log, name in zip(logs, names, strict=True) if name == asked.run]
        if not logs:
            raise InputError(f"{path}: no run {asked.run!r}; there are {listed(names)}")
    limits.RUNS.check(len(logs), path)
    if asked.training_log is not None and len(logs) > 1:
        log, run = asked.naming(name="training_log"), asked.naming(name="run")
        raise InputError(f"{path}: {log} is of one run; choose it with {run}: {listed(names)}")
    training = _training(asked)
    made: list[RunRecord | Unread] = []
    evaluations, first_error = 0, ""
    for log in logs:
        if isinstance(log, Unread):
            made.append(log)
            first_error = first_error or log.reason
            continue
        log = replace(log, notes=(*notes, *log.notes))
        each = [(log, asked)]
        if asked.each:
            each = [
                (replace(log, name=f"{log.name}: {one.name}"), replace(asked, metric=one.name, each=False))
                for one in candidates(log, _vocabulary(log, asked), asked)
            ] or each  # without a metric that is held out, reading one says so
        for one, options in each:
            try:
                run_read = as_run(one, _vocabulary(one, options), options, training)
                limits.EVALUATIONS.check(evaluations + len(run_read.evals), path)
            except InputError as error:
                which = f" (in the run {log.name!r})" if len(logs) > 1 else ""
                first_error = first_error or f"{error}{which}"
                made.append(Unread(str(path), one.name, str(error)))
            else:
                evaluations += len(run_read.evals)
                made.append(run_read)
    found_runs = FoundRuns(tuple(made))
    if not found_runs.runs:
        more = f"; nor can any other of the {len(logs)} runs be read (--run NAME says why)" * (len(logs) > 1)
        raise InputError(f"{first_error}{more}")
    return found_runs


def _logs(path: Path, format: Format, asked: ReadOptions) -> Sequence[Log | Unread]:
    if not (logs := format.read(path, wanted(asked))):
        raise InputError(f"{path}: there are no runs in it ({format.what})")
    return logs


def _training(asked: ReadOptions) -> tuple[Log, Vocabulary] | None:
    """Read the log of the training whose checkpoints were evaluated, if there is one."""
    if asked.training_log is None:
        return None
    path, option = Path(asked.training_log), asked.naming(name="training_log")
    format = on_server(path) or recognise(path)
    if format is None:
        raise InputError(f"{path}: unknown log format; {option} takes what scalerl ingest reads")
    try:
        log, *others = _logs(path, format, asked)
    except OSError as error:
        raise InputError(unopened(error, path)) from error
    if others or isinstance(log, Unread):
        raise InputError(f"{path}: holds {1 + len(others)} runs; {option} takes one" if others else str(log))
    return log, _vocabulary(log, replace(asked, trainer=None))  # --trainer is of the evaluations


def wanted(asked: ReadOptions) -> Wanted:
    """Return a test for names of useful metrics: those of any trainer, and the one asked for.

    A name that no known trainer uses passes too if it says that it is a held-out share of correct answers.
    """
    extra = [asked.metric, *asked.metric.split(",")] if asked.metric else []
    known = any_of((name for one in VOCABULARIES for name in one.patterns()), extra).fullmatch
    return lru_cache(2**16)(lambda name: known(name) is not None or is_held_out_share(name))


def run_of(log: Log, asked: ReadOptions) -> RunRecord:
    """Make a run of a log; its trainer is recognised unless it is named.

    Raises:
        InputError: there is no trainer of this name, or nothing in the log could be a pass rate.
    """
    return as_run(log, _vocabulary(log, asked), asked)


def _vocabulary(log: Log, asked: ReadOptions) -> Vocabulary:
    trainer = asked.trainer or log.trainer
    if not trainer:
        return tell(log.names) or ANY
    if trainer not in BY_TRAINER:
        raise InputError(f"no trainer {asked.trainer!r}; there are {', '.join(BY_TRAINER)}")
    return BY_TRAINER[trainer]


@dataclass(frozen=True)
class Data:
    """One RUN or FILE, read: `record` is that of a run folder or a log, and None for a table."""

    path: str
    points: Points
    record: RunRecord | None
    foreign: bool = False
    """Whether it is the log of another trainer."""
    unread: tuple[Unread, ...] = ()
    """The runs of the same source that cannot be read."""
    given: str = ""
    """The path that a command was given for it: its own, or a folder with several."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The compute axes that it could be read on."""
        return (self.points.axis,) if self.record is None else self.record.logged_axes()

    def on(self, axis: str, price: float | None) -> Self:
        """Return the data on one of its axes."""
        if self.record is None or axis == self.points.axis:
            return self
        return replace(self, points=Points.from_record(self.record, axis, price))


def read_data(path: str | Path, x: str | None, source: ReadOptions, price: float | None) -> Data:
    """Read the evaluations of RUN or FILE, and the record that they come from.

    Args:
        path: a run folder, a CSV or JSONL file, the log of another trainer, or `-` for standard input.
        x: compute axis or column; None means `dollars` with a price, else the axis of a run's budget, and
            `gpu_hours` for a file.
        source: the column of pass rates of a file, and how the log of another trainer is to be read.
        price: dollars per GPU-hour.

    Raises:
        InputError: it cannot be read, has no such axis, or the price does not apply to it.
    """
    found = read_all(path, x, source, price)
    _check_one([data.record for data in found if data.record is not None], path, found[0].unread)
    first = found[0]
    points = replace(first.points, warnings=(*first.points.warnings, *map(str, first.unread)))
    return replace(first, points=points, record=first.record and _with(first.record, first.unread))


def read_all(path: str | Path, x: str | None, source: ReadOptions, price: float | None) -> list[Data]:
    """Read as `read_data` does, but return all runs of another trainer's log that can be read.

    Raises:
        InputError: as `read_data`, if none can be read.
    """
    if price and x not in (None, "dollars"):
        raise InputError(f"--price measures compute in dollars: leave out --x {x}, or --price")
    x = "dollars" if price else x
    y, (wrong, right) = source.metric, source.rewards or (0.0, 1.0)
    if str(path) == STANDARD_INPUT:
        data = whole_of(sys.stdin.buffer, "standard input")
        try:
            points = parse_table(data, "standard input", x, y, price, right, wrong)
        except InputError as error:
            what = "standard input is read as a table; a log is given by the name of its file"
            raise InputError(f"{error} ({what})") from error
        return [Data(str(path), points, None)]
    found, foreign = _records(path, source)
    if found is None:
        return [Data(str(path), read_table(path, x, y, price, right, wrong), None)]
    read: list[tuple[RunRecord, Points]] = []
    errors: list[InputError] = []
    unread = [*found.unread]
    for one in found.runs:
        try:
            read.append((one, Points.from_record(one, x or one.default_axis, price)))
        except InputError as error:
            errors.append(error)
            unread.append(Unread(str(path), one.name if len(found.runs) > 1 else "", str(error)))
    if not read:
        raise errors[0]
    return [Data(str(path), points, one, foreign, tuple(unread)) for one, points in read]


def _records(path: str | Path, source: ReadOptions) -> tuple[FoundRuns | None, bool]:
    """Read the runs at a path (None: a table, or nothing); return also whether they are another trainer's."""
    place = as_path(path)
    format = on_server(path, source.format)
    if format is None:
        with reading(path):
            is_own = holds_run(place) or bool(runs_below(place)) if place.is_dir() else not place.is_file()
        # What is not a file is a pipe, which can be read only once: nothing looks into it here.
        format = None if is_own and source.format is None else recognise(place, source.format)
    if format is not None:
        return read_source(path, source, format), True
    if not place.is_dir():
        return None, False
    if not holds_run(place):
        _check_holds_no_logs(place)
    record = RunRecord.read(path)
    if not record.evals:  # a run that has just begun may have the file already
        raise NoEvaluationError(f"{path}: the run has no evaluation yet")
    return FoundRuns((record if source.task is None else of_task(record, source.task),)), False


def _with(record: RunRecord, unread: Sequence[Unread]) -> RunRecord:
    """Add a warning to a record for every run beside it that cannot be read."""
    return replace(record, warnings=(*record.warnings, *map(str, unread)))


def _check_holds_no_logs(folder: Path) -> None:
    """Raise an InputError that names what can be read in a folder, if it holds a log or a table."""
    try:
        found = sorted(one for one in folder.iterdir() if not one.name.startswith("."))[:_MOST_LOOKED_AT]
        logs = [one.name for one in found if _is_log(one)]
        names = sorted({*logs, *runs_below(folder)})
    except OSError:  # the reader of the folder reports what is wrong with it
        return
    if logs:
        raise InputError(f"{folder}: a folder, not a run; give one of those in it: {listed(names)}")


def _is_log(path: Path) -> bool:
    try:
        if log_format(path) or (path.suffix in _TABLES and path.is_file()):
            return True
        return path.suffix == ".json" and json_rows(read_bytes(path), str(path), []) is not None
    except (InputError, OSError):  # it is not readable, or a pipe
        return False


def log_format(path: Path) -> str:
    """Return the name of the format of one among many files or folders; empty if it is not a log.

    Unlike for `recognise`, a console needs a suffix of consoles and a row: other texts may quote rows.

    Raises:
        InputError, OSError: it cannot be read.
    """
    check_input(path)
    for one in formats():
        is_console = one.name == "console"
        if (path.suffix in CONSOLE_SUFFIXES and has_rows(path, HEAD)) if is_console else one.recognises(path):
            return one.name
    return ""


def _check_one(records: Sequence[RunRecord], path: str | Path, unread: Sequence[Unread] = ()) -> None:
    """Raise an InputError that names the runs if there are several."""
    if len(records) > 1:
        names = listed([str(record.config["name"]) for record in records])
        if unread:
            names += f"; of {listed([one.run for one in unread])} --run says why it cannot be read"
        raise InputError(f"{path}: holds {len(records)} runs; choose one with --run: {names}")
