"""`scalerl fit`: a curve, its ceiling, forecasts and a verdict, from a run or a table."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalerl.commands._data import read_points
from scalerl.commands._text import compute, computes, positive, print_rows, share, span
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.curve import Fit


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl fit`."""
    fit = commands.add_parser("fit", help="fit a curve to a run, and forecast it")
    fit.add_argument(
        "run_or_file", metavar="RUN|FILE", help="a run folder, a CSV or JSONL, or - for standard input"
    )
    fit.add_argument(
        "--x", metavar="AXIS", help="compute axis, or column of FILE (the axis of RUN's budget; gpu_hours)"
    )
    fit.add_argument("--y", default="pass_rate", metavar="COLUMN", help="column of pass rates of FILE")
    fit.add_argument("--r0", type=_r0, metavar="R|free", help="pass rate before training, where it is known")
    fit.add_argument(
        "--min-compute", type=compute, default=0.0, metavar="C", help="leave out compute under C"
    )
    fit.add_argument("--at", type=computes, default=(), metavar="C1,C2", help="forecast at these computes")
    fit.add_argument("--target", type=share, metavar="R", help="pass rate to reach at --budget")
    fit.add_argument("--budget", type=compute, metavar="C", help="compute at which --target is asked")
    fit.add_argument("--level", type=_level, default=0.95, metavar="P", help="of the intervals (0.95)")
    fit.add_argument("--price", type=positive, metavar="USD", help="dollars per GPU-hour, for --x dollars")
    fit.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, and print the table or the JSON."""
    from scalerl.curve import fit
    from scalerl.jsonl import dumps

    if (args.target is None) != (args.budget is None):
        raise InputError("--target and --budget belong together: the pass rate to reach, and at what compute")
    points = read_points(args.run_or_file, args.x, args.y, args.price)
    result = fit(points, r0=args.r0, min_compute=args.min_compute, level=args.level, price=args.price)
    if args.json:
        print(dumps(result.to_json(args.at, args.target, args.budget), indent=2))
        return
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print_rows(_rows(result, args.at, args.target, args.budget))


def _rows(
    result: Fit, at: Sequence[float], target: float | None, budget: float | None
) -> list[tuple[str, str]]:
    """The rows of the table for people: a label and what stands beside it."""
    median, intervals = result.median, result.intervals
    left_out = f", {len(result.excluded)} left out" if len(result.excluded) else ""
    known = "" if math.isnan(result.noise.floor) else f" (sampling alone {result.noise.floor:.4f})"
    rows = [
        ("points", f"{result.n_points} on {result.axis}{left_out}"),
        ("ceiling A", f"{median.A:.3f}   {intervals.level:.0%} {span(intervals.A)}"),
        ("efficiency B", f"{median.B:.3g}   {span(intervals.B, '.3g')}"),
        ("C_mid", f"{median.C_mid:.4g}   {span(intervals.C_mid, '.4g')}"),
        ("least squares (paper)", result.least_squares),
        ("R_0", f"{result.r0_value:.3f}   {result.r0_source}"),
        ("noise sd", f"{result.noise.sd:.4f}{known}"),
        ("families", "  ".join(f"{name} {weight:.2f}" for name, weight in result.families.items())),
        ("ceiling identified", f"{'yes' if result.identified else 'no'}: {result.why}"),
    ]
    for amount in at:
        forecast = result.forecast(amount)
        spans = f"curve {span(forecast.interval)}   evaluation {span(forecast.prediction)}"
        rows.append((f"at {amount:g}", f"{forecast.mean:.3f}   {spans}"))
    if target is not None and budget is not None:
        probability = result.probability(target, budget)
        verdict = result.verdict(target, budget)
        rows.append((f"{target:g} at {budget:g}", f"{verdict.upper()}, probability {probability:.2f}"))
    return rows


def _r0(text: str) -> float | str:
    return text if text == "free" else share(text)


def _level(text: str) -> float:
    level = share(text)
    if level in (0.0, 1.0):
        raise argparse.ArgumentTypeError(f"the level of the intervals is between 0 and 1, found {text!r}")
    return level
