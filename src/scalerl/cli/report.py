"""`scalerl report`: the page of one run or several, their figures and tables."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.cli.shared.arguments import amount, option, output, print_json, print_warnings
from scalerl.cli.shared.data import (
    add_data_arguments,
    check_amounts,
    check_one_axis,
    fit_options,
    paths_of,
    read_each,
    recipes_of,
    settle_amounts,
)
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.ingest.formats.format import Unread
    from scalerl.ingest.load import Data
    from scalerl.view.runs.gathered import RunsView

HELP = "write an HTML page of a run, or of several"
ABOUT = "Write a page of a run, or of several, overlaid: one self-contained HTML file."
EXAMPLES = """
  scalerl report runs/mine                                      # writes runs/mine/report.html
  scalerl report runs/mine --figure curve.png
  scalerl report runs/a-seed0 runs/b-seed0 log.csv --budget 16000 --target 0.6 -o page.html
  scalerl report runs/a-seed0 runs/b-seed0 -o page.html --figure figures/ --latex table.tex
"""


def add(report: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(report, "runs RUN|FILE", "run folders, or what `fit` reads", nargs="*")
    option(report, "-o --output FILE", "file to write (default: RUN/report.html, or runs.html)", type=output)
    option(
        report,
        "--figure FILE|FOLDER",
        "write the figure (.svg, .png, .pdf), or all figures to a folder, and the page only with -o",
        type=output,
    )
    option(report, "--markdown FILE", "also write the tables in Markdown", type=output)
    option(report, "--latex FILE", "also write the tables in LaTeX", type=output)
    several = report.add_argument_group("forecasts and comparisons")
    option(several, "--budget", "forecast every run at this compute", type=amount(True))
    option(several, "--target", "pass rate to reach at --budget, or else at the budget of the runs")
    option(several, "--base", "recipe to compare the others with (default: the first)")
    option(several, "--group", "treat these runs as seeds of one recipe (run folders group themselves)")
    option(report, "--max-compute")
    add_data_arguments(report, several=True)


def run(args: argparse.Namespace) -> None:
    """Write the page, the figures and tables, and print their paths."""
    from scalerl.view.assets import write_text
    from scalerl.view.runs.gathered import warnings_of
    from scalerl.view.runs.page import runs_document

    view, paths, unread = _view(args)
    written = []
    if args.output or args.markdown or args.latex or not args.figure:
        document = runs_document(view)
        if args.output or not args.figure:
            advice = "" if args.output else "; give another file with -o"
            record = view.runs[0].record if len(view.runs) == 1 else None
            own = record is not None and (record.path / "evals.jsonl").is_file()
            place = record.path / "report.html" if own and record is not None else Path("runs.html")
            written.append(write_text(args.output or place, document.html(), advice))
        if args.markdown:
            written.append(write_text(args.markdown, document.markdown()))
        if args.latex:
            written.append(write_text(args.latex, document.latex()))
    if args.figure:
        from scalerl.view.runs.figures import write_figures

        written += write_figures(view, args.figure)
    if args.json:
        at = [] if view.budget is None else [view.budget]
        runs = [
            {
                "name": run.name,
                "source": path,
                "reason": run.reason or None,
                "fit": run.fit and run.fit.to_json(at, view.target, view.budget),
            }
            for run, path in zip(view.runs, paths, strict=True)
        ]
        answer = {
            "files": [str(path) for path in written],
            "axis": view.axis,
            "runs": runs,
            "recipes": [
                {"name": name, "runs": [run.name for run in runs]} for name, runs in view.recipes.items()
            ],
            "comparison": view.comparison and view.comparison.to_json(),
            "unread": [one.to_json() for one in unread],
            "not_compared": view.not_compared or None,
            "warnings": [*view.uncompared, *view.beyond],
        }
        print_json(answer)
        return
    print_warnings([*unread, *view.uncompared, *view.beyond])
    print_warnings(f"{run.name}: {warning}" for run in view.runs for warning in warnings_of(run))
    print_warnings(f"{run.name}: no curve: {run.reason}" for run in view.runs if run.fit is None)
    print("\n".join(map(str, written)))


def _view(args: argparse.Namespace) -> tuple[RunsView, list[str], list[Unread]]:
    """Read, name and fit the runs; return also their paths, and the runs that cannot be read."""
    from scalerl.cli.console import share_shown
    from scalerl.forecast.recipes import distinct, run_name
    from scalerl.view.assets import without_folders
    from scalerl.view.facts.fit_rows import common_budget
    from scalerl.view.facts.shown import ShownRun
    from scalerl.view.runs.gathered import RunsView, compared

    paths = paths_of(args)
    if not paths:
        raise InputError("report needs a RUN or a FILE")
    read, unread = read_each(paths, args, steps=True)
    found = _on_one_axis(read, args)
    check_one_axis(found)
    settle_amounts(args, found)
    if args.target is not None and args.budget is None:
        args.budget = common_budget((data.record, data.points.axis) for data in found)
        if math.isnan(args.budget):
            raise InputError("--target needs --budget, the compute at which to reach it")
    paths = [data.path for data in found]
    names = distinct([run_name(data.record, data.path) for data in found], paths)
    options = {**fit_options(args), "max_compute": args.max_compute, "level": args.level}
    runs = []
    with share_shown("report", "of the runs fitted") as shown:
        for name, data in zip(names, found, strict=True):
            runs.append(ShownRun(name, data.points, data.record).fitted_with(**options))
            shown(len(runs) / len(found))
    pairs = list(zip(found, runs, strict=True))
    recipes = {name: [run for _, run in members] for name, members in recipes_of(args, pairs).items()}
    asked = {"budget": args.budget, "target": args.target, "price": args.price, **options}
    left_out = tuple(without_folders(str(one), Path(one.path).parent) for one in unread)
    view = RunsView(tuple(runs), left_out=left_out, **asked)
    return compared(view, recipes, args.base, args.budget), paths, unread


def _on_one_axis(found: list[Data], args: argparse.Namespace) -> list[Data]:
    """Put runs with different default axes on the first common axis, and a single run on its forecast's."""
    from scalerl.record.evaluation import AXES
    from scalerl.view import axis_for, leading_forecast

    own = dict.fromkeys(data.points.axis for data in found)
    if len(found) == 1 and (record := found[0].record) is not None and args.x is None:
        axis = axis_for(record, frozen=leading_forecast(record))
        if axis in record.logged_axes():
            return [found[0].on(axis, args.price)]
    if len(own) == 1:
        return found
    check_amounts(args, found)
    for axis in dict.fromkeys((*own, *AXES)):
        if all(axis in (data.points.axis, *data.axes) for data in found):
            return [data.on(axis, args.price) for data in found]
    return found
