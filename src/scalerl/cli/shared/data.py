"""Input of the commands that fit: its arguments, and the runs at several paths."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scalerl.cli.shared.arguments import amount, finite, option, pass_rate, positive, print_warnings, whole
from scalerl.errors import CannotAnswerError, InputError
from scalerl.record.amounts import Amount

if TYPE_CHECKING:
    from scalerl.curve import Fit
    from scalerl.ingest.formats.format import Unread
    from scalerl.ingest.load import Data
    from scalerl.ingest.options import ReadOptions

T = TypeVar("T")


def add_data_arguments(command: argparse.ArgumentParser, auto: bool = False, several: bool = False) -> None:
    """Add the arguments of all commands that fit: columns, axis, start of the curve, level, price.

    With `auto` the fit may choose the start: `--min-compute auto`. `several` is as in `add_source_arguments`.
    """
    axes = "gpu_hours, flops, tokens, tokens_processed, samples, steps"
    option(
        command,
        "--x",
        f"compute axis: {axes}; or a column of FILE (default: that of the budget, else gpu_hours)",
    )
    option(command, "--y NAME", "column or metric with the pass rates; * matches any text")
    option(
        command,
        "--r0 R|free",
        "pass rate before training, if it is known",
        type=lambda text: text if text == "free" else pass_rate(text),
    )
    said = " (auto: what precedes a change that no curve describes)" if auto else ""
    option(
        command,
        "--min-compute",
        f"leave out evaluations below compute C{said}",
        metavar="C|auto" if auto else "C",
        type=lambda text: text if auto and text == "auto" else amount()(text),
    )
    option(command, "--level")
    option(command, "--price", "dollars per GPU-hour; measures compute in dollars")
    option(command, "--json")
    add_source_arguments(command, several)


def add_source_arguments(command: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the arguments of all commands that read logs of other trainers, for facts missing in such a log.

    With `several` the command reads several runs of a log, by `read_each`.
    """
    source = command.add_argument_group("the log of another trainer")
    option(source, "--format FORMAT", "format of the log (default: detected)")
    option(source, "--trainer TRAINER", "trainer that named the metrics (default: detected)")
    option(
        source, "--run NAME ...", f"which run to read, of several{'; repeatable' * several}", dest="run_names"
    )
    if not several:
        option(source, "--training-log LOG", "log of the training whose checkpoints RUN evaluates")
    option(source, "--devices N", "number of devices, if not logged", type=positive)
    option(source, "--model FOLDER", "folder or config.json of the model, to count FLOPs", type=Path)
    scale = source.add_mutually_exclusive_group()
    option(
        scale, "--percent", "the metric is in percent", dest="max_reward", action="store_const", const=100.0
    )
    option(scale, "--max-reward X", "what a right answer earns (default: 1)", type=positive)
    option(source, "--min-reward X", "what a wrong answer earns (default: 0)", type=finite)
    option(source, "--pooled", "take the mean over data sets, weighted by prompts")
    option(source, "--prompts N|SET=N,...", "held-out prompts, if not logged", type=_prompts, default={})


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return the options for reading a log, from `add_source_arguments` and --y.

    Raises:
        InputError: --run is given twice.
    """
    first, *others = _options_of_runs(args)
    if others:
        raise InputError(f"--run is given {1 + len(others)} times, and this command reads one run")
    return first


def _options_of_runs(args: argparse.Namespace) -> list[ReadOptions]:
    """Return the options for reading a log for every --run."""
    from scalerl.ingest.options import ReadOptions

    names = ("format", "trainer", "devices", "model", "max_reward", "min_reward", "pooled", "prompts")
    given = {name: getattr(args, name) for name in names}
    each, training_log = getattr(args, "each", False), getattr(args, "training_log", None)
    shared = ReadOptions(metric=args.y, each=each, training_log=training_log, **given)
    return [replace(shared, run=name) for name in dict.fromkeys(args.run_names)] or [shared]


def _prompts(text: str) -> dict[str, int]:
    """Convert `1319`, or `gsm8k=1319,math=500`; a number for all data sets has the name ""."""
    if "=" not in text:  # a comma here would group digits, which `whole` rejects
        return {"": whole()(text)}
    found = {}
    for part in text.split(","):
        name, is_named, number = part.rpartition("=")
        if not is_named:
            raise argparse.ArgumentTypeError(f"expected SET=N,SET=N, found {part!r} in {text!r}")
        found[name] = whole()(number)
    return found


def read_each(
    paths: Sequence[str], args: argparse.Namespace, *, least: int = 1, once: bool = True, steps: bool = False
) -> tuple[list[Data], list[Unread]]:
    """Read the runs at several paths; a run that cannot be read becomes an `Unread`, and the others are read.

    A folder of run folders stands for the runs in it. A log may have several runs; each --run names one. With
    `once`, a path given twice is an error; with `steps`, so is a steps.jsonl that cannot be read.

    Raises:
        InputError: there is nothing at a path, fewer than `least` runs can be read, or an option is for logs
            of other trainers, and there is no such log.
    """
    from scalerl.ingest.formats.format import Unread
    from scalerl.ingest.load import STANDARD_INPUT, read_all

    found: list[Data] = []
    unread: list[Unread] = []
    errors: list[InputError] = []
    seen: set[Path] = set()
    for path in paths:
        for one in _runs_at(path):
            if once and Path(one).resolve() in seen:
                raise InputError(f"{one}: given twice; list every run only once")
            seen.add(Path(one).resolve())
            for options in _options_of_runs(args):
                try:
                    for data in read_all(one, args.x, options, args.price):
                        record = data.record.with_columns() if data.record and steps else data.record
                        found.append(replace(data, given=path, record=record))
                except InputError as error:
                    if one != STANDARD_INPUT and not os.path.lexists(one):
                        raise
                    errors.append(error)
                    unread.append(Unread(one, options.run or "", str(error)))
    if errors and len(found) < least:
        raise errors[0]
    check_options(args, found)
    return found, list(dict.fromkeys([*unread, *(one for data in found for one in data.unread)]))


def _runs_at(path: str) -> list[str]:
    """Return the run folders in a folder that is not one itself; otherwise the path."""
    from scalerl.ingest.load import STANDARD_INPUT
    from scalerl.record.folder import holds_run, runs_below

    place = Path(path)
    try:
        if path == STANDARD_INPUT or not place.is_dir() or holds_run(place):
            return [path]
        return [str(place / name) for name in runs_below(place)] or [path]
    except OSError:  # reading the path reports the error
        return [path]


def fit_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a fit for the start of its curve."""
    return {"r0": args.r0, "min_compute": args.min_compute or 0.0}


