"""What a command is given to fit: a run folder, a table, or a table on standard input; and how to fit it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.commands._text import compute, level, positive, print_warnings, share
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.curve import Fit, Points
    from scalerl.ingest.formats import Format
    from scalerl.ingest.imported import Imported
    from scalerl.record import RunRecord

STANDARD_INPUT = "-"


def add_data_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that fit: which columns, on which axis, and from where on."""
    command.add_argument(
        "--x", metavar="AXIS", help="compute axis, or column of FILE (the axis of RUN's budget; gpu_hours)"
    )
    command.add_argument("--y", metavar="NAME", help="column or metric of pass rates of FILE (pass_rate)")
    command.add_argument(
        "--r0", type=_r0, metavar="R|free", help="pass rate before training, where it is known"
    )
    command.add_argument("--min-compute", type=compute, metavar="C", help="leave out compute under C")
    command.add_argument("--level", type=level, default=0.95, metavar="P", help="of the intervals (0.95)")
    command.add_argument(
        "--price", type=positive, metavar="USD", help="dollars per GPU-hour: compute in dollars"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_source_arguments(command)


def add_source_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that read the log of another trainer: what it does not say itself."""
    source = command.add_argument_group("the log of another trainer")
    source.add_argument("--format", metavar="NAME", help="its format (recognised)")
    source.add_argument("--trainer", metavar="NAME", help="whose names its metrics have (recognised)")
    source.add_argument("--run", dest="run_name", metavar="NAME", help="of several runs in it this one")
    source.add_argument(
        "--devices", type=positive, metavar="N", help="devices it ran on, where it does not say so"
    )
    source.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model's folder or config.json, to count FLOPs"
    )


@dataclass(frozen=True)
class Source:
    """How the log of another trainer is to be read; None is as it says itself."""

    pass_rate: str | None = None
    format: str | None = None
    trainer: str | None = None
    run: str | None = None
    devices: float | None = None
    model: Path | None = None


def asked_of(args: argparse.Namespace) -> Source:
    """What `add_source_arguments` was told, and --y."""
    return Source(args.y, args.format, args.trainer, args.run_name, args.devices, args.model)


def read_runs(path: str | Path, source: Source, format: Format | None = None) -> list[Imported]:
    """The runs in the log of another trainer, whose `format` may have been recognised already.

    Raises:
        InputError: it cannot be read, or has no run of the name asked for.
    """
    from scalerl.ingest.flops import model_cost
    from scalerl.ingest.imported import Asked
    from scalerl.ingest.sources import read_source

    model = model_cost(source.model) if source.model is not None else None
    asked = Asked(source.pass_rate, source.devices, model)
    runs = read_source(path, asked, format=format or source.format, trainer=source.trainer)
    if source.run is None:
        return runs
    if chosen := [one for one in runs if one.config["name"] == source.run]:
        return chosen
    raise InputError(f"{path}: no run {source.run!r}; there are {_names(runs)}")


def _names(runs: Sequence[Imported]) -> str:
    from scalerl.ingest.log import listed

    return listed([str(one.config["name"]) for one in runs])


def _r0(text: str) -> float | str:
    return text if text == "free" else share(text)


@dataclass(frozen=True)
class Data:
    """One RUN or FILE, read: `record` is that of a run folder, None of a table."""

    path: str
    points: Points
    record: RunRecord | None


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
    if price and x not in (None, "dollars"):
        raise InputError(f"--price turns GPU-hours into dollars: leave out --x {x}, or the price")
    x = "dollars" if price else x
    from scalerl.curve import Points
    from scalerl.ingest.table import parse_table, read_table

    y = source.pass_rate or "pass_rate"
    if str(path) == STANDARD_INPUT:
        points = parse_table(sys.stdin.buffer.read(), "standard input", x or "gpu_hours", y, price)
        return Data(str(path), points, None)
    if (format := _foreign_format(path, source)) is not None:
        record = _one_run(path, source, format).record
    elif _is_folder(path):
        if source.pass_rate is not None:
            raise InputError(f"{path}: a run has its pass rates; --y names a column of a CSV or JSONL file")
        from scalerl.record import RunRecord

        record = RunRecord.read(path)
    else:
        return Data(str(path), read_table(path, x or "gpu_hours", y, price), None)
    return Data(str(path), Points.from_record(record, x or record.default_axis, price), record)


def _foreign_format(path: str | Path, source: Source) -> Format | None:
    """That of the log of another trainer; None of a run folder, a table or a pipe."""
    path = Path(path)
    is_own = (path / "evals.jsonl").is_file() if _is_folder(path) else not path.is_file()
    if source.format is None and is_own:  # a pipe, too, which can be read only once
        return None
    from scalerl.ingest.formats import recognise

    return recognise(path, source.format)


def _one_run(path: str | Path, source: Source, format: Format) -> Imported:
    runs = read_runs(path, source, format)
    if len(runs) > 1:
        raise InputError(f"{path}: holds {len(runs)} runs; choose one with --run: {_names(runs)}")
    return runs[0]


def _is_folder(path: str | Path) -> bool:
    try:
        return Path(path).is_dir()
    except OSError as error:  # a folder on the way that may not be entered, a name too long
        raise InputError(f"{path}: {error.strerror or error}") from error


def read_siblings(
    paths: Sequence[str], own: Data, source: Source, price: float | None, **options: Any
) -> list[Fit]:
    """Fits of sibling runs, to learn a prior from: of the same evaluation prompts, as far as is on record.

    `options` are those with which the run itself is fitted: B and A mean something else for a curve that
    starts elsewhere.

    Raises:
        InputError: a sibling cannot be read, or was evaluated on other prompts.
    """
    if not paths:
        return []
    from scalerl.curve import fit
    from scalerl.curve.campaign import check_siblings
    from scalerl.errors import CannotAnswerError

    siblings = [read_data(path, own.points.axis, source, price) for path in paths]
    check_siblings([data.record for data in (own, *siblings) if data.record is not None])
    fits = []
    for sibling in siblings:
        try:
            fits.append(fit(sibling.points, **options))
        except CannotAnswerError as error:
            print_warnings([f"left out of the siblings: {error}"])
    return fits
