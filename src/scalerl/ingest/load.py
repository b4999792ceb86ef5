"""A run, one's own or of any other trainer, from what stands at a path: the one place that tells which."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.errors import InputError, number_of
from scalerl.files import reading

if TYPE_CHECKING:
    from scalerl.curve import Points
    from scalerl.ingest.formats.format import Format, Unread
    from scalerl.ingest.sources import FoundRuns
    from scalerl.record.reader import RunRecord

STANDARD_INPUT = "-"
_DEVICES = "the number of devices"


@dataclass(frozen=True)
class Source:
    """How the log of another trainer is to be read; None is as it says itself."""

    pass_rate: str | None = None
    format: str | None = None
    trainer: str | None = None
    run: str | None = None
    devices: float | None = None
    model: Path | None = None

    def __post_init__(self) -> None:
        if self.devices is not None and not 0 < number_of(self.devices, _DEVICES) < math.inf:
            raise InputError(f"{_DEVICES} is a number above 0, found {self.devices}")

    def check_used(self, paths: Sequence[str | Path], foreign: bool, option: str = "--{}") -> None:
        """Raise an InputError if something was said here, and of `paths` none is the log of another trainer.

        `option` is how the user says it. The column of pass rates is not in question: tables have one, too.
        """
        names = ("format", "trainer", "run", "devices", "model")
        said = [option.format(name) for name in names if getattr(self, name) is not None]
        if said and not foreign:
            which = f"{paths[0]} is not" if len(paths) == 1 else f"none of {', '.join(map(str, paths))} is"
            raise InputError(f"{', '.join(said)}: only for the log of another trainer, which {which}")


def load_run(
    path: str | Path,
    *,
    pass_rate: str | None = None,
    format: str | None = None,
    trainer: str | None = None,
    run: str | None = None,
    devices: float | None = None,
    model: str | Path | None = None,
) -> RunRecord:
    """The record of a run folder, or of a run in the log of another trainer.

    Args:
        path: a run folder, or what a trainer or tracker wrote: whatever `scalerl ingest` reads.
        pass_rate: of a log, the metric that is the pass rate; by default the best known one.
        format: its format; by default it is recognised.
        trainer: whose names its metrics have; by default it is recognised.
        run: of several runs in it this one.
        devices: devices that it ran on, where it does not say so.
        model: the model's folder or config.json, to count FLOPs.

    Raises:
        InputError: there is nothing at the path, it cannot be read, it holds several runs and none is named,
            or it is a plain table of compute and pass rates (`scalerl.read_table` reads those).
    """
    source = Source(pass_rate, format, trainer, run, devices, None if model is None else Path(model))
    records, foreign, unread = _records(path, source)
    if records is None:
        what = "a plain table, not a run; scalerl.read_table reads its points"
        raise InputError(f"{path}: {what if Path(path).is_file() else 'no such file or folder'}")
    source.check_used([path], foreign, "{}=")
    _check_one(records, path)
    return _with(records[0], unread)


def read_runs(path: str | Path, source: Source, format: Format | None = None) -> FoundRuns:
    """The runs in the log of another trainer, whose `format` may have been recognised already.

    A run that cannot be read costs only itself: it is named in `Found.unread`.

    Raises:
        InputError: none can be read, or there is no run of the name asked for.
    """
    from scalerl.ingest.flops import model_cost
    from scalerl.ingest.imported import ReadOptions
    from scalerl.ingest.sources import read_source

    model = model_cost(source.model) if source.model is not None else None
    asked = ReadOptions(source.pass_rate, source.devices, model)
    return read_source(
        path, asked, format or source.format, source.trainer, source.run, guessed=source.format is None
    )


@dataclass(frozen=True)
class Data:
    """One RUN or FILE, read: `record` is that of a run folder or a log, None of a table."""

    path: str
    points: Points
    record: RunRecord | None
    foreign: bool = False
    """Whether it is the log of another trainer."""
    unread: tuple[Unread, ...] = ()
    """The runs beside it that cannot be read."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The compute axes that it could be read on."""
        return (self.points.axis,) if self.record is None else self.record.logged_axes()


def read_data(path: str | Path, x: str | None, source: Source, price: float | None) -> Data:
    """The evaluations of RUN or FILE, and the record that they are from.

    Args:
        path: a run folder, a CSV or JSONL file, the log of another trainer, or `-` for standard input.
        x: compute axis or column; None is `dollars` at a price, else the axis of a run's budget, and
            `gpu_hours` of a file.
        source: the column of pass rates of a file, and how the log of another trainer is to be read.
        price: dollars per GPU-hour.

    Raises:
        InputError: what is there cannot be read, or has no such axis, or the price is not for it.
    """
    found = read_all(path, x, source, price)
    _check_one([data.record for data in found if data.record is not None], path)
    first = found[0]
    points = replace(first.points, warnings=(*first.points.warnings, *map(str, first.unread)))
    return replace(first, points=points, record=first.record and _with(first.record, first.unread))