def settle_amounts(args: argparse.Namespace, found: Sequence[Data]) -> list[str]:
    """Replace the amounts of compute in `args` by numbers on the axis of `found`.

    Return a warning if amounts lie far beyond the data, else an empty list.

    Raises:
        InputError: an amount has the unit of another axis, or the runs are on several axes.
    """
    from scalerl.view.facts.fit_rows import beyond

    typed = _typed(args)
    if not typed:
        return []
    check_amounts(args, found)
    runs, axis = [(data.points, data.record) for data in found], found[0].points.axis
    reach = max(float(points.compute_N.max(initial=0.0)) for points, _ in runs)
    axes = [name for name in axes_of(found[0]) if all(name in axes_of(data) for data in found)]
    numbers: list[float] = []
    for name, given in typed.items():
        settled = [one.on(option_name(name), axis, reach, axes) for one in given]
        setattr(args, name, settled if isinstance(getattr(args, name), list) else settled[0])
        numbers += settled
    return [text] if (text := beyond(numbers, runs)) else []


def check_amounts(args: argparse.Namespace, found: Sequence[Data]) -> None:
    """Raise an InputError if runs are on several axes and an amount of compute could be on any of them."""
    on = {data.points.axis: data.path for data in found}
    listed = "; ".join(f"{path} is on {axis}" for axis, path in on.items())
    given = [f"{option_name(name)} {one.text}" for name, typed in _typed(args).items() for one in typed]
    if given and len(on) > 1:
        raise InputError(f"{given[0]} could be on either axis: {listed}; choose one with --x")


