"""Does overlapping pay? PipelineRL(8) against OffPolicy(8), generator and trainer on a core each.

    python benchmarks/pipeline.py [--batch 32x8] [--steps 160] [--seeds 3]

Two cores of one machine share memory, caches and their clock, so that two of them are not twice one. What
they are worth here is measured in the same run: two independent runs at once, a core each, against one alone.

    alone         the run inline, generator and trainer taking turns on one core; the mean of either core
    two at once   two of these at a time, independent
    pipeline      PipelineRL(8): generator on one core, trainer on the other
    off-policy    OffPolicy(8), placed alike: a role waits while the other works
    off-policy 2  OffPolicy(8) with both cores for whoever works: two generators, two threads of the trainer

What overlapping can win is bounded by the longer of the two roles: half of the time where they are equal, as
they nearly are with 32 prompts x 8; with 16 x 16 fewer prompts are read and more groups have a signal, so
that the trainer is the longer one.

All train the same recipe (printed), as `scalerl train` does, on the demonstration's task and base model.
Completions per second are those of the steps after the first `WARMUP`; the sides take turns, seed by seed,
and the trainer is on the first core with even seeds, on the second with odd ones.
`generating` and `training` are shares of the time in which the roles worked; the trainer is idle while
it waits for groups, and verifies and records in the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WARMUP = 40
K = 8
LR = 3e-5
"""Twelve times that of `demo`, so that 120 steps learn something and final pass rates can differ."""
ROWS = {"alone": 256, "two at once": 256, "pipeline": 256, "off-policy": 1024, "off-policy 2": 512}
"""Completions in flight of each side: the best of 128, 256, 512 and 1024."""


def settings(side: str, steps: int, seed: int, batch: str) -> list[str]:
    """Return the recipe of a side, as changes to `demo`."""
    kind = "off_policy" if side.startswith("off-policy") else "pipeline_rl"
    prompts, samples = batch.split("x")
    changes = {
        "seed": seed,
        "batch.prompts": prompts,
        "batch.samples": samples,
        "budget.kind": "steps",
        "budget.amount": steps,
        "evaluation.count": 1,
        "optimiser.lr": LR,
        "schedule.kind": kind,
        "schedule.k": K,
        "decode_slots": ROWS[side],
    }
    if side in ("alone", "two at once"):
        return [f"{key}={value}" for key, value in (changes | {"placement.kind": "inline"}).items()]
    generators = 2 if side == "off-policy 2" else 1
    changes |= {
        "placement.kind": "local",
        "placement.generators": generators,
        "decode_slots": ROWS[side] // generators,
    }
    return [f"{key}={value}" for key, value in changes.items()]


def run_side(args: argparse.Namespace) -> None:
    """Make one run in this process, pinned to its cores."""
    import torch

    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.placement import rollouts
    from scalerl.rl.train import train

    cores = sorted(os.sched_getaffinity(0))[:2]
    if args.side == "off-policy 2":
        first = second = set(cores)
        torch.set_num_threads = lambda n, set_threads=torch.set_num_threads: set_threads(2)
    else:
        first, second = ({cores[args.place]}, {cores[1 - args.place]})
    os.sched_setaffinity(0, first)
    start = rollouts.LocalGenerator._spawn

    def start_on_its_core(self: Any, worker: Any) -> None:
        os.sched_setaffinity(0, second)  # inherited by the worker
        try:
            start(self, worker)
        finally:
            os.sched_setaffinity(0, first)

    rollouts.LocalGenerator._spawn = start_on_its_core
    recipe = load_recipe("demo", settings(args.side, args.steps, args.seed, args.batch))
    train(recipe, args.folder, args.model, evaluate_aside=False)


def run(side: str, seed: int, args: argparse.Namespace, model: str) -> dict[str, float]:
    """Return the figures of a side."""
    if side == "two at once":
        both = run_places(side, seed, args, model, (0, 1))
        return mean_of(both) | {"rate": sum(figures["rate"] for figures in both)}
    places = (0, 1) if side == "alone" else (seed % 2,)
    return mean_of([f for place in places for f in run_places(side, seed, args, model, (place,))])


def mean_of(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.mean([f[key] for f in figures])) for key in figures[0]}


def run_places(
    side: str, seed: int, args: argparse.Namespace, model: str, places: Sequence[int]
) -> list[dict[str, float]]:
    """Make runs at the same time, each with its trainer on the core at its place; return their figures."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(place) for place in places]
        processes = []
        for place, folder in zip(places, folders, strict=True):
            options = {
                "side": side,
                "place": place,
                "seed": seed,
                "folder": folder,
                "model": model,
                "steps": args.steps,
                "batch": args.batch,
            }
            command = [f"--{key}={value}" for key, value in options.items()]
            processes.append(
                subprocess.Popen([sys.executable, __file__, *command], stderr=subprocess.DEVNULL)
            )
        if any(process.wait() for process in processes):
            raise SystemExit(f"{side} failed")
        return [figures_of(folder) for folder in folders]


