"""`scalerl train`: a recipe into a run folder."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.commands._parser import examples
from scalerl.commands._text import positive
from scalerl.errors import InterruptedRunError

if TYPE_CHECKING:
    from scalerl.rl.recipe import Recipe


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl train`."""
    train = commands.add_parser(
        "train",
        help="train a recipe into a run folder",
        description="Train a recipe into a run folder, forecast it on the way, and write its report.",
        epilog=examples("""
  scalerl train demo -o runs/mine                               # a recipe of the package
  scalerl train scalerl --set task.path=problems.jsonl --set model=MODEL
  scalerl train runs/mine --set seed=1                          # the recipe of a run, with another seed
  scalerl train runs/mine --resume                              # go on with a run that was cut
"""),
    )
    train.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a TOML file, the name of a recipe of the package, or a run folder (its recipe again)",
    )
    train.add_argument("-o", "--output", metavar="RUN", type=Path, help="run folder (runs/NAME-seedN)")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key: loss.max_ratio=4"
    )
    train.add_argument(
        "--until",
        type=positive,
        default=math.inf,
        metavar="C",
        help="stop with a checkpoint at this part of the budget, in its unit; --resume goes on",
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint of the run folder; start where there is none",
    )
    train.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train the recipe, or go on with a run."""
    from scalerl.rl.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.set)
    folder: Path | None = args.output
    if folder is None and args.resume and Path(args.recipe).is_dir():
        folder = Path(args.recipe)
    run_training(recipe, folder or Path("runs") / f"{recipe.name}-seed{recipe.seed}", args.resume, args.until)


def run_training(recipe: Recipe, folder: Path, resume: bool = False, until: float = math.inf) -> None:
    """Train, write the report, and print the closing table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import; one bar is enough
    from scalerl.console import TrainingProgress
    from scalerl.curve.freeze import freeze
    from scalerl.report import print_closing, write_report
    from scalerl.rl.base import find_model
    from scalerl.rl.process import stopped_by_signals
    from scalerl.rl.train import train
    from scalerl.run_writer import check_unused

    if not resume:
        check_unused(folder)
    with TrainingProgress("base model") as bar:
        model, about = find_model(recipe, bar.base_model)
    try:
        with TrainingProgress(recipe.name) as bar, stopped_by_signals() as stop:
            record = train(
                recipe,
                folder,
                model,
                resume=resume,
                forecaster=freeze,
                watch=bar.update,
                extra=about,
                stop=stop,
                until=until,
            )
    except KeyboardInterrupt:
        if not (folder / "config.json").exists():
            raise
        fits = f", scalerl fit {folder} fits what was run" if (folder / "evals.jsonl").exists() else ""
        raise InterruptedRunError(f"interrupted; scalerl train {folder} --resume goes on{fits}") from None
    print_closing(record, report=write_report(record))
