"""Is the demonstration's ceiling where it is said to be? The base model, trained on perfect examples instead.

    python benchmarks/ceiling.py --steps 3000

The same architecture learns from careful examples alone, under the same thinking budget, with the right
answer even where the budget was too short to work it out, and for several times as long. If it then fails on
just the chains that do not fit, the budget sets the ceiling. Prints the pass rate of each chain length.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from dataclasses import replace

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000, help="of training on perfect demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from scalerl.files import cache_folder
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.model.causal_lm import load_model
    from scalerl.rl.model.demo_base import BaseModel, build_base
    from scalerl.rl.model.weights import weights_of
    from scalerl.rl.placement.evaluate import Evaluator
    from scalerl.rl.tasks.chain import Chain, Demonstrations

    recipe = load_recipe("demo")
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, samples=16))
    task, thinking = recipe.task, recipe.context.thinking
    assert isinstance(task, Chain)
    perfect = Demonstrations(task, thinking, give_up=0.0, slip=0.0, ramble=0.0)
    spec = BaseModel(
        perfect,
        careful_loss=0.0,
        max_careful_steps=args.steps,
        imperfect_steps=args.steps // 5,
        seed=args.seed,
    )
    folder = build_base(spec, cache_folder())
    result = Evaluator(recipe, str(folder)).evaluate(weights_of(load_model(folder)), 0)

    rates: dict[int, list[float]] = defaultdict(list)
    for prompt, correct in zip(task.prompts("heldout"), result.correct_P, strict=True):
        rates[int(prompt.id.split("/")[1])].append(correct / recipe.evaluation.samples)
    print("| operations | thinking tokens needed | pass rate | known beforehand |\n|---|---|---|---|")
    for k, rate in sorted(rates.items()):
        print(f"| {k} | {2 * k} | {np.mean(rate):.3f} | {1.0 if 2 * k <= thinking else 0.1:.1f} |")
    every = np.mean([r for rate in rates.values() for r in rate])
    print(f"| all | | {every:.3f} | {task.ceiling(thinking):.2f} |")


if __name__ == "__main__":
    main()
