"""`scalerl backtest`: how good the forecasts of finished runs would have been."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from scalerl.cli._arguments import examples
from scalerl.cli._data import add_data_arguments, fit_options, read_each, settle_amounts
from scalerl.cli._text import print_json, print_warnings
from scalerl.errors import CannotAnswerError

if TYPE_CHECKING:
    from scalerl.forecast.backtest_result import Backtest
    from scalerl.record.reader import RunRecord


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    test = commands.add_parser(
        "backtest",
        help="score forecasts on finished runs",
        description="Score the forecasts that finished runs would have had, against five rival methods.",
        epilog=examples("""
  scalerl backtest runs/mine                                    # cut at 1/8, 1/4, 1/2, 3/4 of its compute
  scalerl backtest runs/a-seed0 runs/b-seed0 log.csv --at 1/2   # scores of all, pooled
  scalerl backtest log.csv --at 1/4,1/2 --json                  # and every cut
"""),
    )
    test.add_argument(
        "runs_or_files", metavar="RUN|FILE", nargs="+", help="run folders, tables and logs, as for fit"
    )
    add_data_arguments(test)
    test.add_argument(
        "--at",
        type=_fractions,
        default=(1 / 8, 1 / 4, 1 / 2, 3 / 4),
        metavar="F1,F2",
        help="fractions of the compute to cut at (1/8,1/4,1/2,3/4)",
    )
    test.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit every cut of every run, and print the scores or the JSON."""
    from scalerl.forecast.backtest import backtest

    found, unread = read_each(args.runs_or_files, args, once=False)
    runs = [data for of_path in found.values() for data in of_path]
    far = settle_amounts(args, runs)
    test = backtest(
        [run.points for run in runs],
        fractions=args.at,
        level=args.level,
        **fit_options(args),
        watch=_progress if sys.stderr.isatty() else None,
    )
    frozen = _frozen([run.record for run in runs if run.record is not None], test)
    if args.json:
        print_json({**test.to_json(), "frozen": frozen, "unread": [one.to_json() for one in unread]})
    else:
        print_warnings([*unread, *far])
        print_warnings(warning for run in runs for warning in run.points.warnings)
        print(test)
        if frozen:
            print(
                f"\nfrozen while the runs were made: {frozen['judged']} forecasts whose compute was reached, "
                f"{frozen['inside']} inside; error rms {frozen['rms']:.4f}, bias {frozen['bias']:+.4f}"
            )
    if all(cut.outcome == "cannot answer" for cut in test.cuts):
        last = test.cuts[-1]
        raise CannotAnswerError(f"{last.source}: no cut can be forecast; of the last one: {last.why}")


def _frozen(records: list[RunRecord], test: Backtest) -> dict[str, Any] | None:
    """Score the forecasts that the tested runs have on record, each run once; None if there are none."""
    import numpy as np

    from scalerl.view import frozen_forecasts, judge

    errors, inside = [], 0
    for record in {record.path: record for record in records}.values():
        if str(record.evals_file) not in test.sources:
            continue
        for forecast in frozen_forecasts(record):
            outcome = judge(record, forecast)
            if outcome.measured is not None and outcome.inside is not None:
                errors.append(forecast.mean - outcome.measured.pass_rate)
                inside += outcome.inside
    if not errors:
        return None
    rms, bias = float(np.sqrt(np.mean(np.square(errors)))), float(np.mean(errors))
    return {"judged": len(errors), "inside": inside, "rms": rms, "bias": bias}


def _progress(done: int, to_do: int) -> None:
    end = "\n" if done == to_do else ""
    print(f"\r{done} of {to_do} cuts", end=end, file=sys.stderr, flush=True)


def _fractions(text: str) -> tuple[float, ...]:
    """Convert numbers between 0 and 1, as 1/8 or .125, separated by commas."""
    from fractions import Fraction

    try:
        values = tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        values = ()
    if not values or not all(0 < value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected fractions between 0 and 1, e.g. 1/8,1/2, found {text!r}")
    return values
