"""What the commands that fit are given: arguments that say what to read and how, and sibling runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scalerl.cli._arguments import add_shared, compute, positive, share
from scalerl.cli._text import print_warnings
from scalerl.errors import CannotAnswerError, InputError
from scalerl.ingest.imported import ReadOptions
from scalerl.ingest.load import (
    STANDARD_INPUT,
    Data,
    check_devices,
    mixed_devices,
    read_all,
    read_data,
)

if TYPE_CHECKING:
    from scalerl.curve import Fit
    from scalerl.ingest.formats.format import Unread
    from scalerl.record.reader import RunRecord

T = TypeVar("T")


def add_data_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that fit: which columns, on which axis, and from where on."""
    add_shared(command, "--x", "compute axis, or column of FILE (the axis of RUN's budget; gpu_hours)")
    command.add_argument("--y", metavar="NAME", help="column or metric of pass rates of FILE (pass_rate)")
    command.add_argument(
        "--r0", type=_r0, metavar="R|free", help="pass rate before training, where it is known"
    )
    command.add_argument("--min-compute", type=compute, metavar="C", help="leave out compute under C")
    add_shared(command, "--level")
    add_shared(command, "--price", "dollars per GPU-hour: compute in dollars")
    add_shared(command, "--json")
    add_source_arguments(command)


def add_source_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that read the log of another trainer: what it does not say itself."""
    source = command.add_argument_group("the log of another trainer")
    source.add_argument("--format", metavar="FORMAT", help="its format (recognised)")
    source.add_argument("--trainer", metavar="TRAINER", help="whose names its metrics have (recognised)")
    source.add_argument("--run", dest="run_name", metavar="NAME", help="of several runs in it this one")
    source.add_argument(
        "--devices", type=positive, metavar="N", help="devices it ran on, where it does not say so"
    )
    source.add_argument(
        "--model", type=Path, metavar="FOLDER", help="the model's folder or config.json, to count FLOPs"
    )


def asked_of(args: argparse.Namespace) -> ReadOptions:
    """What `add_source_arguments` was told, and --y."""
    return ReadOptions(args.y, args.format, args.trainer, args.run_name, args.devices, args.model)


def read_each(
    paths: Sequence[str], args: argparse.Namespace, least: int = 1, once: bool = True
) -> tuple[dict[str, list[Data]], list[Unread]]:
    """What can be read at several paths, and what cannot: one run costs only itself.

    A folder of run folders is those in it, and a log may hold several runs. `once` refuses a path that comes
    twice.

    Raises:
        InputError: there is nothing at a path, or fewer than `least` runs can be read, or an option is for
            logs of other trainers, and there is none.
    """
    from scalerl.ingest.formats.format import Unread

    found: dict[str, list[Data]] = {}
    unread: list[Unread] = []
    errors: list[InputError] = []
    seen: set[Path] = set()
    for path in paths:
        found.setdefault(path, [])
        for one in _runs_at(path):
            if once and Path(one).resolve() in seen:
                raise InputError(f"{one}: given twice; every run is one seed of one recipe")
            seen.add(Path(one).resolve())
            try:
                found[path] += read_all(one, args.x, asked_of(args), args.price)
            except InputError as error:
                if one != STANDARD_INPUT and not os.path.lexists(one):
                    raise
                errors.append(error)
                unread.append(Unread(one, "", str(error)))
    whole = [data for runs in found.values() for data in runs]
    if errors and len(whole) < least:
        raise errors[0]
    check_options(args, whole)
    return found, list(dict.fromkeys([*unread, *(one for data in whole for one in data.unread)]))


def _runs_at(path: str) -> list[str]:
    """The run folders in a folder that is none itself; else the path."""
    from scalerl.record.reader import holds_run, runs_below

    place = Path(path)
    try:
        if path == STANDARD_INPUT or not place.is_dir() or holds_run(place):
            return [path]
        return [str(place / name) for name in runs_below(place)] or [path]
    except OSError:  # reading it reports that
        return [path]


def fit_options(args: argparse.Namespace) -> dict[str, Any]:
    """Where a curve starts, as the arguments have it."""
    return {"r0": args.r0, "min_compute": args.min_compute or 0.0}


def paths_of(args: argparse.Namespace) -> list[str]:
    """The paths that were given, those of --group first.

    Raises:
        InputError: two groups have one name.
    """
    for name, _ in args.group:
        if [other for other, _ in args.group].count(name) > 1:
            raise InputError(f"--group {name} is given twice: list all of its runs in one")
    return [*(path for _, paths in args.group for path in paths), *args.runs]


def recipes_of(
    args: argparse.Namespace,
    runs: Mapping[str, Sequence[T]],
    record: Callable[[T], RunRecord | None],
    path: Callable[[T], str],
) -> dict[str, list[T]]:
    """Runs by recipe: the groups that were named, then by the recipe of their config.json.

    `runs` are those at every path that was given, `record` and `path` those of a run.
    """
    from scalerl.forecast.recipes import by_recipe

    named = {name: [run for one in paths for run in runs[one]] for name, paths in args.group}
    others = [run for one in args.runs for run in runs[one]]
    return by_recipe(others, record, path, {name: members for name, members in named.items() if members})


def check_options(args: argparse.Namespace, found: Sequence[Data]) -> None:
    """Raise an InputError if an option for logs of other trainers was given, and there is none."""
    asked_of(args).check_used([data.path for data in found], any(data.foreign for data in found))


def check_one_axis(found: Sequence[Data]) -> None:
    """Raise an InputError that names what there is, unless all are read on one axis, in one unit."""
    first = found[0] if found else None
    other = next((data for data in found if first and data.points.axis != first.points.axis), None)
    runs = [(data.path, data.record) for data in found]
    if first is None or other is None:
        return check_devices(runs, first and first.points.axis)
    one, another = (f"'{data.path}' is on {data.points.axis}" for data in (first, other))
    common = [axis for axis in first.axes if all(axis in data.axes for data in found)]
    common = [axis for axis in common if not mixed_devices(runs, axis)]
    has = "; ".join(f"'{data.path}' has {', '.join(data.axes)}" for data in (first, other))
    hint = f"all have {', '.join(common)}: choose --x {common[0]}" if common else f"none is common: {has}"
    raise InputError(f"all runs need one compute axis: {one}, {another}; {hint}")


def _r0(text: str) -> float | str:
    return text if text == "free" else share(text)


def read_siblings(paths: Sequence[str], own: Data, args: argparse.Namespace, **options: Any) -> list[Fit]:
    """Fits of sibling runs, to learn a prior from: of the same evaluation prompts, as far as is on record.

    `options` are those with which the run itself is fitted: B and A mean something else for a curve that
    starts elsewhere.

    Raises:
        InputError: a sibling cannot be read, or was evaluated on other prompts.
    """
    siblings = [read_data(path, own.points.axis, asked_of(args), args.price) for path in paths]
    check_options(args, [own, *siblings])
    if not siblings:
        return []
    from scalerl.curve import fit
    from scalerl.curve.campaign import check_siblings

    check_siblings([data.record for data in (own, *siblings) if data.record is not None])
    fits = []
    for sibling in siblings:
        try:
            fits.append(fit(sibling.points, **options))
        except CannotAnswerError as error:
            print_warnings([f"left out of the siblings: {error}"])
    return fits
