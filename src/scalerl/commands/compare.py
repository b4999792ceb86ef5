"""`scalerl compare`: which recipe has the higher ceiling, which gets to its own sooner, and what is seed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.commands._text import number, print_rows
from scalerl.errors import InputError

if TYPE_CHECKING:
    from scalerl.curve import Fit
    from scalerl.curve.paired import PairedPrompts
    from scalerl.record import RunRecord


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl compare`."""
    compare = commands.add_parser("compare", help="compare recipes by their runs, seeds counted")
    compare.add_argument(
        "runs",
        metavar="RUN|FILE",
        type=Path,
        nargs="*",
        help="run folders (runs of one recipe are its seeds), or CSV or JSONL files (a recipe each)",
    )
    compare.add_argument(
        "--group",
        type=_group,
        action="append",
        default=[],
        metavar="NAME=RUN,RUN",
        help="these runs are the seeds of one recipe",
    )
    compare.add_argument("--base", metavar="NAME", help="compare with this recipe (the first)")
    compare.add_argument("--x", default="gpu_hours", metavar="AXIS", help="compute axis, or column of FILE")
    compare.add_argument("--y", default="pass_rate", metavar="COLUMN", help="column of pass rates of FILE")
    compare.add_argument("--r0", type=number, metavar="R", help="pass rate before training, of all runs")
    compare.add_argument(
        "--min-compute", type=number, default=0.0, metavar="C", help="leave out compute under C"
    )
    compare.add_argument("--budget", type=number, metavar="C", help="compare the pass rates at this compute")
    compare.add_argument("--target", type=number, metavar="R", help="compare the compute to this pass rate")
    compare.add_argument(
        "--level", type=number, default=0.95, metavar="P", help="of intervals and verdicts (0.95)"
    )
    compare.add_argument("--price", type=number, metavar="USD", help="dollars per GPU-hour, for --x dollars")
    compare.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    compare.set_defaults(run=run)


@dataclass(frozen=True)
class _Run:
    """One argument, read and fitted; a file has no record."""

    path: Path
    fit: Fit
    record: RunRecord | None


def run(args: argparse.Namespace) -> None:
    """Fit every run, compare the recipes, and print the table or the JSON."""
    from scalerl.curve import compare
    from scalerl.record import dumps

    groups = _groups(args.group)
    _check_once([*args.runs, *(path for paths in groups.values() for path in paths)])
    named = {name: [_read(path, args) for path in paths] for name, paths in groups.items()}
    recipes = _by_recipe([_read(path, args) for path in args.runs], named)
    fits = {name: [run.fit for run in runs] for name, runs in recipes.items()}
    result = compare(fits, base=args.base, budget=args.budget, target=args.target, level=args.level)
    prompts = {pair.recipe: _prompts(recipes[pair.base], recipes[pair.recipe], args) for pair in result.pairs}
    if args.json:
        sources = {name: [str(run.path) for run in runs] for name, runs in recipes.items()}
        paired = {name: found.to_json() if found else None for name, found in prompts.items()}
        print(dumps({**result.to_json(), "sources": sources, "paired_prompts": paired}, indent=2))
        return
    for run in (run for runs in recipes.values() for run in runs):
        for warning in run.fit.warnings:
            print(f"warning: {run.path}: {warning}", file=sys.stderr)
    for pair in result.pairs:
        found = prompts[pair.recipe]
        print_rows([*result.rows(pair), *([("same prompts", str(found))] if found else [])])
        print()
    print(result.priors())


def _read(path: Path, args: argparse.Namespace) -> _Run:
    from scalerl.curve import fit
    from scalerl.ingest.table import read_table
    from scalerl.record import RunRecord

    if path.is_dir() and args.y != "pass_rate":
        raise InputError(f"{path}: a run has its pass rates; --y names a column of a CSV or JSONL file")
    record = RunRecord.read(path) if path.is_dir() else None
    data = record or read_table(path, args.x, args.y, args.price)
    fitted = fit(data, x=args.x, r0=args.r0, min_compute=args.min_compute, level=args.level, price=args.price)
    return _Run(path, fitted, record)


def _prompts(base: list[_Run], recipe: list[_Run], args: argparse.Namespace) -> PairedPrompts | None:
    """The comparison on common prompts, where all runs of both recipes are folders."""
    from scalerl.curve.paired import paired_prompts

    sides = [[run.record for run in runs if run.record is not None] for runs in (base, recipe)]
    if len(sides[0]) < len(base) or len(sides[1]) < len(recipe):
        return None
    return paired_prompts(sides[0], sides[1], args.x, args.price)


def _by_recipe(runs: Sequence[_Run], named: dict[str, list[_Run]]) -> dict[str, list[_Run]]:
    """The groups that were named, then runs by the recipe in their config.json less the seed and the name."""
    groups: dict[str, list[_Run]] = {}
    for run in runs:
        groups.setdefault(_recipe_key(run), []).append(run)
    recipes = dict(named)
    for members in groups.values():
        name = _name(members[0])
        if name in recipes:  # another recipe of the same name
            name = str(members[0].path)
        if name in recipes:
            raise InputError(f"{name}: given twice; name the groups apart with --group NAME=RUN,RUN")
        recipes[name] = members
    return recipes


def _recipe_key(run: _Run) -> str:
    recipe = run.record.config.get("recipe") if run.record else None
    if not isinstance(recipe, dict):
        return str(run.path)
    return json.dumps(
        {key: value for key, value in recipe.items() if key not in ("seed", "name")}, sort_keys=True
    )


def _name(run: _Run) -> str:
    name = run.record.config.get("name") if run.record else None
    return name if isinstance(name, str) and name else run.path.stem


def _groups(pairs: Sequence[tuple[str, list[Path]]]) -> dict[str, list[Path]]:
    for name, _ in pairs:
        if [other for other, _ in pairs].count(name) > 1:
            raise InputError(f"--group {name} is given twice: list all of its runs in one")
    return dict(pairs)


def _check_once(paths: Sequence[Path]) -> None:
    """A run that is given twice would count as two seeds."""
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise InputError(f"{path}: given twice; every run is one seed of one recipe")
        seen.add(path.resolve())


def _group(text: str) -> tuple[str, list[Path]]:
    name, equals, runs = text.partition("=")
    paths = [Path(part) for part in runs.split(",") if part]
    if not (name and equals and paths):
        raise argparse.ArgumentTypeError(f"expected NAME=RUN,RUN, found {text!r}")
    return name, paths
