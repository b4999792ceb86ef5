"""`scalerl ingest`: the log of any trainer as a run folder."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalerl.commands._data import add_source_arguments, asked_of, read_runs
from scalerl.commands._text import print_rows, print_warnings

if TYPE_CHECKING:
    from scalerl.ingest.imported import Imported


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl ingest`."""
    ingest = commands.add_parser("ingest", help="make run folders of the log of another trainer")
    ingest.add_argument("source", metavar="SOURCE", help="a file or folder that a trainer or tracker wrote")
    ingest.add_argument(
        "-o", "--output", metavar="RUN", type=Path, required=True, help="the run folder to make"
    )
    ingest.add_argument("--y", metavar="METRIC", help="the metric that is the pass rate")
    add_source_arguments(ingest)
    ingest.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    ingest.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Read the source, write a folder for every run in it, and say what was taken for what."""
    from scalerl.jsonl import dumps
    from scalerl.run_writer import RunWriter

    runs = read_runs(args.source, asked_of(args))
    places = _places(args.output, runs)
    for place, imported in zip(places, runs, strict=True):
        writer = RunWriter(place, imported.config)
        writer.whole(imported.record.evals, imported.steps)
        writer.close()
    if args.json:
        print(dumps({"runs": [_json(place, one) for place, one in zip(places, runs, strict=True)]}, indent=2))
        return
    for place, imported in zip(places, runs, strict=True):
        print_warnings(imported.warnings)
        source = imported.config["source"]
        print_rows(
            [
                ("run", f"{imported.config['name']} ({source['trainer']}, {source['format']})"),
                *imported.taken,
                ("axes", ", ".join(imported.record.logged_axes())),
                ("written", str(place)),
            ]
        )
        print()


def _places(output: Path, runs: Sequence[Imported]) -> list[Path]:
    """The folder of every run: the one asked for, or one in it for each of several."""
    if len(runs) == 1:
        return [output]
    places: dict[Path, None] = {}
    for one in runs:
        name = re.sub(r"[^\w.=+-]+", "_", str(one.config["name"])).strip("._")[:100] or "run"
        place, n = output / name, 1
        while place in places:
            n += 1
            place = output / f"{name}-{n}"
        places[place] = None
    return list(places)


def _json(place: Path, imported: Imported) -> dict[str, Any]:
    return {
        "run": str(place),
        "name": imported.config["name"],
        **imported.config["source"],
        "evaluations": len(imported.record.evals),
        "axes": imported.record.logged_axes(),
        "taken": dict(imported.taken),
        "warnings": imported.warnings,
    }
