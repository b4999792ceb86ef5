"""Does the demonstration's forecast hold? Its recipe over many seeds, each forecast at half of its compute.

    python benchmarks/seeds.py --seeds 20 --jobs 2 --runs runs/seeds
    python benchmarks/seeds.py --refit runs/seeds/seed*

Prints one line per seed, how often the 95 % intervals held, and how far off the last value was: frozen at a
quarter, half and three quarters of the compute, and set against the evaluation at the end. The base model is
the same for all; the seed draws prompts and completions. Runs that are complete are not run again. `--refit`
trains nothing: it forecasts existing runs anew, from the evaluations that each share of their compute had,
with the present fit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from scalerl.errors import CannotAnswerError
from scalerl.forecast.freeze import freeze
from scalerl.record.reader import RunRecord
from scalerl.view import FrozenForecast, frozen_forecasts, judge

SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Result:
    """One forecast and the pass rate measured at its target."""

    run: str
    share: float
    forecast: FrozenForecast
    measured: float
    last: float
    """The newest evaluation that the forecast had."""


def run_seed(seed: int, folder: Path) -> None:
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.train import train

    recipe = load_recipe("demo", [f"seed={seed}"])
    shutil.rmtree(folder, ignore_errors=True)  # remains of an interrupted run
    train(recipe, folder, forecaster=freeze, evaluate_aside=False)


def complete(folder: Path) -> bool:
    return (folder / "checkpoints" / "final").is_dir()


def results(run: RunRecord, forecasts: Sequence[FrozenForecast]) -> Iterator[Result]:
    """Yield the forecast made at every share whose target was measured."""
    for share in SHARES:
        for forecast in [f for f in forecasts if abs(f.share - share) < 0.05][:1]:
            outcome = judge(run, forecast)
            if outcome.measured is not None:
                seen_N = run.compute(forecast.axis) <= forecast.compute
                last = run.evals[int(np.flatnonzero(seen_N)[-1])].pass_rate
                yield Result(run.path.name, share, forecast, outcome.measured.pass_rate, last)


def refit(run: RunRecord) -> Iterator[FrozenForecast]:
    """Yield forecasts as training would freeze them now, at the first evaluation at each share of budget."""
    axis, compute_N = run.default_axis, run.compute(run.default_axis)
    budget = run.config.get("budget") or {}
    target = float(budget["amount"]) if budget.get("kind") == axis else float(compute_N[-1])
    for share in SHARES:
        n = int(np.argmax(compute_N >= share * target)) + 1
        try:
            row = freeze(replace(run, evals=run.evals[:n], lines=run.lines[:n]), axis, target)
        except CannotAnswerError as error:
            print(f"{run.path.name} at {share}: {error}", file=sys.stderr)
            continue
        yield FrozenForecast.from_row(row)


def report(found: Sequence[Result], ceiling: float) -> None:
    """Print every forecast made at half, then a summary of each share."""
    print("| run | share | last value | forecast | 95 % interval | measured | inside | width |")
    print("|---|---|---|---|---|---|---|---|")
    for result in found:
        if result.share == 0.5:
            (low, high), width = result.forecast.prediction, result.forecast.width
            inside = "inside" if result.forecast.covers(result.measured) else "outside"
            print(
                f"| {result.run} | {result.share} | {result.last:.3f} | {result.forecast.median:.3f} | "
                f"[{low:.3f}, {high:.3f}] | {result.measured:.3f} | {inside} | {width:.3f} |"
            )
    print(
        "\n| share | C_mid reached | forecasts | inside | median width | rms error of the last value |"
        " rms error | mean error | rerun holds | rerun width |"
        f" A stated | A's holds {ceiling:.2f} | identified |"
    )
    print(f"|{'---|' * 13}")
    for share in SHARES:
        chosen = [result for result in found if result.share == share]
        if chosen:
            print(f"| {share} | {summary(chosen, ceiling)} |")


def summary(found: Sequence[Result], ceiling: float) -> str:
    """Return the cells of one share."""
    inside = [result.forecast.covers(result.measured) for result in found]
    error = np.array([result.forecast.median - result.measured for result in found])
    width = np.median([result.forecast.width for result in found])
    fits = [result.forecast.fit for result in found]
    stated = [fit["intervals"]["A"] for fit in fits if fit["intervals"]["A"]]
    holds = sum(low <= ceiling <= high for low, high in stated)
    identified = sum(bool(fit["identified"]) for fit in fits)
    last = np.array([result.last - result.measured for result in found])
    rms, rms_last = np.sqrt(np.mean(error**2)), np.sqrt(np.mean(last**2))
    reached = np.median([fit["c_max_over_c_mid"] for fit in fits])
    return (
        f"{reached:.2f} | {len(found)} | {sum(inside)} | {width:.3f} | {rms_last:.4f} | {rms:.4f} | "
        f"{error.mean():+.4f} | "
        f"{reruns(fits, [result.measured for result in found])} | {len(stated)} | {holds} | {identified}"
    )


def reruns(fits: Sequence[Mapping[str, Any]], measured: Sequence[float]) -> str:
    """Return how often rerun intervals hold the other runs' ends, and their median width; dashes if none."""
    spans = [fit["forecast"][0].get("rerun") for fit in fits]
    if None in spans or len(spans) < 2:
        return "- | -"
    low_N, high_N = np.array(spans).T
    held_NM = (low_N[:, None] <= measured) & (measured <= high_N[:, None])
    others = held_NM[~np.eye(len(measured), dtype=bool)]
    return f"{others.mean():.2f} | {np.median(high_N - low_N):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one core each")
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--refit", type=Path, nargs="+", metavar="RUN", help="forecast these runs anew")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.tasks.chain import Chain

    recipe = load_recipe("demo")
    folders = args.refit or train_all([args.runs / f"seed{seed}" for seed in range(args.seeds)], args.jobs)
    records = [RunRecord.read(folder) for folder in sorted(folders, key=number)]
    forecasts = [list(refit(run)) if args.refit else frozen_forecasts(run) for run in records]
    found = [result for pair in zip(records, forecasts, strict=True) for result in results(*pair)]
    assert isinstance(recipe.task, Chain)
    report(found, recipe.task.ceiling(recipe.context.thinking))


def train_all(folders: list[Path], jobs: int) -> list[Path]:
    """Train the runs that are not complete; the seed of a run is its index in the list."""
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.model.named import find_model

    find_model(load_recipe("demo"))  # build the base model once; runs find it in the cache
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        left = {seed: folder for seed, folder in enumerate(folders) if not complete(folder)}
        started = {pool.submit(run_seed, seed, folder): seed for seed, folder in left.items()}
        for job in as_completed(started):
            job.result()
            print(f"seed {started[job]} done", file=sys.stderr, flush=True)
    return folders


def number(folder: Path) -> tuple[int, str]:
    """Return a sort key that puts seed9 before seed10."""
    return int("".join(filter(str.isdigit, folder.name)) or 0), folder.name


if __name__ == "__main__":
    main()
