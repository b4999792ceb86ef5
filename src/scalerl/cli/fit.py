"""`scalerl fit`: the curve of a run or a table, with its ceiling, forecasts and a verdict."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from scalerl.cli.shared.arguments import amounts, option, positive, print_json, print_warnings
from scalerl.cli.shared.data import (
    add_data_arguments,
    check_options,
    fit_options,
    option_name,
    read_options,
    read_siblings,
    settle_amounts,
)
from scalerl.errors import CannotAnswerError, InputError
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.curve import Fit, Points
    from scalerl.ingest.load import Data
    from scalerl.view.facts.shown import ShownRun

_OF_ONE_FIT = ("prior_from", "family", "sensitivity", "cross_check")
"""Options that neither --each nor --paper supports."""

HELP = "fit a curve to a run, and forecast it"
ABOUT = "Fit a curve to a run: ceiling and efficiency with intervals, forecasts, and a verdict."
EXAMPLES = """
  scalerl fit runs/mine --at 16000                              # what the run will reach there
  scalerl fit log.csv --x gpu_hours --y pass_rate --at 2x       # any table; at twice its compute
  scalerl fit runs/mine --target 0.6 --budget 16000             # is the target reached: a verdict
  scalerl fit verl.jsonl --devices 8 --json                     # the log of another trainer; one JSON object