def figures_of(folder: Path) -> dict[str, float]:
    """Return completions/s after the warm-up, shares of time, largest age, and final pass rate."""
    from scalerl.record.reader import RunRecord

    record = RunRecord.read(folder)
    steps = record.steps()
    first, last = steps[WARMUP - 1], steps[len(steps) // K * K - 1]  # whole phases
    wall = last["time"] - first["time"]

    def share(what: str, role: str) -> float:
        return (last[what][role] - first[what][role]) / wall

    completions = sum(row["completions"] for row in steps if first["step"] < row["step"] <= last["step"])
    return {
        "rate": completions / wall,
        "generating": share("device_seconds", "generate"),
        "training": share("device_seconds", "train"),
        "idle": share("idle_seconds", "train"),
        "age": max(row["staleness_max"] for row in steps),
        "pass rate": record.evals[-1].pass_rate,
    }


def print_table(found: dict[str, list[dict[str, float]]]) -> None:
    heads = ("completions/s", "generating", "training", "trainer idle", "age", "pass rate at the end")
    print(f"\n{'':<13}" + "".join(f"{head:>15}" for head in heads[:-1]) + f"  {heads[-1]}")
    for side, rows in found.items():
        middle = {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
        shares = "".join(f"{middle[key]:>15.0%}" for key in ("generating", "training", "idle"))
        ends = " ".join(f"{row['pass rate']:.3f}" for row in rows)
        print(f"{side:<13}{middle['rate']:>15,.0f}{shares}{middle['age']:>15.0f}  {ends}")

    def ratios(side: str, to: str) -> list[float]:
        return [a["rate"] / b["rate"] for a, b in zip(found[side], found[to], strict=True)]

    two = ratios("two at once", "alone")
    print(f"\ntwo cores are worth {show(two)} of one here")
    for to in ("off-policy", "off-policy 2"):
        gain = ratios("pipeline", to)
        reached = [a / b for a, b in zip(gain, two, strict=True)]
        print(f"pipeline is {show(gain)} of {to}: {show(reached)} of what two cores are worth")
    ends = {side: [row["pass rate"] for row in found[side]] for side in ("pipeline", "off-policy")}
    apart = np.mean(ends["pipeline"]) - np.mean(ends["off-policy"])
    n = len(ends["pipeline"])
    noise = math.sqrt(sum(float(np.var(e, ddof=1)) / n for e in ends.values())) if n > 1 else math.nan
    print(f"pass rate at the end: {apart:+.3f} +- {noise:.3f} (standard error over {n} seeds)")


def show(ratios: Sequence[float]) -> str:
    return f"{np.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", default="32x8", help="prompts x samples")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side", choices=list(ROWS), help=argparse.SUPPRESS)
    for name, kind in {"place": int, "seed": int, "folder": str, "model": str}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args)
        return
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.model.named import find_model

    recipe = load_recipe("demo", settings("pipeline", args.steps, 0, args.batch))
    model, _ = find_model(recipe)
    print(json.dumps({key: value for key, value in recipe.to_dict().items() if key != "health"}))
    found: dict[str, list[dict[str, float]]] = {side: [] for side in ROWS}
    for seed in range(args.seeds):
        for side in ROWS:
            found[side].append(run(side, seed, args, str(model)))
            figures = ", ".join(f"{key} {value:.3g}" for key, value in found[side][-1].items())
            print(f"{side}, seed {seed}: {figures}", flush=True)
    print_table(found)


if __name__ == "__main__":
    main()
