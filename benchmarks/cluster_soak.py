"""A run on a cluster to which something happens every half minute, against the same run left alone.

    python benchmarks/cluster_soak.py --minutes 30 --every 30

On a Ray cluster of simulated nodes on this machine: every so often one process of the run is killed, of each
role in turn, in rounds that are shuffled: a generator, a rank of the learner, the evaluation, a verifier
where there are some in actors, the driver (which is started again with --resume), or a whole node (which
comes back). Then the same run is made undisturbed up to the same step, and so is one of another seed.

Each kill is a line; at the end stand the kills by role, whether the ledger of every step adds up, steps lost
by going back to checkpoints, how memory grows, and the pass rate against the undisturbed run, in standard
errors and in the spread of the two seeds. It takes at most twice the minutes, and a few.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from scalerl.record.reader import RunRecord

ACTORS = ("GeneratorActor", "TrainerActor", "EvaluationActor", "VerifierActor")
ROLES = (*ACTORS, "driver", "node")
SETTINGS = (
    *("budget.kind=steps", "budget.amount=4000", "evaluation.count=400", "checkpoint.steps=5"),
    *("cluster.trainers=2", "cluster.learner.kind=fsdp2", "cluster.generators=2", "schedule.k=8"),
    "cluster.timeouts.heartbeat=60",
)
LOOK, YOUNG = 5.0, 60.0
"""Seconds between two looks at memory, and for which a new process is still warming up."""
STOP = 120.0
"""Seconds that a driver has to write a checkpoint and exit."""


class Nodes:
    """Ray cluster of four nodes with two CPUs each; the head has none."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        self._nodes = [self._cluster.add_node(num_cpus=2) for _ in range(4)]
        self.address = str(self._cluster.address)

    def kill_one(self, draw: random.Random) -> None:
        """Kill a node as a power cut would, and start another."""
        node = self._nodes.pop(draw.randrange(len(self._nodes)))
        self._cluster.remove_node(node, allow_graceful=False)
        self._nodes.append(self._cluster.add_node(num_cpus=2))

    def close(self) -> None:
        """Shut down all nodes."""
        self._cluster.shutdown()


class Driver:
    """A process of `scalerl train` that can be started again."""

    def __init__(self, folder: Path, address: str, seed: int, *more: str) -> None:
        self._folder = folder
        values = (*SETTINGS, f"cluster.address={address}", f"seed={seed}")
        changes = [word for value in values for word in ("--set", value)]
        self._command = [sys.executable, "-m", "scalerl", "train", "demo", "-o", str(folder)]
        self._command += [*changes, *more]
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start the run, or resume it."""
        self.starts += 1
        resume = ["--resume"] if (self._folder / "config.json").exists() else []
        with self._folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen([*self._command, *resume], stdout=log, stderr=log)

    def stop(self) -> None:
        """Stop the driver, leaving it `STOP` seconds for a checkpoint."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=STOP)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def processes(driver: Driver) -> dict[str, list[psutil.Process]]:
    """Return the run's processes by role, found among the descendants of this one."""
    found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        for role in ACTORS:
            if f"ray::{role}" in title:
                found[role].append(process)
        if process.pid == driver.process.pid and driver.process.poll() is None:
            found["driver"].append(process)
    return found


@dataclass
class Memory:
    """Resident memory of processes over time, in MiB, without shared memory (Ray's object store)."""

    looks: dict[str, list[tuple[float, int, float]]] = field(default_factory=dict)
    """Time in seconds, process id and size of every look, by role."""
    _born: dict[int, float] = field(default_factory=dict)

    def look(self, second: float, driver: Driver) -> dict[str, float]:
        """Record the memory of all processes; return the largest of each role."""
        largest: dict[str, float] = {}
        for role, members in processes(driver).items():
            for process in members:
                try:
                    info = process.memory_info()
                except psutil.Error:
                    continue
                size = (info.rss - info.shared) / 2**20
                self._born.setdefault(process.pid, second)
                self.looks.setdefault(role, []).append((second, process.pid, size))
                largest[role] = max(largest.get(role, 0.0), size)
        return largest

    def slopes(self, role: str) -> tuple[float, float]:
        """Return the growth of a role in MiB a minute, by least squares, of processes older than `YOUNG`: of
        its largest process after the first quarter of the run; and within processes. NaN if too few."""
        old = [look for look in self.looks.get(role, []) if look[0] >= self._born[look[1]] + YOUNG]
        end = max((second for second, _, _ in self.looks.get(role, [])), default=0.0)
        largest: dict[float, float] = {}
        by_pid: dict[int, list[tuple[float, float]]] = {}
        for second, pid, size in old:
            by_pid.setdefault(pid, []).append((second, size))
            if second >= end / 4:
                largest[second] = max(largest.get(second, 0.0), size)
        return _slope([list(largest.items())]), _slope(list(by_pid.values()))

    def tell(self) -> None:
        """Print a line for each role."""
        after = f"{YOUNG:g} s after starts"
        print(f"MiB a minute, {after}: the largest after the first quarter, and within processes")
        for role, looks in self.looks.items():
            largest, within = self.slopes(role)
            most = max(size for _, _, size in looks)
            print(f"  {role:<16}{largest:+8.2f}{within:+8.2f}   largest ever {most:.0f}")


