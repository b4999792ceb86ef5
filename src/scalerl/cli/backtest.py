"""`scalerl backtest`: how good the forecasts of finished runs would have been."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cli.shared.arguments import option, print_json, print_warnings
from scalerl.cli.shared.data import add_data_arguments, fit_options, read_each, settle_amounts
from scalerl.errors import CannotAnswerError, InputError

if TYPE_CHECKING:
    from scalerl.forecast.backtest_result import Backtest
    from scalerl.record.reader import RunRecord

HELP = "score forecasts on finished runs"
ABOUT = "Score the forecasts that finished runs would have had, against five other methods."
EXAMPLES = """
  scalerl backtest runs/mine                                    # cut at 1/8, 1/4, 1/2, 3/4 of its compute
  scalerl backtest runs/a-seed0 runs/b-seed0 log.csv --at 1/2   # scores of all, pooled
  scalerl backtest log.csv --at 1/4,1/2 --json                  # and every cut
  scalerl backtest --bank runs                                  # all runs and tables in a folder, by method
"""


def add(test: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(test, "runs_or_files RUN|FILE", "run folders, tables and logs, as for fit", nargs="*")
    option(
        test,
        "--bank FOLDER",
        "score six methods on every run, table and log in a folder, cut at 1/4, 1/2, 3/4",
    )
    add_data_arguments(test, several=True)
    option(test, "--prior")
    option(
        test,
        "--at F1,F2",
        "fractions of the compute to cut at (default: 1/8,1/4,1/2,3/4; with --bank 1/4,1/2,3/4)",
        type=_fractions,
    )


def run(args: argparse.Namespace) -> None:
    """Fit every cut of every run, and print the scores or the JSON."""
    if bool(args.runs_or_files) == bool(args.bank):
        raise InputError("give runs and files, or --bank FOLDER for all that are in a folder")
    from scalerl.cli.console import share_shown
    from scalerl.forecast.backtest import backtest
    from scalerl.forecast.bank import Bank
    from scalerl.forecast.rivals import BANK_RIVALS, POINT_RIVALS

    paths = _in_folder(Path(args.bank)) if args.bank else args.runs_or_files
    runs, unread = read_each(paths, args, once=False)
    far = settle_amounts(args, runs)
    with share_shown("backtest", "of the cuts made") as shown:
        test = backtest(
            [run.points for run in runs],
            fractions=args.at or ((1 / 4, 1 / 2, 3 / 4) if args.bank else (1 / 8, 1 / 4, 1 / 2, 3 / 4)),
            level=args.level,
            **fit_options(args),
            prior=args.prior,
            rivals=BANK_RIVALS if args.bank else POINT_RIVALS,
            watch=lambda done, to_do: shown(done / to_do),
        )
    frozen = _frozen([run.record for run in runs if run.record is not None], test)
    bank = Bank(test) if args.bank else None
    if args.json:
        rows = bank.to_json() if bank else None
        print_json(
            {**test.to_json(), "bank": rows, "frozen": frozen, "unread": [one.to_json() for one in unread]}
        )
    else:
        print_warnings([*unread, *far])
        print_warnings(warning for run in runs for warning in run.points.warnings)
        print(bank or test)
        if frozen:
            print(
                f"\nfrozen while the runs were made: {frozen['judged']} forecasts whose compute was reached, "
                f"{frozen['inside']} inside; error rms {frozen['rms']:.4f}, bias {frozen['bias']:+.4f}"
            )
    if all(cut.outcome == "cannot answer" for cut in test.cuts):
        last = test.cuts[-1]
        raise CannotAnswerError(f"{last.source}: no cut can be forecast; of the last one: {last.why}")


def _in_folder(folder: Path) -> list[str]:
    """Return the files and folders in a folder, except hidden ones."""
    from scalerl import limits
    from scalerl.files import reading
    from scalerl.record.folder import holds_run

    with reading(folder):
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; --bank needs one with runs, tables or logs in it")
        if holds_run(folder):
            raise InputError(f"{folder}: a run, not a folder of runs: leave out --bank")
        shown = [child for child in folder.iterdir() if not child.name.startswith(".")]
        # No pipes, as reading would wait for them.
        names = sorted(child.name for child in shown if child.is_dir() or child.is_file())
    if not names:
        raise InputError(f"{folder}: there is nothing in it; --bank needs runs, tables or logs")
    limits.RUNS.check(len(names), folder)
    return [str(folder / name) for name in names]


def _frozen(records: list[RunRecord], test: Backtest) -> dict[str, Any] | None:
    """Score the recorded forecasts of the tested runs, each run once; None if there are none."""
    import numpy as np

    from scalerl.view import frozen_forecasts, judge

    errors, inside = [], 0
    for record in {record.path: record for record in records}.values():
        if str(record.evals_file) not in test.sources:
            continue
        for forecast in frozen_forecasts(record):
            outcome = judge(record, forecast)
            if outcome.measured is not None and outcome.inside is not None:
                errors.append(forecast.median - outcome.measured.pass_rate)
                inside += outcome.inside
    if not errors:
        return None
    rms, bias = float(np.sqrt(np.mean(np.square(errors)))), float(np.mean(errors))
    return {"judged": len(errors), "inside": inside, "rms": rms, "bias": bias}


def _fractions(text: str) -> tuple[float, ...]:
    """Convert numbers between 0 and 1, such as 1/8 or .125, separated by commas."""
    from fractions import Fraction

    try:
        values = tuple(float(Fraction(part.strip())) for part in text.split(","))
    except (ValueError, ZeroDivisionError, OverflowError):
        values = ()
    if not values or not all(0 < value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected fractions between 0 and 1, e.g. 1/8,1/2, found {text!r}")
    return values
