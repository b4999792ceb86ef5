"""The command line: `scalerl COMMAND ...`. Whatever a command needs is imported inside of it.

Exit status: 0 done; 1 a run failed; 2 bad usage or unreadable input; 3 the data cannot answer; 130
interrupted; 141 the reader of a pipe has left. One line on standard error says what is wrong and what would
be right.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from scalerl._version import __version__
from scalerl.errors import InputError, InterruptedRunError, ScalerlError

if TYPE_CHECKING:
    from scalerl.curve import Fit
    from scalerl.rl.recipe import Recipe


class _Parser(argparse.ArgumentParser):
    """Argparse whose usage errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        args = _parser().parse_args(argv)
        args.run(args)
        sys.stdout.flush()
        return 0
    except ScalerlError as error:
        print(f"scalerl: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("scalerl: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "pydantic", "tokenizers", "safetensors"):
            raise
        print(f"scalerl: training needs {error.name}: pip install 'scalerl[train]'", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, say) has left; the flush at exit must not complain of it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scalerl",
        description="Forecast, train and compare RL for language models by compute-performance curves.",
    )
    parser.add_argument("--version", action="version", version=f"scalerl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_fit(commands)
    _add_report(commands)
    _add_train(commands)
    _add_demo(commands)
    return parser


def _add_fit(commands: argparse._SubParsersAction) -> None:
    fit = commands.add_parser("fit", help="fit a curve to a run, and forecast it")
    fit.add_argument("run_or_file", metavar="RUN|FILE", type=Path, help="a run folder, or a CSV or JSONL")
    fit.add_argument("--x", default="gpu_hours", metavar="AXIS", help="compute axis, or column of FILE")
    fit.add_argument("--y", default="pass_rate", metavar="COLUMN", help="column of pass rates of FILE")
    fit.add_argument("--r0", type=_r0, metavar="R|free", help="pass rate before training, where it is known")
    fit.add_argument(
        "--min-compute", type=_number, default=0.0, metavar="C", help="leave out compute under C"
    )
    fit.add_argument("--at", type=_numbers, default=(), metavar="C1,C2", help="forecast at these computes")
    fit.add_argument("--target", type=_number, metavar="R", help="pass rate to reach at --budget")
    fit.add_argument("--budget", type=_number, metavar="C", help="compute at which --target is asked")
    fit.add_argument("--level", type=_number, default=0.95, metavar="P", help="of the intervals (0.95)")
    fit.add_argument("--price", type=_number, metavar="USD", help="dollars per GPU-hour, for --x dollars")
    fit.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    fit.set_defaults(run=_fit)


def _fit(args: argparse.Namespace) -> None:
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
    _print(_fit_lines(result, args.at, args.target, args.budget))


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser("report", help="write report.html of a run")
    report.add_argument("run_folder", metavar="RUN", type=Path, help="a run folder")
    report.add_argument("-o", "--output", metavar="FILE", type=Path, help="instead of RUN/report.html")
    report.add_argument(
        "--figure", metavar="FILE", type=Path, help="write its main figure alone, .png or .svg"
    )
    report.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from scalerl.curve import fit
    from scalerl.record import RunRecord
    from scalerl.report import curve_figure, frozen_forecasts, main_forecast, write_report

    if args.figure and args.output:
        raise InputError("--figure writes the figure alone: leave out -o")
    if not args.figure:
        print(write_report(args.run_folder, out=args.output))
        return
    run = RunRecord.read(args.run_folder)
    frozen = main_forecast(frozen_forecasts(run))
    whole = fit(run, x=frozen.axis if frozen else "gpu_hours")
    print(curve_figure(run, whole, frozen=frozen, out=args.figure))


def _add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser("train", help="train a recipe into a run folder")
    train.add_argument("recipe", metavar="RECIPE", help="a TOML file, or the name of a recipe of the package")
    train.add_argument("-o", "--output", metavar="RUN", type=Path, help="run folder (runs/NAME-seedN)")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key: loss.max_ratio=4"
    )
    train.set_defaults(run=_train)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser("demo", help="train, forecast half-way, and hold the forecast to the end")
    demo.add_argument(
        "-o", "--output", metavar="RUN", type=Path, help="run folder (runs/demo, then demo-2 ...)"
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the run (0)")
    demo.add_argument("--quick", action="store_true", help="a fourteenth of the compute: a first look")
    demo.set_defaults(run=_demo)


def _train(args: argparse.Namespace) -> None:
    from scalerl.rl.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.set)
    _run_training(recipe, args.output or Path("runs") / f"{recipe.name}-seed{recipe.seed}")


