"""Does `scalerl plan` foresee what a run does? Runs of the demonstration against their simulation.

    python benchmarks/plan.py [--within 10] [--steps 240] [--repeats 1] [--cases 0,1,7] [--own]

Generators in processes of their own (placement `local`), one to four of them; several schedules and
batches. Runs that were kept (`--keep`) are not made again.
The first run, on-policy with one generator, gives the rates; every run, that one included, is then compared
with its simulation. With `--own` each run gives its own rates: what is then apart is the simulation's doing,
and not that the machine was slower or faster meanwhile. The learning rate is next to nothing, so that lengths
and pass rates stay as they are.

    steps/h      of trainer steps
    gen idle     share of the generators' time in which they neither decode nor install weights
    train waits  share of the trainer's time in which it waits for groups
    age          mean age of the trained tokens, in versions
    others       cores that processes of others kept busy meanwhile

All but the last stand as measured -> simulated. The figures are of the steps after the first quarter. The
planner gives every role a device of its own: on a machine with fewer free cores than processes its forecasts
are of a machine that has them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CASES = [  # generators, schedule, k, prompts x samples, rows
    (1, "pipeline_rl", 0, "64x16", 512),  # its rows run empty
    (1, "pipeline_rl", 4, "64x16", 512),
    (1, "pipeline_rl", 8, "64x16", 512),
    (1, "pipeline_rl", 4, "32x8", 128),
    (1, "pipeline_rl", 1, "32x16", 1024),
    (1, "off_policy", 4, "64x16", 512),
    (2, "pipeline_rl", 0, "64x16", 512),
    (2, "pipeline_rl", 4, "64x16", 512),
    (2, "pipeline_rl", 8, "64x16", 512),
    (2, "pipeline_rl", 4, "32x8", 128),
    (2, "off_policy", 4, "64x16", 512),
    (3, "pipeline_rl", 4, "64x16", 512),
    (4, "pipeline_rl", 4, "64x16", 512),
    (3, "pipeline_rl", 8, "32x16", 256),
    (2, "pipeline_rl", 2, "48x16", 384),
    (3, "off_policy", 4, "64x16", 512),
]
NAMES = ("steps/h", "gen idle", "train waits", "age")


def settings(case: tuple[int, str, int, str, int], steps: int, seed: int) -> list[str]:
    """Return the recipe of a case, as changes to `demo`."""
    generators, schedule, k, batch, rows = case
    prompts, samples = batch.split("x")
    changes = {
        "seed": seed,
        "batch.prompts": prompts,
        "batch.samples": samples,
        "budget.kind": "steps",
        "budget.amount": steps,
        "evaluation.count": 1,
        "evaluation.samples": 1,
        "schedule.kind": schedule,
        "schedule.k": k,
        "decode_slots": rows,
        "placement.kind": "local",
        "placement.generators": generators,
        "optimiser.lr": 1e-9,
        "checkpoint.steps": 0,
        "checkpoint.minutes": 0,
        "health.probe": 0,
    }
    return [f"{key}={value}" for key, value in changes.items()]


def run_one(case_number: int, steps: int, seed: int, model: str, folder: str) -> None:
    """Make one run in this process."""
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.train import train

    recipe = load_recipe("demo", settings(CASES[case_number], steps, seed))
    train(recipe, folder, model, evaluate_aside=False)


# -- runs against simulations ------------------------------------------------------------------------------


def measured(folder: Path) -> dict[str, float]:
    """Return the measured figures of a run."""
    from scalerl.record.reader import RunRecord

    rows = RunRecord.read(folder).steps()
    rows = rows[int(len(rows) * 0.25) :]
    first, last, counted = rows[0], rows[-1], rows[1:]
    seconds = last["wall_seconds"] - first["wall_seconds"]
    busy = last["device_seconds"]["generate"] - first["device_seconds"]["generate"]
    idle = last["idle_seconds"]["generate"] - first["idle_seconds"]["generate"]
    waited = last["idle_seconds"]["train"] - first["idle_seconds"]["train"]
    trained = [b["tokens"]["trained"] - a["tokens"]["trained"] for a, b in zip(rows, counted, strict=False)]
    ages = [row.get("staleness_mean", 0.0) for row in counted]
    return {
        "steps/h": 3600 * len(counted) / seconds,
        "gen idle": idle / (busy + idle),
        "train waits": waited / seconds,
        "age": float(np.average(ages, weights=trained)),
    }


def simulated(case: tuple[int, str, int, str, int], rates: Any, steps: int) -> dict[str, float]:
    """Return the same figures of the simulation."""
    from scalerl.plan.job import PlannedJob
    from scalerl.plan.simulate import simulate
    from scalerl.rl.config.recipe import load_recipe

    found = simulate(PlannedJob.of(load_recipe("demo", settings(case, steps, 0))), rates, case[0], 1)
    return {
        "steps/h": found.steps_per_hour,
        "gen idle": found.generators_idle,
        "train waits": found.wait_for_groups,
        "age": found.staleness_mean,
    }


def one_run(number: int, seed: int, steps: int, model: str, folder: Path) -> float:
    """Make a run unless it was kept; return how many cores the machine's other processes kept busy."""
    kept = folder.with_suffix(".others.json")
    if kept.exists():
        return json.loads(kept.read_text())
    options = {"case": number, "steps": steps, "seed": seed, "model": model, "folder": folder}
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in options.items())]
    began, busy, own = time.time(), busy_seconds(), os.times()
    process = subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    if process.returncode:
        sys.exit(f"the run of case {number} ended with status {process.returncode}")
    spent = sum(os.times()[2:4]) - sum(own[2:4])  # of the run and its processes
    others = max(busy_seconds() - busy - spent, 0.0) / (time.time() - began)
    kept.write_text(json.dumps(others))
    return others


