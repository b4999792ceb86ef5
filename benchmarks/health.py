"""What the probe of generator against trainer costs, and which faults show in it.

    python benchmarks/health.py

Each row is a run of the demonstration's recipe, in batches of 8 x 16, with one fault: the gap of one version
of the weights, and what is told; beside it the largest shift of a step, which is what the trained tokens
show, age included. The last row is the recipe as it is, and what the probe took of its generating and
training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from scalerl.rl.config.health import Health
from scalerl.rl.config.recipe import Recipe, load_recipe
from scalerl.rl.engine.build import load_generator
from scalerl.rl.health.figures import FIGURES
from scalerl.rl.learner.load import load_learner
from scalerl.rl.learner.probe import Probe
from scalerl.rl.loop.pipeline import Pipeline
from scalerl.rl.loop.prompt_pool import PromptPool
from scalerl.rl.model.causal_lm import load_tokenizer
from scalerl.rl.model.named import find_model
from scalerl.rl.model.weights import WeightStream
from scalerl.rl.sync.shared_weights import hold
from scalerl.rl.types import Weights
from scalerl.rl.verify.verifier import load_verifier

Change = Callable[[Weights, int], Weights]


def run(
    name: str, recipe: Recipe, n_steps: int, generator: Recipe | None = None, change: Change | None = None
) -> None:
    """Print the row of one fault: the generator's own recipe, or a change to its weights."""
    learner = load_learner(recipe, recipe.model)
    sampler = load_generator(generator or recipe, recipe.model, recipe.seed, recipe.decode_slots)
    update = sampler.update
    if change is not None:
        sampler.update = lambda weights, version: update(change(weights, version), version)
    pool = PromptPool(recipe.task.prompts("train"), recipe.curriculum, recipe.seed)
    verifier = load_verifier(recipe, load_tokenizer(recipe.model))
    probe, rows, shifts, probing, training = Probe(learner, recipe), [], [], 0.0, 0.0
    for step in islice(Pipeline(recipe, pool, sampler, learner, verifier.start).steps(), n_steps):
        started = time.perf_counter()
        rows.append(probe([rollout for group in step.groups for rollout in group.rollouts]))
        probing += time.perf_counter() - started
        training += step.train_seconds
        shifts.append(step.stats.logp_shift)
    print(f"{name:<34} {_figures(rows, recipe.precision)}  {np.nanmax(shifts):.4f}", flush=True)
    if recipe.health.probe == Health().probe:
        spent = sampler.counters.seconds + training
        scored = sum(bool(row) for row in rows)
        print(
            f"    the probe took {probing / spent:.2%} of {spent:.1f} s; it found tokens in {scored} steps",
            flush=True,
        )


def _figures(rows: Sequence[dict[str, Any]], precision: str) -> str:
    figures = {name: FIGURES[name].of(precision) for name in ("logp_gap", "head", "sampling")}
    values = {name: figure.value(rows, 100) for name, figure in figures.items()}
    levels = {name: figure.level(values[name]) for name, figure in figures.items()}
    found = [f"{level}: {name}" for name, level in levels.items() if level]
    tokens = sum(row.get("probe_tokens", 0) for row in rows)
    numbers = f"{tokens:6d}  {values['logp_gap']:.1e}  {values['head']:5.1f}  {values['sampling']:5.1f}"
    return f"{numbers}  {', '.join(found) or '-':<32}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30, metavar="N")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    demo = load_recipe("demo")
    demo = replace(demo, model=find_model(demo)[0])
    small = replace(demo.batch, prompts=8)
    recipe = replace(demo, batch=small, decode_slots=256, health=replace(demo.health, probe=8))
    low, late = replace(recipe, precision="bfloat16"), []

    def one_behind(weights: Weights, version: int) -> Weights:
        late.append(hold(weights))
        return late[-2] if len(late) > 1 else weights

    def corrupted(weights: Weights, version: int) -> Weights:
        return WeightStream.of({name: 1.02 * w if "layers.1.mlp" in name else w for name, w in weights})

    print(f"{'fault':<34} tokens      gap   head   rank  told                              age included")
    run("none", recipe, steps)
    for temperature in (0.9, 0.98, 1.02):
        run(f"temperature {temperature:g}", recipe, steps, replace(recipe, temperature=temperature))
    run("weights one version behind", recipe, steps, change=one_behind)
    run("three matrices 2 % off", recipe, steps, change=corrupted)
    run("none, bfloat16", low, steps)
    run("bfloat16, generator's head not fp32", low, steps, replace(low, fp32_logits="trainer"))
    neither = replace(low, fp32_logits="neither")
    run("bfloat16, trainer's head not fp32", neither, steps, low)
    run("none, the demonstration as it is", demo, steps)


if __name__ == "__main__":
    main()