def _typed(args: argparse.Namespace) -> dict[str, list[Amount]]:
    """Return the amounts of compute in `args` by argument, without fractions as in `backtest --at`."""
    given = {name: getattr(args, name, None) for name in ("budget", "at", "min_compute", "max_compute")}
    each = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    typed = {name: [one for one in values if isinstance(one, Amount)] for name, values in each.items()}
    return {name: found for name, found in typed.items() if found}


def option_name(name: str) -> str:
    """Return the option for the name of an argument."""
    return f"--{name.replace('_', '-')}"


def axes_of(data: Data) -> tuple[str, ...]:
    """Return the known axes on which --x can put a run or a table."""
    steps = data.record is None and data.points.step_N is not None
    return (*data.axes, "steps") if steps and "steps" not in data.axes else data.axes


def paths_of(args: argparse.Namespace) -> list[str]:
    """Return the given paths, those of --group first.

    Raises:
        InputError: two groups have one name.
    """
    names = [name for name, _ in args.group]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--group {name} is given twice: list all of its runs in one")
    return [*(path for _, paths in args.group for path in paths), *args.runs]


def recipes_of(args: argparse.Namespace, runs: Sequence[tuple[Data, T]]) -> dict[str, list[tuple[Data, T]]]:
    """Group runs, each given with a value, by --group, else by the recipe in config.json."""
    from scalerl.forecast.recipes import by_recipe

    named = {name: [run for run in runs if run[0].given in paths] for name, paths in args.group}
    others = [run for run in runs if run[0].given in args.runs]
    named = {name: members for name, members in named.items() if members}
    return by_recipe(others, lambda run: run[0].record, lambda run: run[0].path, named)


def check_options(args: argparse.Namespace, found: Sequence[Data]) -> None:
    """Raise an InputError if an option for logs of other trainers was given, but no such log."""
    paths, is_table = [data.path for data in found], any(data.record is None for data in found)
    _options_of_runs(args)[0].check_used(paths, any(data.foreign for data in found), is_table=is_table)


def name_among(found: Sequence[Data], data: Data) -> str:
    """Return the path of one of several runs, or its name if there are other runs at that path."""
    is_shared = sum(other.path == data.path for other in found) > 1
    return data.record.name if is_shared and data.record else data.path


def check_one_axis(found: Sequence[Data]) -> None:
    """Raise an InputError that names the axes unless all runs are on one axis, in one unit."""
    from scalerl.record.devices import check_devices, common_axes

    first = found[0] if found else None
    other = next((data for data in found if first and data.points.axis != first.points.axis), None)
    runs = [(name_among(found, data), data.record) for data in found]
    if first is None or other is None:
        return check_devices(runs, first.points.axis if first else "")
    one, another = (f"'{data.path}' is on {data.points.axis}" for data in (first, other))
    common = common_axes(runs, [axes_of(data) for data in found])
    has = "; ".join(f"'{data.path}' has {', '.join(axes_of(data))}" for data in (first, other))
    hint = f"all have {', '.join(common)}: choose --x {common[0]}" if common else f"none is common: {has}"
    raise InputError(f"all runs need one compute axis: {one}, {another}; {hint}")


def read_siblings(paths: Sequence[str], own: Data, args: argparse.Namespace, **options: Any) -> list[Fit]:
    """Fit sibling runs, from which to learn a prior.

    `options` must be those of the run's own fit, as B and A differ in meaning if the curve starts elsewhere.

    Raises:
        InputError: a sibling cannot be read, or its record shows that it was evaluated on other prompts.
    """
    from scalerl.ingest.load import read_data

    asked = replace(read_options(args), training_log=None)
    siblings = [read_data(path, own.points.axis, asked, args.price) for path in paths]
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