"""


def add(fit: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(
        fit,
        "run_or_file RUN|FILE",
        "a run folder, a CSV or JSONL, the log of another trainer, - for standard input, or a run on a "
        "tracker's server: wandb:ENTITY/PROJECT/RUN, mlflow:EXPERIMENT/RUN",
    )
    add_data_arguments(fit, auto=True)
    option(fit, "--max-compute")
    option(
        fit,
        "--at C1,C2",
        "forecast at these amounts of compute, besides 10x: 16000, 12k, 300GFLOP, 2x (twice the data), "
        "'600 steps' (default: the run's budget, else 2x)",
        type=amounts,
        action="extend",
        default=[],
    )
    option(fit, "--target", "pass rate to reach at --budget")
    option(fit, "--budget", "compute at which --target must be reached")
    option(fit, "--worth G", "report where one more unit of compute gains less than G", type=positive)
    option(fit, "--prior")
    option(fit, "--prior-from RUN", "three or more sibling runs to learn a prior of B and A from", nargs="+")
    option(
        fit,
        "--family FILE.py:CLASS ...",
        "your own family of curves, averaged with the built-in ones; repeatable",
    )
    option(fit, "--sensitivity", "fit again with more of the start left out")
    option(fit, "--cross-check", "check A by bootstrap and profile likelihood")
    option(fit, "--each", "fit every held-out metric of a log; print a table")
    option(fit, "--paper", "run only the fit of arXiv 2510.13786")


def run(args: argparse.Namespace) -> None:
    """Fit, and print the table or the JSON."""
    if (args.target is None) != (args.budget is None):
        raise InputError(
            "--target R and --budget C need each other: a pass rate, and the compute to reach it"
        )
    if args.each:
        _each(args)
        return
    chosen = args.min_compute == "auto"
    if chosen and args.prior_from:
        raise InputError("--prior-from does not support --min-compute auto: give the compute that it chose")
    from scalerl.ingest.load import read_data

    data = read_data(args.run_or_file, args.x, read_options(args), args.price)
    points, warnings = data.points, settle_amounts(args, [data])
    if args.paper:
        check_options(args, [data])
        _paper(args, points, warnings)
        return
    from scalerl.curve import fit
    from scalerl.curve.own_families import load_family

    start = fit_options(args)
    extra = [load_family(kind) for kind in args.family]
    own: dict[str, Any] = {"prior": args.prior, "extra_families": extra}
    options: dict[str, Any] = {"r0": args.r0, "max_compute": args.max_compute, "level": args.level, **own}
    # Siblings are cut at the start like the run, but not at the end, as a longer curve is identified better.
    siblings = read_siblings(
        args.prior_from or (), data, args, **start, prior=args.prior, extra_families=extra
    )
    result = fit(points, prior_from=siblings, **(options | start))
    if chosen:
        args.min_compute = result.min_compute
        options["r0"] = "free" if result.min_compute else args.r0
    more = _more(args, points, result, options)
    tasks = _tasks(data, args.price, options | {"min_compute": args.min_compute or 0.0})
    from scalerl.view.facts.fit_rows import answer_rows, basis_rows, known_at, task_row, worth_rows

    at = known_at(result, data.record, args.at, args.budget)
    if args.json:
        answer = result.to_json(at, args.target, args.budget)
        if tasks:
            answer["tasks"] = {
                name: {"metric": run.points.metric.to_json(), "error": run.reason}
                if run.fit is None
                else run.fit.to_json(
                    known_at(run.fit, data.record, args.at, args.budget), args.target, args.budget
                )
                for name, run in tasks.items()
            }
        answer |= {name: value.to_json() for name, value in more.items()}
        answer["warnings"] += warnings
        if args.worth is not None:
            gain = result.gain_per_unit(float(result.points.compute_N[-1]))
            answer["stop"] = {"worth": args.worth, "compute": result.stop_at(args.worth), "gain_now": gain}
        print_json(answer, indent=None)
        return
    shown = {*result.left_out.sentences()} - {result.left_out.ending}  # rows of the table say the same
    print_warnings([*(text for text in result.warnings if text not in shown), *warnings])
    answers = answer_rows(result, at, args.target, args.budget)
    answers += worth_rows(result, args.worth) if args.worth else []
    metric_row, *basis = basis_rows(result)
    of_tasks = [task_row(name, run.fit, run.reason, args.at) for name, run in tasks.items()]
    between = ("", "")
    print_table(
        [*answers, between, metric_row, *_axis(args, data), *basis, *([between] if tasks else []), *of_tasks]
    )
    for value in more.values():
        print(f"\n{value}")


def _tasks(data: Data, price: float | None, options: dict[str, Any]) -> dict[str, ShownRun]:
    """Fit each task of a mixture by itself; return nothing for any other run."""
    if data.record is None or data.record.task or not data.record.tasks:
        return {}
    from scalerl.view.facts.shown import ShownRun
    from scalerl.view.runs.gathered import parts_of

    run = ShownRun(data.record.name, data.points, data.record)
    return parts_of(run, data.record.tasks, price, **options)


def _each(args: argparse.Namespace) -> None:
    """Fit every held-out metric of a log, and print a row for each."""
    _refuse("--each", args, "at", "worth", *_OF_ONE_FIT, "paper", "pooled")
    from scalerl.curve import fit
    from scalerl.curve.answers import span
    from scalerl.ingest.load import read_all

    found = read_all(args.run_or_file, args.x, read_options(args), args.price)
    check_options(args, found)
    warnings = settle_amounts(args, found)
    options = {"level": args.level, "max_compute": args.max_compute, "prior": args.prior}
    options |= fit_options(args)
    answers: list[dict[str, Any]] = []
    asked = [] if args.target is None else [f"{args.target:g} at {args.budget:g}"]
    refused: list[str] = []
    header = ["metric", "points", "ceiling A", "identified", *asked]
    rows: list[list[str]] = []
    for data in found:
        name = data.points.metric
        try:
            result = fit(data.points, **options)
        except CannotAnswerError as error:
            short = re.split(r"[:;(]", str(error).removeprefix(f"{data.points.source}: "))[0].strip()
            rows.append([str(name), f"{len(data.points)}", f"none: {short}", *([""] * (len(header) - 3))])
            refused.append(f"{name.name}: {error}")
            answers.append({"metric": name.to_json(), "error": str(error)})
            continue
        answers.append(result.to_json((), args.target, args.budget))
        ceiling = f"{result.median.A:.3f} {span(result.intervals.A)}"
        ceiling = "withheld" if result.misfit else ceiling
        verdict = [] if args.target is None else [result.chance(args.target, args.budget).answer]
        known = "yes" if result.identified else "no"
        rows.append([str(name), f"{result.n_points}", ceiling, known, *verdict])
    if args.json:
        unread = [one.to_json() for one in found[0].unread]
        print_json({"each": answers, "unread": unread, "warnings": warnings}, indent=None)
        return
    print_warnings([*map(str, found[0].unread), *refused, *warnings])
    print_table(rows, header)


def _refuse(option: str, args: argparse.Namespace, *others: str) -> None:
    """Raise an InputError if an option was given with others that it does not support."""
    if given := [option_name(name) for name in others if getattr(args, name)]:
        raise InputError(f"{option} does not support {', '.join(given)}: leave out one or the other")


def _axis(args: argparse.Namespace, data: Data) -> list[tuple[str, str]]:
    """Return a row on the default axis and its alternatives, for a log without a budget, and one if GPU-hours
    are those of one device."""
    from scalerl.record.devices import OF_ONE_DEVICE, is_of_one_device

    hours = [("GPU-hours", OF_ONE_DEVICE)] if is_of_one_device(data.record, data.points.axis) else []
    if not data.foreign or data.record is None or "budget" in data.record.config or args.x or args.price:
        return hours
    from scalerl.numbers import axis_name

    others = ", ".join(axis for axis in data.axes if axis != data.points.axis)
    row = ("axis", f"{axis_name(data.points.axis)} (the default); others: --x {others}")
    return [row, *hours] if others else hours


def _paper(args: argparse.Namespace, points: Points, warnings: list[str]) -> None:
    """Run the paper's procedure alone, so that published numbers can be matched."""
    from scalerl.forecast.paper import linearised, paper_fit

    _refuse("--paper", args, "target", "worth", *_OF_ONE_FIT)
    if args.min_compute == "auto":
        raise InputError("--paper needs a number: give --min-compute C")
    if args.r0 == "free":
        raise InputError("--paper needs a known R_0: give --r0 R, or an evaluation at compute 0")
    points = points.select(points.compute_N <= args.max_compute)
    result = paper_fit(points, args.r0, min_compute=args.min_compute)
    at = [{"compute": c, "paper_point": float(result.curve(c))} for c in args.at]
    if args.json:
        F_N = linearised(result.points, result.curve)
        lines = zip(result.points.compute_N.tolist(), F_N.tolist(), strict=True)
        more = {"forecast": at, "linearised": [{"compute": c, "F": F} for c, F in lines]}
        answer = result.to_json() | more
        answer["warnings"] += warnings
        print_json({"paper": answer}, indent=None)
        return
    print_warnings(warnings)
    print(result)
    for row in at:
        print(f"at {row['compute']:g}: {row['paper_point']:.3f}")


def _more(args: argparse.Namespace, points: Points, result: Fit, options: dict[str, Any]) -> dict[str, Any]:
    """Compute the requested additions to the fit; each prints itself and has a `to_json`."""
    more: dict[str, Any] = {}
    if args.sensitivity:
        from scalerl.forecast.sensitivity import sensitivity

        if args.min_compute:
            points = points.select(points.kept_from(args.min_compute))
        more["sensitivity"] = sensitivity(points, at=args.at[0] if args.at else args.budget, **options)
    if args.cross_check:
        from scalerl.forecast.crosscheck import cross_check

        more["cross_check"] = cross_check(result, args.at)
    return more
