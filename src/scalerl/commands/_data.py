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
    from scalerl.record import RunRecord

STANDARD_INPUT = "-"


def add_data_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that fit: which columns, on which axis, and from where on."""
    command.add_argument(
        "--x", metavar="AXIS", help="compute axis, or column of FILE (the axis of RUN's budget; gpu_hours)"
    )
    command.add_argument("--y", default="pass_rate", metavar="COLUMN", help="column of pass rates of FILE")
    command.add_argument(
        "--r0", type=_r0, metavar="R|free", help="pass rate before training, where it is known"
    )
    command.add_argument("--min-compute", type=compute, metavar="C", help="leave out compute under C")
    command.add_argument("--level", type=level, default=0.95, metavar="P", help="of the intervals (0.95)")
    command.add_argument(
        "--price", type=positive, metavar="USD", help="dollars per GPU-hour: compute in dollars"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def _r0(text: str) -> float | str:
    return text if text == "free" else share(text)


@dataclass(frozen=True)
class Data:
    """One RUN or FILE, read: `record` is that of a run folder, None of a table."""

    path: str
    points: Points
    record: RunRecord | None


def read_data(path: str | Path, x: str | None, y: str, price: float | None) -> Data:
    """The evaluations of RUN or FILE, and the record that they are from.

    Args:
        path: a run folder, a CSV or JSONL file, or `-` for standard input.
        x: compute axis or column; None is `dollars` at a price, else the axis of a run's budget, and
            `gpu_hours` of a file.
        y: column of pass rates of a file.
        price: dollars per GPU-hour.

    Raises:
        InputError: what is there cannot be read, or has no such axis, or the price is not for it.
    """
    if price and x not in (None, "dollars"):
        raise InputError(f"--price turns GPU-hours into dollars: leave out --x {x}, or the price")
    x = "dollars" if price else x
    from scalerl.curve import Points
    from scalerl.ingest.table import parse_table, read_table
    from scalerl.record import RunRecord

    if str(path) == STANDARD_INPUT:
        points = parse_table(sys.stdin.buffer.read(), "standard input", x or "gpu_hours", y, price)
        return Data(str(path), points, None)
    if not _is_folder(path):
        return Data(str(path), read_table(path, x or "gpu_hours", y, price), None)
    if y != "pass_rate":
        raise InputError(f"{path}: a run has its pass rates; --y names a column of a CSV or JSONL file")
    record = RunRecord.read(path)
    return Data(str(path), Points.from_record(record, x or record.default_axis, price), record)


def _is_folder(path: str | Path) -> bool:
    try:
        return Path(path).is_dir()
    except OSError as error:  # a folder on the way that may not be entered, a name too long
        raise InputError(f"{path}: {error.strerror or error}") from error


def read_siblings(paths: Sequence[str], own: Data, y: str, price: float | None, **options: Any) -> list[Fit]:
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

    siblings = [read_data(path, own.points.axis, y, price) for path in paths]
    check_siblings([data.record for data in (own, *siblings) if data.record is not None])
    fits = []
    for sibling in siblings:
        try:
            fits.append(fit(sibling.points, **options))
        except CannotAnswerError as error:
            print_warnings([f"left out of the siblings: {error}"])
    return fits
