"""`scalerl train`: a recipe into a run folder."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from scalerl.errors import InterruptedRunError

if TYPE_CHECKING:
    from scalerl.rl.recipe import Recipe


def add(commands: argparse._SubParsersAction) -> None:
    """The arguments of `scalerl train`."""
    train = commands.add_parser("train", help="train a recipe into a run folder")
    train.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a TOML file, the name of a recipe of the package, or a run folder (its recipe again)",
    )
    train.add_argument("-o", "--output", metavar="RUN", type=Path, help="run folder (runs/NAME-seedN)")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key: loss.max_ratio=4"
    )
    train.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train the recipe."""
    from scalerl.rl.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.set)
    run_training(recipe, args.output or Path("runs") / f"{recipe.name}-seed{recipe.seed}")


def run_training(recipe: Recipe, folder: Path) -> None:
    """Train, write the report, and print the closing table."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import; one bar is enough
    from scalerl.console import TrainingProgress
    from scalerl.curve.freeze import freeze
    from scalerl.report import print_closing, write_report
    from scalerl.rl.base import find_model
    from scalerl.rl.train import train
    from scalerl.run_writer import check_unused

    check_unused(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's kill ends as Ctrl-C does
    with TrainingProgress("base model") as bar:
        model, about = find_model(recipe, bar.base_model)
    try:
        with TrainingProgress(recipe.name) as bar:
            record = train(recipe, folder, model, forecaster=freeze, watch=bar.update, extra=about)
    except KeyboardInterrupt:
        if not (folder / "evals.jsonl").exists():
            raise
        kept = f"{folder} keeps what was run: scalerl fit {folder} --x flops"
        raise InterruptedRunError(f"interrupted; {kept}") from None
    print_closing(record, report=write_report(record))
