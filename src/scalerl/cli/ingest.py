"""`scalerl ingest`: the log of any trainer as a run folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.cli._arguments import add_shared
from scalerl.cli._data import add_source_arguments, asked_of
from scalerl.cli._parser import examples
from scalerl.cli._text import print_json, print_rows, print_warnings
from scalerl.files import folder_name
from scalerl.ingest.load import read_source

if TYPE_CHECKING:
    from scalerl.ingest.imported import Imported
    from scalerl.record.reader import RunRecord


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl ingest`."""
    ingest = commands.add_parser(
        "ingest",
        help="make run folders of the log of another trainer",
        description="Make run folders of the log of another trainer, and say what was taken for what.",
        epilog=examples("""
  scalerl ingest verl.jsonl -o runs/theirs --devices 8          # then: scalerl fit runs/theirs
  scalerl ingest wandb/run-20260101_120000-abc -o runs/theirs   # W&B's own folder, MLflow, TensorBoard, ...
  scalerl ingest log.jsonl -o runs/math --y eval/accuracy       # this metric is the pass rate
"""),
    )
    ingest.add_argument("source", metavar="SOURCE", help="a file or folder that a trainer or tracker wrote")
    ingest.add_argument(
        "-o", "--output", metavar="RUN", type=Path, required=True, help="the run folder to make"
    )
    ingest.add_argument("--y", metavar="METRIC", help="the metric that is the pass rate")
    add_source_arguments(ingest)
    add_shared(ingest, "--json")
    ingest.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Read the source, write a folder for every run in it, and say what was taken for what."""
    from scalerl.record.folder import check_unused
    from scalerl.record.writer import RunWriter

    found = read_source(args.source, asked_of(args))
    runs = found.runs
    places = _places(args.output, runs, is_one=len(runs) + len(found.unread) == 1)
    for place in places:  # all of them, before the first is written
        check_unused(place)
    for place, imported in zip(places, runs, strict=True):
        writer = RunWriter(place, imported.config)
        writer.whole(imported.record.evals, imported.steps())
        writer.close()
    if args.json:
        written = [_json(place, one) for place, one in zip(places, runs, strict=True)]
        print_json({"runs": written, "unread": [one.to_json() for one in found.unread]})
        return
    print_warnings(map(str, found.unread))
    for place, imported in zip(places, runs, strict=True):
        print_warnings(imported.warnings)
        source = imported.config["source"]
        print_rows(
            [
                ("run", f"{imported.config['name']} ({source['trainer']}, {source['format']})"),
                *imported.taken,
                ("axes", _axes(imported.record)),
                ("written", str(place)),
            ]
        )
        print()


def _axes(record: RunRecord) -> str:
    """Those that the log has, and which one a fit is made on unless it is told."""
    logged, own = record.logged_axes(), record.default_axis
    if len(logged) == 1:
        return own
    why = " of its budget" if record.config.get("budget", {}).get("kind") == own else ""
    return f"{', '.join(logged)}; a fit takes {own}{why}, --x another"


def _places(output: Path, runs: Sequence[Imported], is_one: bool) -> list[Path]:
    """The folder of every run: the one asked for, or one in it for each of several, be they readable or not.

    Their names differ by more than capitals, which some file systems do not tell apart.
    """
    if is_one:
        return [output]
    places: dict[str, Path] = {}
    for one in runs:
        name = folder_name(str(one.config["name"]), empty="run")
        unique, n = name, 1
        while unique.casefold() in places:
            n += 1
            unique = f"{name}-{n}"
        places[unique.casefold()] = output / unique
    return list(places.values())


def _json(place: Path, imported: Imported) -> dict[str, Any]:
    return {
        "run": str(place),
        "name": imported.config["name"],
        **imported.config["source"],
        "evaluations": len(imported.record.evals),
        "axes": imported.record.logged_axes(),
        "taken": dict(imported.taken),
        "left_out": imported.left_out.to_json(),
        "warnings": imported.warnings,
    }
