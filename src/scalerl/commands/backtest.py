"""`scalerl backtest`: how good would the forecasts of finished runs have been?"""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.commands._text import number
from scalerl.errors import CannotAnswerError, InputError

if TYPE_CHECKING:
    from scalerl.curve.backtest import Backtest
    from scalerl.curve.points import Points
    from scalerl.record import RunRecord


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl backtest`."""
    test = commands.add_parser("backtest", help="fit the first part of finished runs, forecast the rest")
    test.add_argument(
        "runs_or_files", metavar="RUN|FILE", type=Path, nargs="+", help="run folders and tables"
    )
    test.add_argument("--x", default="gpu_hours", metavar="AXIS", help="compute axis, or column of FILE")
    test.add_argument("--y", default="pass_rate", metavar="COLUMN", help="column of pass rates of FILE")
    test.add_argument(
        "--at",
        type=_fractions,
        default=(1 / 8, 1 / 4, 1 / 2, 3 / 4),
        metavar="F1,F2",
        help="fractions of the compute to cut at (1/8,1/4,1/2,3/4)",
    )
    test.add_argument(
        "--min-compute", type=number, default=0.0, metavar="C", help="leave out compute under C"
    )
    test.add_argument("--level", type=number, default=0.95, metavar="P", help="of the intervals (0.95)")
    test.add_argument("--price", type=number, metavar="USD", help="dollars per GPU-hour, for --x dollars")
    test.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    test.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Test, and print the scores or the JSON."""
    from scalerl.curve.backtest import backtest
    from scalerl.record import RunRecord, dumps

    data = [_read(path, args) for path in args.runs_or_files]
    test = backtest(
        data,
        x=args.x,
        fractions=args.at,
        level=args.level,
        min_compute=args.min_compute,
        price=args.price,
        watch=_progress if sys.stderr.isatty() else None,
    )
    frozen = _frozen([item for item in data if isinstance(item, RunRecord)])
    if args.json:
        print(dumps({**test.to_json(), "frozen": frozen}, indent=2))
    else:
        print(test)
        if frozen:
            print(
                f"\nfrozen while the runs were made: {frozen['judged']} forecasts whose compute was reached, "
                f"{frozen['inside']} inside; error rms {frozen['rms']:.4f}, bias {frozen['bias']:+.4f}"
            )
    _check_answered(test)


def _read(path: Path, args: argparse.Namespace) -> RunRecord | Points:
    from scalerl.ingest.table import read_table
    from scalerl.record import RunRecord

    if not path.is_dir():
        return read_table(path, args.x, args.y, args.price)
    if args.y != "pass_rate":
        raise InputError(f"{path}: a run has its pass rates; --y names a column of a CSV or JSONL file")
    return RunRecord.read(path)


def _frozen(runs: list[RunRecord]) -> dict[str, Any] | None:
    """What became of the forecasts that the runs have on record, each run once; None without any."""
    import numpy as np

    from scalerl.report import frozen_forecasts, judge

    errors, inside = [], 0
    for record in {run.path: run for run in runs}.values():
        for forecast in frozen_forecasts(record):
            outcome = judge(record, forecast)
            if outcome.measured is not None and outcome.inside is not None:
                errors.append(forecast.mean - outcome.measured.pass_rate)
                inside += outcome.inside
    if not errors:
        return None
    rms, bias = float(np.sqrt(np.mean(np.square(errors)))), float(np.mean(errors))
    return {"judged": len(errors), "inside": inside, "rms": rms, "bias": bias}


def _check_answered(test: Backtest) -> None:
    """Exit status 3 where no cut of any run could be forecast."""
    if all(cut.outcome == "cannot answer" for cut in test.cuts):
        last = test.cuts[-1]
        raise CannotAnswerError(f"{last.source}: no cut can be forecast; of the last one: {last.why}")


def _progress(done: int, to_do: int) -> None:
    end = "\n" if done == to_do else ""
    print(f"\r{done} of {to_do} cuts", end=end, file=sys.stderr, flush=True)


def _fractions(text: str) -> tuple[float, ...]:
    """Numbers between 0 and 1, as 1/8 or .125, by commas."""
    try:
        values = tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        values = ()
    if not values or not all(0 < value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected fractions between 0 and 1, as 1/8,1/2; found {text!r}")
    return values
