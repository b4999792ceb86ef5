"""`scalerl demo`: the whole job with a small model."""

import argparse
import itertools
from pathlib import Path

from scalerl.cli.shared.arguments import option, output
from scalerl.cli.train import JSON_HELP, run_training

# The curve must bend within its 17 steps, so the learning rate is higher, and the warm-up is shorter than the
# usual ten steps: while the learning rate rises, a curve in compute forecasts nothing.
QUICK = [
    "budget.amount=1.1e11",
    "optimiser.lr=3e-5",
    "evaluation.count=8",
    "evaluation.samples=2",
    "optimiser.warmup_steps=2",
]

HELP = "train a small model, forecast it half-way, and check the forecast"
ABOUT = "Train a small model, freeze a forecast half-way, and check it against the measured end."
EXAMPLES = """
  scalerl demo                                                  # 2 to 3 minutes on 2 cores
  scalerl demo --quick -o runs/first                            # a first look, in about half a minute
  scalerl demo --seed 3
"""


def add(demo: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(demo, "-o --output RUN", "run folder (default: runs/demo, then demo-2 ...)", type=output)
    option(demo, "--seed N", "seed of the run (default: 0)", type=int, default=0)
    option(demo, "--quick", "use a fourteenth of the compute")
    option(demo, "--set", "change one key of the recipe: engine.kind=transformers")
    option(demo, "--json", JSON_HELP)


def run(args: argparse.Namespace) -> None:
    """Train the recipe `demo`."""
    from scalerl.record.folder import RunFolder

    names = itertools.chain(["demo"], (f"demo-{n}" for n in itertools.count(2)))
    unused = next(place for name in names if not (place := Path("runs") / name).exists())
    place = RunFolder.claim(args.output or unused, new=True)

    from scalerl.rl.config.recipe import load_recipe

    quick = QUICK if args.quick else []
    run_training(load_recipe("demo", [f"seed={args.seed}", *quick, *args.set]), place, as_json=args.json)
