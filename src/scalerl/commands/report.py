"""`scalerl report`: the page of a run, or its main figure alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from scalerl.commands._parser import examples
from scalerl.errors import CannotAnswerError, InputError


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl report`."""
    report = commands.add_parser(
        "report",
        help="write report.html of a run",
        description="Write the page of a run, self-contained, or its main figure alone.",
        epilog=examples("""
  scalerl report runs/mine                                      # writes runs/mine/report.html
  scalerl report runs/mine -o page.html
  scalerl report runs/mine --figure curve.png
"""),
    )
    report.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder")
    report.add_argument("-o", "--output", metavar="FILE", type=Path, help="instead of RUN/report.html")
    report.add_argument(
        "--figure", metavar="FILE", type=Path, help="write its main figure alone, .png or .svg"
    )
    report.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the page or the figure, and print where it is."""
    from scalerl.curve import fit
    from scalerl.record import RunRecord
    from scalerl.report import axis_for, curve_figure, frozen_forecasts, main_forecast, write_report

    if args.figure and args.output:
        raise InputError("--figure writes the figure alone: leave out -o")
    if not args.figure:
        print(write_report(args.run_folder, out=args.output))
        return
    record = RunRecord.read(args.run_folder)
    frozen = main_forecast(frozen_forecasts(record))
    try:
        whole = fit(record, x=axis_for(record, frozen=frozen))
    except CannotAnswerError:  # the evaluations can be drawn all the same
        whole = None
    print(curve_figure(record, whole, frozen=frozen, out=args.figure))
