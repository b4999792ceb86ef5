"""Does `scalerl plan` foresee what a run does? Runs of the demonstration against their simulation.

    python benchmarks/plan.py [--paced 1] [--steps 48] [--repeats 1] [--cases 0,1,7]

Generators in processes of their own (placement `local`), one and two of them; several schedules and batches.
For each number of generators the first run gives the rates, and every run, that one included, is then
compared with its simulation. The learning rate is next to nothing, so that lengths and pass rates stay as
they are.

    steps/h      of trainer steps
    gen idle     share of the generators' time in which they neither decode nor install weights
    train waits  share of the trainer's time in which it waits for groups
    age          mean age of the trained tokens, in versions

Each stands as measured -> simulated. The figures are of the steps after the first quarter.

As it is, generators and trainer compete for the cores and the memory of one machine, so that rates depend on
who works at the time; and whatever else the machine does moves them. `--paced X` makes every decode step last
X times 10 ms + 0.3 ms a row at the least, and every trainer step X times 0.1 s + 0.2 ms a token: processes,
messages and completions are those of any run, the cores have time to spare, and what is compared is the loop.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PACED = "SCALERL_BENCHMARK_PACED"
CASES = [  # generators, schedule, k, prompts x samples, rows
    (1, "pipeline_rl", 0, "8x8", 32),  # its rows run empty, so that it shows what a row costs
    (1, "pipeline_rl", 4, "8x8", 32),
    (1, "pipeline_rl", 1, "8x8", 32),
    (1, "pipeline_rl", 8, "8x8", 128),
    (1, "pipeline_rl", 4, "16x8", 64),
    (1, "pipeline_rl", 2, "4x16", 64),
    (1, "off_policy", 4, "8x8", 64),
    (2, "pipeline_rl", 0, "8x8", 32),
    (2, "pipeline_rl", 4, "8x8", 32),
    (2, "pipeline_rl", 8, "16x8", 32),
    (2, "off_policy", 4, "8x8", 32),
]


def pace() -> None:
    """Let decode steps and trainer steps of this process last so long at the least."""
    from scalerl.rl.generator import TorchGenerator
    from scalerl.rl.learner import Learner

    tick, step, times = TorchGenerator.tick, Learner.step, float(os.environ[PACED])

    def slow_tick(self: Any) -> Any:
        started = time.perf_counter()
        done = tick(self)
        if done:
            time.sleep(max(times * (0.010 + 0.0003 * done[0]) - (time.perf_counter() - started), 0.0))
        return done

    def slow_step(self: Any, batch: Any) -> Any:
        started = time.perf_counter()
        stats = step(self, batch)
        time.sleep(max(times * (0.1 + 0.0002 * stats.tokens) - (time.perf_counter() - started), 0.0))
        return stats

    TorchGenerator.tick, Learner.step = slow_tick, slow_step  # type: ignore[method-assign]


if os.environ.get(PACED):  # in the processes of the generators too, which import this file
    pace()


def settings(case: tuple[int, str, int, str, int], steps: int, seed: int) -> list[str]:
    """The recipe of a case, as changes to `demo`."""
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
        "rows": rows,
        "placement.kind": "local",
        "placement.generators": generators,
        "optimiser.lr": 1e-9,
        "checkpoint.steps": 0,
        "checkpoint.minutes": 0,
        "health.probe": 0,
    }
    return [f"{key}={value}" for key, value in changes.items()]


def run_one(case_number: int, steps: int, seed: int, model: str, folder: str) -> None:
    """In a process of its own: one run."""
    from scalerl.rl.recipe import load_recipe
    from scalerl.rl.train import train

    recipe = load_recipe("demo", settings(CASES[case_number], steps, seed))
    train(recipe, folder, model, evaluate_aside=False)


def measured(folder: Path, generators: int) -> dict[str, float]:
    """The figures of a run."""
    from scalerl.record import RunRecord

    rows = RunRecord.read(folder).steps()
    rows = rows[int(len(rows) * 0.25) :]
    first, last, counted = rows[0], rows[-1], rows[1:]
    seconds = last["time"] - first["time"]
    busy = last["device_seconds"]["generate"] - first["device_seconds"]["generate"]
    waited = last["idle_seconds"]["train"] - first["idle_seconds"]["train"]
    trained = [b["tokens"]["trained"] - a["tokens"]["trained"] for a, b in zip(rows, counted, strict=False)]
    ages = [row.get("age_mean", 0.0) for row in counted]
    return {
        "steps/h": 3600 * len(counted) / seconds,
        "gen idle": 1 - busy / (seconds * generators),
        "train waits": waited / seconds,
        "age": float(np.average(ages, weights=trained)),
    }


def simulated(case: tuple[int, str, int, str, int], rates: Any, steps: int) -> dict[str, float]:
    """The same figures of the simulation."""
    from scalerl.plan.job import Job
    from scalerl.plan.simulate import simulate
    from scalerl.rl.recipe import load_recipe

    job = Job.of(load_recipe("demo", settings(case, steps, 0)))
    found = simulate(job, rates, case[0], 1, steps=200)
    return {
        "steps/h": found.steps_per_hour,
        "gen idle": found.generators_idle,
        "train waits": found.wait_for_groups,
        "age": found.age_mean,
    }


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paced", type=float, default=0.0, metavar="X")
    parser.add_argument("--cases", help="their numbers, from 0 on (all)")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1, help="of each case; the median counts")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        run_one(args.case, args.steps, args.seed, args.model, args.folder)
        return
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Runs beside simulations; at the end how far they are apart."""
    from scalerl.plan.measured import rates_of
    from scalerl.record import RunRecord
    from scalerl.rl.base import find_model
    from scalerl.rl.recipe import load_recipe

    model, _ = find_model(load_recipe("demo"))
    env = os.environ | ({PACED: str(args.paced)} if args.paced else {})
    rates: dict[int, Any] = {}
    apart: dict[str, list[float]] = {}
    print(f"load of the machine before: {', '.join(f'{load:.1f}' for load in os.getloadavg())}\n")
    names = ("steps/h", "gen idle", "train waits", "age")
    print("| generators, schedule, batch, rows | " + " | ".join(names) + " |\n|" + "---|" * 5)
    chosen = map(int, args.cases.split(",")) if args.cases else range(len(CASES))
    for number in chosen:
        case, found = CASES[number], []
        for seed in range(args.repeats):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / "run"
                options = {
                    "case": number,
                    "steps": args.steps,
                    "seed": seed,
                    "model": model,
                    "folder": folder,
                }
                command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in options.items())]
                subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
                if case[0] not in rates:
                    rates[case[0]] = rates_of(RunRecord.read(folder))
                found.append(measured(folder, case[0]))
        real = {key: float(np.median([one[key] for one in found])) for key in names}
        ours = simulated(case, rates[case[0]], args.steps)
        cells = [show(name, real[name], ours[name]) for name in names]
        generators, schedule, k, batch, rows = case
        print(f"| {generators}, {schedule} {k}, {batch}, {rows} | " + " | ".join(cells) + " |", flush=True)
        apart.setdefault("steps/h", []).append(ours["steps/h"] / real["steps/h"] - 1)
        for name in names[1:]:
            apart.setdefault(name, []).append(ours[name] - real[name])
    print(f"\nload of the machine after: {', '.join(f'{load:.1f}' for load in os.getloadavg())}\n")
    for name, differences in apart.items():
        unit = 100 if name != "age" else 1
        word = "%" if name == "steps/h" else " points" if name != "age" else " versions"
        size = np.abs(differences) * unit
        print(
            f"{name}: apart by {np.median(size):.2g}{word} in the middle, {size.max():.2g}{word} at the most"
        )


def show(name: str, real: float, ours: float) -> str:
    """Measured -> simulated."""
    if name == "steps/h":
        return f"{real:,.0f} -> {ours:,.0f} ({(ours / real - 1) * 100:+.0f} %)"
    return f"{real:.2f} -> {ours:.2f}" if name == "age" else f"{real:.0%} -> {max(ours, 0.0):.0%}"


if __name__ == "__main__":
    main()
