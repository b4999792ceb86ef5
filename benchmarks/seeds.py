"""Does the demonstration's forecast hold? Its recipe over many seeds, each forecast at half of its compute.

    python benchmarks/seeds.py --seeds 20 --jobs 2 --runs runs/seeds

Prints one line per seed and the coverage of the 95 % interval: frozen at half of the compute, held against
the evaluation at the end. The base model is the same for all; the seed draws prompts and completions. Runs
that are complete are not run again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.curve.freeze import freeze
from scalerl.record import RunRecord
from scalerl.report import FrozenForecast, frozen_forecasts, judge


def run_seed(seed: int, folder: Path, model: str, about: dict[str, Any]) -> None:
    from scalerl.rl.recipe import load_recipe
    from scalerl.rl.train import train

    recipe = load_recipe("demo", [f"seed={seed}"])
    shutil.rmtree(folder, ignore_errors=True)  # what a run that was cut short left
    train(recipe, folder, model, forecaster=freeze, evaluate_aside=False, extra=about)


def complete(folder: Path) -> bool:
    return (folder / "checkpoints" / "final").is_dir()


def at_share(run: RunRecord, share: float) -> FrozenForecast | None:
    close = [f for f in frozen_forecasts(run) if abs(f.share - share) < 0.05]
    return close[0] if close else None


def report(folders: dict[int, Path], ceiling: float) -> None:
    print("| seed | share | forecast | 95 % interval | measured | inside | width |")
    print("|---|---|---|---|---|---|---|")
    outcomes: dict[float, list[tuple[bool, float, float, bool]]] = {0.25: [], 0.5: [], 0.75: []}
    for seed, folder in sorted(folders.items()):
        run = RunRecord.read(folder)
        for share, found in outcomes.items():
            forecast = at_share(run, share)
            if forecast is None:
                continue
            outcome = judge(run, forecast)
            if outcome.measured is None:
                continue
            low, high = forecast.prediction
            error = forecast.mean - outcome.measured.pass_rate
            low_A, high_A = forecast.fit["intervals"]["A"]
            found.append((bool(outcome.inside), forecast.width, error, low_A <= ceiling <= high_A))
            if share == 0.5:
                print(
                    f"| {seed} | {share} | {forecast.mean:.3f} | [{low:.3f}, {high:.3f}] | "
                    f"{outcome.measured.pass_rate:.3f} | {outcome.word} | {forecast.width:.3f} |"
                )
    print(
        f"\n| share | forecasts | inside | median width | rms error | mean error | A's holds {ceiling:.2f} |"
    )
    print("|---|---|---|---|---|---|---|")
    for share, found in outcomes.items():
        if not found:
            continue
        inside, width, error, holds = (np.array(column, dtype=float) for column in zip(*found, strict=True))
        print(
            f"| {share} | {len(found)} | {int(inside.sum())} | {np.median(width):.3f} | "
            f"{np.sqrt(np.mean(error**2)):.4f} | {error.mean():+.4f} | {int(holds.sum())} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one core each")
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from scalerl.rl.base import find_model
    from scalerl.rl.recipe import load_recipe

    recipe = load_recipe("demo")
    model, about = find_model(recipe)
    folders = {seed: args.runs / f"seed{seed}" for seed in range(args.seeds)}
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        left = {seed: folder for seed, folder in folders.items() if not complete(folder)}
        jobs = {pool.submit(run_seed, seed, folder, model, about): seed for seed, folder in left.items()}
        for job in as_completed(jobs):
            job.result()
            print(f"seed {jobs[job]} done", file=sys.stderr, flush=True)
    report(folders, recipe.task.ceiling(recipe.context.thinking))


if __name__ == "__main__":
    main()
