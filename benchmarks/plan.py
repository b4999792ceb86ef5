"""Does `scalerl plan` foresee what a run does? Runs of the demonstration against their simulation.

    python benchmarks/plan.py [--within 10] [--steps 240] [--repeats 1] [--cases 0,1,7]

Generators in processes of their own (placement `local`), one to four of them; several schedules and
batches. Runs that were kept (`--keep`) are not made again.
The first run, on-policy with one generator, whose rows run empty, gives the rates; every run, that one
included, is then compared with its simulation. How much slower a core is while the others work too is
measured before, by generators that decode alone and at once. The learning rate is next to nothing, so that
lengths and pass rates stay as they are.

    steps/h      of trainer steps
    gen idle     share of the generators' time in which they neither decode nor install weights
    train waits  share of the trainer's time in which it waits for groups
    age          mean age of the trained tokens, in versions
    CPU          seconds of a step, of all processes together
    others       cores that processes of others kept busy meanwhile

All but the last stand as measured -> simulated. The figures are of the steps after the first quarter. Where
others keep more than a twentieth of a core busy, so many pieces of work that never end are simulated too as
take what they took, and the figures say less: an idle machine is what this is for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

CASES = [  # generators, schedule, k, prompts x samples, rows
    (1, "pipeline_rl", 0, "64x16", 512),  # gives the rates: its rows run empty
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
    # How cores are shared was settled with those above; these were run afterwards.
    (4, "pipeline_rl", 4, "64x16", 512),
    (3, "pipeline_rl", 8, "32x16", 256),
    (2, "pipeline_rl", 2, "48x16", 384),
    (3, "off_policy", 4, "64x16", 512),
]
NAMES = ("steps/h", "gen idle", "train waits", "age", "CPU")
QUIET = 0.05
"""Cores that others may keep busy."""


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
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.train import train

    recipe = load_recipe("demo", settings(CASES[case_number], steps, seed))
    train(recipe, folder, model, evaluate_aside=False)


# -- a core alone, and beside others that work -------------------------------------------------------------


def decode_for(model: str, seconds: float) -> None:
    """In a process of its own, once it is told to: tokens for each CPU second of decoding; prints them."""
    import torch

    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.engine.build import load_generator

    torch.set_num_threads(1)
    recipe = load_recipe("demo", ["rows=128"])
    generator = load_generator(recipe, model, 0, recipe.rows)
    prompts, draw = recipe.task.prompts("train")[:64], 0
    print("ready", flush=True)
    sys.stdin.readline()
    tokens, cpu, ends = generator.counters.tokens, time.process_time(), time.time() + seconds
    while time.time() < ends:
        if not generator.busy:
            draw += 1
            for prompt in prompts:
                generator.submit(prompt, draw, 16)
        generator.work()
        generator.take(generator.ready)
    print((generator.counters.tokens - tokens) / (time.process_time() - cpu))


def together(model: str, repeats: int = 2, seconds: float = 4.0) -> float:
    """The speed of a core while all of them work, as a share of that of one that works alone."""
    n = len(os.sched_getaffinity(0))

    def speed(processes: int) -> float:
        command = [sys.executable, __file__, f"--model={model}", f"--seconds={seconds}"]
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        started: list[Any] = [subprocess.Popen(command, text=True, **pipe) for _ in range(processes)]
        for process in started:
            process.stdout.readline()
        for process in started:
            process.stdin.write("go\n")
            process.stdin.flush()
        return float(np.mean([float(process.communicate()[0]) for process in started]))

    alone, at_once = zip(*[(speed(1), speed(n)) for _ in range(repeats)], strict=True)
    return min(float(np.mean(at_once) / np.mean(alone)), 1.0)


def kept_share(folder: Path, model: str) -> float:
    """The same as it was measured for the runs that are kept there."""
    kept = folder / "together.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(together(model)))
    return json.loads(kept.read_text())


# -- runs against simulations ------------------------------------------------------------------------------


def measured(folder: Path, generators: int, samples: list[tuple[float, float]]) -> dict[str, float]:
    """The figures of a run; `samples` are times, and what `busy_seconds` was then."""
    from scalerl.record.reader import RunRecord

    rows = RunRecord.read(folder).steps()
    rows = rows[int(len(rows) * 0.25) :]
    first, last, counted = rows[0], rows[-1], rows[1:]
    seconds = last["time"] - first["time"]
    busy = last["device_seconds"]["generate"] - first["device_seconds"]["generate"]
    waited = last["idle_seconds"]["train"] - first["idle_seconds"]["train"]
    trained = [b["tokens"]["trained"] - a["tokens"]["trained"] for a, b in zip(rows, counted, strict=False)]
    ages = [row.get("age_mean", 0.0) for row in counted]
    parts = ("generate", "hear", "admit", "verify", "train", "publish", "record")
    cpu = sum(last["pace"]["cpu"][part] - first["pace"]["cpu"][part] for part in parts)
    at_S, busy_S = np.array(samples).T
    all_busy = np.interp([first["time"], last["time"]], at_S, busy_S)
    return {
        "others": max(float(all_busy[1] - all_busy[0]) - cpu, 0.0) / seconds,
        "steps/h": 3600 * len(counted) / seconds,
        "gen idle": 1 - busy / (seconds * generators),
        "train waits": waited / seconds,
        "age": float(np.average(ages, weights=trained)),
        "CPU": cpu / len(counted),
    }


def simulated(
    case: tuple[int, str, int, str, int], rates: Any, steps: int, others: float
) -> dict[str, float]:
    """The same figures of the simulation, where others keep so many cores busy."""
    from scalerl.plan.job import PlannedJob
    from scalerl.plan.simulate import simulate
    from scalerl.rl.config.recipe import load_recipe

    job = PlannedJob.of(load_recipe("demo", settings(case, steps, 0)))

    def beside(others: float) -> Any:
        """Pieces of work of others, and the cores that they keep busy."""
        machine = replace(rates.machine, others=others)
        found = simulate(job, replace(rates, machine=machine), case[0], 1, steps=400)
        return found, found.cores_of_others

    found, low, high = beside(0.0)[0], 0.0, 32.0
    for _ in range(9 if others > QUIET else 0):
        middle = (low + high) / 2
        found, took = beside(middle)
        low, high = (middle, high) if took < others else (low, middle)
    return {
        "steps/h": found.steps_per_hour,
        "gen idle": found.generators_idle,
        "train waits": found.wait_for_groups,
        "age": found.age_mean,
        "CPU": found.core_seconds_per_step,
    }


def one_run(number: int, seed: int, steps: int, model: str, folder: Path) -> list[tuple[float, float]]:
    """Make it, unless it was kept; times, and what `busy_seconds` was then."""
    kept = folder.with_suffix(".busy.json")
    if kept.exists():
        return json.loads(kept.read_text())
    options = {"case": number, "steps": steps, "seed": seed, "model": model, "folder": folder}
    command = [sys.executable, __file__, *(f"--{key}={value}" for key, value in options.items())]
    samples = []
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            samples.append((time.time(), busy_seconds()))
            time.sleep(0.1)
    if process.returncode:
        sys.exit(f"the run of case {number} ended with status {process.returncode}")
    kept.write_text(json.dumps(samples))
    return samples


def busy_seconds() -> float:
    """CPU seconds of this machine since it started, of all processes; proc(5), `stat`."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def compare(args: argparse.Namespace) -> float:
    """Runs beside simulations; how far steps/h are apart at the most, as a share."""
    from scalerl.plan.measured import rates_of
    from scalerl.plan.rates import Machine
    from scalerl.record.reader import RunRecord
    from scalerl.rl.config.recipe import load_recipe
    from scalerl.rl.model.demo_base import find_model

    model, _ = find_model(load_recipe("demo"))
    share = kept_share(Path(args.keep), model) if args.keep else together(model)
    print(f"a core while all work: {share:.0%} of its speed alone\n")
    print("| generators, schedule, batch, rows | " + " | ".join((*NAMES, "others")) + " |\n|" + "---|" * 7)
    apart: dict[str, list[float]] = {name: [] for name in NAMES}
    loudest, rates = 0.0, None
    for number in sorted({0, *map(int, args.cases.split(","))} if args.cases else range(len(CASES))):
        case, found = CASES[number], []
        for seed in range(args.repeats):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(args.keep or name) / f"run-{number}-{seed}"
                # What of a trainer step is fixed is told by many steps alone.
                n = args.steps if number else 3 * args.steps
                samples = one_run(number, seed, n, model, folder)
                found.append(measured(folder, case[0], samples))
                if rates is None:
                    of_run = rates_of(RunRecord.read(folder))
                    # Rates of a machine that others keep busy are those of cores that all work.
                    machine = Machine(of_run.machine.cores, share if found[0]["others"] <= QUIET else 1.0)
                    rates = replace(of_run, machine=machine)
        real = {key: float(np.median([one[key] for one in found])) for key in (*NAMES, "others")}
        loudest = max(loudest, real["others"])
        ours = simulated(case, rates, args.steps, real["others"])
        cells = [show(name, real[name], ours[name]) for name in NAMES]
        generators, schedule, k, batch, rows = case
        row = f"| {generators}, {schedule} {k}, {batch}, {rows} | " + " | ".join(cells)
        print(f"{row} | {real['others']:.2f} |", flush=True)
        for name in NAMES:
            ratio = name in ("steps/h", "CPU")
            apart[name].append(ours[name] / real[name] - 1 if ratio else ours[name] - real[name])
    print("\nrates: " + json.dumps(rates.to_json() if rates else {}) + "\n")
    tell(apart)
    if loudest > QUIET:
        print(f"others kept up to {loudest:.2f} cores busy: figures of an idle machine would be better")
    return float(np.abs(apart["steps/h"]).max())


