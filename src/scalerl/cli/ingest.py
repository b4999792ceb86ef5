"""`scalerl ingest`: the log of any trainer as a run folder."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.cli.shared.arguments import option, output, print_json, print_warnings
from scalerl.cli.shared.data import add_source_arguments, read_options
from scalerl.files import folder_name
from scalerl.view.terminal.rows import print_table

if TYPE_CHECKING:
    from scalerl.record.reader import RunRecord

HELP = "turn the log of another trainer into run folders"
ABOUT = "Turn the log of another trainer into run folders, and print which metrics were used."
EXAMPLES = """
  scalerl ingest verl.jsonl -o runs/theirs --devices 8          # then: scalerl fit runs/theirs
  scalerl ingest wandb/run-20260101_120000-abc -o runs/theirs   # W&B's own folder, MLflow, TensorBoard, ...
  scalerl ingest log.jsonl -o runs/math --y eval/accuracy       # use this metric as the pass rate
"""


def add(ingest: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(
        ingest,
        "source SOURCE",
        "a file or folder that a trainer or tracker wrote, or runs on a tracker's server: "
        "wandb:ENTITY/PROJECT/RUN, wandb:ENTITY/PROJECT?group=NAME, mlflow:EXPERIMENT/RUN",
    )
    option(ingest, "-o --output RUN", "the run folder to make", type=output, required=True)
    option(ingest, "--y METRIC", "the metric that is the pass rate")
    add_source_arguments(ingest)
    option(ingest, "--json")


def run(args: argparse.Namespace) -> None:
    """Read the source, write a folder for every run in it, and print which metric was used for what."""
    from scalerl.ingest.load import read_source
    from scalerl.record.folder import check_unused
    from scalerl.record.left_out import NONE
    from scalerl.record.writer import RunWriter

    found = read_source(args.source, read_options(args))
    runs = found.runs
    places = _places(args.output, runs, is_one=len(runs) + len(found.unread) == 1)
    for place in places:  # check all before the first is written
        check_unused(place)
    for place, record in zip(places, runs, strict=True):
        writer = RunWriter(place, record.config)
        writer.whole(record)
        writer.close()
    if args.json:
        made = [
            {
                "run": str(place),
                "name": record.config["name"],
                **record.config["source"],
                "evaluations": len(record.evals),
                "axes": record.logged_axes(),
                "taken": record.config["taken"],
                "left_out": record.config.get("left_out", NONE.to_json()),
                "warnings": record.warnings,
            }
            for place, record in zip(places, runs, strict=True)
        ]
        print_json({"runs": made, "unread": [one.to_json() for one in found.unread]})
        return
    print_warnings(found.unread)
    for n, (place, record) in enumerate(zip(places, runs, strict=True)):
        if n:
            print()
        print_warnings(record.warnings)
        source = record.config["source"]
        run = f"{record.config['name']} ({source['trainer']}, {source['format']})"
        taken = record.config["taken"].items()
        print_table([("run", run), *taken, ("axes", _axes(record)), ("written", str(place))])


def _axes(record: RunRecord) -> str:
    """Name the axes that the log has, and the one that a fit uses by default."""
    logged, own = record.logged_axes(), record.default_axis
    if len(logged) == 1:
        return own
    why = ", the axis of its budget" if record.config.get("budget", {}).get("kind") == own else ""
    return f"{', '.join(logged)} (fit uses {own}{why}; --x changes it)"


def _places(output: Path, runs: Sequence[RunRecord], is_one: bool) -> list[Path]:
    """Return the folder of every run: `output` if the source holds one run, else folders in it by name."""
    if is_one:
        return [output]
    places: dict[str, Path] = {}  # by casefolded name, as some file systems ignore case
    for one in runs:
        name = folder_name(str(one.config["name"]), empty="run")
        names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        unique = next(name for name in names if name.casefold() not in places)
        places[unique.casefold()] = output / unique
    return list(places.values())