def busy_seconds() -> float:
    """Return the CPU seconds of all processes since this machine started; see proc(5), `stat`."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def compare(args: argparse.Namespace) -> float:
    """Print runs beside simulations; return the largest difference in steps/h, as a share."""
    from scalerl.plan.measured import rates_of
    from scalerl.record.reader import RunRecord
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.model.named import find_model

    model, _ = find_model(load_recipe("demo"))
    print("| generators, schedule, batch, rows | " + " | ".join((*NAMES, "others")) + " |\n|" + "---|" * 6)
    apart: dict[str, list[float]] = {name: [] for name in NAMES}
    rates = None
    for number in sorted({0, *map(int, args.cases.split(","))} if args.cases else range(len(CASES))):
        case, found, others = CASES[number], [], []
        for seed in range(args.repeats):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(args.keep or name) / f"run-{number}-{seed}"
                folder.parent.mkdir(parents=True, exist_ok=True)
                others.append(one_run(number, seed, args.steps, model, folder))
                found.append(measured(folder))
                if rates is None or args.own:
                    rates = rates_of(RunRecord.read(folder))
        real = {key: float(np.median([one[key] for one in found])) for key in NAMES}
        ours = simulated(case, rates, args.steps)
        cells = [show(name, real[name], ours[name]) for name in NAMES]
        generators, schedule, k, batch, rows = case
        row = f"| {generators}, {schedule} {k}, {batch}, {rows} | " + " | ".join(cells)
        print(f"{row} | {np.median(others):.2f} |", flush=True)
        for name in NAMES:
            apart[name].append(ours[name] / real[name] - 1 if name == "steps/h" else ours[name] - real[name])
    print("\nrates: " + json.dumps(rates.to_json() if rates else {}) + "\n")
    tell(apart)
    return float(np.abs(apart["steps/h"]).max())


def tell(apart: dict[str, list[float]]) -> None:
    """Print how far runs and simulations are apart."""
    for name, differences in apart.items():
        unit = 100 if name != "age" else 1
        word = "%" if name == "steps/h" else " points" if name != "age" else " versions"
        size = np.abs(differences) * unit
        print(
            f"{name}: apart by {np.median(size):.2g}{word} in the middle, {size.max():.2g}{word} at the most"
        )


def show(name: str, real: float, ours: float) -> str:
    """Return the text `measured -> simulated` of a figure."""
    if name == "steps/h":
        return f"{real:,.0f} -> {ours:,.0f} ({(ours / real - 1) * 100:+.0f} %)"
    return f"{real:.2f} -> {ours:.2f}" if name == "age" else f"{real:.0%} -> {max(ours, 0.0):.0%}"


def main() -> None:
    """Run the cases and print the table; exit with status 1 if steps/h differ more than allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--within", type=float, metavar="P", help="percent that steps/h may be apart")
    parser.add_argument("--cases", help="their numbers, from 0 on (all)")
    parser.add_argument("--own", action="store_true", help="each run by its own rates")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=1, help="of each case; the median counts")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs there")
    for name in ("case", "seed"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        run_one(args.case, args.steps, args.seed, args.model, args.folder)
    elif (worst := compare(args) * 100) > (args.within or worst):
        sys.exit(f"steps/h are apart by {worst:.0f} % at the most; {args.within:g} % were allowed")


if __name__ == "__main__":
    main()