def tell(apart: dict[str, list[float]]) -> None:
    """How far runs and simulations are apart."""
    for name, differences in apart.items():
        unit = 100 if name != "age" else 1
        word = "%" if name in ("steps/h", "CPU") else " points" if name != "age" else " versions"
        size = np.abs(differences) * unit
        print(
            f"{name}: apart by {np.median(size):.2g}{word} in the middle, {size.max():.2g}{word} at the most"
        )


def show(name: str, real: float, ours: float) -> str:
    """Measured -> simulated."""
    if name in ("steps/h", "CPU"):
        form = ",.0f" if name == "steps/h" else ".4f"
        return f"{real:{form}} -> {ours:{form}} ({(ours / real - 1) * 100:+.0f} %)"
    return f"{real:.2f} -> {ours:.2f}" if name == "age" else f"{real:.0%} -> {max(ours, 0.0):.0%}"


def main() -> None:
    """Run all cases and print the table; status 1 where one is further apart than was allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--within", type=float, metavar="P", help="percent that steps/h may be apart")
    parser.add_argument("--cases", help="their numbers, from 0 on (all)")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=1, help="of each case; the median counts")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs there")
    for name, kind in (("case", int), ("seed", int), ("seconds", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        run_one(args.case, args.steps, args.seed, args.model, args.folder)
    elif args.seconds is not None:
        decode_for(args.model, args.seconds)
    elif (worst := compare(args) * 100) > (args.within or worst):
        sys.exit(f"steps/h are apart by {worst:.0f} % at the most; {args.within:g} % were allowed")


if __name__ == "__main__":
    main()
