"""`scalerl fit`: a curve, its ceiling, forecasts and a verdict, from a run or a table."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from scalerl.cli._arguments import add_shared, compute, computes, positive
from scalerl.cli._data import add_data_arguments, asked_of, check_options, fit_options, read_siblings
from scalerl.cli._parser import examples
from scalerl.cli._text import print_json, print_rows, print_warnings
from scalerl.errors import InputError
from scalerl.ingest.load import Data, read_data

if TYPE_CHECKING:
    from scalerl.curve import Fit, Points


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl fit`."""
    fit = commands.add_parser(
        "fit",
        help="fit a curve to a run, and forecast it",
        description="Fit a curve to a run: ceiling and efficiency with intervals, forecasts, a verdict.",
        epilog=examples("""
  scalerl fit runs/mine --at 16000                              # what the run will reach there
  scalerl fit log.csv --x gpu_hours --y pass_rate               # any table of compute and pass rates
  scalerl fit runs/mine --target 0.6 --budget 16000             # is it worth going on: go, no-go, too early
  scalerl fit verl.jsonl --devices 8 --json                     # the log of another trainer; one JSON object
"""),
    )
    fit.add_argument(
        "run_or_file",
        metavar="RUN|FILE",
        help="a run folder, a CSV or JSONL, the log of another trainer, or - for standard input",
    )
    add_data_arguments(fit)
    fit.add_argument("--max-compute", type=compute, metavar="C", help="leave out compute above C")
    fit.add_argument("--at", type=computes, default=(), metavar="C1,C2", help="forecast at these computes")
    add_shared(fit, "--target", "pass rate to reach at --budget")
    add_shared(fit, "--budget", "compute at which --target is asked")
    fit.add_argument(
        "--worth", type=positive, metavar="G", help="say where a further unit of compute gains less than G"
    )
    fit.add_argument(
        "--prior-from", nargs="+", metavar="RUN", help="five or more sibling runs, for a prior of B and A"
    )
    fit.add_argument(
        "--family",
        action="append",
        default=[],
        metavar="FILE.py:CLASS",
        help="a curve of your own, averaged with the package's; repeatable",
    )
    fit.add_argument("--sensitivity", action="store_true", help="fit again with more of the start left out")
    fit.add_argument("--cross-check", action="store_true", help="bootstrap and profile likelihood of A")
    fit.add_argument("--paper", action="store_true", help="the paper's own procedure, and nothing else")
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, and print the table or the JSON."""
    if (args.target is None) != (args.budget is None):
        raise InputError("--target and --budget belong together: the pass rate to reach, and at what compute")
    data = read_data(args.run_or_file, args.x, asked_of(args), args.price)
    points = data.points
    if args.paper:
        check_options(args, [data])
        _paper(args, points)
        return
    from scalerl.curve import fit
    from scalerl.curve.families import load_family

    start = fit_options(args)
    end = math.inf if args.max_compute is None else args.max_compute
    extra = [load_family(kind) for kind in args.family]
    options: dict[str, Any] = {
        "r0": args.r0,
        "max_compute": end,
        "level": args.level,
        "extra_families": extra,
    }
    # Their start is cut as the run's, but not their end: where they went on they say more of one curve.
    siblings = read_siblings(args.prior_from or (), data, args, **start, extra_families=extra)
    result = fit(points, prior_from=siblings, **(options | start))
    more = _more(args, points, result, options)
    if args.json:
        answer = result.to_json(args.at, args.target, args.budget)
        print_json(
            answer | {name: value.to_json() for name, value in more.items()} | _worth(args, result),
            indent=None,
        )
        return
    print_warnings(result.warnings)
    from scalerl.view.facts.fit_rows import fit_rows, worth_rows

    asked = args.at, args.target, args.budget
    points_row, *rows = fit_rows(result, *asked)
    worth = worth_rows(result, args.worth) if args.worth else []
    print_rows([points_row, *_axis(args, data), *rows, *worth])
    for value in more.values():
        print(f"\n{value}")


def _axis(args: argparse.Namespace, data: Data) -> list[tuple[str, str]]:
    """Of a log that does not say its budget: which axis was taken in its place, and which others go."""
    if not data.foreign or data.record is None or "budget" in data.record.config or args.x or args.price:
        return []
    others = " or ".join(axis for axis in data.axes if axis != data.points.axis)
    return [("axis", f"{data.points.axis}, as no budget is logged; --x {others}")] if others else []


def _paper(args: argparse.Namespace, points: Points) -> None:
    """The paper's procedure alone, so that published numbers can be matched."""
    from scalerl.forecast.paper import paper_fit

    others = ("target", "worth", "prior_from", "family", "sensitivity", "cross_check")
    unanswered = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name)]
    if unanswered:
        raise InputError(f"--paper has no answer to {', '.join(unanswered)}: ask without it")
    if args.r0 == "free":
        raise InputError("--paper takes R_0 as given: --r0 R, or an evaluation at compute 0")
    if args.max_compute is not None:
        points = points.select(points.compute_N <= args.max_compute)
    result = paper_fit(points, args.r0, min_compute=args.min_compute)
    at = [{"compute": c, "paper_point": float(result.curve(c))} for c in args.at]
    if args.json:
        lines = zip(result.points.compute_N.tolist(), result.linearised(result.points).tolist(), strict=True)
        more = {"forecast": at, "linearised": [{"compute": c, "F": F} for c, F in lines]}
        print_json({"paper": result.to_json() | more}, indent=None)
        return
    print(result)
    for row in at:
        print(f"at {row['compute']:g}: {row['paper_point']:.3f}")


def _more(args: argparse.Namespace, points: Points, result: Fit, options: dict[str, Any]) -> dict[str, Any]:
    """What was asked for beside the fit: each prints itself, and has a to_json."""
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


def _worth(args: argparse.Namespace, result: Fit) -> dict[str, Any]:
    """The JSON of `--worth`: where to stop, and the expected gain per unit now."""
    if args.worth is None:
        return {}
    now = float(result.points.compute_N[-1])
    stop = {"worth": args.worth, "compute": result.stop_at(args.worth), "gain_now": result.gain_per_unit(now)}
    return {"stop": stop}