def _slope(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the common slope per minute of lines with separate intercepts."""
    parts = [np.array(group) - np.mean(group, axis=0) for group in groups if len(group) > 2]
    moved = np.concatenate(parts) if parts else np.zeros((0, 2))
    across = float((moved[:, 0] ** 2).sum())
    return 60 * float((moved[:, 0] * moved[:, 1]).sum()) / across if across else float("nan")


class Turns:
    """Roles in shuffled rounds; a role without a process keeps its turn for later in the round."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._round: list[str] = []

    def next(self, there: Mapping[str, Sequence[Any]]) -> str:
        """Return the next role of this round that has a process now; start a new round if none has."""
        for role in self._round:
            if role == "node" or there[role]:
                self._round.remove(role)
                return role
        self._round = self._draw.sample(ROLES, len(ROLES))
        return self.next(there)


@dataclass
class Outcome:
    """What was done to a run and observed of it."""

    kills: Counter[str]
    memory: Memory
    starts: int
    unbalanced: int
    """Looks at which the ledger of the newest step did not add up, including steps lost later."""


def disturbed(folder: Path, nodes: Nodes, options: argparse.Namespace) -> Outcome:
    """Run for `options.minutes` minutes with a kill every `options.every` seconds."""
    draw = random.Random(options.seed)
    turns, kills, memory, unbalanced = Turns(draw), Counter[str](), Memory(), 0
    driver = Driver(folder, nodes.address, options.seed)
    began = time.monotonic()
    next_look, next_kill, sizes = 0.0, options.every, {}
    while (second := time.monotonic() - began) < 60 * options.minutes:
        time.sleep(1)
        if driver.process.poll() is not None:
            if driver.process.returncode == 0:
                break
            driver.start()
        if second >= next_look:
            sizes, next_look = memory.look(second, driver), second + LOOK
            unbalanced += not balanced(folder)
        if second >= next_kill:
            there = processes(driver)
            role = turns.next(there)
            kill(role, there, nodes, draw)
            kills[role] += 1
            next_kill += options.every
            tell(second, steps_of(folder), role, sizes, driver.starts)
    if driver.process.poll() is None:
        driver.stop()
    return Outcome(kills, memory, driver.starts, unbalanced)


def kill(role: str, there: Mapping[str, Sequence[psutil.Process]], nodes: Nodes, draw: random.Random) -> None:
    """Kill one process of a role, or a node."""
    if role == "node":
        nodes.kill_one(draw)
    else:
        draw.choice(there[role]).kill()


def tell(second: float, step: int, role: str, sizes: Mapping[str, float], starts: int) -> None:
    """Print a line for a kill."""
    memory = ", ".join(f"{who} {size:.0f}" for who, size in sizes.items())
    print(
        f"{second:6.0f} s  step {step:4d}  kills: {role:<15}  drivers {starts}  MiB: {memory}",
        file=sys.stderr,
        flush=True,
    )


def rows_of(folder: Path) -> list[str]:
    """Return the complete lines of steps.jsonl."""
    file = folder / "steps.jsonl"
    return file.read_text().split("\n")[:-1] if file.exists() else []


def steps_of(folder: Path) -> int:
    """Return the number of recorded steps."""
    return len(rows_of(folder))


def adds_up(row: Mapping[str, Any]) -> bool:
    """Return whether a step's ledger accounts for every admitted group."""
    ledger = row["ledger"]
    return ledger["admitted"] == sum(n for fate, n in ledger.items() if fate != "admitted")


def balanced(folder: Path) -> bool:
    """Return whether the ledger of the newest step adds up."""
    rows = rows_of(folder)
    return not rows or adds_up(json.loads(rows[-1]))


def check(record: RunRecord) -> tuple[int, int, int]:
    """Return the steps, how many have a ledger that does not add up, and the largest age of a token."""
    rows = record.steps()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "steps are missing, or there twice"
    return len(rows), sum(not adds_up(row) for row in rows), max(row.get("staleness_max", 0) for row in rows)


def undisturbed(folder: Path, nodes: Nodes, seed: int, step: int, minutes: float) -> dict[int, Any]:
    """Run undisturbed up to a step or for `minutes`, print the growth of memory, and return the evaluations
    by step."""
    driver = Driver(folder, nodes.address, seed, "--until", str(step))
    memory, began = Memory(), time.monotonic()
    while driver.process.poll() is None and (second := time.monotonic() - began) < 60 * minutes:
        memory.look(second, driver)
        time.sleep(LOOK)
    if driver.process.poll() is None:
        driver.stop()
    record = RunRecord.read(folder)
    took = (time.monotonic() - began) / 60
    print(f"left alone, seed {seed}: {len(record.steps())} steps in {took:.1f} minutes")
    memory.tell()
    return {point.step: point for point in record.evals}


def rewinds_of(folder: Path) -> Iterator[int]:
    """Yield the steps lost at each return to a checkpoint."""
    file = folder / "lost.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        if "lost" in row:
            yield row["lost"]["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs; else they are removed")
    options = parser.parse_args()
    nodes = Nodes()
    with tempfile.TemporaryDirectory() as aside:
        folder = options.keep or Path(aside)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            report(folder, nodes, options)
        finally:
            nodes.close()


def report(folder: Path, nodes: Nodes, options: argparse.Namespace) -> None:
    """Make the runs and print the comparison."""
    outcome = disturbed(folder / "disturbed", nodes, options)
    record = RunRecord.read(folder / "disturbed")
    n_steps, wrong, oldest = check(record)
    rewinds = list(rewinds_of(folder / "disturbed"))
    kills = ", ".join(f"{role} {outcome.kills[role]}" for role in ROLES)
    print(f"{n_steps} steps in {options.minutes:g} minutes, {sum(outcome.kills.values())} kills: {kills}")
    print(
        f"driver started {outcome.starts} times; {len(rewinds)} times back, {sum(rewinds)} steps lost by it"
    )
    print(f"groups begun again since the last rewind {record.steps()[-1]['restarted']}")
    print(f"ledgers that do not add up: {wrong} of {n_steps}, and {outcome.unbalanced} seen on the way")
    print(f"largest age {oldest} (k = {record.config['recipe']['schedule']['k']})")
    outcome.memory.tell()
    last, minutes = max(record.evals[-1].step, 1), options.minutes / 2
    seeds = [options.seed, options.seed + 1]
    alone = [undisturbed(folder / f"alone-{seed}", nodes, seed, last, minutes) for seed in seeds]
    compare({point.step: point for point in record.evals}, *alone)


def compare(found: Mapping[int, Any], like: Mapping[int, Any], other: Mapping[int, Any]) -> None:
    """Print pass rates at the steps that all have, and how far apart the first two runs are."""
    steps = sorted(found.keys() & like.keys() & other.keys() - {0})
    if not steps:
        print("no evaluation after step 0 that all runs have")
        return
    print(f"{'step':>6}{'disturbed':>11}{'alone':>8}{'of another seed':>17}")
    rates = np.array([[of[step].pass_rate for of in (found, like, other)] for step in steps])
    for step, row in zip(steps, rates, strict=True):
        print(f"{step:6d}{row[0]:11.3f}{row[1]:8.3f}{row[2]:17.3f}")
    last = found[steps[-1]]
    error = (2 * last.pass_rate * (1 - last.pass_rate) / (last.n_prompts * last.n_samples)) ** 0.5
    spread = float(
        np.sqrt(np.mean((rates[:, 1] - rates[:, 2]) ** 2) / 2)
    )  # the variance of two values is half their squared difference
    apart, mean = rates[-1, 0] - rates[-1, 1], float(np.mean(rates[:, 0] - rates[:, 1]))
    print(f"disturbed less alone: {apart:+.4f} at step {last.step}, {mean:+.4f} on average")
    print(f"in standard errors of completions ({error:.4f}): {apart / error:+.1f} at that step")
    units = apart / max(spread, 1e-9), mean / max(spread, 1e-9)
    print(f"in standard deviations between seeds ({spread:.4f}): {units[0]:+.1f}, {units[1]:+.1f} on average")


if __name__ == "__main__":
    main()