def read_all(path: str | Path, x: str | None, source: Source, price: float | None) -> list[Data]:
    """As `read_data`, of all runs that the log of another trainer holds and that can be read.

    Raises:
        InputError: as `read_data`, where none can.
    """
    if price and x not in (None, "dollars"):
        raise InputError(f"--price turns GPU-hours into dollars: leave out --x {x}, or the price")
    x = "dollars" if price else x
    from scalerl.curve import Points
    from scalerl.ingest.formats.format import Unread
    from scalerl.ingest.formats.table import parse_table, read_table
    from scalerl.jsonl import whole_of

    y = source.pass_rate or "pass_rate"
    if str(path) == STANDARD_INPUT:
        points = parse_table(
            whole_of(sys.stdin.buffer, "standard input"), "standard input", x or "gpu_hours", y, price
        )
        return [Data(str(path), points, None)]
    records, foreign, unread = _records(path, source)
    if records is None:
        return [Data(str(path), read_table(path, x or "gpu_hours", y, price), None)]
    found: list[tuple[RunRecord, Points]] = []
    errors: list[InputError] = []
    for one in records:
        try:
            found.append((one, Points.from_record(one, x or one.default_axis, price)))
        except InputError as error:
            errors.append(error)
            unread = (*unread, Unread(str(path), one.name if len(records) > 1 else "", str(error)))
    if not found:
        raise errors[0]
    return [Data(str(path), points, one, foreign, unread) for one, points in found]


def mixed_devices(runs: Sequence[tuple[str, RunRecord | None]], axis: str | None) -> tuple[str, ...]:
    """A run whose hours are those of one device, as its log does not say how many it ran on, and one whose
    hours are of all; empty where all are alike, or the axis counts something else.

    `runs` are names and records; that of a table is None, whose hours are taken for what they say.
    """
    from scalerl.ingest.counters import DEVICES_NOT_LOGGED

    of_one = [name for name, run in runs if run and DEVICES_NOT_LOGGED in run.config.get("assumed", ())]
    of_all = [name for name, _ in runs if name not in of_one]
    mixed = axis in ("gpu_hours", "dollars") and of_one and of_all
    return (of_one[0], of_all[0]) if mixed else ()


def check_devices(runs: Sequence[tuple[str, RunRecord | None]], axis: str | None) -> None:
    """Raise an InputError if hours of one device would stand beside hours of all: see `mixed_devices`."""
    if mixed := mixed_devices(runs, axis):
        raise InputError(
            f"'{mixed[0]}' does not say on how many devices it ran: its {axis} are those of one, beside all "
            f"those of '{mixed[1]}'; give --devices N, or another axis (--x steps)"
        )


def is_run_folder(path: str | Path) -> bool:
    """Whether there is a run of ours at `path`.

    Raises:
        InputError: what is there may not be entered.
    """
    from scalerl.record.reader import holds_run

    with reading(path):
        return holds_run(Path(path))


def _records(path: str | Path, source: Source) -> tuple[list[RunRecord] | None, bool, tuple[Unread, ...]]:
    """The runs at a path, None of a table or nothing; whether they are foreign; those that cannot be read."""
    if (format := _foreign_format(path, source)) is not None:
        found = read_runs(path, source, format)
        return [one.record for one in found.runs], True, found.unread
    with reading(path):
        if not Path(path).is_dir():
            return None, False, ()
    if source.pass_rate is not None:
        raise InputError(f"{path}: a run has its pass rates; --y names a column of a CSV or JSONL file")
    from scalerl.record.reader import RunRecord

    return [RunRecord.read(path)], False, ()


def _with(record: RunRecord, unread: Sequence[Unread]) -> RunRecord:
    """The record with a warning for every run beside it that cannot be read."""
    return replace(record, warnings=(*record.warnings, *map(str, unread)))


def _foreign_format(path: str | Path, source: Source) -> Format | None:
    """That of the log of another trainer; None of a run folder, a table or a pipe."""
    from scalerl.record.reader import holds_run, runs_below

    with reading(path):
        place = Path(path)
        is_own = holds_run(place) or bool(runs_below(place)) if place.is_dir() else not place.is_file()
    if source.format is None and is_own:  # a pipe, too, which can be read only once
        return None
    from scalerl.ingest.formats.format import recognise

    return recognise(Path(path), source.format)


def _check_one(records: Sequence[RunRecord], path: str | Path) -> None:
    """Raise an InputError if there are several runs, which names them."""
    from scalerl.ingest.logs.log import listed

    if len(records) > 1:
        names = listed([str(record.config["name"]) for record in records])
        raise InputError(f"{path}: holds {len(records)} runs; choose one with --run: {names}")