def _demo(args: argparse.Namespace) -> None:
    from scalerl.rl.recipe import load_recipe

    quick = ["budget.amount=1.1e11", "evaluation.count=8", "evaluation.samples=2"] if args.quick else []
    recipe = load_recipe("demo", [f"seed={args.seed}", *quick])
    _run_training(recipe, args.output or _unused(Path("runs") / "demo"))


def _run_training(recipe: Recipe, folder: Path) -> None:
    """Train, write the report, and print the closing table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import; one bar is enough
    from scalerl.console import TrainingProgress
    from scalerl.curve.freeze import freeze
    from scalerl.record import check_unused
    from scalerl.report import print_closing, write_report
    from scalerl.rl.base import find_model
    from scalerl.rl.train import train

    check_unused(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's kill ends as Ctrl-C does
    with TrainingProgress("base model") as bar:
        model, about = find_model(recipe, bar.base_model)
    try:
        with TrainingProgress(recipe.name) as bar:
            run = train(recipe, folder, model, forecaster=freeze, watch=bar.update, extra=about)
    except KeyboardInterrupt:
        if not (folder / "evals.jsonl").exists():
            raise
        kept = f"{folder} keeps what was run: scalerl fit {folder} --x flops"
        raise InterruptedRunError(f"interrupted; {kept}") from None
    print_closing(run, report=write_report(run))


def _unused(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that does not exist."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _fit_lines(
    result: Fit, at: Sequence[float], target: float | None, budget: float | None
) -> list[tuple[str, str]]:
    """The rows of the table for people: a label and what stands beside it."""
    median, intervals = result.median, result.intervals
    left_out = f", {len(result.excluded)} left out" if len(result.excluded) else ""
    known = "" if math.isnan(result.noise.floor) else f" (sampling alone {result.noise.floor:.4f})"
    rows = [
        ("points", f"{result.n_points} on {result.axis}{left_out}"),
        ("ceiling A", f"{median.A:.3f}   {intervals.level:.0%} {_span(intervals.A)}"),
        ("efficiency B", f"{median.B:.3g}   {_span(intervals.B, '.3g')}"),
        ("C_mid", f"{median.C_mid:.4g}   {_span(intervals.C_mid, '.4g')}"),
        ("least squares (paper)", result.least_squares),
        ("R_0", f"{result.r0_value:.3f}   {result.r0_source}"),
        ("noise sd", f"{result.noise.sd:.4f}{known}"),
        ("families", "  ".join(f"{name} {weight:.2f}" for name, weight in result.families.items())),
        ("ceiling identified", f"{'yes' if result.identified else 'no'}: {result.why}"),
    ]
    for compute in at:
        forecast = result.forecast(compute)
        spans = f"curve {_span(forecast.interval)}   evaluation {_span(forecast.prediction)}"
        rows.append((f"at {compute:g}", f"{forecast.mean:.3f}   {spans}"))
    if target is not None and budget is not None:
        probability = result.probability(target, budget)
        verdict = result.verdict(target, budget)
        rows.append((f"{target:g} at {budget:g}", f"{verdict.upper()}, probability {probability:.2f}"))
    return rows


def _span(interval: tuple[float, float], spec: str = ".3f") -> str:
    return f"[{interval[0]:{spec}}, {interval[1]:{spec}}]"


def _print(rows: Sequence[tuple[str, str]]) -> None:
    """A table of two columns: coloured where a person looks on, plain text in a pipe."""
    width = max(len(label) for label, _ in rows)
    if not sys.stdout.isatty():
        for label, text in rows:
            print(f"{label:<{width}}  {text}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for label, text in rows:
        table.add_row(Text(label, style="bold cyan"), Text(text))
    Console().print(table)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


def _r0(text: str) -> float | str:
    return text if text == "free" else _number(text)


if __name__ == "__main__":
    raise SystemExit(main())
