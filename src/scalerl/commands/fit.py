"""`scalerl fit`: a curve, its ceiling, forecasts and a verdict, from a run or a table."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.commands._text import number, numbers, print_rows, span
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.curve import Fit


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl fit`."""
    fit = commands.add_parser("fit", help="fit a curve to a run, and forecast it")
    fit.add_argument("run_or_file", metavar="RUN|FILE", type=Path, help="a run folder, or a CSV or JSONL")
    fit.add_argument("--x", default="gpu_hours", metavar="AXIS", help="compute axis, or column of FILE")
    fit.add_argument("--y", default="pass_rate", metavar="COLUMN", help="column of pass rates of FILE")
    fit.add_argument("--r0", type=_r0, metavar="R|free", help="pass rate before training, where it is known")
    fit.add_argument("--min-compute", type=number, default=0.0, metavar="C", help="leave out compute under C")
    fit.add_argument("--at", type=numbers, default=(), metavar="C1,C2", help="forecast at these computes")
    fit.add_argument("--target", type=number, metavar="R", help="pass rate to reach at --budget")
    fit.add_argument("--budget", type=number, metavar="C", help="compute at which --target is asked")
    fit.add_argument("--level", type=number, default=0.95, metavar="P", help="of the intervals (0.95)")
    fit.add_argument("--price", type=number, metavar="USD", help="dollars per GPU-hour, for --x dollars")
    fit.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    fit.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, and print the table or the JSON."""
    from scalerl.curve import fit
    from scalerl.ingest.table import read_table
    from scalerl.record import RunRecord, dumps

    if (args.target is None) != (args.budget is None):
        raise InputError("--target and --budget belong together: the pass rate to reach, and at what compute")
    path: Path = args.run_or_file
    if path.is_dir() and args.y != "pass_rate":
        raise InputError(f"{path}: a run has its pass rates; --y names a column of a CSV or JSONL file")
    data = RunRecord.read(path) if path.is_dir() else read_table(path, args.x, args.y, args.price)
    result = fit(data, x=args.x, r0=args.r0, min_compute=args.min_compute, level=args.level, price=args.price)
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
    for compute in at:
        forecast = result.forecast(compute)
        spans = f"curve {span(forecast.interval)}   evaluation {span(forecast.prediction)}"
        rows.append((f"at {compute:g}", f"{forecast.mean:.3f}   {spans}"))
    if target is not None and budget is not None:
        probability = result.probability(target, budget)
        verdict = result.verdict(target, budget)
        rows.append((f"{target:g} at {budget:g}", f"{verdict.upper()}, probability {probability:.2f}"))
    return rows


def _r0(text: str) -> float | str:
    return text if text == "free" else number(text)
