"""A run on a cluster to which something happens every half minute, against the same run left alone.

    python benchmarks/cluster_soak.py --minutes 30 --every 30

On a Ray cluster of simulated nodes on this machine: every so often one process of the run is killed:
a generator, a rank of the learner, the evaluation, the driver (which is started again with --resume),
or a whole node (which comes back). Printed: what was killed, memory over time, whether the ledger of every
step adds up, and the pass rate against that of the undisturbed run of the same seed at the same step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from scalerl.record import RunRecord

ROLES = ("GeneratorActor", "TrainerActor", "EvaluationActor", "driver", "node")
SETTINGS = (
    *("budget.kind=steps", "budget.amount=4000", "evaluation.count=160", "checkpoint.steps=20"),
    *("cluster.trainers=2", "cluster.learner.kind=fsdp2", "cluster.generators=2", "schedule.k=8"),
    "cluster.patience.silence=60",
)


Outcome = tuple[Counter[str], list[Any], int]
"""The kills by role, memory over time, and how often the driver was started."""


class Nodes:
    """Four nodes of two CPUs each; the head has none."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self._nodes = [self._cluster.add_node(num_cpus=2) for _ in range(4)]
        self.address = str(self._cluster.address)

    def kill_one(self, draw: random.Random) -> None:
        """End a node as a power cut would, and bring up another."""
        node = self._nodes.pop(draw.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=2))

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


class Driver:
    """`scalerl train`, started again where it has ended too early."""

    def __init__(self, folder: Path, address: str, seed: int, *more: str) -> None:
        self._folder = folder
        values = (*SETTINGS, f"cluster.address={address}", f"seed={seed}")
        changes = [word for value in values for word in ("--set", value)]
        self._command = [sys.executable, "-m", "scalerl.cli", "train", "demo", "-o", str(folder)]
        self._command += [*changes, *more]
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Begin, or go on."""
        self.starts += 1
        resume = ["--resume"] if (self._folder / "config.json").exists() else []
        with self._folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen([*self._command, *resume], stdout=log, stderr=log)

    def stop(self) -> None:
        """Let it make a checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=300)


def processes(driver: Driver) -> dict[str, list[psutil.Process]]:
    """The processes of the run by role; they are below this one."""
    found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        for role in ROLES[:3]:
            if f"ray::{role}" in title:
                found[role].append(process)
        if process.pid == driver.process.pid:
            found["driver"].append(process)
    return found


def memory(driver: Driver) -> dict[str, float]:
    """The largest resident memory of each role, in MiB."""
    sizes: dict[str, float] = {}
    for role, members in processes(driver).items():
        for process in members:
            try:
                sizes[role] = max(sizes.get(role, 0.0), process.memory_info().rss / 2**20)
            except psutil.Error:
                continue
    return sizes


def kill(role: str, driver: Driver, nodes: Nodes, draw: random.Random) -> bool:
    """Kill one process of a role, if there is one."""
    if role == "node":
        nodes.kill_one(draw)
        return True
    members = processes(driver)[role]
    if members:
        draw.choice(members).kill()
    return bool(members)


def disturbed(folder: Path, nodes: Nodes, options: argparse.Namespace) -> Outcome:
    """Run for so many minutes with a kill every so often."""
    draw, kills, sizes = random.Random(options.seed), Counter[str](), []
    driver = Driver(folder, nodes.address, options.seed)
    began = time.monotonic()
    next_kill = began + options.every
    while time.monotonic() - began < 60 * options.minutes:
        time.sleep(1)
        if driver.process.poll() is not None:
            if driver.process.returncode == 0:
                break
            driver.start()
        if time.monotonic() >= next_kill:
            sizes.append((time.monotonic() - began, steps_of(folder), memory(driver)))
            role = draw.choice(ROLES)
            kills[role] += kill(role, driver, nodes, draw)
            next_kill += options.every
            print(
                f"{sizes[-1][0]:6.0f} s  step {sizes[-1][1]:5d}  killed: {role}", file=sys.stderr, flush=True
            )
    if driver.process.poll() is None:
        driver.stop()
    return kills, sizes, driver.starts


def steps_of(folder: Path) -> int:
    """Steps on record."""
    file = folder / "steps.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def check(record: RunRecord) -> tuple[int, int, int]:
    """Steps, those whose ledger does not add up, and the largest age of a token."""
    rows = record.steps()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "steps are missing, or there twice"
    ledgers = [row["ledger"] for row in rows]
    wrong = sum(x["admitted"] != sum(n for fate, n in x.items() if fate != "admitted") for x in ledgers)
    return len(rows), wrong, max(row.get("age_max", 0) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    nodes = Nodes()
    with tempfile.TemporaryDirectory() as folder:
        try:
            report(Path(folder), nodes, options)
        finally:
            nodes.close()


def report(folder: Path, nodes: Nodes, options: argparse.Namespace) -> None:
    kills, sizes, starts = disturbed(folder / "disturbed", nodes, options)
    record = RunRecord.read(folder / "disturbed")
    n_steps, wrong, oldest = check(record)
    last = record.evals[-1]
    alone = Driver(folder / "alone", nodes.address, options.seed, "--until", str(max(last.step, 1)))
    alone.process.wait()
    like = {point.step: point for point in RunRecord.read(folder / "alone").evals}[last.step]
    lost_file = folder / "disturbed" / "lost.jsonl"
    lost = [json.loads(line) for line in lost_file.read_text().splitlines()] if lost_file.exists() else []
    rewinds = [row["lost"]["steps"] for row in lost if "lost" in row]
    print(f"{n_steps} steps in {options.minutes:g} minutes, {sum(kills.values())} kills: {dict(kills)}")
    print(
        f"driver started {starts} times; {len(rewinds)} times back to a checkpoint, {sum(rewinds)} steps lost"
    )
    print(f"groups begun again {record.steps()[-1]['restarted']}; ledgers that do not add up {wrong}")
    print(f"largest age {oldest} (k = {record.config['recipe']['schedule']['k']})")
    spread = (last.pass_rate * (1 - last.pass_rate) / (last.n_prompts * last.n_samples)) ** 0.5
    print(f"pass rate at step {last.step}: {last.pass_rate:.3f} (se {spread:.3f})")
    print(f"undisturbed: {like.pass_rate:.3f}")
    print(
        f"{'second':>7} {'step':>6} " + " ".join(f"{role:>16}" for role in ROLES[:4]) + "   MiB, the largest"
    )
    for second, step, of in sizes:
        print(f"{second:7.0f} {step:6d} " + " ".join(f"{of.get(role, 0):16.0f}" for role in ROLES[:4]))


if __name__ == "__main__":
    main()
